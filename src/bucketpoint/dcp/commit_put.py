"""The one request that makes a checkpoint: the conditional PUT of its metadata, over nothing or over what was seen."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint import Metadata

from bucketpoint.catalog.deletion import SIGNED_S
from bucketpoint.catalog.fence import AttemptFence, Stopwatch
from bucketpoint.catalog.snapshot import CLOCKS_S
from bucketpoint.dcp.commit_log import CommitLog
from bucketpoint.dcp.session import Seen
from bucketpoint.errors import (
    AccessDeniedError,
    BucketpointError,
    CheckpointExistsError,
    CommitConflictError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from bucketpoint.format import keys
from bucketpoint.format.deletion_marker import MARKER_HEAD_BYTES, is_marker
from bucketpoint.format.metadata import decode_metadata
from bucketpoint.format.metadata_facts import extra
from bucketpoint.stores import ObjectInfo, Store, proven, retry
from bucketpoint.transfer import retry_transient
from bucketpoint.transfer.checksum import crc32c

logger = logging.getLogger(__name__)

COMMIT_ATTEMPTS = 3
_POLL_S = 2.0


@dataclass(frozen=True)
class Commit:
    """What is committed, and under which name.

    Attributes:
        name: `.metadata`, or `__{rank}.metadata` for a save without collectives.
        seen: the commit that was there when the save began; only it may be replaced. None: unknown, not checked.
        fence: guards the data of the attempt against sweeps.
    """

    store: Store
    prefix: str
    url: str
    token: str
    name: str
    overwrite: bool
    log: CommitLog | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further plain values to put into the metadata. What the log says counts more."""
    seen: Seen | None = None
    fence: AttemptFence | None = None

    def ensure_alive(self) -> None:
        """Make sure that no sweep takes this attempt for dead. Called right before each PUT of the commit.

        Raises:
            IncompleteSaveError: one has.
        """
        if self.fence is not None:
            self.fence.ensure()


def look(store: Store, prefix: str, name: str) -> Seen | None:
    """What is committed now. None if those who ask may not know."""
    try:
        head, info = retry_transient(
            lambda: store.get(keys.join(prefix, name), first=MARKER_HEAD_BYTES), attempts=COMMIT_ATTEMPTS
        )
    except ObjectNotFoundError:
        return Seen(there=False)
    except AccessDeniedError:
        # S3's answer for a key that is not there, to those who may not list.
        return None
    return Seen(there=False) if is_marker(head) else Seen(there=True, etag=info.etag)


def put_commit(request: Commit, data: bytes) -> tuple[ObjectInfo, Metadata | None]:
    """Commit over nothing, or over exactly the checkpoint that was seen there. Returns what was replaced.

    Raises:
        CheckpointExistsError, CommitConflictError: as `commit`.
    """
    store, key = request.store, keys.join(request.prefix, request.name)
    able = retry_transient(lambda: proven(store, request.prefix), attempts=COMMIT_ATTEMPTS)
    if not able.conditional_put:
        return _put_unconditionally(request, key, data)
    verified = not able.conditional_replace
    # Without a condition that was refused, or a commit that was seen, nothing is there.
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
        "What is committed here comes and goes while this save tries to replace it", url=request.url
    ) from gone


class _GoneError(Exception):
    """What had refused a condition, or was to be replaced, is not there any more."""

    def __init__(self, reason: BucketpointError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _get_committed(store: Store, key: str) -> tuple[bytes, ObjectInfo]:
    try:
        return retry_transient(lambda: store.get(key), attempts=COMMIT_ATTEMPTS)
    except (ObjectNotFoundError, AccessDeniedError) as error:
        # Deleted in between, by a pruner or a person. S3 answers 403 for that to those who may not list.
        raise _GoneError(error) from None


def _create(request: Commit, key: str, data: bytes) -> ObjectInfo | None:
    """Commit where nothing is. None if something is."""
    store, body, crc = request.store, [memoryview(data)], crc32c(memoryview(data))
    request.ensure_alive()
    try:
        return retry_transient(lambda: store.put(key, body, crc32c=crc, if_none_match=True), attempts=COMMIT_ATTEMPTS)
    except PreconditionFailedError:
        return None


def _replace(
    request: Commit, key: str, data: bytes, there: bytes, info: ObjectInfo, *, verified: bool
) -> tuple[ObjectInfo, Metadata | None] | None:
    """Commit over what is there. None if that has become the marker of a deletion meanwhile.

    Args:
        verified: read back what was written: the store looks before it writes, and no more.

    Raises:
        CheckpointExistsError, CommitConflictError: as `commit`.
        _GoneError: it is gone.
    """
    if there == data:
        # Ours: the store acted, and the answer to an earlier attempt was lost on the way.
        return info, None
    replaced = None
    if is_marker(there) and not _settled(request, info):
        return None
    # A marker is nobody's checkpoint. Whoever deletes removes only what the commit before the marker had named.
    if not is_marker(there):
        if not request.overwrite:
            raise CheckpointExistsError("Checkpoint already exists here", url=request.url) from None
        _refuse_others(request, info, there)
        replaced = _readable(there, request.url)
    store, body, crc = request.store, [memoryview(data)], crc32c(memoryview(data))
    request.ensure_alive()
    try:
        info = retry_transient(lambda: store.put(key, body, crc32c=crc, if_match=info.etag), attempts=COMMIT_ATTEMPTS)
    except (ObjectNotFoundError, PreconditionFailedError):
        now, found = _get_committed(store, key)
        if now == data:
            return found, replaced
        if is_marker(now):
            return None
        raise _conflict(request) from None
    if verified:
        _check_ours(request, key, data)
    return info, replaced


def _settled(request: Commit, marker: ObjectInfo) -> bool:
    """Wait until no deletion of a marker can be under way that would remove what replaces it. False if it is gone.

    Where a deletion carries no condition, it is signed before the marker is put, and expires. The service reckons with
    the clock of the machine that signed, which it lets be a quarter of an hour ahead.
    """
    store = request.store
    # Not by the type: from Python 3.12 on a protocol does not see what a wrapper of a store passes on.
    if store.capabilities.conditional_delete or getattr(store, "expiring_delete", None) is None:
        return True
    watch, longest = Stopwatch(), SIGNED_S + CLOCKS_S
    while watch.seconds() < longest and (marker.modified is None or time.time() < marker.modified + longest + CLOCKS_S):
        logger.info("a checkpoint is being deleted at %s, and the commit of its successor waits for that", request.url)
        retry.pause(_POLL_S)
        try:
            if retry_transient(lambda: store.head(marker.key), attempts=COMMIT_ATTEMPTS).etag != marker.etag:
                return False
        except (ObjectNotFoundError, AccessDeniedError):
            return False
    return True


def _refuse_others(request: Commit, found: ObjectInfo, data: bytes) -> None:
    """Raise if what is there was committed after this attempt began: its job believes that it stands."""
    seen = request.seen
    if seen is None or (seen.there and (seen.etag == found.etag or seen.etag == _thinned_from(data))):
        return
    raise _conflict(request)


def _thinned_from(data: bytes) -> str | None:
    """The ETag of the metadata that a pruner replaced when it thinned this checkpoint; None if none did."""
    try:
        etag = extra(decode_metadata(data)).get("thinned_from")
    except BucketpointError:
        return None
    return etag if isinstance(etag, str) else None


def _conflict(request: Commit) -> CommitConflictError:
    return CommitConflictError(
        "Another job committed a checkpoint to this URL while this one was being saved; this save is discarded",
        url=request.url,
        remedy="Give every job its own URL, or save again",
    )


def _put_unconditionally(request: Commit, key: str, data: bytes) -> tuple[ObjectInfo, Metadata | None]:
    """For stores without conditional writes: look, write, and look again. Two jobs at once may still collide."""
    replaced = None
    try:
        there, found = request.store.get(key)
        if not is_marker(there):
            if not request.overwrite:
                raise CheckpointExistsError("Checkpoint already exists here", url=request.url)
            _refuse_others(request, found, there)
            replaced = _readable(there, request.url)
    except ObjectNotFoundError:
        pass
    request.ensure_alive()
    info = request.store.put(key, [memoryview(data)], crc32c=crc32c(memoryview(data)))
    _check_ours(request, key, data)
    return info, replaced


def _check_ours(request: Commit, key: str, data: bytes) -> None:
    if request.store.get(key)[0] != data:
        raise CommitConflictError("Another job committed a checkpoint to this URL at the same time", url=request.url)


def _readable(data: bytes, url: str) -> Metadata | None:
    """The checkpoint about to be replaced; None if it is not one that can be read, so that its data is left alone."""
    try:
        return decode_metadata(data, url=url)
    except BucketpointError as error:
        logger.warning("the checkpoint being replaced cannot be read, so its data objects stay: %s", error)
        return None
