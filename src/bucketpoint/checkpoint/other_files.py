"""Errors for a source that is no checkpoint: pointers, web pages, and files that are missing."""

from __future__ import annotations

from collections.abc import Collection

from bucketpoint.errors import BucketpointError, CorruptDataError, MetadataError, first_of

HEAD_BYTES = 64
"""Number of first bytes of a file in which `explain` recognises it."""

_NAMED_AT_MOST = 5

_DOWNLOAD = "Download the file itself"
_BEGINNINGS = (
    (b"version https://git-lfs.", "a Git LFS pointer", "Fetch the data: `git lfs pull` in the clone, or `hf download`"),
    (b"<", "a web or XML page, such as a login page", f"{_DOWNLOAD}; the server sent this page in its place"),
)


def explain(head: bytes, url: str, key: str, error: BucketpointError) -> BucketpointError:
    """Return an error that names the kind of a file that its reader did not expect, by its first bytes; or `error`."""
    for beginning, what, remedy in _BEGINNINGS:
        if head.lstrip().startswith(beginning):
            return MetadataError(f"The file is {what}, not its data", url=url, key=key, remedy=remedy)
    if not head:
        return MetadataError("The file is empty", url=url, key=key, remedy=f"{_DOWNLOAD} again")
    return error


def missing_files(gone: Collection[str], url: str) -> CorruptDataError:
    """Return the error for files that a safetensors index names, and that are not there."""
    named = first_of(sorted(gone), _NAMED_AT_MOST)
    return CorruptDataError(
        f"Files that the safetensors index names are missing: {named}",
        url=url,
        key=min(gone),
        remedy="Put the missing files beside the index; an interrupted download leaves such a folder",
    )
