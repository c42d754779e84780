"""Tables at the end of a data object: checksums of blocks, and digests of items.

A table of checksums is needed only to read a part of an item. The checksum of the whole item, in the metadata, verifies
the table. The first save of a restarted process reads the digests; loads do not need them. Their table's layout:

    digests of n items (16 bytes each) | their offsets in the object (8 bytes each) | n (8 bytes) | magic (16 bytes)

Numbers are little-endian.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.format.item_info import ItemInfo
from bucketpoint.stores import ObjectInfo, Store, pinned
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer.checksum import DIGEST_BYTES, fold_blocks


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
