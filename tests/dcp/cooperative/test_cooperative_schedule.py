"""Any ranges on any ranks are dealt out whole, once and evenly; `auto` decides by the figures of a model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.dcp.cooperative.decision import Bandwidths, Demand, decide, predict
from bucketpoint.dcp.cooperative.schedule import SMALLEST_CELL, Cell, Overlaps, Schedule
from bucketpoint.errors import BucketpointError, MetadataError

GB = 10**9
Rows = list[tuple[int, int, int]]


def overlaps(tables: list[Rows], nodes: list[int] | None = None) -> Overlaps:
    tensors = [torch.tensor(rows, dtype=torch.int64).reshape(-1, 3) for rows in tables]
    return Overlaps(tensors, nodes or [0] * len(tables))


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
def test_every_byte_is_read_by_one_rank_that_wants_it_and_reaches_all_that_do(
    tables: list[Rows], round_bytes: int
) -> None:
    read: Counter[tuple[int, int]] = Counter()
    seen = set()
    for rank, schedule in enumerate(schedules(tables, round_bytes)):
        wanted = set(bytes_of(row for row, shared in zip(tables[rank], schedule.shared, strict=True) if shared))
        got = bytes_of(
            (cell.obj, start, stop) for cell in cells_of(schedule) for start, stop in cell.needs.get(rank, ())
        )
        assert got == Counter(wanted)
        alone = set(bytes_of(row for row, shared in zip(tables[rank], schedule.shared, strict=True) if not shared))
        assert not alone & seen
        seen |= alone
        read.update(bytes_of((c.obj, c.start, c.stop) for c in cells_of(schedule) if c.reader == rank))
        assert all(rank in cell.needs for cell in cells_of(schedule) if cell.reader == rank)
        read.update(alone)
    assert read == Counter(set(bytes_of(row for rows in tables for row in rows)))


@given(tables=ranges(), round_bytes=st.integers(1, 50))
def test_peers_agree_on_their_rounds_and_no_round_is_too_large(tables: list[Rows], round_bytes: int) -> None:
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
                assert ours.reader != rank or ours.needs.get(peer) == theirs.needs.get(peer)
        for cells in schedule.rounds:
            assert sum(cell.nbytes for cell in cells) <= round_bytes
            assert all(set(cell.needs) <= set(schedule.peers) for cell in cells)


@given(tables=ranges())
def test_demand_counts_every_byte_once(tables: list[Rows]) -> None:
    demand = overlaps(tables).demand
    assert demand.total == sum(stop - start for rows in tables for _, start, stop in rows)
    assert demand.distinct == len(bytes_of(row for rows in tables for row in rows))


@given(
    ranks=st.integers(2, 6),
    sizes=st.lists(st.integers(1, 40 << 20), min_size=1, max_size=8),
    alone=st.lists(st.integers(0, 20 << 20), min_size=6, max_size=6),
)
def test_replicas_read_within_a_cell_of_each_other_whatever_they_read_alone(
    ranks: int, sizes: list[int], alone: list[int]
) -> None:
    common = [(1, sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))]
    tables = [[*common, (2 + rank, 0, alone[rank])] for rank in range(ranks)]
    loads = Counter({rank: alone[rank] for rank in range(ranks)})
    cells = cells_of(overlaps(tables).schedule(0, 8 << 20))
    for cell in cells:
        loads[cell.reader] += cell.nbytes
    dealt = {cell.reader for cell in cells}
    assert max(loads[rank] for rank in dealt) - min(loads.values()) <= max(cell.nbytes for cell in cells)


def test_replica_pairs_of_a_hybrid_mesh_wait_for_nobody_else() -> None:
    tables = [[(0, rank % 4 * 100, rank % 4 * 100 + 100)] for rank in range(8)]
    assert [schedule.peers for schedule in schedules(tables, 1000)] == [(rank % 4, rank % 4 + 4) for rank in range(8)]


def test_cells_of_many_ranks_are_small_enough_for_all_of_them_to_read_in_one_round() -> None:
    tables: list[Rows] = [[(0, 0, 64 << 20)] for _ in range(16)]
    first = schedules(tables, 8 << 20)[0].rounds[0]
    assert {cell.reader for cell in first} == set(range(16))
    assert min(cell.nbytes for cell in first) >= SMALLEST_CELL


def test_a_thousand_replicas_are_dealt_out_evenly_and_each_knows_whom_it_reads_for() -> None:
    ranks, nbytes = 1024, 600 << 20
    found = overlaps([[(0, 0, nbytes)] for _ in range(ranks)]).schedule(3, 8 << 20)
    cells = cells_of(found)
    assert sum(cell.nbytes for cell in cells) == nbytes
    loads = Counter(dict.fromkeys(range(ranks), 0))
    for cell in cells:
        loads[cell.reader] += cell.nbytes
        assert set(cell.needs) == (set(range(ranks)) if cell.reader == 3 else {3})
        assert set(map(tuple, cell.needs.values())) == {((cell.start, cell.stop),)}
    assert max(loads.values()) - min(loads.values()) <= SMALLEST_CELL


def test_ranges_beyond_any_store_are_refused() -> None:
    with pytest.raises(MetadataError, match="beyond what any store holds"):
        overlaps([[(0, 0, 1 << 61)], [(1, 0, 1 << 61)]])


def replicas(count: int, nodes: int, nbytes: int, crossing: float = 1.0) -> Demand:
    return Demand(ranks=count, nodes=nodes, total=count * nbytes, distinct=nbytes, crossing=crossing)


@pytest.mark.parametrize(
    ("demand", "bandwidths", "seconds", "together"),
    [
        # 16 replicas of 840 GB on 8 nodes each, 1 Tb/s from the store, a fabric of 50 GB/s a node.
        (replicas(16, 128, 840 * GB), Bandwidths(store=125e9, exchange=50e9), (107.5, 6.7), True),
        # The same without a fabric of its own.
        (replicas(16, 128, 840 * GB), Bandwidths(store=125e9), (107.5, 8.4), True),
        # 96 GB on each of 8 ranks of one node.
        (replicas(8, 1, 96 * GB, 0.0), Bandwidths(), (61.4, 7.7), True),
        # Two replicas of one node each, over the port that they read through: nothing to gain.
        (replicas(2, 2, 16 * GB), Bandwidths(), (1.3, 1.3), False),
        # And over a fabric of twice its rate.
        (replicas(2, 2, 16 * GB), Bandwidths(exchange=25e9), (1.3, 0.6), True),
        # 32 MB a rank.
        (replicas(8, 1, 32 * 10**6, 0.0), Bandwidths(), (0.02, 0.003), False),
    ],
)
def test_auto_follows_the_model(
    demand: Demand, bandwidths: Bandwidths, seconds: tuple[float, float], together: bool
) -> None:
    assert predict(demand, bandwidths) == pytest.approx(seconds, rel=0.15)
    assert decide("auto", demand, bandwidths).together is together


@given(
    count=st.integers(2, 64),
    nodes=st.integers(1, 64),
    nbytes=st.integers(1, 1000 * GB),
    store=st.floats(1e6, 1e13),
    exchange=st.none() | st.floats(1e6, 1e12),
)
def test_what_was_asked_for_is_done_and_auto_never_chooses_the_slower(
    count: int, nodes: int, nbytes: int, store: float, exchange: float | None
) -> None:
    demand, bandwidths = replicas(count, nodes, nbytes), Bandwidths(store=store, exchange=exchange)
    assert decide("group", demand, bandwidths).together
    plain, together = predict(demand, bandwidths)
    if decide("auto", demand, bandwidths).together and nodes > 1:
        assert together < plain


def test_exchange_crosses_nodes_as_far_as_holders_are_on_different_ones() -> None:
    rows: Rows = [(0, 0, 100)]
    assert overlaps([rows] * 4, [0, 0, 0, 0]).demand.crossing == 0.0
    assert overlaps([rows] * 4, [0, 1, 2, 3]).demand.crossing == 1.0
    assert overlaps([rows] * 4, [0, 0, 1, 1]).demand.crossing == pytest.approx(2 / 3)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_bandwidths_are_positive_numbers(value: float) -> None:
    with pytest.raises(BucketpointError, match=r"Bandwidths\.nic"):
        Bandwidths(nic=value)
