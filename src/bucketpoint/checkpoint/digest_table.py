"""The table of item digests at the very end of a data object, which a restarted process reads.

    digests of n items (16 bytes each) | their offsets in the object (8 bytes each) | n (8 bytes) | magic (16 bytes)

Numbers are little-endian. Readers of checkpoints never need the table.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

from bucketpoint.stores import Store
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer.digest import DIGEST_BYTES

_MAGIC = b"b\xbe\x1a\xb1\x00F\xc6\x9c\x02u\xc2G\xc2\x85\xd9\x1c"
"""Random bytes, which no item ends with by chance."""

_END = struct.Struct("<Q16s")

_ENTRY_BYTES = DIGEST_BYTES + 8

_MOST_ITEMS = 1 << 22
"""More items than an object of a save has. A table that claims more would make its reader allocate without limit."""


FIRST_READ_BYTES = 64 << 10
"""Bytes of the first read: the tables of about 2,700 items, which need no second read."""


def table_tail(offsets: Sequence[int]) -> bytes:
    """Return the bytes of a table that follow its digests.

    Args:
        offsets: offset in the object of each item, in the order of the digests.
    """
    return struct.pack(f"<{len(offsets)}Q", *offsets) + _END.pack(len(offsets), _MAGIC)


def table_nbytes(count: int) -> int:
    """Return the size of a table of `count` items."""
    return _ENTRY_BYTES * count + _END.size


def stored_table_nbytes(ending: memoryview, size: int) -> int | None:
    """Return the size of the table of which `ending` has the last bytes; None if the object ends with no valid table.

    Args:
        size: size of the object.
    """
    if len(ending) < _END.size:
        return None
    count, magic = _END.unpack(ending[-_END.size :])
    if magic != _MAGIC or count > _MOST_ITEMS or table_nbytes(count) > size:
        return None
    return table_nbytes(count)


def parse_table(table: memoryview, size: int) -> dict[int, bytes]:
    """Return the digest of each item by its offset in the object. Empty if the offsets cannot be those of items.

    Args:
        table: the bytes of a whole table, of the size that `stored_table_nbytes` returned.
        size: size of the object.
    """
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
    """Return the digests that an object of a save holds, by the offset of their item. Empty if it has no table.

    The table is untrusted: whoever uses an offset checks that an item of this size begins there.

    Args:
        size: size of the object.
        etag: the object is read only if it has this ETag, where the store pins reads.

    Raises:
        StoreError: the store fails.
        ObjectNotFoundError, PreconditionFailedError: the object was deleted or replaced.
    """

    def last(nbytes: int) -> memoryview:
        view = memoryview(bytearray(nbytes))
        if nbytes:
            condition = etag if store.capabilities.pinned_reads else None
            retry_transient(functools.partial(store.read_into, key, size - nbytes, [view], if_match=condition))
        return view

    ending = last(min(size, FIRST_READ_BYTES))
    nbytes = stored_table_nbytes(ending, size)
    if nbytes is None:
        return {}
    if nbytes > len(ending):
        ending = last(nbytes)
        if stored_table_nbytes(ending, size) != nbytes:
            # Replaced between both reads, in a store that does not pin them.
            return {}
    return parse_table(ending[-nbytes:], size)
