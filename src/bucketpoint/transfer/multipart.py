"""The two ends of a multipart upload that every upload shares: completing it once, and dropping it. No tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from bucketpoint.errors import BucketpointError, UploadNotFoundError
from bucketpoint.stores import ObjectInfo, Part, Store, retry

logger = logging.getLogger(__name__)

ABORT_DEADLINE_S = 30.0
"""The save has failed, and whoever waits for its error should not wait for the tidying."""


def complete(store: Store, key: str, upload_id: str, parts: Iterable[Part], *, nbytes: int) -> ObjectInfo:
    """Make the object of `nbytes` visible, also when the answer to an earlier attempt to do so was lost."""
    try:
        return store.complete_multipart(key, upload_id, sorted(parts, key=lambda part: part.number))
    except UploadNotFoundError:
        # The store may have acted before. The key belongs to this attempt to save alone, so an object of the right
        # size under it can only be ours.
        info = store.head(key)
        if info.size != nbytes:
            raise
        return info


def abort(store: Store, key: str, upload_id: str | None) -> None:
    """Drop an upload, if one was begun. Its own failure must not hide the error that led here."""
    if upload_id is None:
        return
    try:
        with retry.deadline(ABORT_DEADLINE_S):
            store.abort_multipart(key, upload_id)
    except BucketpointError as error:
        logger.warning("could not abort the multipart upload of %s: %s", key, error)
