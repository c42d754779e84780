"""The conditional PUT of `.metadata`, which commits a checkpoint.

The PUT succeeds only if the URL has no commit, or still the commit that was found when the save began.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import Metadata

from bucketpoint.catalog.deletion.fence import AttemptFence
from bucketpoint.dcp.session import PriorCommit
from bucketpoint.errors import (
    AccessDeniedError,
    BucketpointError,
    CheckpointExistsError,
    CommitConflictError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import mark_of
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.facts import extra
from bucketpoint.format.record import MARKER_HEAD_BYTES, is_marker
from bucketpoint.stopwatch import Stopwatch
from bucketpoint.stores import ObjectInfo, Store, proven, retry
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer.checksum import crc32c

if TYPE_CHECKING:
    from bucketpoint.catalog.save_log import SaveLog

logger = logging.getLogger(__name__)

COMMIT_ATTEMPTS = 3
_POLL_S = 2.0


@dataclass(frozen=True)
class Commit:
    """The request for one commit.

    Attributes:
        name: `.metadata`, or `__{rank}.metadata` for a save without collectives.
        seen: commit found when the save began, the only one that may be replaced; None (unknown) allows any.
        fence: protects the data of the attempt against sweeps.
        partial: the caller has declared that this rank saves only its part of the state.
        ranks: number of ranks whose `rank_state` values the state must have.
    """

    store: Store
    prefix: str
    url: str
    token: str
    name: str
    overwrite: bool
    log: SaveLog | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further plain values for the metadata. Values of the log with the same names replace them."""
    seen: PriorCommit | None = None
    fence: AttemptFence | None = None
    partial: bool = False
    ranks: int = 1

    def ensure_alive(self) -> None:
        """Ensure that no sweep deletes the data of this attempt. Called right before each PUT of the commit.

        Raises:
            IncompleteSaveError: a sweep has declared the attempt dead.
        """
        if self.fence is not None:
            self.fence.ensure()


def prior_commit(store: Store, prefix: str, name: str) -> PriorCommit | None:
    """Return the current commit; None if this process has no permission to read it."""
    try:
        head, info = retry_transient(
            lambda: store.get(keys.join(prefix, name), first=MARKER_HEAD_BYTES), attempts=COMMIT_ATTEMPTS
        )
    except ObjectNotFoundError:
        return PriorCommit(there=False)
    except AccessDeniedError:
        # S3 answers 403 for a missing key if the caller has no permission to list.
        return None
    return PriorCommit(there=False) if is_marker(head) else PriorCommit(there=True, etag=info.etag)


def refuse_existing(
    seen: PriorCommit | None, url: str | None, *, overwrite: bool, replaces_only: frozenset[str] | None
) -> None:
    """Raise if the URL has a commit that the save may not replace.

    Args:
        replaces_only: marks of the commits that may be replaced; None for any commit.

    Raises:
        CheckpointExistsError: the URL has such a commit.
    """
    # It is enough to check `seen`: the PUT replaces no other commit.
    replaceable = replaces_only is None or (seen is not None and mark_of(seen.etag) in replaces_only)
    if seen is not None and seen.there and not (overwrite and replaceable):
        raise CheckpointExistsError("Checkpoint already exists at this URL", url=url)


def refuse_hidden(seen: PriorCommit | None, url: str | None) -> None:
    """Raise if the URL of a save without collectives has a commit: its `__{rank}.metadata` would never be read.

    Raises:
        CheckpointExistsError: the URL has a commit.
    """
    if seen is not None and seen.there:
        raise CheckpointExistsError(
            "Checkpoint already exists at this URL: beside it, one saved without collectives would never be read",
            url=url,
            remedy="Choose another checkpoint_id",
        )


def put_commit(request: Commit, data: bytes) -> tuple[ObjectInfo, Metadata | None]:
    """Create the commit, or replace exactly the commit that was seen, whose metadata is returned too.

    Raises:
        CheckpointExistsError, CommitConflictError: as `commit`.
    """
    store, key = request.store, keys.join(request.prefix, request.name)
    able = retry_transient(lambda: proven(store, request.prefix), attempts=COMMIT_ATTEMPTS)
    if not able.conditional_put:
        return _put_unconditionally(request, key, data)
    verified = not able.conditional_replace
    # Look for an existing commit only if one was seen, or a conditional PUT was refused: otherwise there is none.
    look_first = request.seen is not None and request.seen.there
    gone: BucketpointError | None = None
    for _ in range(COMMIT_ATTEMPTS):
        try:
            if look_first:
                there, info = _get_committed(store, key)
                done = _replace(request, key, data, there, info, verified=verified)
                if done is not None:
                    return done
                continue
        except _GoneError as error:
            gone = error.reason
        created = _create(request, key, data)
        if created is not None:
            return created, None
        look_first = True
    if isinstance(gone, AccessDeniedError):
        raise gone
    raise CommitConflictError(
        "Other jobs commit and delete checkpoints at this URL, so this save could not replace the checkpoint",
        url=request.url,
    ) from gone


class _GoneError(Exception):
    """Raised if the object that refused a conditional PUT, or that was to be replaced, no longer exists."""

    def __init__(self, reason: BucketpointError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _metadata_at(store: Store, key: str) -> tuple[bytes, ObjectInfo]:
    # Imported here: most saves replace nothing.
    from bucketpoint.catalog.catalog import get_metadata

    if not key.endswith(keys.METADATA):
        # An index of safetensors, of which `get_metadata` reads only the beginning.
        return store.get(key)
    return get_metadata(store, key)


def _get_committed(store: Store, key: str) -> tuple[bytes, ObjectInfo]:
    try:
        return retry_transient(lambda: _metadata_at(store, key), attempts=COMMIT_ATTEMPTS)
    except (ObjectNotFoundError, AccessDeniedError) as error:
        # The object was deleted in between. S3 answers 403 in place of 404 without permission to list.
        raise _GoneError(error) from None


def _create(request: Commit, key: str, data: bytes) -> ObjectInfo | None:
    """Put the metadata if the key has no object; return None if it has."""
    store, body, crc = request.store, [memoryview(data)], crc32c(memoryview(data))
    request.ensure_alive()
    try:
        return retry_transient(lambda: store.put(key, body, crc32c=crc, if_none_match=True), attempts=COMMIT_ATTEMPTS)
    except PreconditionFailedError:
        return None


def _replace(
    request: Commit, key: str, data: bytes, there: bytes, info: ObjectInfo, *, verified: bool
) -> tuple[ObjectInfo, Metadata | None] | None:
    """Replace the existing commit or deletion marker; return None if a marker has appeared or changed meanwhile.

    Args:
        there: content of the existing object.
        verified: read the metadata again after the write, because the store does not check conditions atomically.

    Raises:
        CheckpointExistsError, CommitConflictError: as `commit`.
        _GoneError: the existing object is gone.
    """
    if there == data:
        # This is our commit: an earlier request succeeded, but the answer of the store was lost.
        return info, None
    replaced = None
    if is_marker(there) and not _settled(request, info):
        return None
    # Any save may replace a marker: the deletion removes only objects that the earlier commit named.
    if not is_marker(there):
        replaced = _to_be_replaced(request, info, there)
    store, body, crc = request.store, [memoryview(data)], crc32c(memoryview(data))
    request.ensure_alive()
    try:
        info = retry_transient(lambda: store.put(key, body, crc32c=crc, if_match=info.etag), attempts=COMMIT_ATTEMPTS)
    except (ObjectNotFoundError, PreconditionFailedError):
        now, info = _get_committed(store, key)
        if now == data:
            return info, replaced
        if is_marker(now):
            return None
        raise _conflict(request) from None
    if verified:
        _check_ours(request, key, data)
    return info, replaced


def _settled(request: Commit, marker: ObjectInfo) -> bool:
    """Wait until no request to delete the marker can arrive any more: the request would delete the new commit.

    In stores without a conditional DELETE, the DELETE is signed before the marker is put, and its signature expires.
    The time in the signature is from the signing machine, whose clock may be up to 15 minutes ahead.

    Returns:
        False if the marker was deleted or replaced.
    """
    store = request.store
    # isinstance() would return False: from Python 3.12 on, it does not see attributes that a wrapper forwards.
    if store.capabilities.conditional_delete or getattr(store, "expiring_delete", None) is None:
        return True
    from bucketpoint.catalog.deletion.delete import SIGNED_S
    from bucketpoint.catalog.snapshot import CLOCKS_S

    watch, longest = Stopwatch(), SIGNED_S + CLOCKS_S
    while watch.seconds() < longest and (marker.modified is None or time.time() < marker.modified + longest + CLOCKS_S):
        logger.info("the commit to %s waits until the deletion of the previous checkpoint has ended", request.url)
        retry.pause(_POLL_S)
        try:
            if retry_transient(lambda: store.head(marker.key), attempts=COMMIT_ATTEMPTS).etag != marker.etag:
                return False
        except (ObjectNotFoundError, AccessDeniedError):
            return False
    return True


def _refuse_others(request: Commit, info: ObjectInfo, data: bytes) -> None:
    """Raise if another job has committed since this attempt began, because that job's save has succeeded."""
    seen = request.seen
    if seen is None or (seen.there and (seen.etag == info.etag or seen.etag == _thinned_from(data))):
        return
    raise _conflict(request)


def _thinned_from(data: bytes) -> str | None:
    """Return the ETag of the metadata that a pruner replaced when it thinned this checkpoint; None if none did."""
    try:
        etag = extra(decode_metadata(data)).get("thinned_from")
    except BucketpointError:
        return None
    return etag if isinstance(etag, str) else None


def _conflict(request: Commit) -> CommitConflictError:
    return CommitConflictError(
        "Another job committed a checkpoint to this URL during this save, so this save is discarded",
        url=request.url,
        remedy="Give every job its own URL, or save again",
    )


def _put_unconditionally(request: Commit, key: str, data: bytes) -> tuple[ObjectInfo, Metadata | None]:
    """Commit to a store without conditional writes: read, write, read again. Concurrent jobs may still collide."""
    replaced, there = None, b""
    try:
        there, info = _metadata_at(request.store, key)
        if not is_marker(there):
            replaced = _to_be_replaced(request, info, there)
    except ObjectNotFoundError:
        pass
    request.ensure_alive()
    try:
        info = request.store.put(key, [memoryview(data)], crc32c=crc32c(memoryview(data)))
    except StoreError:
        # The store may fail because it found another job's commit, made right after ours, in place of ours.
        with contextlib.suppress(ObjectNotFoundError):
            _check_ours(request, key, data, there)
        raise
    _check_ours(request, key, data)
    return info, replaced


def _check_ours(request: Commit, key: str, *ours: bytes) -> None:
    if _metadata_at(request.store, key)[0] not in ours:
        raise CommitConflictError("Another job committed a checkpoint to this URL at the same time", url=request.url)


def _to_be_replaced(request: Commit, info: ObjectInfo, data: bytes) -> Metadata | None:
    """Return the metadata to be replaced; None if it cannot be decoded: its data objects then stay.

    Raises:
        CheckpointExistsError, CommitConflictError: the commit must not be replaced.
    """
    if not request.overwrite:
        raise CheckpointExistsError("Checkpoint already exists at this URL", url=request.url)
    _refuse_others(request, info, data)
    if not request.name.endswith(keys.METADATA):
        return None
    try:
        return decode_metadata(data, url=request.url)
    except BucketpointError as error:
        logger.warning(
            "the metadata of the replaced checkpoint cannot be read, so its data objects are not deleted: %s", error
        )
        return None
