"""Load balance of the upload: for each replicated item, the choice of the rank that writes it.

DCP assigns replicated items whole, in the order of the plan, so a few large tensors decide how long the slowest rank
uploads. Here large replicated items are first cut into slices. Then each slice is assigned to the rank with the fewest
bytes to write, the largest slice first.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

MAX_SLICE_BYTES = 64 << 20
"""About two parts of an upload: small enough to balance, large enough for efficient requests."""

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


def rows_of(item: WriteItem, data: TensorWriteData, first: int, last: int, hint: int | None = None) -> WriteItem:
    """Return the rows `[first, last)` of an item's chunk as a separate item."""
    offsets = torch.Size([data.chunk.offsets[0] + first, *data.chunk.offsets[1:]])
    sizes = torch.Size([last - first, *data.chunk.sizes[1:]])
    return WriteItem(
        index=MetadataIndex(item.index.fqn, offsets, hint),
        type=WriteItemType.SHARD,
        tensor_data=replace(data, chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes)),
    )


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
