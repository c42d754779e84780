"""The commit: every planned item accounted for, then one conditional PUT of `.metadata`, then clean-up and the record.

`.metadata` alone is the truth. Everything after its PUT is best effort and never fails a save that has committed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.catalog.deletion import SIGNED_S
from bucketpoint.catalog.fence import AttemptFence, Stopwatch
from bucketpoint.catalog.snapshot import CLOCKS_S
from bucketpoint.dcp.commit_log import CommitLog
from bucketpoint.dcp.planned import Reported, stock
from bucketpoint.dcp.session import Seen
from bucketpoint.errors import (
    AccessDeniedError,
    BucketpointError,
    CheckpointExistsError,
    CommitConflictError,
    IncompleteSaveError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from bucketpoint.format import index_ref, keys
from bucketpoint.format.deletion_marker import MARKER_HEAD_BYTES, is_marker
from bucketpoint.format.index import encode_index
from bucketpoint.format.index_ref import index_path, make_ref, ref_of
from bucketpoint.format.metadata import decode_metadata, encode_metadata, extension, extra, make_record
from bucketpoint.format.record import CommitRecord
from bucketpoint.format.storage_info import data_paths, pop_object_facts, read_storage_info
from bucketpoint.stores import ExpiringDeletes, ObjectInfo, Store, proven, retry
from bucketpoint.transfer import retry_transient
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.version import __version__

logger = logging.getLogger(__name__)

_NAMED_AT_MOST = 5
COMMIT_ATTEMPTS = 3
_POLL_S = 2.0

VERSION = "1.0.0"
"""Of DCP's metadata, as its own writer says."""


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


def complete_metadata(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], *, storage_meta: StorageMeta
) -> tuple[Metadata, dict[str, Any]]:
    """The metadata to commit, with where each item lies, and the table of objects.

    Works on a copy: DCP broadcasts the metadata it passed in to every rank, and must not send the whole index along.

    Raises:
        IncompleteSaveError: an item of the plan has no result, or a size that its shape does not explain.
    """
    storage_data: dict[MetadataIndex, Any] = {}
    objects: dict[str, Any] = {}
    for rank_results in results:
        for result in rank_results:
            facts = pop_object_facts(result.storage_data)
            if facts is not None:
                objects[result.storage_data.relative_path] = facts
            storage_data[result.index] = result.storage_data
    _check_complete(metadata, storage_data)
    fields: dict[str, Any] = {"storage_data": storage_data, "storage_meta": storage_meta}
    if hasattr(metadata, "version"):
        fields["version"] = VERSION
    return dataclasses.replace(stock(metadata), **fields), objects


@dataclass(frozen=True)
class Committed:
    """How much a checkpoint holds."""

    items: int
    objects: int
    nbytes: int


def commit(
    request: Commit, metadata: Metadata, told: Reported, *, world_size: int, created: float, endpoint: str
) -> Committed:
    """Make the checkpoint exist, all of it at once.

    Raises:
        IncompleteSaveError: as `complete_metadata`.
        CheckpointExistsError: something is committed there and `overwrite` is False.
        CommitConflictError: another job committed to the same URL meanwhile; this save has not happened.
    """
    facts = {
        "token": request.token,
        "url": request.url,
        "endpoint": endpoint,
        "world_size": world_size,
        "created": created,
        "torch": str(torch.__version__),
        **request.facts,
        **(request.log.facts(request.url) if request.log is not None else {}),
    }
    made = _encoded(request, metadata, told, facts)
    if made.index is not None:
        _put_index(request, made.index)
    sizes = {path: fact["size"] for path, fact in made.objects.items()}
    if request.fence is not None:
        request.fence.sizes = sizes
    info, replaced = put_commit(request, made.data)
    _release(request)
    if replaced is not None:
        _delete_replaced(request, replaced, kept={*made.objects, index_path(request.token)})
    if request.name == keys.METADATA:
        known = {**facts, "writer": __version__}
        record = make_record(metadata, known, made.data, sizes, items=made.items, metadata_etag=info.etag)
        # Last: it takes the intent away, and without that no sweep would look for what is left of the old checkpoint.
        _write_record(request, record)
    return Committed(made.items, len(made.objects), sum(sizes.values()))


def commit_copy(request: Commit, data: bytes, record: CommitRecord, *, paths: Collection[str]) -> None:
    """Make a checkpoint exist whose data objects are there already, at `paths`, and whose metadata is made.

    Raises:
        CheckpointExistsError, CommitConflictError: as `commit`.
    """
    info, replaced = put_commit(request, data)
    _release(request)
    if replaced is not None:
        _delete_replaced(request, replaced, kept=set(paths))
    _write_record(request, dataclasses.replace(record, metadata_etag=info.etag))


@dataclass(frozen=True)
class _Encoded:
    """What is to be put: `.metadata`, and the index that it names, if it names one."""

    data: bytes
    index: bytes | None
    items: int
    objects: dict[str, Any]


def _encoded(request: Commit, metadata: Metadata, told: Reported, facts: dict[str, Any]) -> _Encoded:
    storage_meta = StorageMeta(checkpoint_id=request.url, save_id=request.token)
    version = (VERSION,) if hasattr(metadata, "version") else ()

    def filled(objects: dict[str, Any], index: bytes | None) -> bytes | None:
        end: dict[str, Any] = {"storage_meta": storage_meta}
        if version:
            end["version"] = VERSION
        ref = None if index is None else make_ref(request.token, index)
        return told.filled({**end, **extension({**facts, "objects": objects})}, ref)

    objects = told.objects()
    (bucketpoint,) = extension({**facts, "objects": objects}).values()
    wanted = _wants_index(request, told.count, objects)
    told.note_if_complete(indexed=wanted)
    index = told.index(bucketpoint, storage_meta, version) if request.name == keys.METADATA else None
    data = filled(objects, index)
    if data is not None:
        return _Encoded(data, index, told.count, objects)
    whole, objects = complete_metadata(metadata, told.results(), storage_meta=storage_meta)
    (bucketpoint,) = extension({**facts, "objects": objects}).values()
    wanted = _wants_index(request, len(whole.storage_data or ()), objects)
    found = encode_index(whole, bucketpoint=bucketpoint) if wanted else None
    index, template = found or (None, None)
    told.note_complete(template)
    data = filled(objects, index)
    if data is None:
        ref = None if index is None else make_ref(request.token, index)
        data = encode_metadata(whole, bucketpoint={**facts, "objects": objects}, index=ref)
    return _Encoded(data, index, len(whole.storage_data or ()), objects)


def _wants_index(request: Commit, items: int, objects: dict[str, Any]) -> bool:
    # A user's group of objects may have the index's name: its data is not to be overwritten.
    free = index_path(request.token) not in objects
    return free and request.name == keys.METADATA and items >= index_ref.INDEX_ITEMS


def _put_index(request: Commit, index: bytes) -> None:
    """Before the commit that names it. Its key is this attempt's own, so there is nothing to overwrite."""
    key, body = keys.join(request.prefix, index_path(request.token)), memoryview(index)
    retry_transient(lambda: request.store.put(key, [body], crc32c=crc32c(body)), attempts=COMMIT_ATTEMPTS)


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
    if store.capabilities.conditional_delete or not isinstance(store, ExpiringDeletes):
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


def _write_record(request: Commit, record: CommitRecord) -> None:
    try:
        if request.log is not None:
            request.log.committed(request.url, record)
            return
        body = memoryview(record.to_json())
        request.store.put(keys.join(request.prefix, keys.RECORD), [body], crc32c=crc32c(body))
    except BucketpointError as error:
        logger.warning("the checkpoint is committed, but its record was not written and can be rebuilt: %s", error)


def _release(request: Commit) -> None:
    try:
        if request.fence is not None:
            request.fence.release()
    except BucketpointError as error:
        logger.warning("the fence of a save that has committed stays until the next deep sweep: %s", error)


def _delete_replaced(request: Commit, replaced: Metadata, *, kept: set[str]) -> None:
    """Remove the data of the checkpoint that was overwritten. A trainer may lack the right to: then it stays."""
    try:
        index = ref_of(replaced)
        paths = (data_paths(replaced) | ({index.path} if index is not None else set())) - kept
        # Whoever wrote it may have named the commit that has just been made, or another one below this URL.
        paths = {path for path in paths if keys.may_be_data(path)}
        failures = request.store.delete([keys.join(request.prefix, path) for path in sorted(paths)])
    except BucketpointError as error:
        logger.warning("the data of the overwritten checkpoint was not deleted: %s", error)
        return
    if failures:
        logger.warning(
            "%d of %d objects of the overwritten checkpoint were not deleted, the first: %s %s",
            len(failures),
            len(paths),
            failures[0].key,
            failures[0].code,
        )


def _check_complete(metadata: Metadata, storage_data: dict[MetadataIndex, Any]) -> None:
    missing: list[str] = []
    wrong: list[str] = []
    for index, nbytes in _expected(metadata):
        found = storage_data.get(index)
        if found is None:
            missing.append(_name(index))
            continue
        item = read_storage_info(found)
        if nbytes is not None and item.payload_nbytes is not None and item.payload_nbytes != nbytes:
            wrong.append(f"{_name(index)}: {item.payload_nbytes} bytes for {nbytes}")
    if missing or wrong:
        named = ", ".join((missing + wrong)[:_NAMED_AT_MOST])
        raise IncompleteSaveError(
            f"{len(missing)} planned items were not written and {len(wrong)} have the wrong size ({named}), "
            "so nothing was committed"
        )


def _expected(metadata: Metadata) -> Iterator[tuple[MetadataIndex, int | None]]:
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            itemsize = entry.properties.dtype.itemsize
            for chunk in entry.chunks:
                yield MetadataIndex(fqn, chunk.offsets), math.prod(chunk.sizes) * itemsize
        else:
            yield MetadataIndex(fqn), None


def _name(index: MetadataIndex) -> str:
    return index.fqn if not index.offset or not any(index.offset) else f"{index.fqn}{list(index.offset)}"
