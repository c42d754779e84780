"""Tables of block checksums, which lie behind the items of a data object: reading and checking them.

They are needed only if part of an item is read. The checksum of the whole item is in the metadata, and verifies its
table.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import replace

from bucketpoint.format.item_info import ItemInfo
from bucketpoint.stores import Store
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer.checksum import fold_blocks


def with_blocks(info: ItemInfo, table: bytes | memoryview) -> ItemInfo | None:
    """Return the item with the checksums of its blocks; None if `table` is not the one that was written."""
    crcs = struct.unpack(f"<{len(table) // 4}I", table)
    if fold_blocks(crcs, info.checked_nbytes, info.block_nbytes or 1) != info.crc32c:
        return None
    return replace(info, block_crcs=crcs)


def read_tables(
    store: Store, key: str, infos: Sequence[ItemInfo], *, size: int, etag: str | None
) -> dict[int, memoryview]:
    """Read the tables of items of one object. Return them by the position of their item in `infos`.

    Neighbouring tables are read by one request; all tables of a save are neighbours.

    Args:
        size: size of the object; tables that do not lie within it are left out.

    Raises:
        StoreError: the store fails.
        ObjectNotFoundError, PreconditionFailedError: the object was deleted or replaced.
    """
    tables: dict[int, memoryview] = {}
    places = [(info.table_offset or 0, info.table_nbytes, number) for number, info in enumerate(infos)]
    places = sorted(place for place in places if place[1] and place[0] + place[1] <= size)
    while places:
        (start, _, _), run = places[0], []
        stop = start
        while places and places[0][0] == stop:
            run.append(places.pop(0))
            stop += run[-1][1]
        view = memoryview(bytearray(stop - start))
        retry_transient(functools.partial(store.read_into, key, start, [view], if_match=etag))
        for at, nbytes, number in run:
            tables[number] = view[at - start : at - start + nbytes]
    return tables
