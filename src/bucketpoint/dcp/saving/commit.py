"""Commit protocol of a save: check for missing items, conditional PUT of `.metadata`, cleanup, and catalog record.

Only `.metadata` decides whether a checkpoint exists. An error in a step after its PUT never fails the committed save.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.planning.global_plan import stock
from bucketpoint.dcp.planning.results import RankResults
from bucketpoint.dcp.saving.commit_put import COMMIT_ATTEMPTS, Commit, put_commit
from bucketpoint.errors import BucketpointError, IncompleteSaveError, first_of
from bucketpoint.format import keys
from bucketpoint.format.index import ref as index_ref
from bucketpoint.format.index.ref import index_path, make_ref, ref_of
from bucketpoint.format.item_info import data_paths, read_item
from bucketpoint.format.metadata.codec import encode_metadata, extension
from bucketpoint.format.metadata.coverage import PARTIAL, lacking_ranks
from bucketpoint.format.metadata.facts import make_record
from bucketpoint.format.record import CommitRecord, dated
from bucketpoint.format.storage_info import pop_object_facts
from bucketpoint.stores import ObjectInfo
from bucketpoint.stores.retry import process_budget, retry_transient
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.version import __version__

logger = logging.getLogger(__name__)

_NAMED_AT_MOST = 5

VERSION = "1.0.0"
"""Version of DCP's metadata, as DCP's own writer sets it."""


def complete_metadata(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], end: dict[str, Any]
) -> tuple[Metadata, dict[str, Any]]:
    """Return the metadata to commit, with the location of each item and the fields `end`, and the table of objects.

    The result is a copy, because DCP broadcasts the metadata object that it passed in, and no rank needs the locations.

    Raises:
        IncompleteSaveError: an item of the plan has no result, or a size that does not match its shape.
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
    return dataclasses.replace(stock(metadata), storage_data=storage_data, **end), objects


def commit(
    request: Commit, metadata: Metadata, results: RankResults, *, world_size: int, created: float, endpoint: str
) -> CommitRecord:
    """Commit a checkpoint atomically, and return its record.

    Raises:
        IncompleteSaveError: as `complete_metadata`; or the chunks do not cover their tensors.
        CheckpointExistsError: the URL has a checkpoint, and `overwrite` is False.
        CommitConflictError: another job committed to the same URL meanwhile; this save committed nothing.
    """
    lost = results.uncovered()
    if not request.partial:
        names = metadata.state_dict_metadata
        _refuse_loss([*lost, *(lacking_ranks(names, request.ranks) if request.ranks > 1 else ())], request.url)
    facts = {
        "token": request.token,
        "url": request.url,
        "endpoint": endpoint,
        "world_size": world_size,
        "created": created,
        "torch": str(torch.__version__),
        **results.facts,
        **({PARTIAL: True} if lost else {}),
        **request.facts,
        **(request.log.facts(request.url) if request.log is not None else {}),
    }
    data, index, items, objects = _encoded(request, metadata, results, facts)
    if index is not None:
        # The index is put before the commit that names it. Only this attempt uses the key, so nothing is overwritten.
        key, body = keys.join(request.prefix, index_path(request.token)), memoryview(index)
        retry_transient(lambda: request.store.put(key, [body], crc32c=crc32c(body)), attempts=COMMIT_ATTEMPTS)
    sizes = {path: fact["size"] for path, fact in objects.items()}
    if request.fence is not None:
        request.fence.sizes = sizes
    known = {**facts, "writer": __version__}
    record = make_record(metadata, known, data, sizes, items=items, metadata_etag=None, covers=True)
    info, again = _put(request, data, kept={*objects, index_path(request.token)})
    record = dated(dataclasses.replace(record, metadata_etag=info.etag), info.modified)
    if request.name == keys.METADATA:
        _write_record(request, record, again=again)
    return record


def commit_copy(request: Commit, data: bytes, record: CommitRecord, *, paths: Collection[str]) -> None:
    """Commit a checkpoint whose data objects are already at `paths`, and whose metadata is encoded.

    Raises:
        CheckpointExistsError, CommitConflictError: as `commit`.
    """
    info, again = _put(request, data, kept=set(paths))
    _write_record(request, dataclasses.replace(record, metadata_etag=info.etag), again=again)


def _put(request: Commit, data: bytes, *, kept: set[str]) -> tuple[ObjectInfo, bool]:
    """Put the metadata, remove the fence, and delete the replaced data except for the paths in `kept`.

    Return the store's description of the metadata, and True if a request was retried.

    A request without an answer may still reach the store while its signature is valid. If the checkpoint is deleted
    before, the late request commits the checkpoint again, without its data. So after a retry the fence and the intent
    stay, and no prune deletes the checkpoint until they are an hour old.
    """
    # The retries of the whole process are counted, since a store may send on another thread. Retries of other requests
    # only keep the fence for an hour.
    before = process_budget().counts["retried"]
    info, replaced = put_commit(request, data)
    again = process_budget().counts["retried"] != before
    if not again and request.fence is not None:
        try:
            request.fence.release()
        except BucketpointError as error:
            logger.warning(
                "the fence of a committed save was not deleted, and stays until the next deep sweep: %s", error
            )
    if replaced is not None:
        _delete_replaced(request, replaced, kept)
    return info, again


def _encoded(
    request: Commit, metadata: Metadata, results: RankResults, facts: dict[str, Any]
) -> tuple[bytes, bytes | None, int, dict[str, Any]]:
    """Return the encoded metadata, the encoded index or None, the number of items, and the table of objects."""
    storage_meta = StorageMeta(checkpoint_id=request.url, save_id=keys.save_id(request.token))
    end = {"storage_meta": storage_meta, "version": VERSION}
    objects, index = results.objects(), None
    templates = results.templates(indexed=_wants_index(request, results.count, objects))
    if templates is not None and templates.metadata is not None:
        ours = extension({**facts, "objects": objects})
        if templates.index is not None:
            checksums = b"".join(columns.checksums for columns in results.known)
            paths = [path for columns in results.known for path, _, _ in columns.objects]
            (bucketpoint,) = ours.values()
            index = templates.index.fill(
                checksums, paths, bucketpoint=bucketpoint, storage_meta=storage_meta, version=VERSION
            )
        ref = None if index is None else make_ref(request.token, index)
        data = templates.metadata.fill(results.known, {**end, **ours}, ref)
        if data is not None:
            return data, index, results.count, objects
    whole, objects = complete_metadata(metadata, results.results(), end)
    facts = {**facts, "objects": objects}
    items, index = len(whole.storage_data or ()), None
    if _wants_index(request, items, objects):
        from bucketpoint.format.index.encode import encode_index

        (bucketpoint,) = extension(facts).values()
        index = encode_index(whole, bucketpoint=bucketpoint)
    ref = None if index is None else make_ref(request.token, index)
    data = encode_metadata(whole, bucketpoint=facts, index=ref)
    return data, index, items, objects


def _wants_index(request: Commit, items: int, objects: dict[str, Any]) -> bool:
    # If a user's group of objects has the same path as the index, the index would overwrite data, so none is made.
    free = index_path(request.token) not in objects
    return free and request.name == keys.METADATA and items >= index_ref.INDEX_ITEMS


def _write_record(request: Commit, record: CommitRecord, *, again: bool) -> None:
    """Write the record, as the last step: it removes the intent, by which sweeps find remains of the old checkpoint."""
    try:
        if request.log is not None:
            request.log.committed(request.url, record, intent_stays=again)
            return
        body = memoryview(record.to_json())
        request.store.put(keys.join(request.prefix, keys.RECORD), [body], crc32c=crc32c(body))
    # The checkpoint exists, so no error may fail the save, not even one of a caller's own log.
    except Exception as error:  # noqa: BLE001
        logger.warning(
            "the checkpoint is committed, but its catalog record was not written (`bucketpoint gc ROOT --adopt` writes "
            "it): %s",
            str(error) or type(error).__name__,
        )


def _delete_replaced(request: Commit, replaced: Metadata, kept: set[str]) -> None:
    """Delete the data of the overwritten checkpoint. Without permission to delete, the data stays."""
    try:
        index = ref_of(replaced)
        paths = (data_paths(replaced) | ({index.path} if index is not None else set())) - kept
        # Delete only paths that can be data: the replaced metadata may name the new commit, or a commit below this URL.
        paths = {path for path in paths if keys.may_be_data(path)}
        failures = request.store.delete([keys.join(request.prefix, path) for path in sorted(paths)])
    except BucketpointError as error:
        logger.warning("the data of the overwritten checkpoint was not deleted: %s", error)
        return
    if failures:
        logger.warning(
            "%d of %d objects of the overwritten checkpoint were not deleted, the first: %s %s; a pruner deletes them "
            "with `bucketpoint gc --deep`",
            len(failures),
            len(paths),
            failures[0].key,
            failures[0].code,
        )


def _refuse_loss(lost: Sequence[tuple[str, str]], url: str) -> None:
    if lost:
        named = first_of([f"{name} {why}" for name, why in lost], _NAMED_AT_MOST, "; ", "; and ")
        raise IncompleteSaveError(
            f"The ranks that saved do not hold the whole state, so nothing was committed: {named}",
            url=url,
            remedy="Save on all ranks that hold a part, before torch.distributed.destroy_process_group(). A rank that "
            "saves its part alone passes no_dist=True to bucketpoint.async_save",
        )


def _check_complete(metadata: Metadata, storage_data: dict[MetadataIndex, Any]) -> None:
    missing: list[str] = []
    wrong: list[str] = []
    for index, nbytes in _expected(metadata):
        stored = storage_data.get(index)
        if stored is None:
            missing.append(_name(index))
            continue
        item = read_item(stored)
        if nbytes is not None and item.payload_nbytes is not None and item.payload_nbytes != nbytes:
            wrong.append(f"{_name(index)}: {item.payload_nbytes} bytes instead of {nbytes}")
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
