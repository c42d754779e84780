"""Memory that is held is counted to the byte of its grain, kept within the limit, and handed out again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint import BucketpointError
from bucketpoint.transfer import BufferPool

GRAIN = 256 << 10


def test_gives_a_buffer_out_again_that_came_back() -> None:
    memory = BufferPool(4 * GRAIN, grain=GRAIN)
    first = memory.take(2 * GRAIN)
    buffer = first.obj
    memory.give(first)
    again = memory.take(2 * GRAIN - 5)
    assert again.obj is buffer
    assert len(again) == 2 * GRAIN - 5
    assert memory.take(2 * GRAIN).obj is not buffer
    assert memory.peak_bytes == 4 * GRAIN


def test_keeps_no_buffer_beyond_the_limit() -> None:
    memory = BufferPool(GRAIN, grain=GRAIN)
    first = memory.take(2 * GRAIN)
    buffer = first.obj
    memory.give(first)
    assert memory.take(2 * GRAIN).obj is not buffer


def test_drops_what_is_kept_before_the_limit_is_passed() -> None:
    memory = BufferPool(4 * GRAIN, grain=GRAIN)
    memory.give(memory.take(3 * GRAIN))
    memory.take(4 * GRAIN)
    assert memory.peak_bytes == 4 * GRAIN


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
