"""Tables of block checksums, which lie behind the items of a data object: reading and checking them.

They are needed only if part of an item is read: the checksum of the whole item is in the metadata, and also proves its
table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from bucketpoint.checkpoint.chunk import PlannedItem
from bucketpoint.errors import CorruptDataError
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.stores import Store
from bucketpoint.transfer import Extent, retry_transient
from bucketpoint.transfer.checksum import fold_blocks

K = TypeVar("K")


def with_blocks(info: ItemInfo, table: bytes | memoryview) -> ItemInfo | None:
    """Return the item with the checksums of its blocks; None if `table` is not the one that was written."""
    crcs = struct.unpack(f"<{len(table) // 4}I", table)
    if fold_blocks(crcs, info.checked_nbytes, info.block_nbytes or 1) != info.crc32c:
        return None
    return replace(info, block_crcs=crcs)


def table_extent(where: K, item: PlannedItem, etag: str | None, found: dict[K, ItemInfo], url: str | None) -> Extent:
    """Return the extent of an item's table to read.

    The item with its blocks is put into `found` once the table is there.
    """
    info = item.info
    assert info.table_offset is not None

    def deliver(view: memoryview | None) -> None:
        assert view is not None
        known = with_blocks(info, view)
        if known is None:
            raise CorruptDataError(
                f"Checksum mismatch in {item.read.storage_index.fqn}: the checksums of its blocks differ from those "
                "written at save",
                url=url,
                key=item.key,
            )
        found[where] = known

    stop = info.table_offset + info.table_nbytes
    return Extent(item.key, info.table_offset, stop, deliver, label=item.read.storage_index.fqn, etag=etag)


def read_tables(
    store: Store, key: str, infos: Sequence[ItemInfo], *, size: int, etag: str | None, attempts: int
) -> dict[int, memoryview]:
    """Read the tables of items of one object. Return them by the position of their item in `infos`.

    Neighbouring tables are read by one request; all tables of a save are neighbours.

    Args:
        size: size of the object; tables that do not lie within it are left out.

    Raises:
        StoreError: the store fails.
        ObjectNotFoundError, PreconditionFailedError: the object was deleted or replaced.
    """
    found: dict[int, memoryview] = {}
    places = [(info.table_offset or 0, info.table_nbytes, number) for number, info in enumerate(infos)]
    places = sorted(place for place in places if place[1] and place[0] + place[1] <= size)
    while places:
        run, stop = [], places[0][0]
        while places and places[0][0] == stop:
            run.append(places.pop(0))
            stop += run[-1][1]
        start = run[0][0]
        view = memoryview(bytearray(stop - start))
        retry_transient(_reading(store, key, start, view, etag), attempts=attempts)
        for at, nbytes, number in run:
            found[number] = view[at - start : at - start + nbytes]
    return found


def _reading(store: Store, key: str, start: int, view: memoryview, etag: str | None) -> Callable[[], object]:
    return lambda: store.read_into(key, start, [view], if_match=etag)
