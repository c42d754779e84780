"""Computation of all byte ranges that a rank's load plan needs, with the small reads that must come first.

Two facts are in the objects and not in the metadata: the position of the payload in another writer's frame, and the
block checksums, by which parts of an item are verified.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.planner import ReadItem

from bucketpoint.dcp.loading.decode import SavedChunk
from bucketpoint.dcp.loading.read_plan import PlannedItem, ReadPlan
from bucketpoint.errors import CorruptDataError, MismatchError
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.tensor_bytes import is_viewable
from bucketpoint.format.torch_zip import PROBE_BYTES, ProbedFrame, probe_frame
from bucketpoint.transfer import Extent

ReadNow = Callable[[Iterable[Extent]], None]
"""Function that reads extents and returns once all of them have been delivered."""

T = TypeVar("T")


def load_extents(plan: ReadPlan, items: Sequence[ReadItem], read_now: ReadNow) -> list[Extent]:
    """Return the byte ranges that the items need, in the order of the items.

    Raises:
        MetadataError: the metadata names no data for an item.
        MismatchError: a target or a slice does not fit the saved data, or two items with different bytes have the same
            target.
        CorruptDataError: a table of block checksums is damaged.
    """
    planned = plan.resolve(items)
    # Locate the payloads in other writers' chunks that are read in part. They can be received in place too.
    foreign = list(filter(plan.needs_probe, planned))
    heads = [(item.info.offset, min(PROBE_BYTES, item.info.length)) for item in foreign]
    frames = _read_first(foreign, heads, lambda item, head: probe_frame(bytes(head)), read_now)
    planned = _apart([_with_frame(item, frames.get(item.place)) for item in planned])
    # Each range from the node's copy is verified alone, because it is not yet decided whether other ranges are read.
    alone = plan.options.node_copy is not None
    in_part = [item for item in planned if item.needs_table(alone=alone)]
    # The tables of an object are adjacent.
    tables = [(item.info.table_offset or 0, item.info.table_nbytes) for item in in_part]
    infos = _read_first(in_part, tables, _with_blocks, read_now, checked=True)
    planned = [replace(item, info=infos[item.place]) if item.place in infos else item for item in planned]
    return [extent for item in planned for extent in plan.extents(item)]


def _read_first(
    items: Sequence[PlannedItem],
    spans: Sequence[tuple[int, int]],
    parse: Callable[[PlannedItem, memoryview], T],
    read_now: ReadNow,
    *,
    checked: bool = False,
) -> dict[tuple[str, int], T]:
    """Read and parse some bytes of each saved chunk, once also if several items are parts of the chunk.

    Args:
        spans: start and length of the bytes, for each item.
        checked: `parse` raises CorruptDataError for damaged bytes.
    """
    found: dict[tuple[str, int], T] = {}

    def extent(item: PlannedItem, start: int, nbytes: int) -> Extent:
        def deliver(view: memoryview | None) -> None:
            assert view is not None
            found[item.place] = parse(item, view)

        check = functools.partial(parse, item) if checked else None
        return Extent(item.key, start, start + nbytes, deliver, label=item.fqn, etag=item.etag, check=check)

    wanted = {item.place: (item, *span) for item, span in zip(items, spans, strict=True)}
    if wanted:
        read_now(itertools.starmap(extent, wanted.values()))
    return found


def _with_frame(item: PlannedItem, frame: ProbedFrame | None) -> PlannedItem:
    if frame is None or item.target is None or frame.payload_offset + frame.payload_nbytes > item.info.length:
        return item
    start, shape, strides = item.info.offset + frame.payload_offset, tuple(frame.shape), tuple(frame.stride)
    chunk = SavedChunk(start, frame.payload_nbytes, frame.dtype, shape, strides, frame.storage_offset)
    return replace(item, chunk=chunk)


def _with_blocks(item: PlannedItem, table: memoryview) -> ItemInfo:
    """Return the item's facts with the block checksums that verify parts of it."""
    from bucketpoint.checkpoint.checksums import with_blocks

    info = with_blocks(item.info, table)
    if info is None:
        raise CorruptDataError(
            f"Checksum mismatch in {item.fqn}: the checksums of its blocks differ from those written at save",
            key=item.key,
        )
    return info


def _apart(items: Sequence[PlannedItem]) -> list[PlannedItem]:
    """Return the items, with `shared` set if the targets of two items overlap in memory. All chunks must be located.

    Raises:
        MismatchError: one tensor of the state has two names, under which different or quantized values were saved.
    """
    quantized = [item for item in items if item.scales is not None]
    # Checked on every device: otherwise one item would multiply elements that another item has filled.
    starts = Counter(map(_start, items if quantized else ()))
    for item in quantized:
        if _start(item) is not None and starts[_start(item)] > 1:
            raise MismatchError(
                "The state has one tensor under two names, and the checkpoint has quantized values for this one",
                key=item.fqn,
                remedy="Leave one of the two names out of the state, or load into a model that does not tie them",
            )
    marked, spans = list(items), []
    into: dict[Any, PlannedItem] = {}
    for number, item in enumerate(items):
        target, chunk = item.target, item.chunk
        if target is None or chunk is None or not target.numel() or not is_viewable(target):
            continue
        begin = target.data_ptr()
        spans.append((begin, begin + target.nbytes, number))
        # Chunks that were cut differently cannot be compared by checksums.
        cut = chunk.shape, chunk.dtype, tuple(item.read.storage_offsets)
        other = into.setdefault((begin, target.shape, target.dtype, cut), item)
        if other.info.crc32c != item.info.crc32c:
            raise MismatchError(
                f"The state has one tensor as {other.fqn} and as {item.fqn}, but the checkpoint has different values",
                key=item.fqn,
                remedy="Leave one of the two names out of the state, or load into a model that does not tie them",
            )
    spans.sort()
    end, last = 0, 0
    for begin, until, number in spans:
        if begin < end:
            marked[last], marked[number] = replace(marked[last], shared=True), replace(marked[number], shared=True)
        if until > end:
            end, last = until, number
    return marked


def _start(item: PlannedItem) -> tuple[torch.device, int] | None:
    """Return device and address of a target's first element; None if the target has no strided memory."""
    target = item.target
    if target is None or not target.numel() or type(target) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return (target.device, target.data_ptr()) if target.layout is torch.strided else None
