"""Check of a data object's bytes, in pieces of any size, against regions with known checksums."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.format.index.view import ChunkShapes
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.torch_zip import tensor_frame
from bucketpoint.transfer.checksum import CrcAccumulator, crc32c


@dataclass(frozen=True)
class Region:
    """Bytes `[start, stop)` of an object, with their expected CRC32C and their state-dict key.

    `part` is `"header"`, `"payload"` or `"trailer"` of a framed tensor, `"item"` for an item that is checked as a
    whole, or `"table"` for the checksums of its blocks.
    """

    start: int
    stop: int
    crc32c: int
    fqn: str
    part: str

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def item_regions(index: MetadataIndex, info: ItemInfo, shapes: ChunkShapes) -> Iterator[Region]:
    """Yield the regions of one item that have a known checksum, in order."""
    if info.crc32c is None:
        return
    if info.payload_offset is None or info.payload_nbytes is None:
        yield from _blocks(index.fqn, info, info.offset, "item")
        return
    payload = info.offset + info.payload_offset
    end = payload + info.payload_nbytes
    frame = _frame(index, info, shapes)
    if frame is not None:
        yield Region(info.offset, payload, crc32c(memoryview(frame[0])), index.fqn, "header")
    yield from _blocks(index.fqn, info, payload, "payload")
    if frame is not None and frame[1]:
        yield Region(end, info.offset + info.length, crc32c(memoryview(frame[1])), index.fqn, "trailer")


def _frame(index: MetadataIndex, info: ItemInfo, shapes: ChunkShapes) -> tuple[bytes, bytes] | None:
    """Return the header and trailer that this version writes around the payload; None if they do not fit the item.

    Frames have no recorded checksum, but their bytes follow from the metadata.
    """
    entry, shape = shapes.metadata.state_dict_metadata.get(index.fqn), shapes.of(index)
    if not isinstance(entry, TensorStorageMetadata) or shape is None:
        return None
    if math.prod(shape) * entry.properties.dtype.itemsize != info.payload_nbytes:
        return None
    try:
        frame = tensor_frame(entry.properties.dtype, shape)
    except TypeError:
        return None
    if frame.payload_offset != info.payload_offset or frame.nbytes != info.length:
        return None
    return frame.header, frame.trailer


def _blocks(fqn: str, info: ItemInfo, start: int, part: str) -> Iterator[Region]:
    size, block = info.checked_nbytes, info.block_nbytes or 0
    if info.block_crcs is None and info.crc32c is not None:
        yield Region(start, start + size, info.crc32c, fqn, part)
    for number, crc in enumerate(info.block_crcs or ()):
        low = number * block
        yield Region(start + low, start + min(low + block, size), crc, fqn, part)


def table_regions(
    items: Sequence[tuple[MetadataIndex, ItemInfo]], tables: Mapping[int, memoryview], after: int
) -> Iterator[Region]:
    """Yield the regions of the `tables` (by position in `items`) that begin at offset `after` or later, in order."""
    places = sorted((items[number][1].table_offset or 0, number) for number in tables)
    for start, number in places:
        if start < after:
            continue
        after = start + len(tables[number])
        yield Region(start, after, crc32c(tables[number]), items[number][0].fqn, "table")


class ObjectCheck:
    """Check of the bytes of one object, which arrive once each, in pieces of any size and order, from any thread.

    The regions must be in order and must not overlap.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._stops = [region.stop for region in regions]
        self._lock = threading.Lock()
        self._parts: dict[int, CrcAccumulator] = {}
        self._wrong: set[int] = set()

    def note(self, start: int, view: memoryview) -> None:
        """Check the bytes in `view`, from offset `start` of the object on. Complete regions are compared at once."""
        stop = start + len(view)
        index = bisect_right(self._stops, start)
        while index < len(self._regions) and self._regions[index].start < stop:
            region = self._regions[index]
            low, high = max(region.start, start), min(region.stop, stop)
            with self._lock:
                arrived = self._parts.setdefault(index, CrcAccumulator(region.nbytes))
            if arrived.take(low, view[low - start : high - start]):
                with self._lock:
                    self._parts.pop(index, None)
                    if arrived.total() != region.crc32c:
                        self._wrong.add(index)
            index += 1

    def wrong(self) -> list[Region]:
        """Return the regions with a wrong checksum. The result is final once every byte has arrived."""
        with self._lock:
            return [self._regions[index] for index in sorted(self._wrong)]
