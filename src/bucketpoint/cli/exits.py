"""Exit codes, and the code that each error leads to."""

from __future__ import annotations

from bucketpoint import errors

FINE = 0
FOUND = 1
"""The command ran, and found its object damaged, different or unfit."""
USAGE = 2
NOT_FOUND = 3
NO_PERMISSION = 4
IN_THE_WAY = 5
"""Something exists at the target already, or appeared meanwhile. Nothing was overwritten."""
STORE_FAILED = 6
INTERNAL = 70
"""A fault of bucketpoint itself: EX_SOFTWARE in sysexits.h."""
OUTPUT_FAILED = 74
"""Standard output is closed, or on a full disk: EX_IOERR in sysexits.h."""
INTERRUPTED = 130
"""The code that a shell reports for a program that SIGINT ended."""

# Order matters: the first match wins, so subclasses come before their bases.
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
    """Return the program's exit code for an error. Errors of no listed kind count as usage errors."""
    return next((code for kind, code in _BY_KIND if isinstance(error, kind)), USAGE)
