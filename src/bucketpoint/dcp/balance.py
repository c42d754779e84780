"""Which replica writes what: pure functions over save plans. No tensors are looked at, and nothing is sent.

DCP keeps each duplicated item on one of the ranks that hold it, in the order in which it meets them and by the size of
the whole tensor. A handful of large tensors then decides how long the slowest rank uploads. Here large duplicates are
cut into slices first, and the largest goes first, to the rank that has least to write.
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
"""About two parts of an upload: small enough to balance, large enough to be sent as such."""

MIN_SLICE_BYTES = 64 << 10
"""Below this a slice is not worth its entry in the metadata."""

_SLICES_A_RANK = 32
"""Largest-first leaves ranks apart by one slice at most, which is then 3 % of a rank's share."""

BYTES_OF_AN_OBJECT = 1024
"""What is not a tensor has no size until it is pickled."""


def item_bytes(item: WriteItem) -> int:
    """Bytes that an item takes in the store: of its chunk, and not of the tensor that the chunk belongs to."""
    data = item.tensor_data
    if data is None:
        return BYTES_OF_AN_OBJECT
    return int(prod(data.chunk.sizes)) * int(data.properties.dtype.itemsize)


def balanced(plans: Sequence[SavePlan], nodes: Sequence[object] | None = None) -> list[SavePlan]:
    """Keep each item on one of the ranks that hold it, so that all ranks, and all nodes, write about the same.

    Deterministic: the same plans give the same result on any rank. Items that only one rank holds stay as they are.

    Args:
        plans: of all ranks, by rank.
        nodes: for each rank, anything that tells its node: ranks of one node share a network card.

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
        for piece in _cut(item, size, slice_bytes)
    ]
    chosen = assign([(item_bytes(piece), ranks) for piece, ranks in pieces], loads, nodes)
    kept: list[list[WriteItem]] = [[item for item in plan.items if len(holders[item.index]) == 1] for plan in plans]
    for (piece, _), rank in zip(pieces, chosen, strict=True):
        kept[rank].append(piece)
    return [replace(plan, items=mine) for plan, mine in zip(plans, kept, strict=True)]


def slice_nbytes(replicated: int, ranks: int) -> int:
    """The largest slice, in bytes, for that many bytes that several of that many ranks hold."""
    return max(MIN_SLICE_BYTES, min(MAX_SLICE_BYTES, replicated // (max(1, ranks) * _SLICES_A_RANK)))


def row_borders(rows: int, size: int, slice_bytes: int) -> list[int]:
    """Where a chunk of `size` bytes is cut along dimension 0: from 0 to `rows`, or nothing where it stays whole."""
    if size <= slice_bytes or rows < 2:
        return []
    count = min(rows, -(-size // slice_bytes))
    return [rows * number // count for number in range(count + 1)]


def _cut(item: WriteItem, size: int, slice_bytes: int) -> list[WriteItem]:
    """The item in slices of whole rows (dimension 0), or itself where it is small or has a single row."""
    data = item.tensor_data
    if data is None or not data.chunk.sizes:
        return [item]
    borders = row_borders(int(data.chunk.sizes[0]), size, slice_bytes)
    return [rows_of(item, data, first, last) for first, last in pairwise(borders)] or [item]


def rows_of(item: WriteItem, data: TensorWriteData, first: int, last: int, hint: int | None = None) -> WriteItem:
    """The rows `[first, last)` of an item's chunk, as an item of its own."""
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
    """For each piece the rank that writes it: the largest piece first, to the least loaded of its holders.

    Args:
        pieces: of each the bytes, and the ranks that hold it, ascending.
        loads: bytes that each rank must write anyway. They grow by what is assigned.
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
    """The least loaded of some members, while loads grow: an entry that is out of date is put back as it is now."""

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
