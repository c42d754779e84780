"""Wire format of the items of a plan (columns with a few bytes for each item, and `PlanItems`), and load balance.

Names, dtypes and shapes are the same on most ranks. They are encoded in tables, and the coordinator decodes equal
tables only once. Offsets and sizes of a rank's chunks are encoded separately.

DCP assigns replicated items whole, in the order of the plan, so a few large tensors decide how long the slowest rank
uploads. Here large replicated items are first cut into slices. Then each slice is assigned to the rank with the fewest
bytes to write, the largest slice first.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import operator
import pickle
import zlib
from array import array
from collections import UserList, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from bucketpoint.errors import BucketpointError
from bucketpoint.format.index.int_columns import over

MAX_SLICE_BYTES = 64 << 20
"""Largest slice, about two parts of an upload: small enough to balance, large enough for efficient requests."""

MIN_SLICE_BYTES = 64 << 10
"""Smaller slices are not worth an entry in the metadata."""

_SLICES_A_RANK = 32
"""Number of slices in each rank's share: ranks then differ by at most one slice (3 %)."""

BYTES_OF_AN_OBJECT = 1024
"""Assumed bytes of a value that is not a tensor: the size is unknown until the value is pickled."""


def slice_nbytes(replicated: int, ranks: int) -> int:
    """Return the size of the largest slice. `replicated`: bytes that more than one rank holds, each counted once."""
    return max(MIN_SLICE_BYTES, min(MAX_SLICE_BYTES, replicated // (max(1, ranks) * _SLICES_A_RANK)))


def row_borders(rows: int, size: int, slice_bytes: int) -> list[int]:
    """Return the rows at which a chunk of `size` bytes is cut: from 0 to `rows`; an empty list if it stays whole."""
    if size <= slice_bytes or rows < 2:
        return []
    count = min(rows, -(-size // slice_bytes))
    return [rows * number // count for number in range(count + 1)]


def assign(pieces: Sequence[tuple[int, tuple[int, ...]]], loads: list[int], nodes: Sequence[object]) -> list[int]:
    """Choose for each piece the rank that writes it: the largest piece first, on the least loaded node and rank.

    Args:
        pieces: for each piece the bytes, and the ranks that hold it, ascending.
        loads: bytes that each rank already has to write. The assigned bytes are added to this list.
        nodes: for each rank, an id of the node: ranks of one node share a network card.
    """
    number = {name: at for at, name in enumerate(dict.fromkeys(nodes))}
    node_of = [number[name] for name in nodes]
    node_loads = [0] * len(number)
    for rank, load in enumerate(loads):
        node_loads[node_of[rank]] += load
    queues: dict[tuple[int, ...], tuple[_Least, dict[int, _Least]]] = {}
    chosen = [0] * len(pieces)
    for at in sorted(range(len(pieces)), key=lambda at: -pieces[at][0]):
        size, ranks = pieces[at]
        if ranks not in queues:
            on_node: dict[int, list[int]] = defaultdict(list)
            for rank in ranks:
                on_node[node_of[rank]].append(rank)
            queues[ranks] = (
                _Least(node_loads, list(on_node)),
                {node: _Least(loads, members) for node, members in on_node.items()},
            )
        by_node, by_rank = queues[ranks]
        node = by_node.get()
        rank = by_rank[node].get()
        chosen[at] = rank
        loads[rank] += size
        node_loads[node] += size
    return chosen


class _Least:
    """Queue of members by load. Loads only grow: `get` puts an outdated entry back with the current load."""

    def __init__(self, loads: list[int], members: list[int]) -> None:
        self._loads = loads
        self._heap = [(loads[member], member) for member in members]
        heapq.heapify(self._heap)

    def get(self) -> int:
        while True:
            load, member = self._heap[0]
            if load == self._loads[member]:
                return member
            heapq.heapreplace(self._heap, (self._loads[member], member))


TENSOR, SHARD, BYTE_IO = range(3)

_KINDS = (WriteItemType.TENSOR, WriteItemType.SHARD, WriteItemType.BYTE_IO)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_LEVEL = 1
_SECTIONS = 16
_PROPERTIES = frozenset(field.name for field in fields(TensorProperties))

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """Facts about items, except offsets and sizes of chunks.

    Attributes:
        kinds: kind of each item: TENSOR, SHARD or BYTE_IO.
        hints: DCP's index hint of each item, or None.
        described: for each item, the number of its description, or -1 for bytes.
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
        offsets, sizes: offsets and sizes of all tensor chunks, chunk by chunk: int64, compressed.
    """

    tables: tuple[bytes, ...]
    offsets: bytes
    sizes: bytes

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that identify these items."""
        return content_digest(*self.tables, self.offsets, self.sizes)

    def items(self) -> list[WriteItem]:
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
    # One table for each top-level name: if some names exist on one rank only, the tables of all other names are still
    # the same on all ranks.
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
    # In fast mode the pickler makes no references to earlier objects. So equal values give equal bytes, whether or not
    # they share objects.
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.fast = True
    pickler.dump(value)
    return compress(stream.getvalue())


def pack_mappings(mappings: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Encode DCP's mappings from flat names to paths, in one part for each top-level name, as in `pack_items`."""
    return tuple([_same_bytes(each) for each in _sections(mappings.items(), lambda pair: str(pair[1][:1]))])


def _sections(values: Iterable[T], key: Callable[[T], str]) -> list[list[T]]:
    sections = [list(group) for _, group in groupby(values, key)]
    return sections if len(sections) <= _SECTIONS else [list(values)]


def unpack_mappings(packed: Sequence[tuple[bytes, ...]]) -> dict[bytes, dict[str, Any]]:
    """Return the decoded parts of all ranks' mappings, in the order of `ChainMap`: those of the last rank first."""
    distinct = dict.fromkeys(blob for blobs, _ in groupby(reversed(packed)) for blob in blobs)
    return {blob: dict(pickle.loads(zlib.decompress(blob))) for blob in distinct}


def unpack_table(blob: bytes) -> Table:
    return Table(*pickle.loads(zlib.decompress(blob)))


def compress(values: Any) -> bytes:
    """Compress bytes, or the numbers of an `array`, at little cost."""
    return zlib.compress(values, _LEVEL)


def unaltered(items: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(items) == len(before) and all(map(operator.is_, items, before))


@dataclass(frozen=True)
class AssignedItems:
    """The items that the coordinator assigned to a rank.

    Attributes:
        encoded: the encoded assignment: positions among the items that the rank holds, and cuts.
        asked: all items that the rank holds; None after unpickling on that rank, which has the items.
    """

    encoded: bytes
    asked: PackedItems | None

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that identify the items and their order."""
        assert self.asked is not None
        return hashlib.blake2b(self.asked.digest + self.encoded, digest_size=16).digest()

    def items(self) -> list[WriteItem]:
        if self.asked is None:
            raise BucketpointError(
                "The items assigned to this rank are known only after SavePlanner.finish_plan",
                remedy="Call super().finish_plan(new_plan) before reading the items of the plan",
            )
        return items_of(self.encoded, self.asked.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return AssignedItems, (self.encoded, None)


class PlanItems(UserList[WriteItem]):
    """Items of a plan: a list with a small pickle, whose items are decoded from columns at the first access."""

    def __init__(
        self, items: Iterable[WriteItem] | None = None, columns: PackedItems | AssignedItems | None = None
    ) -> None:
        self._columns = columns
        if items is not None or columns is None:
            self._set(list(items or ()))

    @property
    def columns(self) -> PackedItems | AssignedItems | None:
        """The columns; None if columns cannot hold the items, or if the list was altered."""
        return self._columns if "data" not in vars(self) or unaltered(self.data, self._made_of) else None

    @cached_property
    def data(self) -> list[WriteItem]:  # type: ignore[override]
        assert self._columns is not None
        return self._set(self._columns.items())

    def _set(self, items: list[WriteItem]) -> list[WriteItem]:
        self._made_of = tuple(items)
        self.data = items
        return items

    def __copy__(self) -> Any:
        return list(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (list, (list(self),)) if self.columns is None else (PlanItems, (None, self.columns))


def packed_items(items: Any) -> PackedItems | None:
    """Return the columns of all items that a rank holds; None if there are none, or the list was altered."""
    columns = items.columns if isinstance(items, PlanItems) else None
    return columns if isinstance(columns, PackedItems) else None


def assigned_items(items: Any) -> AssignedItems | None:
    """Return the columns of the items that a rank was assigned; None if there are none, or the list was altered."""
    columns = items.columns if isinstance(items, PlanItems) else None
    return columns if isinstance(columns, AssignedItems) else None


def items_of(encoded: bytes, held: Sequence[WriteItem]) -> list[WriteItem]:
    """Decode the items that a rank is assigned, given all items that it holds."""
    items = []
    numbers = int_column(encoded)
    for position, hint, first, rows in zip(*numbers.view(4, len(numbers) // 4).tolist(), strict=True):
        item = held[position]
        data, index = item.tensor_data, item.index
        if data is None:
            items.append(item)
        elif first < 0:
            # `replace` would take twice as long, and this runs for each item of each save.
            items.append(WriteItem(MetadataIndex(index.fqn, index.offset, hint), item.type, tensor_data=data))
        else:
            offsets = torch.Size([data.chunk.offsets[0] + first, *data.chunk.offsets[1:]])
            sizes = torch.Size([rows, *data.chunk.sizes[1:]])
            part = replace(data, chunk=ChunkStorageMetadata(offsets, sizes))
            items.append(WriteItem(MetadataIndex(index.fqn, offsets, hint), WriteItemType.SHARD, tensor_data=part))
    return items


def int_column(blob: bytes) -> torch.Tensor:
    """Decode int64 numbers that `compress` has encoded."""
    return over(array("q", zlib.decompress(blob)))
