"""Writer of a checkpoint of bucketpoint, laid out and committed like a save of one rank. Tensors keep their chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from bucketpoint.catalog.deletion.fence import AttemptFence
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.convert.payload_reader import Filling
from bucketpoint.convert.source import Payload, Source, exclude_option
from bucketpoint.convert.target import TargetLayout, TargetPlace, with_checksums
from bucketpoint.dcp.planning.nested_state import INT_KEYS, plain_int_keys
from bucketpoint.dcp.planning.results import reported
from bucketpoint.dcp.saving.commit import commit
from bucketpoint.dcp.saving.commit_put import Commit, prior_commit
from bucketpoint.dcp.saving.object_layout import (
    ItemBytes,
    ObjectNames,
    framed_segments,
    group_items,
    plan_objects,
    results_of,
)
from bucketpoint.errors import MismatchError
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import DEFAULT_RULES
from bucketpoint.format.index.view import ChunkShapes
from bucketpoint.stopwatch import LONG_AGO
from bucketpoint.transfer import Segment, Uploaded


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
    """Plan the objects of a checkpoint as a save does: one group each for model and optimizer, keys with the token.

    With `overwrite`, the commit may replace the commit that exists now, but not one that appears later.
    """
    seen = prior_commit(place.store, place.prefix, keys.METADATA) if overwrite else None
    described = source.metadata.state_dict_metadata
    tensors = {fqn for fqn, entry in described.items() if isinstance(entry, TensorStorageMetadata)}
    items = [
        WriteItem(index, WriteItemType.TENSOR if index.fqn in tensors else WriteItemType.BYTE_IO)
        # Sorted by position in the source, so that items that are read together lie together in the target.
        for index, _ in sorted(source.payloads.items(), key=lambda item: item[1].place)
    ]
    names, shapes = ObjectNames("", token, 0), ChunkShapes(source.metadata)
    planned = []
    for group, members in group_items(items, DEFAULT_RULES).items():
        entries = [_item_bytes(item, source.payloads[item.index], source, filling, shapes) for item in members]
        planned += plan_objects(group, entries, names, target_object_bytes=object_bytes)

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
            # A sweep may delete old objects of an interrupted conversion. The fence then prevents the commit.
            fence=AttemptFence(place.store, place.prefix, LONG_AGO),
        )
        results = [result for entry, done in zip(planned, uploaded, strict=True) for result in results_of(entry, done)]
        reports = reported([results], source.metadata)
        commit(request, source.metadata, reports, world_size=1, created=time.time(), endpoint=place.store.identity)

    return TargetLayout([with_checksums(entry.source) for entry in planned], finish, tensors=len(tensors))


def _item_bytes(item: WriteItem, payload: Payload, source: Source, filling: Filling, shapes: ChunkShapes) -> ItemBytes:
    """Return an item with segments whose bytes are fetched when they are sent."""
    entry, shape = source.metadata.state_dict_metadata[item.index.fqn], shapes.of(item.index)
    body = filling.segment(payload)
    if not isinstance(entry, TensorStorageMetadata) or shape is None or payload.opaque:
        return ItemBytes(item, [Segment(body.nbytes, body.data, body.fill, block_nbytes=body.nbytes)], 0)
    try:
        return ItemBytes(item, framed_segments(entry.properties.dtype, shape, data=body.data, fill=body.fill), 1)
    except TypeError as error:
        raise MismatchError(
            f"The tensor cannot be converted: {error}",
            key=item.index.fqn,
            remedy=f"Leave it out with {exclude_option(item.index.fqn)}",
        ) from None
