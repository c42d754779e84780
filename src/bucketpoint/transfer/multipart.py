"""Completion and abortion of multipart uploads, shared by all kinds of uploads."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from bucketpoint.errors import BucketpointError, UploadNotFoundError
from bucketpoint.stores import ObjectInfo, Part, Store, retry

logger = logging.getLogger(__name__)

ABORT_DEADLINE_S = 30.0
"""Deadline of an abort. The save has failed already, and its error should not be delayed by the cleanup."""


def complete(store: Store, key: str, upload_id: str, parts: Iterable[Part], *, nbytes: int) -> ObjectInfo:
    """Complete an upload of `nbytes`, even if an earlier attempt succeeded and its answer was lost."""
    try:
        return store.complete_multipart(key, upload_id, sorted(parts, key=lambda part: part.number))
    except UploadNotFoundError:
        # An earlier attempt may have completed the upload. Only this save attempt uses the key, so an object of the
        # right size under the key can only be the completed upload.
        info = store.head(key)
        if info.size != nbytes:
            raise
        return info


def abort(store: Store, key: str, upload_id: str | None) -> None:
    """Abort an upload, if one was begun. A failure is only logged, so that it does not hide the error of the save."""
    if upload_id is None:
        return
    try:
        with retry.deadline(ABORT_DEADLINE_S):
            store.abort_multipart(key, upload_id)
    except BucketpointError as error:
        logger.warning("could not abort the multipart upload of %s: %s", key, error)
