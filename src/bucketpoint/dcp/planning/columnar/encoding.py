"""Wire format of the items that a rank holds, for the coordinator: columns with a few bytes for each item.

Names, dtypes and shapes are the same on most ranks. They are encoded in tables, which the coordinator unpacks once
however many ranks send the same bytes. Offsets and sizes of a rank's chunks are encoded separately.
"""

from __future__ import annotations

import hashlib
import io
import operator
import pickle
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

TENSOR, SHARD, BYTE_IO = range(3)

_KINDS = (WriteItemType.TENSOR, WriteItemType.SHARD, WriteItemType.BYTE_IO)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_LEVEL = 1
_SECTIONS = 16
_PROPERTIES = frozenset(field.name for field in fields(TensorProperties))

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """Facts about items, equal on all ranks that send the same bytes.

    Attributes:
        names: name of each item.
        kinds: kind of each item: TENSOR, SHARD or BYTE_IO.
        hints: DCP's index hint of each item, or None.
        described: for each item the number of its description, or -1 for bytes.
        descriptions: properties and size of whole tensors.
    """

    names: tuple[str, ...]
    kinds: bytes
    hints: tuple[int | None, ...]
    described: tuple[int, ...]
    descriptions: tuple[tuple[TensorProperties, torch.Size], ...]


@dataclass(frozen=True)
class PackedItems:
    """The items of one rank.

    Attributes:
        tables: pickled `Table`s of consecutive items, compressed.
        offsets, sizes: offsets and sizes of the chunks of all tensors, dimension by dimension: int64, compressed.
    """

    tables: tuple[bytes, ...]
    offsets: bytes
    sizes: bytes

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that identify these items."""
        return content_digest(*self.tables, self.offsets, self.sizes)

    def items(self) -> list[WriteItem]:
        """Decode the items."""
        offsets, sizes = (iter(array("q", zlib.decompress(blob))) for blob in (self.offsets, self.sizes))
        items = []
        for table in map(unpack_table, self.tables):
            for name, kind, hint, number in zip(table.names, table.kinds, table.hints, table.described, strict=True):
                if number < 0:
                    items.append(WriteItem(MetadataIndex(name, None, hint), _KINDS[kind]))
                    continue
                properties, whole = table.descriptions[number]
                offset, size = (torch.Size([next(each) for _ in whole]) for each in (offsets, sizes))
                data = TensorWriteData(ChunkStorageMetadata(offset, size), properties, whole)
                items.append(WriteItem(MetadataIndex(name, offset, hint), _KINDS[kind], tensor_data=data))
        return items


def content_digest(*parts: bytes) -> bytes:
    """Return 16 bytes that identify the parts, and the borders between them."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def pack_items(items: Sequence[WriteItem]) -> PackedItems | None:
    """Encode items as columns; return None if columns cannot hold some item."""
    offsets, sizes = array("q"), array("q")
    if not all(map(_is_plain, items)):
        return None
    for item in items:
        if item.tensor_data is not None:
            offsets.extend(item.tensor_data.chunk.offsets)
            sizes.extend(item.tensor_data.chunk.sizes)
    # One table for each top-level name: items of only one rank have their own name, so that the tables of all other
    # names are the same on all ranks.
    sections = _sections(items, lambda item: item.index.fqn.partition(".")[0])
    try:
        tables = tuple([_pack_table(section) for section in sections])
    except TypeError:
        return None
    return PackedItems(tables, compress(offsets), compress(sizes))


def _is_plain(item: WriteItem) -> bool:
    index, data = item.index, item.tensor_data
    if type(item) is not WriteItem or type(index) is not MetadataIndex or type(index.fqn) is not str:
        return False
    if item.type == WriteItemType.BYTE_IO:
        return data is None and item.bytes_io_data is None and index.offset is None
    if type(data) is not TensorWriteData or item.bytes_io_data is not None or type(data.size) is not torch.Size:
        return False
    chunk, properties = data.chunk, data.properties
    return (
        type(chunk) is ChunkStorageMetadata
        and type(properties) is TensorProperties
        and vars(properties).keys() == _PROPERTIES
        and type(chunk.offsets) is type(chunk.sizes) is type(index.offset) is torch.Size
        and index.offset == chunk.offsets
        and len(chunk.offsets) == len(chunk.sizes) == len(data.size)
    )


def _pack_table(items: Sequence[WriteItem]) -> bytes:
    descriptions: dict[Any, tuple[int, tuple[TensorProperties, torch.Size]]] = {}
    described = []
    for data in [item.tensor_data for item in items]:
        if data is None:
            described.append(-1)
            continue
        key = (tuple(vars(data.properties).items()), data.size)
        described.append(descriptions.setdefault(key, (len(descriptions), (data.properties, data.size)))[0])
    names = tuple([item.index.fqn for item in items])
    hints = tuple([item.index.index for item in items])
    kinds = bytes([_NUMBERS[item.type] for item in items])
    return _same_bytes((names, kinds, hints, tuple(described), tuple([each for _, each in descriptions.values()])))


def _same_bytes(value: Any) -> bytes:
    # In fast mode the pickler does not refer back to objects that it has seen. So equal values give equal bytes,
    # whether or not their parts are the same object.
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.fast = True
    pickler.dump(value)
    return compress(stream.getvalue())


def pack_mappings(mappings: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Encode DCP's mappings from flattened names to paths, in parts that are the same on most ranks."""
    # One part for each first element of the path, as for items.
    return tuple([_same_bytes(each) for each in _sections(mappings.items(), lambda pair: str(pair[1][:1]))])


def _sections(values: Iterable[T], key: Callable[[T], str]) -> list[list[T]]:
    sections = [list(group) for _, group in groupby(values, key)]
    return sections if len(sections) <= _SECTIONS else [list(values)]


def merged_mappings(packed: Sequence[tuple[bytes, ...]]) -> dict[str, Any]:
    """Merge the mappings of all ranks; where ranks differ, the first rank counts. Like `dict(ChainMap(*mappings))`."""
    sections: dict[bytes, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    before = None
    for blobs in reversed(packed):
        if blobs == before:
            continue
        before = blobs
        for blob in blobs:
            if blob not in sections:
                sections[blob] = dict(pickle.loads(zlib.decompress(blob)))
            whole.update(sections[blob])
    return whole


def unpack_table(blob: bytes) -> Table:
    """Decode a table that a rank sent."""
    return Table(*pickle.loads(zlib.decompress(blob)))


def compress(values: Any) -> bytes:
    """Compress bytes, or the numbers of an `array`, at little cost."""
    return zlib.compress(values, _LEVEL)


def unaltered(items: Sequence[Any], before: Sequence[Any]) -> bool:
    """Return True if a list still holds the same objects."""
    return len(items) == len(before) and all(map(operator.is_, items, before))
