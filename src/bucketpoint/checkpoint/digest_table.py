"""The table of item digests at the end of a data object, which the first save of a restarted process reads.

    digests of n items (16 bytes each) | their offsets in the object (8 bytes each) | n (8 bytes) | magic (16 bytes)

Numbers are little-endian. Loads do not need the table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from bucketpoint.stores import Store, pinned
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer.digest import DIGEST_BYTES

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
