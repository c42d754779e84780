"""Reads and checks of the tables of block checksums, which follow the items of a data object.

A table is needed only to read a part of an item. The checksum of the whole item, in the metadata, verifies the table.
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
from bucketpoint.transfer.checksum import fold_blocks


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
