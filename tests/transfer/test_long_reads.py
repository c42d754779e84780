"""Long reads: few requests, little memory, every byte verified before it is delivered, and nothing delivered twice."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
from awscrt import checksums
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketpoint.errors import CorruptDataError, TransientStoreError
from bucketpoint.stores import open_store
from bucketpoint.stores import retry as stores_retry
from bucketpoint.transfer import Block, BufferPool, Extent, Meter, TransferOptions, fetch, plan_requests
from transfer.wrappers import StreamedReply, StreamingStore

KIB, MIB = 1 << 10, 1 << 20
CONTENT = os.urandom(40 * MIB)


class LeaseCounter(BufferPool):
    """A pool that notes the size of every lease."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.leases: list[int] = []

    def lease(self, nbytes: int) -> Any:
        self.leases.append(nbytes)
        return super().lease(nbytes)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_retry, "pause", lambda seconds: None)


def streaming_store(content: bytes = CONTENT) -> StreamingStore:
    store, _ = open_store(f"memory://long-reads-{os.urandom(6).hex()}")
    store.put("k", [memoryview(content)])
    return StreamingStore(store)


def alter_replies(store: StreamingStore, alter: Callable[[StreamedReply, int], None]) -> None:
    """Call `alter` with each reply to come, and its number."""
    opened = store.open_range

    def open_range(*args: Any, **kwargs: Any) -> StreamedReply:
        reply = opened(*args, **kwargs)
        alter(reply, len(store.replies))
        return reply

    store.open_range = open_range  # type: ignore[method-assign]


def column(size: int, nbytes: int, deliver: Callable[[int, memoryview], None], *, gap: int = 0) -> list[Extent]:
    """Extents of `size` bytes, each with a checksum, as the bands of a column slice are."""

    def extent(start: int) -> Extent:
        stop = min(start + size, nbytes)

        def taken(view: memoryview | None) -> None:
            assert view is not None
            deliver(start, view)

        return Extent("k", start, stop, taken, [Block(stop - start, checksums.crc32c(CONTENT[start:stop]))])

    return [extent(start) for start in range(0, nbytes, size + gap)]


def run(store: StreamingStore, extents: list[Extent], options: TransferOptions) -> tuple[LeaseCounter, Meter]:
    pool, meter = LeaseCounter(options.max_inflight_bytes), Meter("load", "memory://x", 0, None)
    fetch(store, plan_requests(extents, options), options, pool=pool, meter=meter)
    return pool, meter


@pytest.mark.parametrize("budget", [8 * MIB, 2 * MIB])
def test_takes_one_request_and_one_lease_for_each_part_of_a_column(budget: int) -> None:
    store, taken = streaming_store(), dict[int, bytes]()
    options = TransferOptions(part_bytes=10 * MIB, connections=4, max_inflight_bytes=budget)
    extents = column(200 * KIB, len(CONTENT), lambda start, view: taken.update({start: bytes(view)}), gap=1000)
    pool, meter = run(store, extents, options)
    assert all(taken[extent.start] == CONTENT[extent.start : extent.stop] for extent in extents)
    # Each part is a little smaller than it may be, as it ends where an extent does. The last is a single request.
    assert store.calls["open_range"] == len(pool.leases) == meter.requests == 5
    assert store.received <= len(CONTENT)
    assert max(pool.leases) <= options.lease_bytes
    assert pool.peak_bytes <= budget


@pytest.mark.parametrize(
    ("size", "options", "requests"),
    [
        (MIB, TransferOptions(connections=4, max_inflight_bytes=8 * MIB), 4),
        (256 * KIB, TransferOptions(part_bytes=MIB, connections=8), 40),
        (256 * KIB, TransferOptions(part_bytes=MIB, connections=2), 20),
        (256 * KIB, TransferOptions(part_bytes=MIB, connections=1), 10),
    ],
)
def test_spreads_few_requests_over_the_connections_and_joins_parts_of_many(
    size: int, options: TransferOptions, requests: int
) -> None:
    store, taken = streaming_store(), dict[int, bytes]()
    run(store, column(size, len(CONTENT), lambda start, view: taken.update({start: bytes(view)})), options)
    assert store.calls["open_range"] == requests
    assert b"".join(taken[start] for start in sorted(taken)) == CONTENT


def test_requests_only_the_rest_again_after_a_break() -> None:
    store, order = streaming_store(), list[int]()

    def break_twice(reply: StreamedReply, number: int) -> None:
        if number <= 2:
            reply.breaks_at = 3 * MIB + 5

    alter_replies(store, break_twice)
    options = TransferOptions(part_bytes=10 * MIB, connections=1, max_inflight_bytes=2 * MIB)
    _, meter = run(store, column(MIB, 10 * MIB, lambda start, view: order.append(start)), options)
    assert order == list(range(0, 10 * MIB, MIB))
    assert [(reply.start, len(reply.data)) for reply in store.replies] == [
        (0, 10 * MIB),
        (2 * MIB, 8 * MIB),
        (4 * MIB, 6 * MIB),
    ]
    assert meter.done_bytes == 10 * MIB
    assert meter.requests == 3


@pytest.mark.parametrize("times", [1, 2])
def test_requests_damaged_bytes_once_more_and_never_delivers_them(times: int) -> None:
    store, taken = streaming_store(), dict[int, bytes]()

    def damage(reply: StreamedReply, number: int) -> None:
        if number <= times:
            reply.data[4 * MIB + 7 - reply.start] ^= 1

    alter_replies(store, damage)
    options = TransferOptions(part_bytes=10 * MIB, connections=1, max_inflight_bytes=MIB)
    extents = column(MIB, 10 * MIB, lambda start, view: taken.update({start: bytes(view)}))
    if times == 2:
        with pytest.raises(CorruptDataError, match="Checksum mismatch"):
            run(store, extents, options)
    else:
        run(store, extents, options)
    assert [reply.start for reply in store.replies] == [0, 4 * MIB]
    assert store.replies[0].dropped
    assert store.replies[1].dropped is (times == 2)
    assert sorted(taken) == list(range(0, 4 * MIB if times == 2 else 10 * MIB, MIB))
    assert all(data == CONTENT[start : start + MIB] for start, data in taken.items())


def test_drops_a_reply_that_always_breaks_off_or_whose_delivery_fails() -> None:
    def deliver(start: int, view: memoryview) -> None:
        if start == 3 * MIB:
            raise OSError("the planner failed")

    breaking, whole = streaming_store(), streaming_store()
    alter_replies(breaking, lambda reply, number: setattr(reply, "breaks_at", 0))
    options = TransferOptions(part_bytes=10 * MIB, connections=1, max_inflight_bytes=MIB, read_attempts=3)
    with pytest.raises(TransientStoreError, match="broke off"):
        run(breaking, column(MIB, 10 * MIB, lambda start, view: None), options)
    with pytest.raises(OSError, match="the planner failed"):
        run(whole, column(MIB, 10 * MIB, deliver), options)
    assert (len(breaking.replies), len(whole.replies)) == (3, 1)
    assert all(reply.dropped for reply in (*breaking.replies, *whole.replies))


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 300 * KIB), st.integers(0, 400 * KIB), st.booleans(), st.booleans()),
        min_size=1,
        max_size=60,
    ),
    budget=st.integers(64 * KIB, 4 * MIB),
    part_bytes=st.integers(256 * KIB, 12 * MIB),
)
def test_receives_any_extents_whole_through_as_little_memory_as_before(
    pieces: list[tuple[int, int, bool, bool]], budget: int, part_bytes: int
) -> None:
    options = TransferOptions(part_bytes=part_bytes, connections=3, max_inflight_bytes=budget)
    store, extents, arrived = streaming_store(), list[Extent](), dict[int, bytes]()
    position = 0
    for number, (gap, size, direct, checked) in enumerate(pieces):
        start, stop = position + gap, min(position + gap + size, len(CONTENT))
        if start > len(CONTENT):
            break
        memory = memoryview(bytearray(stop - start)) if direct else None

        def deliver(view: memoryview | None, number: int = number, memory: memoryview | None = memory) -> None:
            assert number not in arrived
            arrived[number] = bytes(memory if view is None else view)

        blocks = [Block(stop - start, checksums.crc32c(CONTENT[start:stop]))] if checked else []
        extents.append(Extent("k", start, stop, deliver, blocks, memory, start))
        position = stop
    pool, _ = run(store, extents, options)
    assert arrived == {number: CONTENT[extent.start : extent.stop] for number, extent in enumerate(extents)}
    requests = plan_requests(extents, options)
    most = max(request.leased for request in requests)
    assert max(pool.leases) <= max(most, 64 * KIB)
    assert store.calls["open_range"] + store.calls["read_into"] <= len(requests)
    for reply in store.replies:
        assert len(reply.data) <= max(part_bytes, *(extent.nbytes for extent in extents))
    for reply, other in itertools.combinations(store.replies, 2):
        assert reply.start + len(reply.data) <= other.start or other.start + len(other.data) <= reply.start
