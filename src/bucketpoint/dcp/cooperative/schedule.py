"""The schedule of a cooperative load: which rank reads which bytes for which other ranks.

The ranges that ranks need are cut at every start and end of a range, and then into cells, so that a rank needs either
all bytes of a cell or none. One rank reads a cell and sends it to the other ranks that need it. Every rank computes the
same schedule.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bucketpoint.errors import MetadataError

LARGEST_CELL = 4 << 20
"""Largest cell: small enough for an even distribution and for exchange during reads, large enough for a request."""

SMALLEST_CELL = 256 << 10
"""Least size of a cell, unless a round is smaller: the latency of requests would make smaller cells slower."""


@dataclass(frozen=True)
class Cell:
    """Bytes `[start, stop)` of an object that one rank reads.

    Attributes:
        obj: number of the object in the rows.
        reader: the rank that reads the cell, and also needs it.
        ranks: in the reader's schedule, all ranks that need the cell; in another rank's, only that rank, or none.
    """

    obj: int
    start: int
    stop: int
    reader: int
    ranks: Sequence[int]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Schedule:
    """The part of one rank in a cooperative load.

    Attributes:
        peers: ranks that share bytes with this rank, directly or through other ranks, and this rank; ascending.
        shared: for each row (request) of this rank, True if it is read in cells. Only this rank reads the other rows.
        rounds: cells in the order in which they are sent, the same for all peers.
        cell_bytes: limit on the bytes of a cell, and of the cells that are read in one request.
    """

    peers: tuple[int, ...]
    shared: tuple[bool, ...]
    rounds: tuple[tuple[Cell, ...], ...]
    cell_bytes: int


class Overlaps:
    """The ranges of all ranks, mapped to one address space, and cut into pieces at every start and end of a range.

    A stretch is the union of ranges that overlap, directly or through others. Each rank computes the parts of all ranks
    with tensor operations, so that the time hardly grows with the number of ranks.

    Args:
        tables: for each rank an int64 tensor of shape (requests, 3): the object, the first byte, one past the last.

    Attributes:
        total: bytes that the ranks need, summed over the ranks.
        distinct: bytes that the ranks need, each counted once however many ranks need it.

    Raises:
        MetadataError: the ranges are so far apart that no checkpoint can hold them.
    """

    def __init__(self, tables: Sequence[torch.Tensor]) -> None:
        self._ranks = len(tables)
        self._rank = torch.cat([torch.full((len(table),), rank) for rank, table in enumerate(tables)])
        rows = torch.cat(list(tables))
        self._objects, number = torch.unique(rows[:, 0], return_inverse=True)
        ends = torch.zeros(len(self._objects), dtype=torch.int64).scatter_reduce(0, number, rows[:, 2], "amax")
        if sum(ends.tolist()) >= 1 << 62:
            raise MetadataError("The metadata names bytes beyond what any store holds")
        self._base = torch.cumsum(ends, 0) - ends
        start, stop = rows[:, 1] + self._base[number], rows[:, 2] + self._base[number]
        self._nbytes = stop - start
        self._places = torch.unique(torch.cat([start, stop]))
        low, high = torch.searchsorted(self._places, start), torch.searchsorted(self._places, stop)
        # One pair for each piece and each rank that needs it, ordered by piece.
        row = torch.repeat_interleave(torch.arange(len(rows)), high - low)
        piece = torch.arange(len(row)) - (torch.cumsum(high - low, 0) - high)[row]
        pairs = torch.unique(piece * self._ranks + self._rank[row])
        self._piece, self._holder = pairs // self._ranks, pairs % self._ranks
        # A stretch ends at a place that no range crosses.
        crossed = torch.zeros(len(self._places) + 2, dtype=torch.int64)
        crossed.index_add_(0, low + 1, torch.ones_like(low))
        crossed.index_add_(0, torch.maximum(high, low + 1), -torch.ones_like(low))
        self._stretch = torch.cumsum(torch.cumsum(crossed, 0) == 0, 0)
        self._stretch_of_row = torch.where(self._nbytes > 0, self._stretch[low], 0)
        self.total = int(self._nbytes.sum())
        sizes = torch.diff(self._places)
        self.distinct = int(sizes[torch.unique(self._piece)].sum())

    def schedule(self, rank: int, round_bytes: int) -> Schedule:
        """Return the part of `rank` in a load that reads every shared byte once, in rounds of at most `round_bytes`."""
        stretch, count = self._stretch[self._piece], int(self._stretch[-1]) + 1
        wanted_by = torch.unique(stretch * self._ranks + self._holder) // self._ranks
        shared = torch.bincount(wanted_by, minlength=count) > 1
        mine = shared[self._stretch_of_row]
        alone = torch.bincount(self._rank[~mine], self._nbytes[~mine].double(), minlength=self._ranks)
        # Ranks that share a stretch take the lowest number among them, until all connected ranks have the same number.
        lowest = torch.arange(self._ranks)
        while True:
            of_stretch = torch.full((count,), self._ranks).scatter_reduce(0, stretch, lowest[self._holder], "amin")
            lower = lowest.scatter_reduce(0, self._holder, of_stretch[stretch], "amin")
            if torch.equal(lower, lowest):
                break
            lowest = lower
        peers = torch.nonzero(lowest == lowest[rank]).flatten().tolist()
        size = min(max(round_bytes // len(peers), SMALLEST_CELL), LARGEST_CELL, max(round_bytes, 1))
        dealt = shared[stretch] & (lowest[self._holder] == lowest[rank])
        cells = self._deal(rank, self._piece[dealt], self._holder[dealt], alone.long().tolist(), size)
        shared_rows = tuple(mine[self._rank == rank].tolist())
        return Schedule(tuple(peers), shared_rows, tuple(_rounds(cells, round_bytes)), size)

    def _deal(self, here: int, piece: torch.Tensor, holder: torch.Tensor, load: list[int], size: int) -> Iterator[Cell]:
        """Cut pieces into cells, and assign each cell to the least loaded of the ranks that need it.

        Adjacent small cells are assigned to the same rank, which reads them in one request.

        Args:
            piece, holder: pairs of a piece and a rank that needs it, ordered by piece.
            load: bytes that each rank has to read; the bytes of the cells are added.
        """
        pieces, counts = torch.unique_consecutive(piece, return_counts=True)
        first, last = self._places[pieces], self._places[pieces + 1]
        number = torch.searchsorted(self._base, first, right=True) - 1
        columns = (self._objects[number], first - self._base[number], last - self._base[number], counts)
        holders = iter(holder.tolist())
        reader, followed_by, run = -1, (-1, -1), 0
        for obj, start, stop, count in zip(*(column.tolist() for column in columns), strict=True):
            ranks = tuple(itertools.islice(holders, count))
            own = (here,) if here in ranks else ()
            if followed_by == (obj, start) and reader in ranks and run + stop - start <= size:
                load[reader] += stop - start
                run, followed_by = run + stop - start, (obj, stop)
                yield Cell(obj, start, stop, reader, ranks if reader == here else own)
                continue
            heap = [(load[each], each) for each in ranks]
            heapq.heapify(heap)
            for at in range(start, stop, size):
                end = min(at + size, stop)
                least, reader = heap[0]
                heapq.heapreplace(heap, (least + end - at, reader))
                yield Cell(obj, at, end, reader, ranks if reader == here else own)
                run, followed_by = end - at, (obj, end)
            for nbytes, each in heap:
                load[each] = nbytes


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
