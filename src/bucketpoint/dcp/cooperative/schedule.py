"""The schedule of a cooperative load: which rank reads which bytes for which others.

The ranges that ranks want are cut into cells. One rank reads a cell, and the others that want it receive it. Every rank
computes the same schedule.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bucketpoint.errors import MetadataError

LARGEST_CELL = 4 << 20
"""Small enough for an even distribution and to overlap reading with exchange, large enough for a separate request."""

SMALLEST_CELL = 256 << 10
"""Below this, the latency of a request costs more than a smaller round saves."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Cell:
    """Bytes `[start, stop)` of an object that one rank reads.

    Attributes:
        obj: number of the object in the rows.
        reader: the rank that reads the cell; it needs some of the cell itself.
        needs: spans of the cell that a rank needs, by rank; spans of one rank do not overlap. The reader has the spans
            of all ranks, any other rank only its own.
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
    """The part of one rank in a cooperative load.

    Attributes:
        peers: ranks that share bytes with this rank, directly or through other ranks; this rank included; ascending.
        shared: for each of the rank's own rows, True if it is read cell by cell. Only this rank reads the other rows.
        rounds: cells in the order in which they are handed out, the same for all peers.
    """

    peers: tuple[int, ...]
    shared: tuple[bool, ...]
    rounds: tuple[tuple[Cell, ...], ...]


class Overlaps:
    """The ranges of all ranks, on one common line of numbers, joined to stretches.

    A stretch is the union of ranges that overlap, directly or through others.

    Args:
        tables: for each rank an int64 tensor of shape (requests, 3): the object, the first byte, one past the last.

    Attributes:
        total: bytes that the ranks need, summed over the ranks.
        distinct: bytes that the ranks need, each counted once however many ranks need it.

    Raises:
        MetadataError: the ranges are so far apart that no checkpoint can hold them.
    """

    def __init__(self, tables: Sequence[torch.Tensor]) -> None:
        self._tables = tables
        self._rank = torch.cat([torch.full((len(table),), rank) for rank, table in enumerate(tables)])
        rows = torch.cat(list(tables))
        self._start, self._stop = self._on_one_line(rows)
        # Empty ranges are left out, as no rank has to read them.
        order = torch.argsort(self._start, stable=True)
        self._order = order[self._start[order] < self._stop[order]]
        start = self._start[self._order]
        opens, self._last = _unions(start, self._stop[self._order])
        self._stretch = torch.cumsum(opens, 0) - 1
        self._first = start[opens]
        self._obj = rows[self._order, 0][opens]
        self._base = start[opens] - rows[self._order, 1][opens]
        # One row for each stretch and each rank that wants some of it.
        pairs = torch.unique(self._stretch * len(tables) + self._rank[self._order])
        self._held, self._holder = pairs // len(tables), pairs % len(tables)
        self.total = int((self._stop - self._start).sum())
        self.distinct = int((self._last - self._first).sum())

    def schedule(self, rank: int, round_bytes: int) -> Schedule:
        """Return the part of `rank` in a load in which every stretch that several ranks want is read once.

        Args:
            rank: the rank whose part is computed.
            round_bytes: limit on the bytes of a round.
        """
        ranks = len(self._tables)
        stretch, holder = self._held, self._holder
        shared = torch.bincount(stretch, minlength=len(self._first)) > 1
        lowest = torch.full((len(self._first),), ranks).scatter_reduce(0, stretch, holder, "amin")
        peers = self._peers(rank, torch.unique((lowest[stretch] * ranks + holder)[shared[stretch]]).tolist())
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

    # -- dealing ------------------------------------------------------------------------------------------------------

    def _peers(self, rank: int, edges: Sequence[int]) -> list[int]:
        """Return all ranks that are connected with `rank`, itself included. An edge is `low * ranks + high`."""
        ranks = len(self._tables)
        neighbours: dict[int, list[int]] = {}
        for edge in edges:
            low, high = divmod(edge, ranks)
            neighbours.setdefault(low, []).append(high)
            neighbours.setdefault(high, []).append(low)
        connected, ahead = {rank}, [rank]
        while ahead:
            for peer in neighbours.get(ahead.pop(), []):
                if peer not in connected:
                    connected.add(peer)
                    ahead.append(peer)
        return sorted(connected)

    def _deal(
        self, here: int, wanted: torch.Tensor, peers: Sequence[int], alone: Sequence[int], round_bytes: int
    ) -> Iterator[Cell]:
        """Cut the wanted stretches into cells, and give each to the rank with the least to read among its holders."""
        size = min(max(round_bytes // len(peers), SMALLEST_CELL), LARGEST_CELL, max(round_bytes, 1))
        inside = wanted[self._stretch]
        rows = self._order[inside]
        spans = _Spans.joined(self._rank[rows], self._start[rows], self._stop[rows])
        first, last = self._first[wanted], self._last[wanted]
        cells = _Cells.cut(first, last, size)
        low, high = cells.touched_by(spans)
        readers = _readers(cells, spans.rank, low, high, list(alone))
        base = self._base[wanted][cells.stretch]
        needs = _needs(cells, spans, low, high, base, readers, here)
        columns = (self._obj[wanted][cells.stretch], cells.start - base, cells.stop - base)
        table = zip(*(column.tolist() for column in columns), readers, strict=True)
        for index, (obj, start, stop, reader) in enumerate(table):
            yield Cell(obj, start, stop, reader, needs.get(index, {}))


# Below, all offsets are on the common line. Each rank computes the parts of all ranks in tensors, so that a group of a
# thousand ranks does not take a thousand times as long; loops go only over this rank's own cells and over all readers.


def _unions(start: torch.Tensor, stop: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join ranges, ordered by start, that overlap. Return where a union begins, as a mask, and the ends of the unions.

    Ranges that merely touch are not joined, as they may go to different places.
    """
    reach = torch.cummax(stop, 0).values if len(stop) else stop
    opens = torch.ones(len(start), dtype=torch.bool)
    opens[1:] = start[1:] >= reach[:-1]
    return opens, reach[torch.roll(opens, -1)]


def _expanded(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each count, repeated `count` times, and beside it 0 to `count - 1`."""
    index = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return index, torch.arange(len(index)) - (torch.cumsum(counts, 0) - counts)[index]


@dataclass(frozen=True)
class _Spans:
    """The ranges that each rank wants, joined where those of one rank overlap; ordered by rank, then by place."""

    rank: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor

    @staticmethod
    def joined(rank: torch.Tensor, start: torch.Tensor, stop: torch.Tensor) -> _Spans:
        # Places are numbered, so that the ranges of all ranks fit on one line of small numbers, on which no rank's
        # ranges reach those of the next rank.
        places, number = torch.unique(torch.cat([start, stop]), return_inverse=True)
        width = len(places)
        begin, end = rank * width + number[: len(start)], rank * width + number[len(start) :]
        order = torch.argsort(begin, stable=True)
        opens, last = _unions(begin[order], end[order])
        owner, first = rank[order][opens], begin[order][opens]
        return _Spans(owner, places[first - owner * width], places[last - owner * width])


@dataclass(frozen=True)
class _Cells:
    """The wanted stretches, cut into cells."""

    stretch: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor
    first: torch.Tensor
    before: torch.Tensor
    size: int

    @staticmethod
    def cut(first: torch.Tensor, last: torch.Tensor, size: int) -> _Cells:
        counts = (last - first + size - 1) // size
        before = torch.cumsum(counts, 0) - counts
        stretch, inside = _expanded(counts)
        start = first[stretch] + inside * size
        return _Cells(stretch, start, torch.minimum(start + size, last[stretch]), first, before, size)

    def touched_by(self, spans: _Spans) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and the last cell that each span overlaps."""
        stretch = torch.searchsorted(self.first, spans.start, right=True) - 1
        origin, before = self.first[stretch], self.before[stretch]
        low = before + torch.div(spans.start - origin, self.size, rounding_mode="floor")
        high = before + torch.div(spans.stop - 1 - origin, self.size, rounding_mode="floor")
        return low, high


def _readers(cells: _Cells, rank: torch.Tensor, low: torch.Tensor, high: torch.Tensor, load: list[int]) -> list[int]:
    """Choose the reader of each cell: the rank with the least to read so far, of those that want some of the cell.

    The bytes of each cell are added to `load`.
    """
    # A rank counts once for a cell, however many of its spans touch the cell.
    fresh = low.clone()
    same = rank[1:] == rank[:-1]
    fresh[1:][same] = torch.maximum(low[1:], high[:-1] + 1)[same]
    held = fresh <= high
    rank, low, high = rank[held], fresh[held], high[held]
    # Find runs of cells that the same ranks hold. Each rank has a hash, which is added where the rank begins to hold
    # cells and subtracted where it ends: different sets of ranks have different sums.
    hashes = [hashlib.sha256(each.to_bytes(8, "big")).digest()[:8] for each in range(len(load))]
    number = torch.tensor([int.from_bytes(each, "big", signed=True) for each in hashes], dtype=torch.int64)[rank]
    change = torch.zeros(len(cells.start) + 1, dtype=torch.int64)
    change.index_add_(0, low, number)
    change.index_add_(0, high + 1, -number)
    held_by = torch.cumsum(change, 0)[:-1]
    opens = torch.ones(len(held_by), dtype=torch.bool)
    opens[1:] = held_by[1:] != held_by[:-1]
    run = torch.cumsum(opens, 0) - 1
    begin, end = run[low], run[high]
    owner, into = _expanded(end - begin + 1)
    pairs = torch.unique((begin[owner] + into) * len(load) + rank[owner])
    holders = iter((pairs % len(load)).tolist())
    holding = torch.bincount(pairs // len(load)).tolist()
    sizes = iter((cells.stop - cells.start).tolist())
    readers = []
    for count, length in zip(holding, torch.bincount(run).tolist(), strict=True):
        heap = [(load[each], each) for each in itertools.islice(holders, count)]
        heapq.heapify(heap)
        for nbytes in itertools.islice(sizes, length):
            least, reader = heap[0]
            readers.append(reader)
            heapq.heapreplace(heap, (least + nbytes, reader))
        for total, each in heap:
            load[each] = total
    return readers


def _needs(
    cells: _Cells,
    spans: _Spans,
    low: torch.Tensor,
    high: torch.Tensor,
    base: torch.Tensor,
    readers: Sequence[int],
    here: int,
) -> dict[int, dict[int, list[Span]]]:
    """Return the byte spans needed from each cell: of all ranks if `here` reads the cell, otherwise of `here` only.

    Offsets count from the first byte of the object, which lies at `base`.
    """
    reads = torch.tensor(readers, dtype=torch.int64) == here
    needs: dict[int, dict[int, list[Span]]] = {}
    for chosen, among in ((reads, torch.ones_like(spans.rank, dtype=torch.bool)), (~reads, spans.rank == here)):
        # Chosen cells are numbered consecutively, so that the chosen cells that a span touches form a range.
        numbers = torch.nonzero(chosen).flatten()
        place = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(chosen, 0)])
        begin, end = place[low[among]], place[high[among] + 1]
        span, into = _expanded(end - begin)
        cell = numbers[begin[span] + into]
        start = torch.maximum(spans.start[among][span], cells.start[cell]) - base[cell]
        stop = torch.minimum(spans.stop[among][span], cells.stop[cell]) - base[cell]
        parts = zip(start.tolist(), stop.tolist(), strict=True)
        for index, rank, part in zip(cell.tolist(), spans.rank[among][span].tolist(), parts, strict=True):
            needs.setdefault(index, {}).setdefault(rank, []).append(part)
    return needs


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
