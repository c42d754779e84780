"""Errors for files that are not those of a checkpoint (Git LFS pointers, web pages), and for missing files."""

from __future__ import annotations

from collections.abc import Collection

from bucketpoint.errors import BucketpointError, CorruptDataError, MetadataError, first_of

HEAD_BYTES = 64
"""Number of bytes at the start of a file from which `explain` recognises its kind."""

_NAMED_AT_MOST = 5

_DOWNLOAD = "Download the file itself"
_BEGINNINGS = (
    (b"version https://git-lfs.", "a Git LFS pointer", "Fetch the data: `git lfs pull` in the clone, or `hf download`"),
    (b"<", "a web or XML page, such as a login page", f"{_DOWNLOAD}; the server sent this page in its place"),
)


def explain(head: bytes, url: str, key: str, error: BucketpointError) -> BucketpointError:
    """Return an error that names the kind of an unexpected file, from its first bytes; `error` for other kinds."""
    for beginning, what, remedy in _BEGINNINGS:
        if head.lstrip().startswith(beginning):
            return MetadataError(f"The file is {what}, not its data", url=url, key=key, remedy=remedy)
    if not head:
        return MetadataError("The file is empty", url=url, key=key, remedy=f"{_DOWNLOAD} again")
    return error


def missing_files(gone: Collection[str], url: str) -> CorruptDataError:
    """Return the error for missing files that a safetensors index names."""
    named = first_of(sorted(gone), _NAMED_AT_MOST)
    return CorruptDataError(
        f"Files that the safetensors index names are missing: {named}",
        url=url,
        key=min(gone),
        remedy="Put the missing files beside the index; an interrupted download leaves such a folder",
    )
