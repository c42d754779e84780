"""Checksums of a data object: tables at its end, with checksums of blocks and digests of items; a check of its bytes.

A table of checksums is needed only to read a part of an item. The checksum of the whole item, in the metadata, verifies
the table. The first save of a restarted process reads the digests; loads do not need them. Their table's layout:

    digests of n items (16 bytes each) | their offsets in the object (8 bytes each) | n (8 bytes) | magic (16 bytes)

Numbers are little-endian.
"""

from __future__ import annotations

import functools
import math
import struct
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.format.index.view import ChunkShapes
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.torch_zip import tensor_frame
from bucketpoint.stores import ObjectInfo, Store, pinned
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer.checksum import DIGEST_BYTES, CrcAccumulator, crc32c, fold_blocks


def with_blocks(info: ItemInfo, table: bytes | memoryview) -> ItemInfo | None:
    """Return the item with the checksums of its blocks; None if `table` is damaged."""
    crcs = struct.unpack(f"<{len(table) // 4}I", table)
    if fold_blocks(crcs, info.checked_nbytes, info.block_nbytes or 1) != info.crc32c:
        return None
    return replace(info, block_crcs=crcs)


def read_tables(
    store: Store, items: Sequence[tuple[MetadataIndex, ItemInfo]], info: ObjectInfo
) -> tuple[dict[int, memoryview], list[tuple[MetadataIndex, ItemInfo]], list[int]]:
    """Read the tables of the items of one object.

    Adjacent tables are read by one request; all tables of a save are adjacent. Tables beyond the end of the object are
    left out.

    Returns:
        The tables by the position of their item in `items`; the items, with the checksums of their blocks; and the
        positions of the items with a damaged table.

    Raises:
        StoreError: the store fails.
        ObjectNotFoundError, PreconditionFailedError: the object was deleted or replaced.
    """
    tables: dict[int, memoryview] = {}
    known, wrong = list(items), []
    places = [(item.table_offset or 0, item.table_nbytes, number) for number, (_, item) in enumerate(items)]
    places = sorted(place for place in places if place[1] and place[0] + place[1] <= info.size)
    while places:
        (start, _, _), run = places[0], []
        stop = start
        while places and places[0][0] == stop:
            run.append(places.pop(0))
            stop += run[-1][1]
        view = memoryview(bytearray(stop - start))
        retry_transient(functools.partial(store.read_into, info.key, start, [view], if_match=pinned(store, info.etag)))
        for at, nbytes, number in run:
            tables[number] = view[at - start : at - start + nbytes]
            index, item = items[number]
            checked = with_blocks(item, tables[number])
            if checked is None:
                wrong.append(number)
            else:
                known[number] = index, checked
    return tables, known, wrong


_MAGIC = b"b\xbe\x1a\xb1\x00F\xc6\x9c\x02u\xc2G\xc2\x85\xd9\x1c"
"""Random bytes, with which no item ends by chance."""

_END = struct.Struct("<Q16s")

_ENTRY_BYTES = DIGEST_BYTES + 8

_MOST_ITEMS = 1 << 22
"""Limit on the items of a table, so that a damaged table cannot claim unlimited memory. Objects of saves have fewer."""

FIRST_READ_BYTES = 64 << 10
"""Bytes of the first read: a table of up to about 2,700 items needs no second read."""


def table_tail(offsets: Sequence[int]) -> bytes:
    """Return the bytes of a table that follow its digests. `offsets` are those of the items, in the same order."""
    return struct.pack(f"<{len(offsets)}Q", *offsets) + _END.pack(len(offsets), _MAGIC)


def table_nbytes(count: int) -> int:
    """Return the size of a table of `count` items."""
    return _ENTRY_BYTES * count + _END.size


def stored_table_nbytes(ending: memoryview, size: int) -> int | None:
    """Return the size of the table that ends an object of `size` bytes, from its last bytes; None without a table."""
    if len(ending) < _END.size:
        return None
    count, magic = _END.unpack(ending[-_END.size :])
    if magic != _MAGIC or count > _MOST_ITEMS or table_nbytes(count) > size:
        return None
    return table_nbytes(count)


def parse_table(table: memoryview, size: int) -> dict[int, bytes]:
    """Return the digest of each item by its offset in the object of `size` bytes. Empty if an offset is invalid."""
    count = (len(table) - _END.size) // _ENTRY_BYTES
    offsets = struct.unpack_from(f"<{count}Q", table, DIGEST_BYTES * count)
    digests = {
        offset: bytes(table[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)])
        for number, offset in enumerate(offsets)
    }
    if len(digests) < count or any(offset >= size - len(table) for offset in offsets):
        return {}
    return digests


def read_digests(store: Store, key: str, *, size: int, etag: str | None) -> dict[int, bytes]:
    """Return the digests in an object of `size` bytes, by the offset of their item. Empty if the object has no table.

    The table is untrusted: callers must check that an item of the expected size begins at an offset. The object must
    have the ETag `etag`, if the store pins reads.

    Raises:
        StoreError: the store fails.
        ObjectNotFoundError, PreconditionFailedError: the object was deleted or replaced.
    """

    def last(nbytes: int) -> memoryview:
        view = memoryview(bytearray(nbytes))
        if nbytes:
            retry_transient(lambda: store.read_into(key, size - nbytes, [view], if_match=pinned(store, etag)))
        return view

    ending = last(min(size, FIRST_READ_BYTES))
    nbytes = stored_table_nbytes(ending, size)
    if nbytes is None:
        return {}
    if nbytes > len(ending):
        ending = last(nbytes)
        if stored_table_nbytes(ending, size) != nbytes:
            # The object was replaced between the reads, in a store that does not pin reads.
            return {}
    return parse_table(ending[-nbytes:], size)


# Check of the bytes, in pieces of any size, against regions with known checksums


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
