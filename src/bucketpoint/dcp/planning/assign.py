"""Assignment of items to ranks, computed on columns (int64 tensors), with no Python object per item.

Large replicated items are cut, each item is assigned to a rank (`items.py`), and hints and metadata are the same as
from DCP's global plan. DCP's planner plans all items if one is irregular: a chunk on which ranks disagree, a chunk
outside its tensor, or a chunk that one rank holds twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketpoint.dcp.planning.items import (
    BYTE_IO,
    BYTES_OF_AN_OBJECT,
    SHARD,
    PackedItems,
    Table,
    assign,
    compress,
    int_column,
    row_borders,
    slice_nbytes,
)
from bucketpoint.format.index.int_columns import Segments
from bucketpoint.format.metadata.facts import without_gc
from bucketpoint.format.storage_info import IndexColumns
from bucketpoint.format.tensor_bytes import tensor_bytes

_MAX_DIMS = 8
_MAX_KEY = 1 << 62
_WHOLE = -1
"""Value for the first row of an entry that is not cut."""


class _IrregularError(Exception):
    """Raised for irregular items (see the module)."""


@dataclass(frozen=True)
class Assignment:
    """The items that all ranks write, ordered by rank, and their metadata.

    Attributes:
        kept: int64, (entries, 4): position among the rank's own items, hint or -1, first row or -1, rows.
        nbytes: int64, payload bytes of each entry; -1 for an entry that is not a tensor.
        index: index columns of all entries, by rank.
    """

    kept: torch.Tensor
    nbytes: torch.Tensor
    metadata: Metadata
    index: IndexColumns

    def count(self, rank: int) -> int:
        return self.index.borders[rank + 1] - self.index.borders[rank]

    def encode(self, rank: int) -> bytes:
        """Encode the assignment of a rank: its part of `kept`, column by column, compressed."""
        mine = self.kept[self.index.borders[rank] : self.index.borders[rank + 1]].t().contiguous()
        return compress(tensor_bytes(mine))


def assign_items(
    asked: Sequence[PackedItems], tables: Mapping[bytes, Table], nodes: Sequence[object], apart: Sequence[str] = ()
) -> Assignment | None:
    """Assign the items of all ranks; return None if some are irregular.

    Args:
        tables: unpacked tables, by the bytes in which they were sent.
        nodes: for each rank, an id of the node: ranks of one node share a network card.
        apart: names of replicated tensors that differ between ranks. The first rank that holds one saves it, uncut.
    """
    try:
        # Planning runs on the CPU, also if a training script has set another default device.
        with without_gc(), torch.device("cpu"):
            return _assigned(_held(asked, tables), len(asked), nodes, frozenset(apart))
    except _IrregularError:
        return None


def _require(condition: Any) -> None:
    if not condition:
        raise _IrregularError


_Kind = tuple[int, torch.Size, Any, Any]
"""TENSOR, SHARD or BYTE_IO; then size, dtype and layout of the whole tensor."""


@dataclass(frozen=True)
class _NameTable:
    """Facts about each name, by number. Shapes are padded with 1 for dimensions that a tensor does not have."""

    texts: list[str]
    sizes: list[torch.Size]
    dims: torch.Tensor
    shapes: torch.Tensor
    kinds: torch.Tensor
    """TENSOR, SHARD or BYTE_IO."""

    itemsizes: torch.Tensor
    strides: torch.Tensor
    """Increase of a key (`_Held.keys`) for each step of an offset, by dimension."""

    bases: torch.Tensor
    """The first key of each name."""


def _numbered(
    tables: Mapping[bytes, Table],
) -> tuple[_NameTable, dict[bytes, tuple[torch.Tensor, torch.Tensor]], list[TensorProperties]]:
    """Number the names and the properties of all tables, in order of appearance.

    Returns:
        The names; for each table the number of each item's name, and of the item's properties (or -1); the properties.
    """
    numbers: dict[str, int] = {}
    kinds: dict[_Kind, int] = {}
    kind_of: list[int] = []
    every: list[TensorProperties] = []
    of_table = {}
    for blob, table in tables.items():
        first = len(every)
        every += [properties for properties, _ in table.descriptions]
        facts: list[tuple[torch.Size, Any, Any]] = [
            (size, properties.dtype, properties.layout) for properties, size in table.descriptions
        ]
        facts.append((torch.Size(), None, None))
        mine = []
        for name, item_kind, about in zip(table.names, table.kinds, table.described, strict=True):
            kind = kinds.setdefault((item_kind, *facts[about]), len(kinds))
            number = numbers.setdefault(name, len(numbers))
            if number == len(kind_of):
                kind_of.append(kind)
            elif kind_of[number] != kind:
                raise _IrregularError
            mine.append(number)
        described = [first + each if each >= 0 else -1 for each in table.described]
        of_table[blob] = torch.tensor(mine), torch.tensor(described)
    _require(numbers)
    shapes = [size for _, size, *_ in kinds]
    most = max(1, *map(len, shapes))
    _require(most <= _MAX_DIMS)
    extents = [[at + 1 for at in shape] for shape in shapes]
    keys = list(map(prod, extents))
    _require(sum(keys[kind] for kind in kind_of) < _MAX_KEY)
    by_name = torch.tensor(kind_of)

    def per_name(values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values)[by_name]

    spans = per_name(keys)
    names = _NameTable(
        texts=list(numbers),
        sizes=[shapes[kind] for kind in kind_of],
        dims=per_name(list(map(len, shapes))),
        shapes=per_name([[*shape, *[1] * (most - len(shape))] for shape in shapes]),
        kinds=per_name([kind for kind, *_ in kinds]),
        itemsizes=per_name([BYTES_OF_AN_OBJECT if dtype is None else dtype.itemsize for _, _, dtype, _ in kinds]),
        strides=per_name([[prod(each[at + 1 :]) if at < len(each) else 0 for at in range(most)] for each in extents]),
        bases=spans.cumsum(0) - spans,
    )
    return names, of_table, every


@dataclass(frozen=True)
class _Held:
    """All items of all ranks, one after the other.

    A dimension that an item does not have is padded: offset 0, size 1, in a shape of 1.
    """

    names: _NameTable
    described: list[TensorProperties]
    """Properties in all tables, one table after the other."""

    rank: torch.Tensor
    position: torch.Tensor
    number: torch.Tensor
    properties: torch.Tensor
    offsets: torch.Tensor
    sizes: torch.Tensor
    keys: torch.Tensor
    """Key of each item: one number for each pair of name and offset, in ascending order of the offsets."""


def _held(asked: Sequence[PackedItems], tables: Mapping[bytes, Table]) -> _Held:
    names, of_table, every = _numbered(tables)
    most = names.shapes.shape[1]
    joined: dict[tuple[bytes, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    empty = torch.empty(0, dtype=torch.int64)
    for packed in asked:
        if packed.tables not in joined:
            number, described = (torch.cat([empty, *[of_table[blob][at] for blob in packed.tables]]) for at in range(2))
            has = torch.arange(most).unsqueeze(0) < names.dims[number].unsqueeze(1)
            joined[packed.tables] = (number, described, has.view(-1).nonzero().view(-1))
    numbers, properties, places = zip(*[joined[packed.tables] for packed in asked], strict=True)
    counts = torch.tensor([len(each) for each in numbers])
    total = int(counts.sum())
    offsets, sizes = torch.zeros(total * most, dtype=torch.int64), torch.ones(total * most, dtype=torch.int64)
    at = 0
    for packed, place, mine in zip(asked, places, numbers, strict=True):
        for column, blob in ((offsets, packed.offsets), (sizes, packed.sizes)):
            values = int_column(blob)
            _require(len(values) == len(place))
            column[at : at + len(mine) * most][place] = values
        at += len(mine) * most
    number = torch.cat([empty, *numbers])
    offsets, sizes = offsets.view(-1, most), sizes.view(-1, most)
    whole = names.shapes[number]
    _require(((offsets >= 0) & (sizes >= 0) & (offsets + sizes <= whole)).all())
    _require(((names.kinds[number] == SHARD) | ((offsets == 0) & (sizes == whole)).all(1)).all())
    keys = names.bases[number] + (offsets * names.strides[number]).sum(1)
    of_rank, described = Segments.of(counts), torch.cat([empty, *properties])
    return _Held(names, every, of_rank.owner, of_rank.place, number, described, offsets, sizes, keys)


def _assigned(held: _Held, ranks: int, nodes: Sequence[object], apart: frozenset[str]) -> Assignment:
    source, seen_first, first, rows, rank = _chosen(held, ranks, nodes, apart)
    names, number = held.names, held.number[source]
    offsets, sizes = held.offsets[source], held.sizes[source]
    cut = first != _WHOLE
    offsets[cut, 0] += first[cut]
    sizes[cut, 0] = rows[cut]
    # The hint of a chunk is its number within the tensor, in the order of assignment.
    by_tensor = torch.sort(number, stable=True).indices
    grouped = number[by_tensor]
    begins, lengths = _runs(grouped)
    hints = torch.empty_like(number)
    hints[by_tensor] = Segments.of(lengths).place
    is_bytes = names.kinds[number] == BYTE_IO
    hints[is_bytes] = -1
    nbytes = sizes.prod(1) * names.itemsizes[number]
    nbytes[is_bytes] = -1
    borders = torch.searchsorted(rank, torch.arange(ranks + 1)).tolist()
    # Order the tensors by the place of their first chunk in the assignment.
    order = torch.sort(by_tensor[begins]).indices
    firsts = by_tensor[begins][order]
    spans = list(zip(begins[order].tolist(), lengths[order].tolist(), strict=True))
    missing = torch.arange(offsets.shape[1]).unsqueeze(0) >= names.dims[number].unsqueeze(1)
    shapes: dict[tuple[int, ...], torch.Size] = {}
    places, extents = (_shared(values.masked_fill(missing, -1)[by_tensor], shapes) for values in (offsets, sizes))
    described = held.properties[seen_first[firsts]].tolist()
    texts = names.texts
    state: dict[str, Any] = {}
    for at, properties, (begin, length) in zip(number[firsts].tolist(), described, spans, strict=True):
        if properties < 0:
            state[texts[at]] = BytesStorageMetadata()
            continue
        chunks = list(map(ChunkStorageMetadata, places[begin : begin + length], extents[begin : begin + length]))
        state[texts[at]] = TensorStorageMetadata(held.described[properties], names.sizes[at], chunks)
    offset_of: list[torch.Size | None] = [None] * len(number)
    for entry, place in zip(by_tensor.tolist(), places, strict=True):
        offset_of[entry] = place
    for entry in is_bytes.nonzero().view(-1).tolist():
        offset_of[entry] = None
    index = IndexColumns([texts[at] for at in number.tolist()], offset_of, hints.tolist(), tuple(borders))
    kept = torch.stack([held.position[source], hints, first, rows], 1)
    return Assignment(kept, nbytes, Metadata(state), index)


def _chosen(held: _Held, ranks: int, nodes: Sequence[object], apart: frozenset[str]) -> tuple[torch.Tensor, ...]:
    """Choose the rank of each item.

    Returns:
        Five columns, with a row for each entry in the order of assignment: the chosen rank's item, the item of the
        first rank that holds the same chunk, first row, number of rows, and chosen rank.
    """
    keys, order = torch.sort(held.keys, stable=True)
    begins, counts = _runs(keys)
    rank, sizes = held.rank[order], held.sizes[order]
    again = keys[1:] == keys[:-1]
    _require(not (again & (rank[1:] == rank[:-1])).any())
    _require((~again | (sizes[1:] == sizes[:-1]).all(1)).all())
    items = order[begins]
    nbytes = held.sizes[items].prod(1) * held.names.itemsizes[held.number[items]]
    alone = counts == 1
    loads = torch.zeros(ranks, dtype=torch.int64).scatter_add_(0, held.rank[items[alone]], nbytes[alone]).tolist()
    shared = (~alone).nonzero().view(-1)
    shared = shared[torch.sort(items[shared]).indices]
    slice_bytes = slice_nbytes(int(nbytes[shared].sum()), ranks)
    # Items without dimensions have one row here by padding, and so are not cut.
    rows = held.sizes[items[shared], 0].tolist()
    owners = rank.tolist() if len(shared) else []
    holders: dict[tuple[int, ...], tuple[int, ...]] = {}
    pieces: list[tuple[int, tuple[int, ...]]] = []
    cuts: list[tuple[int, int, int]] = []
    spans = zip(begins[shared].tolist(), counts[shared].tolist(), nbytes[shared].tolist(), rows, strict=True)
    texts = [held.names.texts[number] for number in held.number[items[shared]].tolist()] if apart else []
    for (begin, count, size, height), name in itertools.zip_longest(spans, texts):
        whole = name in apart
        holding = tuple(owners[begin : begin + (1 if whole else count)])
        holding = holders.setdefault(holding, holding)
        borders = [] if whole else row_borders(height, size, slice_bytes)
        for top, bottom in pairwise(borders):
            pieces.append((size // height * (bottom - top), holding))
            cuts.append((begin, top, bottom - top))
        if not borders:
            pieces.append((size, holding))
            cuts.append((begin, _WHOLE, height))
    chosen = assign(pieces, loads, nodes)
    at = {holding: {rank: number for number, rank in enumerate(holding)} for holding in holders}
    places = [begin + at[holding][to] for (begin, _, _), (_, holding), to in zip(cuts, pieces, chosen, strict=True)]
    own = torch.sort(items[alone]).values
    begun, low, high = torch.tensor(cuts, dtype=torch.int64).view(-1, 3).unbind(1)
    source = torch.cat([own, order[torch.tensor(places, dtype=torch.int64)]])
    seen_first = torch.cat([own, order[begun]])
    low, high = torch.cat([torch.full_like(own, _WHOLE), low]), torch.cat([held.sizes[own, 0], high])
    to, by_rank = torch.sort(torch.cat([held.rank[own], torch.tensor(chosen, dtype=torch.int64)]), stable=True)
    return source[by_rank], seen_first[by_rank], low[by_rank], high[by_rank], to


def _runs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions at which runs of equal values begin, and the lengths of the runs."""
    lengths = torch.unique_consecutive(values, return_counts=True)[1]
    return lengths.cumsum(0) - lengths, lengths


def _shared(rows: torch.Tensor, seen: dict[tuple[int, ...], torch.Size]) -> list[torch.Size]:
    """Return each row as a `torch.Size` without the negative numbers; equal rows share one object."""
    shapes = []
    for row in zip(*[column.tolist() for column in rows.unbind(1)], strict=True):
        shape = seen.get(row)
        if shape is None:
            shape = seen[row] = torch.Size([value for value in row if value >= 0])
        shapes.append(shape)
    return shapes
