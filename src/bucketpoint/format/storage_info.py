"""Attributes that bucketpoint adds to DCP's `_StorageInfo` of an item: payload position and checksums.

They are plain attributes of the stock class, so they are pickled with it, and stock readers ignore them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo

from bucketpoint.format.item_info import (
    _CRC32C,
    _OBJECT,
    _PAYLOAD_NBYTES,
    _PAYLOAD_OFFSET,
    _TABLE_BLOCK_NBYTES,
    _TABLE_OFFSET,
)

KIB = 1 << 10
MIB = 1 << 20

SINGLE_BLOCK_NBYTES = MIB
"""Items up to this size are one block: reading all of it for a slice costs little beyond the request."""

# Number of blocks to aim for, smallest and largest size of a block. A slice is read in whole blocks, so that it can be
# verified. Coarse blocks suffice if their borders fall on rows at which a resharding load is likely to cut. Otherwise
# fine blocks limit the excess bytes, at 4 bytes of table per block.
_COARSE = (32, 256 * KIB, 4 * MIB)
_FINE = (256, 32 * KIB, MIB)
_SECTIONS = 8  # block borders at halves, quarters and eighths, at which a resharding load is likely to cut
_PIECES_TRIED = 256


def make_storage_info(
    path: str,
    offset: int,
    length: int,
    *,
    payload_offset: int | None = None,
    payload_nbytes: int | None = None,
    crc32c: int | None = None,
    block_nbytes: int | None = None,
    table_offset: int | None = None,
    transform_descriptors: Sequence[str] | None = None,
) -> _StorageInfo:
    """Make the stock `_StorageInfo` of an item, with bucketpoint's attributes attached."""
    info = _StorageInfo(path, offset, length, list(transform_descriptors) if transform_descriptors else None)
    if payload_offset is not None:
        setattr(info, _PAYLOAD_OFFSET, payload_offset)
        setattr(info, _PAYLOAD_NBYTES, payload_nbytes)
    if crc32c is not None:
        setattr(info, _CRC32C, crc32c)
    # A single block has no table: its checksum is that of the item, from which `read_item` restores it.
    if table_offset is not None:
        setattr(info, _TABLE_BLOCK_NBYTES, block_nbytes)
        setattr(info, _TABLE_OFFSET, table_offset)
    return info


def plan_blocks(nbytes: int, row_nbytes: int) -> int:
    """Return the length of the blocks into which an item is cut for checksums; the last block may be shorter.

    Halves, quarters and eighths of the rows begin and end at block borders if the number of rows allows it. So does
    every row that is at least as long as a block.

    Args:
        nbytes: number of bytes that the checksums cover.
        row_nbytes: bytes of one index of dimension 0, or 0 for an item that is never sliced.
    """
    if nbytes <= SINGLE_BLOCK_NBYTES:
        return nbytes
    coarse = _target(nbytes, *_COARSE)
    if row_nbytes >= coarse:
        per_row = _power_of_two_below(row_nbytes // coarse)
        while row_nbytes % per_row:
            per_row //= 2
        if row_nbytes // per_row <= 2 * _COARSE[2]:
            return row_nbytes // per_row
    most = _power_of_two_below(nbytes // coarse)
    if row_nbytes == 0:
        return -(-nbytes // most)
    rows = nbytes // row_nbytes
    sections = min(rows & -rows, most)
    if sections >= min(_SECTIONS, most):
        section = nbytes // sections
        usual = max(section // coarse, 1)
        finer = range(usual, min(section // (coarse // 4), usual + _PIECES_TRIED) + 1)
        coarser = range(usual - 1, -(-section // (3 * coarse)) - 1, -1)
        for pieces in itertools.chain(finer, coarser):
            if section % pieces == 0:
                return section // pieces
    block = -(-nbytes // _power_of_two_below(nbytes // _target(nbytes, *_FINE)))
    return -(-block // row_nbytes) * row_nbytes if row_nbytes < block else block


def _target(nbytes: int, count: int, smallest: int, largest: int) -> int:
    return min(max(nbytes // count, smallest), largest)


def _power_of_two_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def set_object_facts(info: Any, *, size: int, etag: str | None) -> None:
    """Attach an object's size and ETag to the object's first item, which carries them to the coordinator."""
    setattr(info, _OBJECT, (size, etag))


def pop_object_facts(info: Any) -> dict[str, Any] | None:
    """Remove and return the facts that `set_object_facts` attached, or None."""
    facts = vars(info).pop(_OBJECT, None)
    return None if facts is None else {"size": facts[0], "etag": facts[1]}
