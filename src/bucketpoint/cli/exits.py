"""What an exit code means, and which error ends in which. No output."""

from __future__ import annotations

from bucketpoint import errors

FINE = 0
FOUND = 1
"""The command did its work, and what it looked at is damaged, different or unfit."""
USAGE = 2
NOT_FOUND = 3
NO_PERMISSION = 4
IN_THE_WAY = 5
"""Something is there already, or came there meanwhile. Nothing was overwritten."""
STORE_FAILED = 6
INTERNAL = 70
"""A fault of bucketpoint's own: sysexits.h calls it EX_SOFTWARE."""
INTERRUPTED = 130
"""What a shell gives a program that SIGINT ended."""

# Order matters: the first match wins, and subclasses stand before their bases.
_BY_KIND: tuple[tuple[type[errors.BucketpointError], int], ...] = (
    (errors.InvalidURLError, USAGE),
    (errors.CheckpointNotFoundError, NOT_FOUND),
    (errors.ObjectNotFoundError, NOT_FOUND),
    (errors.BucketNotFoundError, NOT_FOUND),
    (errors.AccessDeniedError, NO_PERMISSION),
    (errors.CredentialsError, NO_PERMISSION),
    (errors.CheckpointExistsError, IN_THE_WAY),
    (errors.CommitConflictError, IN_THE_WAY),
    (errors.OtherRunError, IN_THE_WAY),
    (errors.PreconditionFailedError, IN_THE_WAY),
    (errors.CorruptDataError, FOUND),
    (errors.MetadataError, FOUND),
    (errors.UnsafeDataError, FOUND),
    (errors.StoreError, STORE_FAILED),
)


def exit_code(error: errors.BucketpointError) -> int:
    """The code that a program ends with on this error. Unknown options and the like count as usage."""
    return next((code for kind, code in _BY_KIND if isinstance(error, kind)), USAGE)
