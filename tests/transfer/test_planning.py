"""The arithmetic of parts and ranges, and the memory that they pass through."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.errors import BucketpointError
from bucketpoint.stores.http_store import CAPABILITIES as S3
from bucketpoint.transfer import BufferPool, Extent, TransferOptions, plan_requests
from bucketpoint.transfer.pieces import common_part_bytes, plan_parts

MIB = 1 << 20


@given(nbytes=st.integers(1, 48 << 40), part=st.integers(1, 1 << 30))
def test_covers_the_object_by_parts_within_the_services_limits(nbytes: int, part: int) -> None:
    plan = plan_parts(nbytes, part, S3)
    bounds = [plan.bounds(number) for number in range(1, plan.count + 1)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == nbytes
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    assert plan.count <= S3.max_parts
    sizes = [stop - start for start, stop in bounds]
    assert all(size == plan.part_bytes for size in sizes[:-1])
    assert 0 < sizes[-1] <= plan.part_bytes <= S3.max_part_bytes
    assert plan.count == 1 or plan.part_bytes >= S3.min_part_bytes


def test_cuts_a_tensor_into_parts_of_the_wanted_size_unless_the_service_holds_none() -> None:
    plan = plan_parts(7 << 30, 32 * MIB, S3)
    assert (plan.count, plan.part_bytes) == (224, 32 * MIB)
    with pytest.raises(BucketpointError, match="does not fit"):
        plan_parts(60 << 40, 32 * MIB, S3)


@given(sizes=st.lists(st.integers(0, 3 << 30), min_size=1, max_size=5), connections=st.integers(1, 64))
def test_fills_whole_waves_by_parts_of_objects_that_go_up_together(sizes: list[int], connections: int) -> None:
    options = TransferOptions(connections=connections)
    size = common_part_bytes(sizes, options)
    largest = options.part_bytes * 3 // 2
    assert 1 <= size <= int(largest * 1.02) + 1
    waves = max(round(sum(sizes) / (options.part_bytes * connections)), 1)
    parts = sum(-(-nbytes // size) for nbytes in sizes)
    assert parts <= max(waves * connections, sum(-(-nbytes // largest) for nbytes in sizes))


def extent(start: int, stop: int, *, key: str = "k", direct: bool = False) -> Extent:
    memory = memoryview(bytearray(stop - start)) if direct else None
    return Extent(key, start, stop, lambda view: None, direct=memory, direct_start=start)


@given(
    pieces=st.lists(st.tuples(st.integers(0, 3 * MIB), st.integers(1, 4 * MIB), st.booleans()), max_size=40),
    keys=st.integers(1, 3),
)
def test_holds_every_extent_once_in_requests_and_overreads_within_the_cap(
    pieces: list[tuple[int, int, bool]], keys: int
) -> None:
    options = TransferOptions(part_bytes=16 * MIB, max_inflight_bytes=64 * MIB)
    extents, position = [], 0
    for number, (gap, size, direct) in enumerate(pieces):
        extents.append(extent(position + gap, position + gap + size, key=f"k{number % keys}", direct=direct))
        position += gap + size
    requests = plan_requests(extents, options)
    assert sorted(id(e) for r in requests for e in r.extents) == sorted(id(e) for e in extents)
    for request in requests:
        span = request.stop - request.start
        assert {e.key for e in request.extents} == {request.key}
        gaps = [b.start - a.stop for a, b in zip(request.extents, request.extents[1:], strict=False)]
        assert all(0 <= gap <= options.coalesce_gap_bytes for gap in gaps)
        if len(request.extents) > 1:
            assert span <= options.part_bytes
            assert request.leased <= options.lease_bytes
            tiny = all(gap <= options.free_gap_bytes for gap in gaps)
            assert tiny or span <= options.max_overread * request.wanted + options.free_gap_bytes * len(gaps)


def test_reads_overlapping_extents_apart() -> None:
    requests = plan_requests([extent(0, 100), extent(50, 150)], TransferOptions())
    assert len(requests) == 2


GRAIN = 256 << 10


def test_gives_a_buffer_out_again_that_came_back_within_the_limit() -> None:
    memory = BufferPool(4 * GRAIN, grain=GRAIN)
    first = memory.take(2 * GRAIN)
    buffer = first.obj
    memory.give(first)
    again = memory.take(2 * GRAIN - 5)
    assert again.obj is buffer
    assert len(again) == 2 * GRAIN - 5
    assert memory.take(2 * GRAIN).obj is not buffer
    assert memory.peak_bytes == 4 * GRAIN
    # What is kept is dropped before the limit is passed.
    memory = BufferPool(4 * GRAIN, grain=GRAIN)
    memory.give(memory.take(3 * GRAIN))
    memory.take(4 * GRAIN)
    assert memory.peak_bytes == 4 * GRAIN
    memory = BufferPool(GRAIN, grain=GRAIN)
    first = memory.take(2 * GRAIN)
    buffer = first.obj
    memory.give(first)
    assert memory.take(2 * GRAIN).obj is not buffer


def test_leases_more_than_the_limit_alone_and_names_what_cannot_be_had() -> None:
    pool = BufferPool(4 * GRAIN)
    for _ in range(50):
        with pool.lease(2 * GRAIN) as one, pool.lease(2 * GRAIN) as two:
            assert len(one) == len(two) == 2 * GRAIN
    assert pool.peak_bytes == 4 * GRAIN
    with pool.lease(9 * GRAIN) as large:
        assert len(large) == 9 * GRAIN
    for nbytes in (1 << 60, 1 << 80):
        with pytest.raises(BucketpointError, match="could not be allocated"), pool.lease(nbytes):
            pass
    with pool.lease(4 * GRAIN) as view:
        assert len(view) == 4 * GRAIN


@given(sizes=st.lists(st.integers(0, 5 * GRAIN), min_size=1, max_size=30), order=st.randoms(), limit=st.integers(0, 20))
def test_overlaps_no_buffers_in_use_and_keeps_the_rest_within_the_limit(
    sizes: list[int], order: object, limit: int
) -> None:
    memory = BufferPool(limit * GRAIN, grain=GRAIN)
    used: list[tuple[int, memoryview]] = []
    most = 0
    for number, size in enumerate(sizes):
        view = memory.take(size)
        assert len(view) == size
        if size:
            view[0] = number
        used.append((number, view))
        most = max(most, sum(len(each) for _, each in used))
        if order.random() < 0.5:  # type: ignore[attr-defined]
            number_, back = used.pop(order.randrange(len(used)))  # type: ignore[attr-defined]
            assert not len(back) or back[0] == number_
            memory.give(back)
    assert most <= memory.peak_bytes <= max(most + len(sizes) * GRAIN, limit * GRAIN)
