"""Computation of all byte ranges that a rank's load plan needs, with the small reads that must come first.

Two facts are in the objects and not in the metadata: the position of the payload in a frame of another writer, and the
checksums of the blocks of an item of which only a part is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch.distributed.checkpoint.planner import ReadItem

from bucketpoint.dcp.loading.read_plan import PlannedItem, ReadPlan, SavedChunk
from bucketpoint.errors import CorruptDataError
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.zip_probe import PROBE_BYTES, ProbedFrame, probe_frame
from bucketpoint.transfer import Extent

ReadNow = Callable[[Iterable[Extent]], None]
"""Function that reads extents and returns once all of them have been delivered."""


def load_extents(plan: ReadPlan, items: Sequence[ReadItem], read_now: ReadNow, *, url: str | None) -> list[Extent]:
    """Return the byte ranges that the items need, in the order of the items.

    Args:
        url: URL of the checkpoint, for messages.

    Raises:
        MetadataError: the metadata names no data for an item.
        MismatchError: a target or a wanted slice does not fit what was saved.
        CorruptDataError: a table of block checksums is damaged.
    """
    planned = _with_blocks(_probed(plan, plan.resolve(items), read_now), read_now, url)
    return [extent for item in planned for extent in plan.extents(item)]


def _probed(plan: ReadPlan, items: list[PlannedItem], read_now: ReadNow) -> list[PlannedItem]:
    """Locate the payload in chunks of other writers, one small read a chunk, where only a part is wanted."""
    frames: dict[tuple[str, int], ProbedFrame | None] = {}
    wanted = {item.place: item for item in items if plan.needs_probe(item)}
    if not wanted:
        return items

    def probe(item: PlannedItem) -> Extent:
        def deliver(view: memoryview | None) -> None:
            assert view is not None
            frames[item.place] = probe_frame(bytes(view))

        start = item.info.offset
        return Extent(item.key, start, start + min(PROBE_BYTES, item.info.length), deliver)

    read_now(map(probe, wanted.values()))
    return [_with_frame(item, frames.get(item.place)) for item in items]


def _with_frame(item: PlannedItem, frame: ProbedFrame | None) -> PlannedItem:
    if frame is None or item.target is None or frame.payload_offset + frame.payload_nbytes > item.info.length:
        return item
    start, shape, strides = item.info.offset + frame.payload_offset, tuple(frame.shape), tuple(frame.stride)
    chunk = SavedChunk(start, frame.payload_nbytes, frame.dtype, shape, strides, frame.storage_offset)
    return replace(item, chunk=chunk)


def _with_blocks(items: list[PlannedItem], read_now: ReadNow, url: str | None) -> list[PlannedItem]:
    """Read the block checksums that are needed to verify parts of items: one small read for each object."""
    wanted = {item.place: item for item in items if item.needs_table}
    if not wanted:
        return items
    from bucketpoint.checkpoint.block_tables import with_blocks

    infos: dict[tuple[str, int], ItemInfo] = {}

    def table(item: PlannedItem) -> Extent:
        start = item.info.table_offset
        assert start is not None

        def deliver(view: memoryview | None) -> None:
            assert view is not None
            info = with_blocks(item.info, view)
            if info is None:
                raise CorruptDataError(
                    f"Checksum mismatch in {item.fqn}: the checksums of its blocks differ from those written at save",
                    url=url,
                    key=item.key,
                )
            infos[item.place] = info

        return Extent(item.key, start, start + item.info.table_nbytes, deliver, label=item.fqn, etag=item.etag)

    read_now(map(table, wanted.values()))
    return [replace(item, info=infos[item.place]) if item.place in infos else item for item in items]
