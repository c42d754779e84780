"""DCP checkpoints as a target: with bucketpoint's names and commit, or with the names that torch's own writer gives.

Items keep the chunks in which they were saved. Stock readers read both kinds, and our readers verify both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.catalog.deletion.fence import LONG_AGO, AttemptFence
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.checkpoint.regions import ChunkShapes
from bucketpoint.convert.payload_reader import Filling
from bucketpoint.convert.source import Payload, Source, exclude_option
from bucketpoint.convert.target import TargetLayout, TargetPlace, batched, held
from bucketpoint.dcp.planning.nested_state import INT_KEYS, plain_int_keys
from bucketpoint.dcp.planning.plan_cache import reported
from bucketpoint.dcp.saving.commit import commit, complete_metadata
from bucketpoint.dcp.saving.commit_put import Commit, prior_commit, put_commit
from bucketpoint.dcp.saving.object_layout import PlacedItem, PlannedObject, results_of
from bucketpoint.errors import MismatchError
from bucketpoint.format import keys
from bucketpoint.format.groups import group_of
from bucketpoint.format.metadata.codec import pickled
from bucketpoint.format.storage_info import plan_blocks
from bucketpoint.format.torch_zip import tensor_frame
from bucketpoint.transfer import ObjectSource, Segment, Uploaded

Items = list[tuple[MetadataIndex, Payload]]


def plan_bucketpoint(
    source: Source,
    filling: Filling,
    place: TargetPlace,
    *,
    token: str,
    object_bytes: int,
    overwrite: bool,
    log: SaveLog | None,
) -> TargetLayout:
    """Lay out a checkpoint as our writer does: model and optimizer apart, names with this attempt's token, one commit.

    With `overwrite` it may replace the commit that is there now, but none that appears later.
    """
    seen = prior_commit(place.store, place.prefix, keys.METADATA) if overwrite else None
    groups: dict[str, Items] = {}
    for index, payload in _ordered(source):
        tensor = isinstance(source.metadata.state_dict_metadata[index.fqn], TensorStorageMetadata)
        groups.setdefault(group_of(index.fqn, tensor=tensor), []).append((index, payload))
    planned = [
        _lay_out(source, filling, keys.data_path(token, 0, group, number), batch)
        for group, items in groups.items()
        for number, batch in enumerate(_batches(items, object_bytes))
    ]

    def finish(uploaded: Sequence[Uploaded]) -> None:
        facts: dict[str, Any] = {"kind": source.kind, "metrics": dict(source.metrics), "converted_from": source.url}
        if source.int_keys:
            facts[INT_KEYS] = plain_int_keys(source.int_keys)
        request = Commit(
            place.store,
            place.prefix,
            place.url,
            token,
            keys.METADATA,
            overwrite=overwrite,
            log=log,
            facts=facts,
            seen=seen,
            # Objects of an interrupted conversion may be old, and a sweep may take them for dead: the fence decides.
            fence=AttemptFence(place.store, place.prefix, LONG_AGO),
        )
        results = reported([_results(planned, uploaded)], source.metadata)
        endpoint = place.store.identity
        commit(request, source.metadata, results, world_size=1, created=time.time(), endpoint=endpoint)

    return _layout(source, planned, finish)


def plan_stock(source: Source, filling: Filling, place: TargetPlace, *, token: str, object_bytes: int) -> TargetLayout:
    """Lay out a checkpoint under the names that torch's `FileSystemWriter` gives, with DCP's metadata only."""
    batches = _batches(_ordered(source), object_bytes)
    planned = [_lay_out(source, filling, f"__0_{number}.distcp", batch) for number, batch in enumerate(batches)]

    def finish(uploaded: Sequence[Uploaded]) -> None:
        meta = StorageMeta(checkpoint_id=place.url, save_id=keys.save_id(token))
        whole, _ = complete_metadata(source.metadata, [_results(planned, uploaded)], storage_meta=meta)
        request = Commit(place.store, place.prefix, place.url, token, keys.METADATA, overwrite=False)
        put_commit(request, pickled(whole))

    return _layout(source, planned, finish)


def _layout(
    source: Source, planned: Sequence[PlannedObject], finish: Callable[[Sequence[Uploaded]], None]
) -> TargetLayout:
    entries = source.metadata.state_dict_metadata.values()
    return TargetLayout(
        [entry.source for entry in planned],
        finish,
        tensors=sum(isinstance(entry, TensorStorageMetadata) for entry in entries),
    )


def _results(planned: Sequence[PlannedObject], uploaded: Sequence[Uploaded]) -> list[WriteResult]:
    return [result for entry, done in zip(planned, uploaded, strict=True) for result in results_of(entry, done)]


def _ordered(source: Source) -> Items:
    """Order items by their position in the source, so that items which are read together lie together in the target."""
    return sorted(source.payloads.items(), key=lambda item: item[1].place)


def _batches(items: Items, object_bytes: int) -> list[Items]:
    return batched(items, lambda item: item[1].nbytes, object_bytes)


def _lay_out(source: Source, filling: Filling, path: str, batch: Items) -> PlannedObject:
    """Lay out an object as our writer does, with segments that are fetched later instead of tensors."""
    shapes = ChunkShapes(source.metadata)
    segments: list[Segment] = []
    placed: list[PlacedItem] = []
    offset = 0
    for index, payload in batch:
        entry = source.metadata.state_dict_metadata[index.fqn]
        shape = shapes.of(index)
        tensor = isinstance(entry, TensorStorageMetadata)
        item = WriteItem(index, WriteItemType.TENSOR if tensor else WriteItemType.BYTE_IO)
        if isinstance(entry, TensorStorageMetadata) and shape is not None and not payload.opaque:
            try:
                frame = tensor_frame(entry.properties.dtype, shape)
            except TypeError as error:
                raise MismatchError(
                    f"The tensor cannot be converted: {error}",
                    key=index.fqn,
                    remedy=f"Leave it out with {exclude_option(index.fqn)}",
                ) from None
            row = payload.nbytes // shape[0] if shape and shape[0] else payload.nbytes
            body = filling.segment(payload, block_nbytes=plan_blocks(payload.nbytes, row))
            parts = [held(frame.header), body, held(frame.trailer)]
            placed.append(PlacedItem(item, offset, frame.nbytes, len(segments) + 1, frame.payload_offset, None))
        else:
            parts = [filling.segment(payload, block_nbytes=payload.nbytes)]
            placed.append(PlacedItem(item, offset, payload.nbytes, len(segments), None, None))
        segments += parts
        offset += sum(part.nbytes for part in parts)
    tabled = []
    for number, item_place in enumerate(placed):
        segment = segments[item_place.payload]
        if segment.nbytes > segment.block_nbytes:
            # The table goes after all items: the checksums are known only once everything before the table has been
            # read.
            placed[number] = replace(item_place, table=offset)
            tabled.append(item_place.payload)
            offset += 4 * -(-segment.nbytes // segment.block_nbytes)
    if tabled:
        nbytes = offset - sum(segment.nbytes for segment in segments)
        segments.append(Segment(nbytes, table_of=tabled, block_nbytes=nbytes))
    return PlannedObject(path, ObjectSource(path, segments), placed)
