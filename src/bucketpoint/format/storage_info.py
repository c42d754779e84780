"""Storage data of items: DCP's `_StorageInfo` with the attributes that bucketpoint adds, and columns of many items.

The attributes (payload position and checksums) are plain attributes of the stock class, so they are pickled with it,
and stock readers ignore them. Ranks send columns to the coordinator, at a few bytes per item. Facts that are equal in
every save of one structure (object number and position of each item) are separate from facts that change (names, sizes
and ETags of the objects, checksums), so that the coordinator recognises a known structure.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from bucketpoint.errors import MetadataError
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


_NONE = -1
_KNOWN = {
    "relative_path", "offset", "length", "transform_descriptors", _PAYLOAD_OFFSET, _PAYLOAD_NBYTES,
    _CRC32C, _TABLE_BLOCK_NBYTES, _TABLE_OFFSET, _OBJECT,
}  # fmt: skip
COLUMNS = 7
OBJECT, PAYLOAD_NBYTES = 0, 4
"""Positions, in `ItemColumns.packed`, of the columns of object numbers and of payload sizes."""

ObjectFacts = tuple[str, int | None, str | None]
"""Path, size and ETag of a data object; size and ETag are None if no item carried them."""


@dataclass(frozen=True)
class ItemColumns:
    """Object number and position of each item in a list.

    Attributes:
        packed: zlib-compressed int64 columns, one after the other, each with one entry per item: object number, offset,
            length, payload offset, payload size, block size, offset of the table of block checksums. -1 means None.
        transforms: descriptors of the stream transforms, the same for all items.
    """

    packed: bytes
    transforms: tuple[str, ...] | None = None

    @cached_property
    def _columns(self) -> bytes:
        return zlib.decompress(self.packed)

    @cached_property
    def count(self) -> int:
        return len(self._columns) // (8 * COLUMNS)

    def column(self, number: int) -> array[int]:
        values = array("q")
        values.frombytes(self._columns[number * 8 * self.count : (number + 1) * 8 * self.count])
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return ItemColumns, (self.packed, self.transforms)


@dataclass(frozen=True)
class Columns:
    """Storage data of a list of items. `checksums` has the CRC32C of each item in 4 bytes, little-endian."""

    layout: ItemColumns
    objects: tuple[ObjectFacts, ...]
    checksums: bytes


@dataclass(frozen=True)
class IndexColumns:
    """Keys of `Metadata.storage_data` as columns, so that no `MetadataIndex` object is needed for each item.

    Attributes:
        names: fully qualified name of each item's tensor or value.
        offsets: offset of each item's chunk; None for values that are not tensors.
        hints: number of each item's chunk in the tensor's list of chunks, or -1.
        borders: rank `r` wrote the items from `borders[r]` up to, not including, `borders[r + 1]`.
    """

    names: list[str]
    offsets: list[torch.Size | None]
    hints: list[int]
    borders: tuple[int, ...]


def pack(infos: Sequence[Any]) -> Columns | None:
    """Encode results of `make_storage_info` as columns; None if one has content for which there is no column."""
    paths: dict[str, int] = {}
    facts: dict[str, tuple[int, str | None]] = {}
    columns = [array("q") for _ in range(COLUMNS)]
    objects, offsets, lengths, payload_offsets, payload_sizes, block_sizes, tables = columns
    crcs = array("I")
    transforms = {tuple(info.transform_descriptors or ()) for info in infos}
    if len(transforms) > 1 or any(vars(info).keys() - _KNOWN for info in infos):
        return None
    for info in infos:
        values = vars(info)
        crc, path = values.get(_CRC32C), values["relative_path"]
        if crc is None:
            return None
        if _OBJECT in values:
            facts[path] = values[_OBJECT]
        crcs.append(crc)
        objects.append(paths.setdefault(path, len(paths)))
        offsets.append(values["offset"])
        lengths.append(values["length"])
        payload_offsets.append(values.get(_PAYLOAD_OFFSET, _NONE))
        payload_sizes.append(values.get(_PAYLOAD_NBYTES, _NONE))
        block_sizes.append(values.get(_TABLE_BLOCK_NBYTES, _NONE))
        tables.append(values.get(_TABLE_OFFSET, _NONE))
    data = zlib.compress(b"".join(column.tobytes() for column in columns))
    layout = ItemColumns(data, next(iter(transforms), ()) or None)
    checksums = struct.pack(f"<{len(crcs)}I", *crcs)
    return Columns(layout, tuple([(path, *facts.get(path, (None, None))) for path in paths]), checksums)


def unpack(columns: Columns) -> list[_StorageInfo]:
    """Rebuild the storage data that was given to `pack`.

    Raises:
        MetadataError: the number of checksums differs from the number of items.
    """
    layout, count = columns.layout, columns.layout.count
    if len(columns.checksums) != 4 * count:
        raise MetadataError(f"{len(columns.checksums)} bytes of checksums were sent for {count} items")
    crcs = struct.unpack(f"<{count}I", columns.checksums)
    transforms = list(layout.transforms) if layout.transforms else None
    infos = []
    named = [False] * len(columns.objects)
    for number, offset, length, payload_offset, payload_nbytes, block_nbytes, table, crc in zip(
        *map(layout.column, range(COLUMNS)), crcs, strict=True
    ):
        path, size, etag = columns.objects[number]
        info = object.__new__(_StorageInfo)
        values = vars(info)
        values["relative_path"], values["offset"], values["length"] = path, offset, length
        values["transform_descriptors"] = transforms
        if payload_offset != _NONE:
            values[_PAYLOAD_OFFSET], values[_PAYLOAD_NBYTES] = payload_offset, payload_nbytes
        values[_CRC32C] = crc
        if table != _NONE:
            values[_TABLE_BLOCK_NBYTES], values[_TABLE_OFFSET] = block_nbytes, table
        if not named[number]:
            named[number] = True
            if size is not None:
                set_object_facts(info, size=size, etag=etag)
        infos.append(info)
    return infos
