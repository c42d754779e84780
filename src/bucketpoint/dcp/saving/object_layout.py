"""Layout of a rank's write items in objects, and the results that the rank reports for the items."""

from __future__ import annotations

import functools
import io
import logging
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import SavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.errors import UNSAVEABLE, BucketpointError
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import GroupRule, group_of
from bucketpoint.format.pickles.items import read_item
from bucketpoint.format.pickles.vocabulary import RefusedError, UnreadableError
from bucketpoint.format.storage_info import make_storage_info, plan_blocks, set_object_facts
from bucketpoint.format.tensor_bytes import copy_stretch, is_viewable, refuse_freed, tensor_bytes
from bucketpoint.format.torch_zip import frameable, tensor_frame
from bucketpoint.stores import Capabilities, ObjectInfo
from bucketpoint.transfer import ObjectSource, Segment, TransferOptions, Uploaded
from bucketpoint.transfer.checksum import digest, fold_blocks
from bucketpoint.transfer.pieces import batched
from bucketpoint.transfer.upload import Fill

logger = logging.getLogger(__name__)

DEFAULT_OBJECT_BYTES = 4 << 30
"""Default size of an object: below 5 GiB, the limit of one CopyObject request (Amazon S3 service limit)."""

WHOLE_OBJECT_BYTES = 64 << 20
"""Default size of an object for stores without multipart uploads."""


@dataclass(frozen=True)
class ItemBytes:
    """A write item with the bytes that are stored for it.

    Attributes:
        payload: index of the segment of which checksum and digest are computed; 0 unless the item is framed.
        tensor: a tensor that keeps the memory of the segments alive.
    """

    item: WriteItem
    segments: Sequence[Segment]
    payload: int
    tensor: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    @property
    def body(self) -> Segment:
        return self.segments[self.payload]

    @property
    def payload_offset(self) -> int | None:
        """Bytes from the start of the item to its payload; None if the item is not framed."""
        return self.segments[0].nbytes if self.payload else None


@dataclass(frozen=True)
class PlacedItem:
    """An item at `offset` in its object.

    Attributes:
        payload: index of the payload among the object's segments.
        table: offset in the object of the checksums of the item's blocks; None if the item has a single block.
    """

    entry: ItemBytes
    offset: int
    payload: int
    table: int | None = None


@dataclass(frozen=True)
class PlannedObject:
    """An object to write: the path within the checkpoint, the bytes, and the items in it."""

    path: str
    source: ObjectSource
    items: Sequence[PlacedItem]


class ObjectNames:
    """Paths of one rank's objects: named by the attempt's token and the rank, and numbered within each group.

    Attributes:
        prefix: key prefix of the checkpoint.
    """

    def __init__(self, prefix: str, token: str, rank: int) -> None:
        self.prefix = prefix
        self._token, self._rank = token, rank
        self._used: Counter[str] = Counter()

    def next(self, group: str) -> str:
        """Return a path that no other object of this save has."""
        number = self._used[group]
        self._used[group] += 1
        return keys.data_path(self._token, self._rank, group, number)


def resolve(item: WriteItem, planner: SavePlanner) -> torch.Tensor | memoryview:
    """Return the data of one item: a tensor, on any device, or bytes.

    Raises:
        BucketpointError: a value cannot be pickled, or the planner returns something other than it planned.
    """
    try:
        data = planner.resolve_data(item)
    except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
        # The error of pickle names a type, but not the key in the state.
        if item.type != WriteItemType.BYTE_IO:
            raise
        raise BucketpointError(
            f"The value of {item.index.fqn} cannot be pickled: {type(error).__name__}: {error}",
            key=item.index.fqn,
            remedy=UNSAVEABLE,
        ) from error
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise BucketpointError(
                f"resolve_data of the planner returned {type(data).__name__} for a byte item, which needs io.BytesIO",
                key=item.index.fqn,
            )
        # Not getbuffer(): Python 3.12.1 crashes when it collects such a buffer in a reference cycle, and the frames of
        # an error form such cycles.
        return memoryview(data.getvalue())
    if not isinstance(data, torch.Tensor):
        raise BucketpointError(
            f"resolve_data of the planner returned {type(data).__name__} for a tensor item", key=item.index.fqn
        )
    planned = item.tensor_data
    if planned is not None and data.dtype != planned.properties.dtype:
        raise BucketpointError(
            f"resolve_data of the planner returned {data.dtype} for an item planned as {planned.properties.dtype}",
            key=item.index.fqn,
            remedy="Convert the tensor in the state, or in both create_local_plan and resolve_data",
        )
    return data.detach()


def group_items(items: Sequence[WriteItem], rules: Sequence[GroupRule]) -> dict[str, list[WriteItem]]:
    """Return the items by group of objects; within a group they keep the order of the plan."""
    groups: dict[str, list[WriteItem]] = {}
    for item in items:
        group = group_of(item.index.fqn, rules, tensor=item.type != WriteItemType.BYTE_IO)
        groups.setdefault(group, []).append(item)
    return groups


def default_object_bytes(store: Capabilities, options: TransferOptions) -> int:
    """Return the size, in bytes, at which a group of items continues in another object."""
    if store.multipart:
        return DEFAULT_OBJECT_BYTES
    # If the upload holds a copy of the whole object in memory, several objects should fit the memory budget.
    return min(WHOLE_OBJECT_BYTES, 2 * options.copied_part_bytes) if store.copies_bodies else WHOLE_OBJECT_BYTES


def item_bytes(item: WriteItem, planner: SavePlanner, *, digests: bool = False) -> ItemBytes:
    """Resolve an item to the bytes that are stored for it. `digests`: compute a digest if the bytes are in memory."""
    data = resolve(item, planner)
    segments = item_segments(item, data)
    payload = 1 if len(segments) > 1 else 0
    if digests and segments[payload].data is not None:
        # The digest includes the frame, because the same bytes with another dtype or shape are another item.
        frame = b"".join(segment.data or b"" for number, segment in enumerate(segments) if number != payload)
        segments[payload] = replace(segments[payload], digest_seed=digest(memoryview(frame), b""))
    return ItemBytes(item, segments, payload, data if payload and isinstance(data, torch.Tensor) else None)


def plan_objects(
    group: str, items: Sequence[ItemBytes], names: ObjectNames, *, target_object_bytes: int
) -> list[PlannedObject]:
    """Arrange the items of one group in objects.

    Each group has separate objects, so that objects can be deleted to thin a checkpoint to its weights. A group larger
    than `target_object_bytes` is spread over several objects, but an item is never split.
    """
    batches = batched(items, lambda entry: entry.body.nbytes, target_object_bytes)
    return [_lay_out(names.next(group), names.prefix, batch) for batch in batches]


def _lay_out(path: str, prefix: str, batch: Sequence[ItemBytes]) -> PlannedObject:
    segments: list[Segment] = []
    placed: list[PlacedItem] = []
    offset = 0
    for entry in batch:
        placed.append(PlacedItem(entry, offset, len(segments) + entry.payload))
        segments += entry.segments
        offset += entry.nbytes
    for number, item in enumerate(placed):
        body = item.entry.body
        if body.nbytes > body.block_nbytes:
            # Tables follow all items, because the checksums are computed while the items are sent.
            placed[number] = replace(item, table=offset)
            offset += 4 * -(-body.nbytes // body.block_nbytes)
    tabled = [item.payload for item in placed if item.table is not None]
    if tabled:
        segments.append(Segment(offset - sum(part.nbytes for part in segments), table_of=tabled))
    digested = [item for item in placed if item.entry.body.digest_seed is not None]
    if digested:
        from bucketpoint.checkpoint.checksums import table_nbytes, table_tail

        tail = memoryview(table_tail([item.offset for item in digested]))
        of = [item.payload for item in digested]
        segments.append(Segment(table_nbytes(len(of)), tail, digests_of=of))
    return PlannedObject(path, ObjectSource(keys.join(prefix, path), segments), placed)


def item_segments(write: WriteItem, data: torch.Tensor | memoryview) -> list[Segment]:
    """Return header, payload and trailer of a tensor that can be framed, or one segment for any other item."""
    if isinstance(data, torch.Tensor):
        refuse_freed(data, write.index.fqn)
    if isinstance(data, torch.Tensor) and frameable(data):
        if is_viewable(data):
            return framed_segments(data.dtype, data.shape, data=tensor_bytes(data))
        return framed_segments(data.dtype, data.shape, fill=functools.partial(copy_stretch, data))
    if isinstance(data, torch.Tensor):
        # Our frames cannot hold a sparse or quantised tensor, or a subclass.
        buffer = io.BytesIO()
        torch.save(data.cpu(), buffer)
        data = memoryview(buffer.getvalue())
    if write.type == WriteItemType.BYTE_IO:
        # Warn at the save, while the program can still change the value.
        try:
            read_item(bytes(data))
        except UnreadableError:
            pass  # bytes that a custom planner made, and that no load unpickles
        except RefusedError as error:
            logger.warning(
                "%s contains %s, which a load refuses by default: save plain values, or load with trusted=True",
                write.index.fqn,
                error,
            )
    return [Segment(len(data), data, block_nbytes=len(data))]


def framed_segments(
    dtype: torch.dtype, shape: Sequence[int], *, data: memoryview | None = None, fill: Fill | None = None
) -> list[Segment]:
    """Return header, payload and trailer of a tensor whose elements are in `data`, or are produced by `fill`.

    Raises:
        TypeError: our frames cannot hold this dtype.
    """
    frame = tensor_frame(dtype, tuple(shape))
    header, trailer, nbytes = memoryview(frame.header), memoryview(frame.trailer), frame.payload_nbytes
    blocks = plan_blocks(nbytes, nbytes // shape[0] if len(shape) and shape[0] else nbytes)
    payload = Segment(nbytes, data, fill, block_nbytes=blocks)
    return [Segment(len(header), header), payload, Segment(len(trailer), trailer)]


def results_of(planned: PlannedObject, uploaded: Uploaded) -> list[WriteResult]:
    """Return the results that this rank reports to the coordinator for the items of one object."""
    infos = []
    for placed in planned.items:
        entry, body = placed.entry, placed.entry.body
        info = make_storage_info(
            planned.path,
            placed.offset,
            entry.nbytes,
            payload_offset=entry.payload_offset,
            payload_nbytes=body.nbytes if entry.payload else None,
            crc32c=fold_blocks(uploaded.block_crcs[placed.payload], body.nbytes, body.block_nbytes),
            block_nbytes=body.block_nbytes,
            table_offset=placed.table,
        )
        infos.append((entry.item.index, info))
    return results_with(infos, uploaded.info)


def results_with(infos: Sequence[tuple[MetadataIndex, Any]], stored: ObjectInfo) -> list[WriteResult]:
    """Return the results for the items of one stored object.

    Only the first result holds the size and ETag of the object; the commit moves them to a table of objects.
    """
    set_object_facts(infos[0][1], size=stored.size, etag=stored.etag)
    return [WriteResult(index=index, size_in_bytes=info.length, storage_data=info) for index, info in infos]
