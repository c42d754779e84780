"""Who reads which bytes for whom, when ranks load together: the same schedule, computed on every rank.

Pure: from the ranges that each rank wants to read, to cells that one rank reads and others receive. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bucketpoint.dcp.cooperative import Demand
from bucketpoint.errors import MetadataError

LARGEST_CELL = 4 << 20
"""Small enough to deal out evenly and to overlap reading with exchange, large enough for a request of its own."""

SMALLEST_CELL = 256 << 10
"""Below this a request's latency costs more than what a smaller round saves."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Cell:
    """Bytes `[start, stop)` of an object that one rank reads.

    Attributes:
        obj: the object, as it is numbered in the rows.
        reader: the rank that reads it; it needs some of it itself.
        needs: which spans of it a rank needs; of one rank they do not overlap. On the reader for each rank that needs
            any, elsewhere for the rank itself alone.
    """

    obj: int
    start: int
    stop: int
    reader: int
    needs: Mapping[int, Sequence[Span]]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Schedule:
    """What one rank takes part in.

    Attributes:
        peers: the ranks, itself included, that share bytes with it, or with one that does; ascending.
        shared: for each of the rank's own rows, whether it is read cell by cell. All others are the rank's alone.
        rounds: cells in the order in which they are handed out, the same for all peers.
    """

    peers: tuple[int, ...]
    shared: tuple[bool, ...]
    rounds: tuple[tuple[Cell, ...], ...]


class Overlaps:
    """The ranges of all ranks, laid on one line and joined where they overlap: a stretch is what one or more ranks
    want without a break that nobody's range crosses.

    Args:
        tables: for each rank an int64 tensor of shape (requests, 3): the object, the first byte, one past the last.
        nodes: for each rank the number of the node that it is on.

    Raises:
        MetadataError: the ranges are so far apart that no checkpoint can hold them.
    """

    def __init__(self, tables: Sequence[torch.Tensor], nodes: Sequence[int]) -> None:
        self._tables = tables
        self._rank = torch.cat([torch.full((len(table),), rank) for rank, table in enumerate(tables)])
        rows = torch.cat(list(tables)).reshape(-1, 3)
        self._start, self._stop = self._on_one_line(rows)
        # Empty ranges concern nobody: they sort behind all others and are left out.
        order = torch.argsort(self._start, stable=True)
        self._order = order[self._start[order] < self._stop[order]]
        start, stop = self._start[self._order], self._stop[self._order]
        reach = torch.cummax(stop, 0).values if len(stop) else stop
        opens = torch.ones(len(start), dtype=torch.bool)
        opens[1:] = start[1:] >= reach[:-1]
        self._stretch = torch.cumsum(opens, 0) - 1
        closes = torch.ones_like(opens)
        closes[:-1] = opens[1:]
        self._first, self._last = start[opens], reach[closes]
        self._obj = rows[self._order, 0][opens]
        self._base = start[opens] - rows[self._order, 1][opens]
        self.demand = self._measure(len(tables), nodes)

    def schedule(self, rank: int, round_bytes: int) -> Schedule:
        """The part of `rank` in a load in which every stretch that several ranks want is read once.

        Args:
            round_bytes: no round hands out more than this.
        """
        ranks = len(self._tables)
        holder = self._rank[self._order]
        pairs = torch.unique(self._stretch * ranks + holder)
        stretch, holder_of = pairs // ranks, pairs % ranks
        shared = torch.bincount(stretch, minlength=len(self._first)) > 1
        lowest = torch.full((len(self._first),), ranks).scatter_reduce(0, stretch, holder_of, "amin")
        peers = self._peers(rank, torch.unique((lowest[stretch] * ranks + holder_of)[shared[stretch]]).tolist())
        mine = torch.zeros(len(self._rank), dtype=torch.bool)
        mine[self._order] = shared[self._stretch]
        alone = torch.bincount(self._rank[~mine], (self._stop - self._start)[~mine].double(), minlength=ranks)
        wanted = shared & torch.isin(lowest, torch.tensor(peers))
        cells = self._deal(rank, wanted, peers, alone.long().tolist(), round_bytes)
        return Schedule(tuple(peers), tuple(mine[self._rank == rank].tolist()), tuple(_rounds(cells, round_bytes)))

    # -- the line -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _on_one_line(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        objects, number = torch.unique(rows[:, 0], return_inverse=True)
        ends = torch.zeros(len(objects), dtype=torch.int64).scatter_reduce(0, number, rows[:, 2], "amax")
        if sum(ends.tolist()) >= 1 << 62:
            raise MetadataError("The metadata names bytes beyond what any store holds")
        base = torch.cumsum(ends, 0) - ends
        return rows[:, 1] + base[number], rows[:, 2] + base[number]

    def _measure(self, ranks: int, nodes: Sequence[int]) -> Demand:
        lengths = (self._last - self._first).double()
        pairs = torch.unique(self._stretch * ranks + self._rank[self._order])
        stretch, holder = pairs // ranks, pairs % ranks
        holders = torch.bincount(stretch, minlength=len(lengths)).double()
        width = max(nodes, default=0) + 1
        on_node = torch.unique(stretch * width + torch.tensor(nodes)[holder], return_counts=True)
        squares = torch.bincount(on_node[0] // width, on_node[1].double() ** 2, minlength=len(lengths))
        # A reader drawn at random hands each byte to the holders on other nodes.
        exchanged = float((lengths * (holders - 1)).sum())
        crossing = float((lengths * (holders - squares / holders)).sum())
        total = int((self._stop - self._start).sum())
        distinct = int((self._last - self._first).sum())
        share = min(crossing / exchanged, 1.0) if exchanged else 0.0
        return Demand(ranks, len(set(nodes)), total, distinct, share)

    # -- dealing ------------------------------------------------------------------------------------------------------

    def _peers(self, rank: int, edges: Sequence[int]) -> list[int]:
        """All ranks that `rank` is connected with, itself included; an edge is `one * ranks + another`."""
        ranks = len(self._tables)
        neighbours: dict[int, list[int]] = {}
        for edge in edges:
            one, another = divmod(edge, ranks)
            neighbours.setdefault(one, []).append(another)
            neighbours.setdefault(another, []).append(one)
        found, ahead = {rank}, [rank]
        while ahead:
            for peer in neighbours.get(ahead.pop(), []):
                if peer not in found:
                    found.add(peer)
                    ahead.append(peer)
        return sorted(found)

    def _deal(
        self, here: int, wanted: torch.Tensor, peers: Sequence[int], alone: Sequence[int], round_bytes: int
    ) -> Iterator[Cell]:
        """Cut the wanted stretches into cells, and give each to the rank with the least to read among its holders."""
        size = min(max(round_bytes // len(peers), SMALLEST_CELL), LARGEST_CELL, max(round_bytes, 1))
        load = dict(enumerate(alone))
        inside = wanted[self._stretch]
        rows = self._order[inside]
        per_stretch = torch.bincount(self._stretch[inside], minlength=len(wanted)).tolist()
        entries = zip(self._rank[rows].tolist(), self._start[rows].tolist(), self._stop[rows].tolist(), strict=True)
        for index in torch.nonzero(wanted).flatten().tolist():
            spans: dict[int, list[Span]] = {}
            for _ in range(per_stretch[index]):
                rank, start, stop = next(entries)
                _append(spans.setdefault(rank, []), start, stop)
            obj, base = int(self._obj[index]), int(self._base[index])
            for start, stop, needs in _cells(int(self._first[index]), int(self._last[index]), spans, size):
                reader = min(needs, key=lambda rank: (load[rank], rank))
                load[reader] += stop - start
                moved = {
                    rank: [(a - base, b - base) for a, b in parts]
                    for rank, parts in needs.items()
                    if here in (reader, rank)
                }
                yield Cell(obj, start - base, stop - base, reader, moved)


def _append(spans: list[Span], start: int, stop: int) -> None:
    # Joined only where they overlap: ranges that merely touch go to different places.
    if spans and start < spans[-1][1]:
        spans[-1] = spans[-1][0], max(spans[-1][1], stop)
    else:
        spans.append((start, stop))


def _cells(
    first: int, last: int, spans: dict[int, list[Span]], size: int
) -> Iterator[tuple[int, int, dict[int, Sequence[Span]]]]:
    at = dict.fromkeys(spans, 0)
    for start in range(first, last, size):
        stop = min(start + size, last)
        needs: dict[int, Sequence[Span]] = {}
        for rank, own in spans.items():
            index, parts = at[rank], []
            while index < len(own) and own[index][0] < stop:
                parts.append((max(own[index][0], start), min(own[index][1], stop)))
                if own[index][1] > stop:
                    break
                index += 1
            at[rank] = index
            if parts:
                needs[rank] = parts
        yield start, stop, needs


def _rounds(cells: Iterator[Cell], round_bytes: int) -> Iterator[tuple[Cell, ...]]:
    current: list[Cell] = []
    held = 0
    for cell in cells:
        if current and held + cell.nbytes > round_bytes:
            yield tuple(current)
            current, held = [], 0
        current.append(cell)
        held += cell.nbytes
    if current:
        yield tuple(current)
