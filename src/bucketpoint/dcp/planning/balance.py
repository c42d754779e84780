"""Balance of the upload over ranks: for each duplicated item, the choice of the rank that writes it.

DCP keeps each duplicated item on one of the ranks that hold it, in the order in which it meets the items and by the
size of the whole tensor. A few large tensors then decide how long the slowest rank uploads. Here large duplicates are
first cut into slices; then the largest slice is assigned first, to the rank that has the least to write.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

MAX_SLICE_BYTES = 64 << 20
"""About two parts of an upload: small enough to balance, large enough for efficient requests."""

MIN_SLICE_BYTES = 64 << 10
"""Smaller slices are not worth an entry in the metadata."""

_SLICES_A_RANK = 32
"""Slices in each rank's share. Largest-first assignment leaves ranks apart by one slice at most: 3 % of a share."""

BYTES_OF_AN_OBJECT = 1024
"""Assumed bytes of a value that is not a tensor, whose size is not known until it is pickled."""


def item_bytes(item: WriteItem) -> int:
    """Return the bytes that an item takes in the store: those of the chunk, not of the whole tensor."""
    data = item.tensor_data
    if data is None:
        return BYTES_OF_AN_OBJECT
    return int(prod(data.chunk.sizes)) * int(data.properties.dtype.itemsize)


def balanced(
    plans: Sequence[SavePlan], nodes: Sequence[object] | None = None, apart: Sequence[str] = ()
) -> list[SavePlan]:
    """Keep each item on one of the ranks that hold it, so that all ranks, and all nodes, write about the same.

    Deterministic: the same plans give the same result on any rank. Items that only one rank holds stay as they are.

    Args:
        plans: plans of all ranks, by rank.
        nodes: for each rank a value that identifies the node: ranks of one node share a network card.
        apart: names under which ranks hold different tensors: the first rank that has one saves it, whole.

    Returns:
        The plans without duplicates, with large duplicates cut along dimension 0 into items of type SHARD.
    """
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            ranks = holders[item.index]
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
            items.setdefault(item.index, item)
    loads = [0] * len(plans)
    replicated: list[tuple[WriteItem, tuple[int, ...]]] = []
    for index, ranks in holders.items():
        if len(ranks) == 1:
            loads[ranks[0]] += item_bytes(items[index])
        else:
            replicated.append((items[index], tuple(ranks)))
    sizes = [item_bytes(item) for item, _ in replicated]
    slice_bytes = slice_nbytes(sum(sizes), len(plans))
    pieces = [
        (piece, ranks)
        for (item, ranks), size in zip(replicated, sizes, strict=True)
        for piece in ([item] if item.index.fqn in apart else _cut(item, size, slice_bytes))
    ]
    pieces = [(piece, ranks[:1] if piece.index.fqn in apart else ranks) for piece, ranks in pieces]
    chosen = assign([(item_bytes(piece), ranks) for piece, ranks in pieces], loads, nodes)
    kept: list[list[WriteItem]] = [[item for item in plan.items if len(holders[item.index]) == 1] for plan in plans]
    for (piece, _), rank in zip(pieces, chosen, strict=True):
        kept[rank].append(piece)
    return [replace(plan, items=mine) for plan, mine in zip(plans, kept, strict=True)]


def slice_nbytes(replicated: int, ranks: int) -> int:
    """Return the size of the largest slice. `replicated`: bytes that more than one rank holds, each counted once."""
    return max(MIN_SLICE_BYTES, min(MAX_SLICE_BYTES, replicated // (max(1, ranks) * _SLICES_A_RANK)))


def row_borders(rows: int, size: int, slice_bytes: int) -> list[int]:
    """Return the rows at which a chunk of `size` bytes is cut: from 0 to `rows`; an empty list if it stays whole."""
    if size <= slice_bytes or rows < 2:
        return []
    count = min(rows, -(-size // slice_bytes))
    return [rows * number // count for number in range(count + 1)]


def _cut(item: WriteItem, size: int, slice_bytes: int) -> list[WriteItem]:
    """Cut an item into slices of whole rows (dimension 0). A small item, or one with a single row, stays whole."""
    data = item.tensor_data
    if data is None or not data.chunk.sizes:
        return [item]
    borders = row_borders(int(data.chunk.sizes[0]), size, slice_bytes)
    return [rows_of(item, data, first, last) for first, last in pairwise(borders)] or [item]


def rows_of(item: WriteItem, data: TensorWriteData, first: int, last: int, hint: int | None = None) -> WriteItem:
    """Return the rows `[first, last)` of an item's chunk as a separate item."""
    offsets = torch.Size([data.chunk.offsets[0] + first, *data.chunk.offsets[1:]])
    sizes = torch.Size([last - first, *data.chunk.sizes[1:]])
    return WriteItem(
        index=MetadataIndex(item.index.fqn, offsets, hint),
        type=WriteItemType.SHARD,
        tensor_data=replace(data, chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes)),
    )


def assign(
    pieces: Sequence[tuple[int, tuple[int, ...]]], loads: list[int], nodes: Sequence[object] | None
) -> list[int]:
    """Choose for each piece the rank that writes it: the largest piece first, on the least loaded node and rank.

    Args:
        pieces: for each piece the bytes, and the ranks that hold it, ascending.
        loads: bytes that each rank must write anyway. The assigned bytes are added to this list.
        nodes: as in `balanced`.
    """
    names = list(nodes) if nodes is not None else list(range(len(loads)))
    number = {name: at for at, name in enumerate(dict.fromkeys(names))}
    node_of = [number[name] for name in names]
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
