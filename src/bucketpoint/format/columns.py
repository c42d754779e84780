"""Columns of the storage data of many items, which ranks send to the coordinator at a few bytes per item.

Facts that are equal in every save of one structure (object number and position of each item) are separate from facts
that change (names, sizes and ETags of the objects, checksums), so that the coordinator recognises a known structure.
"""

from __future__ import annotations

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
from bucketpoint.format import item_info as names
from bucketpoint.format.storage_info import set_object_facts

_NONE = -1
_KNOWN = {
    "relative_path", "offset", "length", "transform_descriptors", names._PAYLOAD_OFFSET, names._PAYLOAD_NBYTES,
    names._CRC32C, names._TABLE_BLOCK_NBYTES, names._TABLE_OFFSET, names._OBJECT,
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
        crc, path = values.get(names._CRC32C), values["relative_path"]
        if crc is None:
            return None
        if names._OBJECT in values:
            facts[path] = values[names._OBJECT]
        crcs.append(crc)
        objects.append(paths.setdefault(path, len(paths)))
        offsets.append(values["offset"])
        lengths.append(values["length"])
        payload_offsets.append(values.get(names._PAYLOAD_OFFSET, _NONE))
        payload_sizes.append(values.get(names._PAYLOAD_NBYTES, _NONE))
        block_sizes.append(values.get(names._TABLE_BLOCK_NBYTES, _NONE))
        tables.append(values.get(names._TABLE_OFFSET, _NONE))
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
            values[names._PAYLOAD_OFFSET], values[names._PAYLOAD_NBYTES] = payload_offset, payload_nbytes
        values[names._CRC32C] = crc
        if table != _NONE:
            values[names._TABLE_BLOCK_NBYTES], values[names._TABLE_OFFSET] = block_nbytes, table
        if not named[number]:
            named[number] = True
            if size is not None:
                set_object_facts(info, size=size, etag=etag)
        infos.append(info)
    return infos
