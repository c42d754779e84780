"""Any ranges on any ranks are dealt out whole, once and evenly, and a request is put together from any pieces."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.dcp.cooperative.schedule import SMALLEST_CELL, Cell, Overlaps, Schedule
from bucketpoint.errors import MetadataError
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.download import SMALL_EXTENT_BYTES, Assembly, Block, Extent, Request

Rows = list[tuple[int, int, int]]


def overlaps(tables: list[Rows]) -> Overlaps:
    return Overlaps([torch.tensor(rows, dtype=torch.int64).reshape(-1, 3) for rows in tables])


def schedules(tables: list[Rows], round_bytes: int) -> list[Schedule]:
    found = overlaps(tables)
    return [found.schedule(rank, round_bytes) for rank in range(len(tables))]


def cells_of(schedule: Schedule) -> list[Cell]:
    return [cell for cells in schedule.rounds for cell in cells]


def bytes_of(rows: Any) -> Counter[tuple[int, int]]:
    return Counter((obj, at) for obj, start, stop in rows for at in range(start, stop))


@st.composite
def ranges(draw: st.DrawFn) -> list[Rows]:
    row = st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 30)).map(
        lambda drawn: (drawn[0], drawn[1], drawn[1] + drawn[2])
    )
    return draw(st.lists(st.lists(row, max_size=6), min_size=1, max_size=5))


@given(tables=ranges(), round_bytes=st.integers(1, 50))
def test_reads_every_byte_on_one_rank_that_wants_it_and_sends_it_to_all_that_do(
    tables: list[Rows], round_bytes: int
) -> None:
    found = overlaps(tables)
    assert found.total == sum(stop - start for rows in tables for _, start, stop in rows)
    assert found.distinct == len(bytes_of(row for rows in tables for row in rows))
    read: Counter[tuple[int, int]] = Counter()
    seen = set()
    for rank, schedule in enumerate(schedules(tables, round_bytes)):
        wanted = set(bytes_of(row for row, shared in zip(tables[rank], schedule.shared, strict=True) if shared))
        got = bytes_of((cell.obj, cell.start, cell.stop) for cell in cells_of(schedule) if rank in cell.ranks)
        assert got == Counter(wanted)
        alone = set(bytes_of(row for row, shared in zip(tables[rank], schedule.shared, strict=True) if not shared))
        assert not alone & seen
        seen |= alone
        read.update(bytes_of((c.obj, c.start, c.stop) for c in cells_of(schedule) if c.reader == rank))
        assert all(rank in cell.ranks for cell in cells_of(schedule) if cell.reader == rank)
        read.update(alone)
    assert read == Counter(set(bytes_of(row for rows in tables for row in rows)))


@given(tables=ranges(), round_bytes=st.integers(1, 50))
def test_agrees_with_peers_on_rounds_of_bounded_size(tables: list[Rows], round_bytes: int) -> None:
    found = schedules(tables, round_bytes)
    for rank, schedule in enumerate(found):
        assert rank in schedule.peers
        for peer in schedule.peers:
            assert found[peer].peers == schedule.peers
            assert [len(cells) for cells in found[peer].rounds] == [len(cells) for cells in schedule.rounds]
            for ours, theirs in zip(cells_of(schedule), cells_of(found[peer]), strict=True):
                assert (ours.obj, ours.start, ours.stop, ours.reader) == (
                    theirs.obj,
                    theirs.start,
                    theirs.stop,
                    theirs.reader,
                )
                # What one sends is what the other waits for.
                assert ours.reader != rank or (peer in ours.ranks) == (peer in theirs.ranks)
        for cells in schedule.rounds:
            assert sum(cell.nbytes for cell in cells) <= round_bytes
            assert all(set(cell.ranks) <= set(schedule.peers) for cell in cells)


@given(
    ranks=st.integers(2, 6),
    sizes=st.lists(st.integers(1, 40 << 20), min_size=1, max_size=8),
    alone=st.lists(st.integers(0, 20 << 20), min_size=6, max_size=6),
)
def test_balances_replicas_to_within_the_largest_cell_whatever_they_read_alone(
    ranks: int, sizes: list[int], alone: list[int]
) -> None:
    common = [(1, sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))]
    tables = [[*common, (2 + rank, 0, alone[rank])] for rank in range(ranks)]
    loads = Counter({rank: alone[rank] for rank in range(ranks)})
    cells = cells_of(overlaps(tables).schedule(0, 8 << 20))
    for cell in cells:
        loads[cell.reader] += cell.nbytes
    dealt = {cell.reader for cell in cells}
    # Of small cells that follow each other, a rank reads as many as a large one holds.
    largest = max(SMALLEST_CELL, (8 << 20) // ranks)
    assert max(loads[rank] for rank in dealt) - min(loads.values()) <= largest


def test_lets_replica_pairs_of_a_hybrid_mesh_wait_for_nobody_else() -> None:
    tables = [[(0, rank % 4 * 100, rank % 4 * 100 + 100)] for rank in range(8)]
    assert [schedule.peers for schedule in schedules(tables, 1000)] == [(rank % 4, rank % 4 + 4) for rank in range(8)]


def test_makes_cells_of_many_ranks_small_enough_to_read_in_one_round() -> None:
    tables: list[Rows] = [[(0, 0, 64 << 20)] for _ in range(16)]
    first = schedules(tables, 8 << 20)[0].rounds[0]
    assert {cell.reader for cell in first} == set(range(16))
    assert min(cell.nbytes for cell in first) >= SMALLEST_CELL


def test_deals_a_thousand_replicas_out_evenly_and_tells_each_whom_it_reads_for() -> None:
    ranks, nbytes = 1024, 600 << 20
    found = overlaps([[(0, 0, nbytes)] for _ in range(ranks)]).schedule(3, 8 << 20)
    cells = cells_of(found)
    assert sum(cell.nbytes for cell in cells) == nbytes
    loads = Counter(dict.fromkeys(range(ranks), 0))
    for cell in cells:
        loads[cell.reader] += cell.nbytes
        assert set(cell.ranks) == (set(range(ranks)) if cell.reader == 3 else {3})
    assert max(loads.values()) - min(loads.values()) <= SMALLEST_CELL


def test_refuses_ranges_beyond_any_store() -> None:
    with pytest.raises(MetadataError, match="beyond what any store holds"):
        overlaps([[(0, 0, 1 << 61)], [(1, 0, 1 << 61)]])


SOURCE = random.Random(5).randbytes(6 * SMALL_EXTENT_BYTES)


class Built:
    """A request over SOURCE, and what its extents were given."""

    def __init__(self, layout: list[tuple[int, int, str]]) -> None:
        self.request = Request("data", None)
        self.places: list[tuple[int, int, bytearray]] = []
        at = 10
        for gap, size, kind in layout:
            at += gap
            self._add(at, at + size, kind)
            at += size
        self.request.leased = at

    def _add(self, start: int, stop: int, kind: str) -> None:
        # A direct extent is wider than its place by what its blocks need.
        inner = (start + 3, stop - 2) if kind == "direct" else (start, stop)
        place = bytearray(inner[1] - inner[0])
        self.places.append((*inner, place))

        def deliver(view: memoryview | None) -> None:
            if view is not None:
                place[:] = view

        blocks = [Block(stop - start, crc32c(memoryview(SOURCE)[start:stop]))]
        direct = memoryview(place) if kind == "direct" else None
        self.request.extents.append(Extent("data", start, stop, deliver, blocks, direct, inner[0]))


@st.composite
def cases(draw: st.DrawFn) -> Any:
    extent = st.tuples(
        st.integers(0, 50),
        st.sampled_from([7, 1000, SMALL_EXTENT_BYTES + 500]),
        st.sampled_from(["direct", "copied"]),
    )
    layout = draw(st.lists(extent, min_size=1, max_size=5))
    return layout, draw(st.lists(st.integers(0, 6 * SMALL_EXTENT_BYTES), max_size=8)), draw(st.randoms())


@given(case=cases())
def test_assembles_the_request_from_pieces_in_any_order(case: Any) -> None:
    layout, cuts, order = case
    built = Built(layout)
    request = built.request
    borders = sorted({request.start, request.stop, *(cut for cut in cuts if request.start < cut < request.stop)})
    pieces = list(itertools.pairwise(borders))
    order.shuffle(pieces)
    assembly = Assembly("memory://", request)
    for number, (start, stop) in enumerate(pieces):
        place = assembly.direct(start, stop) if number % 2 else assembly.place(start, stop)
        if place is not None:
            place[:] = SOURCE[start:stop]
        else:
            assembly.put(start, memoryview(SOURCE)[start:stop])
        assert assembly.arrived(stop - start) is (number == len(pieces) - 1)
    assembly.finish()
    assert assembly.leased == 0
    for start, stop, place in built.places:
        assert place == SOURCE[start:stop]


def test_gives_bytes_between_extents_no_place_in_the_callers_memory() -> None:
    built = Built([(0, SMALL_EXTENT_BYTES + 500, "direct"), (20, 1000, "copied")])
    assembly = Assembly("memory://", built.request)
    start, stop, place = built.places[0]
    assert assembly.direct(start, stop) == place
    assert assembly.direct(start - 1, stop) is None
    assert assembly.direct(start, stop + 1) is None
    assert assembly.direct(built.request.stop - 10, built.request.stop) is None
