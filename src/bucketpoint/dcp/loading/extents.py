"""Computation of all byte ranges that a rank's load plan needs, with the small reads that must come first.

Two facts are in the objects and not in the metadata: the position of the payload in a frame of another writer, and the
checksums of the blocks of an item of which only a part is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from bucketpoint.checkpoint.block_tables import table_extent
from bucketpoint.checkpoint.chunk import PlannedItem, SavedChunk, chunk_of_probe
from bucketpoint.dcp.loading.read_plan import ReadPlan
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.torch_zip import PROBE_BYTES, ProbedFrame, probe_frame
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
    planned = plan.resolve(items)
    probed = _probe(plan, planned, read_now)
    chunks = [probe or plan.chunk_of(item) for item, probe in zip(planned, probed, strict=True)]
    planned = _with_blocks(plan, planned, chunks, read_now, url)
    return [extent for item, chunk in zip(planned, chunks, strict=True) for extent in plan.extents(item, chunk)]


def _with_blocks(
    plan: ReadPlan, items: list[PlannedItem], chunks: Sequence[SavedChunk | None], read_now: ReadNow, url: str | None
) -> list[PlannedItem]:
    """Read the block checksums that are needed to verify parts of items: one small read for each object."""
    pairs = zip(items, chunks, strict=True)
    wanted = {(item.key, item.info.offset): item for item, chunk in pairs if plan.needs_table(item, chunk)}
    if not wanted:
        return items
    infos: dict[tuple[str, int], ItemInfo] = {}
    read_now(table_extent(where, item, plan.etag_of(item), infos, url) for where, item in wanted.items())
    return [
        replace(item, info=infos[where]) if (where := (item.key, item.info.offset)) in infos else item for item in items
    ]


def _probe(plan: ReadPlan, items: Sequence[PlannedItem], read_now: ReadNow) -> list[SavedChunk | None]:
    """Locate the payload in chunks of other writers, one small read a chunk, where only a part is wanted."""
    frames: dict[tuple[str, int], ProbedFrame | None] = {}
    wanted = {(item.key, item.info.offset): item for item in items if plan.needs_probe(item)}

    def probe(where: tuple[str, int], item: PlannedItem) -> Extent:
        def deliver(view: memoryview | None) -> None:
            assert view is not None
            frames[where] = probe_frame(bytes(view))

        start = item.info.offset
        return Extent(item.key, start, start + min(PROBE_BYTES, item.info.length), deliver)

    if wanted:
        read_now(probe(where, item) for where, item in wanted.items())
    chunks: list[SavedChunk | None] = []
    for item in items:
        frame = frames.get((item.key, item.info.offset)) if item.read.type != LoadItemType.BYTE_IO else None
        fits = frame is not None and frame.payload_offset + frame.payload_nbytes <= item.info.length
        chunks.append(chunk_of_probe(item, frame) if frame is not None and fits else None)
    return chunks
