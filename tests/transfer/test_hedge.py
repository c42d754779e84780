"""Late ranges that are asked for twice: what counts, what it costs, and that nothing is written after the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketpoint import BucketpointError, S3Reader, S3Writer
from bucketpoint.errors import (
    AccessDeniedError,
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    ThrottledError,
    TransientStoreError,
)
from bucketpoint.stores import Store, open_store, retry
from bucketpoint.stores.base import Buffers
from bucketpoint.testing import Delay, Fault, FaultProxy, FlipReply, Rule, Script, Slow, Stall, always
from bucketpoint.testing.certificates import make_certificates
from bucketpoint.testing.plugin import MakeProxy
from bucketpoint.testing.servers import S3Server
from bucketpoint.transfer import (
    Block,
    BufferPool,
    Extent,
    Hedge,
    Meter,
    TaskGroup,
    TransferOptions,
    fetch,
    plan_requests,
)
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.fetch import range_reader
from bucketpoint.transfer.hedge import ENOUGH, FIRST, SECOND, HedgedReads, RecentTimes
from gcs_server import GCSServer

KIB, MIB = 1 << 10, 1 << 20
NBYTES = 600 * KIB
DATA = bytes(index % 251 for index in range(NBYTES))
SOON_S, NEVER_S = 0.2, 600.0
"""When a range counts as late, and how long a fault lasts whose end nobody waits for."""


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in (FIRST, SECOND)]


def meter() -> Meter:
    return Meter("load", "s3://x", 0, None)


@pytest.fixture
def behind(minio: S3Server, fault_proxy: MakeProxy) -> tuple[FaultProxy, Store]:
    """A proxy, and a store of one object that is reached through it."""
    proxy = fault_proxy(minio)
    bucket = minio.make_bucket("hedge")
    minio.client().put_object(Bucket=bucket, Key="k", Body=DATA)
    return proxy, open_store(f"s3://{bucket}", storage_options=minio.at(proxy.url).options)[0]


def reads_of(store: Any, hedge: Hedge, *, limit: int = 64 * MIB) -> tuple[HedgedReads, BufferPool]:
    pool = BufferPool(limit)
    return HedgedReads(store, store.url, hedge, pool, meter()), pool


def gets(proxy: FaultProxy) -> int:
    return proxy.counts.requests["GetObject"]


# What is late


def test_a_range_is_late_beyond_the_quantile_of_its_size_and_twice_the_median() -> None:
    times = RecentTimes(Hedge(quantile=0.9))
    for _ in range(ENOUGH - 1):
        times.add(MIB, 0.1)
    assert times.late_after(MIB) is None
    times.add(MIB, 0.5)
    assert times.late_after(MIB) == pytest.approx(0.2)
    for _ in range(ENOUGH):
        times.add(MIB, 0.5)
    assert times.late_after(MIB) == pytest.approx(1.0)


def test_sizes_are_told_apart_and_a_smaller_range_goes_by_larger_ones() -> None:
    times = RecentTimes(Hedge())
    for _ in range(ENOUGH):
        times.add(64 * KIB, 0.01)
    assert times.late_after(MIB) is None
    for _ in range(ENOUGH):
        times.add(16 * MIB, 1.0)
    assert times.late_after(16 * MIB) == times.late_after(MIB) == pytest.approx(2.0)
    assert times.late_after(64 * KIB) == times.late_after(KIB) == pytest.approx(0.02)


def test_old_times_are_forgotten() -> None:
    times = RecentTimes(Hedge())
    for seconds in [9.0] * 200 + [0.1] * 200:
        times.add(MIB, seconds)
    assert times.late_after(MIB) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "values",
    [{"quantile": 0.4}, {"quantile": 1.0}, {"after_s": 0.0}, {"after_s": -1.0}, {"most_extra": 0.0}, {"most_extra": 2}],
)
def test_values_that_mean_nothing_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(BucketpointError, match=next(iter(values))):
        Hedge(**values)


def test_without_the_option_and_on_stores_without_replies_nothing_changes(tmp_path: Path, minio: S3Server) -> None:
    here, there = open_store(f"file://{tmp_path}")[0], open_store("s3://bucket", storage_options=minio.options)[0]
    pool, hedging = BufferPool(1), TransferOptions(hedge=Hedge())
    assert TransferOptions().hedge is None
    assert range_reader(there, TransferOptions(), pool, meter()) is there
    assert range_reader(here, hedging, pool, meter()) is here
    assert isinstance(range_reader(there, hedging, pool, meter()), HedgedReads)


# Against a server


@pytest.mark.contract
def test_what_is_not_late_is_asked_for_once(behind: tuple[FaultProxy, Store]) -> None:
    proxy, store = behind
    reads, pool = reads_of(store, Hedge(after_s=NEVER_S))
    for start in (0, 1, NBYTES - 7):
        target = bytearray(NBYTES - start)
        reads.read_into("k", start, [memoryview(target)])
        assert target == DATA[start:]
    assert (reads.asked, reads.extra, pool.peak_bytes, gets(proxy)) == (3, 0, 0, 3)


@pytest.mark.contract
def test_an_answer_that_does_not_come_is_not_waited_for_and_costs_no_memory(behind: tuple[FaultProxy, Store]) -> None:
    proxy, store = behind
    proxy.play(always(Stall(NEVER_S), kinds=["GetObject"], times=1))
    reads, pool = reads_of(store, Hedge(after_s=SOON_S))
    target = bytearray(NBYTES)
    with memoryview(target) as view:
        reads.read_into("k", 0, [view[:100], view[100:200_000], view[200_000:]])
    assert target == DATA
    assert (reads.asked, reads.extra, pool.peak_bytes) == (1, 1, 0)
    # The stalled request is still under way: it is not among those that have ended.
    assert gets(proxy) == 1


@contextlib.contextmanager
def over_tls(server: S3Server, folder: Path) -> Iterator[tuple[FaultProxy, S3Server]]:
    ca = make_certificates(folder)
    pair = str(folder / "public.crt"), str(folder / "private.key")
    with FaultProxy(server.endpoint, certificate=pair) as proxy:
        yield proxy, S3Server("minio", proxy.url, server.key, server.secret, ca=ca)


@pytest.mark.contract
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_body_that_hangs_is_overtaken_cut_off_and_never_written_again(
    minio: S3Server, fault_proxy: MakeProxy, tmp_path: Path, tls: bool
) -> None:
    bucket = minio.make_bucket("hedge")
    minio.client().put_object(Bucket=bucket, Key="k", Body=DATA)
    with contextlib.ExitStack() as stack:
        if tls:
            proxy, server = stack.enter_context(over_tls(minio, tmp_path))
        else:
            proxy = fault_proxy(minio)
            server = minio.at(proxy.url)
        store = open_store(f"s3://{bucket}", storage_options=server.options)[0]
        # A piece of 256 KiB at once, and then nothing for minutes: the thread waits in `recv`, in the target.
        proxy.play(always(Slow(1000.0), kinds=["GetObject"], times=1))
        reads, pool = reads_of(store, Hedge(after_s=1.0))
        target = bytearray(NBYTES)
        reads.read_into("k", 0, [memoryview(target)])
        assert target == DATA
        assert reads.extra == 1
        assert NBYTES <= pool.peak_bytes <= NBYTES + MIB
        target[:] = b"\xee" * NBYTES
        for thread in threads():
            # At once, and not when the slow body has ended: its connection is closed.
            thread.join(200)
            assert not thread.is_alive()
        assert target == b"\xee" * NBYTES
        # Connections that were given back are whole.
        for _ in range(3):
            reads.read_into("k", 0, [memoryview(target)])
            assert target == DATA
            target[:] = bytes(NBYTES)


@pytest.mark.contract
@pytest.mark.parametrize("fault", [Stall(NEVER_S), Slow(1000.0)], ids=["answer", "body"])
def test_late_answers_and_bodies_of_gcs_are_overtaken(gcs: GCSServer, fault_proxy: MakeProxy, fault: Fault) -> None:
    proxy = fault_proxy(gcs.endpoint)
    bucket = gcs.make_bucket()
    gcs.write(bucket, "k", DATA)
    store = open_store(f"gs://{bucket}", storage_options={**gcs.options, "endpoint_url": proxy.url})[0]
    proxy.play(always(fault, kinds=["GetObject"], times=1))
    reads, pool = reads_of(store, Hedge(after_s=1.0))
    target = bytearray(NBYTES)
    reads.read_into("k", 0, [memoryview(target)], if_match=gcs.generation(bucket, "k"))
    assert target == DATA
    assert reads.extra == 1
    assert (pool.peak_bytes > 0) == isinstance(fault, Slow)


@pytest.mark.contract
def test_a_second_reply_without_room_is_given_up(behind: tuple[FaultProxy, Store]) -> None:
    proxy, store = behind
    # The first is in the target, and ends by itself.
    proxy.play(always(Slow(300_000.0), kinds=["GetObject"], times=1))
    reads, pool = reads_of(store, Hedge(after_s=SOON_S), limit=NBYTES - 1)
    target = bytearray(NBYTES)
    reads.read_into("k", 0, [memoryview(target)])
    assert target == DATA
    assert (reads.extra, pool.peak_bytes) == (1, 0)


@pytest.mark.contract
def test_a_store_that_is_slow_as_a_whole_is_not_asked_for_everything_twice(behind: tuple[FaultProxy, Store]) -> None:
    proxy, store = behind
    proxy.play(always(Delay(0.5), kinds=["GetObject"]))
    size, count = 8 * KIB, 41
    options = TransferOptions(part_bytes=size, connections=8, hedge=Hedge(after_s=0.01))
    targets = [bytearray(size) for _ in range(count)]

    def extent(number: int) -> Extent:
        start = number * size

        def deliver(view: memoryview | None) -> None:
            assert view is not None
            targets[number][:] = view

        blocks = [Block(size, crc32c(memoryview(DATA)[start : start + size]))]
        return Extent("k", start, start + size, deliver, blocks)

    counted = meter()
    fetch(store, plan_requests(map(extent, range(count)), options), options, pool=BufferPool(MIB), meter=counted)
    assert b"".join(targets) == DATA[: size * count]
    # 5 % of 41, rounded up.
    assert counted.requests == count + 3
    # Those that lost may still be under way.
    assert count <= gets(proxy) <= count + 3


@pytest.mark.contract
def test_the_quantile_of_what_came_before_finds_what_is_late(behind: tuple[FaultProxy, Store]) -> None:
    proxy, store = behind
    proxy.play(always(Stall(NEVER_S), kinds=["GetObject"], skip=2 * ENOUGH, times=1))
    reads, _ = reads_of(store, Hedge(most_extra=1.0))
    target = bytearray(NBYTES)
    for _ in range(2 * ENOUGH + 1):
        target[:] = bytes(NBYTES)
        reads.read_into("k", 0, [memoryview(target)])
        assert target == DATA
    assert reads.extra >= 1


@pytest.mark.contract
def test_errors_are_those_of_the_first_request(behind: tuple[FaultProxy, Store]) -> None:
    proxy, store = behind
    reads, _ = reads_of(store, Hedge(after_s=NEVER_S))
    target = [memoryview(bytearray(NBYTES))]
    with pytest.raises(ObjectNotFoundError):
        reads.read_into("missing", 0, target)
    with pytest.raises(PreconditionFailedError):
        reads.read_into("k", 0, target, if_match="0" * 32)
    with pytest.raises(CorruptDataError, match="ends before"):
        reads.read_into("k", 1, target)
    assert reads.extra == 0
    proxy.play(always(Delay(1.0), kinds=["GetObject"]))
    reads, _ = reads_of(store, Hedge(after_s=SOON_S))
    with pytest.raises(ObjectNotFoundError):
        reads.read_into("missing", 0, target)
    assert reads.extra == 1


@pytest.mark.contract
def test_a_load_with_late_and_damaged_ranges_is_right(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio)
    url = f"s3://{minio.make_bucket('hedge')}/step-1"
    state = {f"w{number}": torch.arange(50_000.0) + number for number in range(12)}
    dcp.save(state, storage_writer=S3Writer(url, storage_options=minio.options), no_dist=True)
    target = {
        name: torch.zeros(50_000, dtype=torch.float64 if index % 3 else torch.float32)
        for index, name in enumerate(state)
    }
    options = TransferOptions(
        part_bytes=64 * KIB, connections=6, max_inflight_bytes=2 * MIB, hedge=Hedge(after_s=0.1, most_extra=1.0)
    )
    faults = (Delay(0.5), Slow(100_000.0), FlipReply())
    proxy.play(Script((Rule(faults, ("GetObject",), keys="*.distcp", probability=0.7, times=12),), seed=5))
    reader = S3Reader(url, storage_options=minio.at(proxy.url).options, transfer=options)
    dcp.load(target, storage_reader=reader, no_dist=True)
    for name, value in state.items():
        assert torch.equal(target[name].float(), value), name
    assert proxy.counts.faults


# In every order


@dataclass(frozen=True)
class Fate:
    """What becomes of one request: seconds until its head and for each piece, and where it breaks off."""

    head_s: float
    piece_s: float
    breaks_at: int | None
    heeds: bool
    """Whether a drop wakes it. Otherwise it reads on, as a body does whose socket cannot be had."""


PIECES, PIECE = 4, 16
CONTENT = bytes(range(PIECES * PIECE))


class Reply:
    def __init__(self, fate: Fate, who: str) -> None:
        self.fate, self.who = fate, who
        self.dropped = threading.Event()

    def receive(self, buffers: Buffers) -> None:
        (view,) = buffers
        for number in range(PIECES):
            woken = self.dropped.wait(self.fate.piece_s) if self.fate.heeds else time.sleep(self.fate.piece_s)
            if woken or number == self.fate.breaks_at:
                raise TransientStoreError(f"{self.who} broke off")
            at = number * PIECE
            view[at : at + PIECE] = CONTENT[at : at + PIECE]

    def drop(self) -> None:
        self.dropped.set()


class Scripted:
    """A store whose requests have fates."""

    url = "memory://x"

    def __init__(self, first: Fate, second: Fate) -> None:
        self.fates = {FIRST: (first, "the first"), SECOND: (second, "the second")}

    def open_range(self, key: str, offset: int, nbytes: int, *, if_match: str | None = None) -> Reply:
        fate, who = self.fates[threading.current_thread().name]
        time.sleep(fate.head_s)
        if fate.breaks_at == -1:
            raise TransientStoreError(f"{who} was refused")
        return Reply(fate, who)


fates = st.builds(
    Fate,
    head_s=st.sampled_from([0.0, 0.0, 0.004, 0.012]),
    piece_s=st.sampled_from([0.0, 0.001, 0.004]),
    breaks_at=st.sampled_from([None, None, None, -1, 0, 2, PIECES - 1]),
    heeds=st.booleans(),
)


@settings(max_examples=150)
@given(first=fates, second=fates, after_s=st.sampled_from([0.0001, 0.003, 0.008]), room=st.sampled_from([0, 100]))
def test_however_two_requests_meet_the_bytes_are_whole_or_an_error_and_nothing_is_written_later(
    first: Fate, second: Fate, after_s: float, room: int
) -> None:
    reads, pool = reads_of(Scripted(first, second), Hedge(after_s=after_s), limit=room)
    target = bytearray(len(CONTENT))
    error = ""
    try:
        reads.read_into("k", 0, [memoryview(target)])
    except TransientStoreError as raised:
        error = raised.message
    assert error.startswith("the first") if error else target == CONTENT
    assert not error or first.breaks_at is not None
    target[:] = b"\xee" * len(target)
    for thread in threads():
        thread.join()
    assert target == b"\xee" * len(target)
    assert pool._taken == 0
    assert pool.peak_bytes <= room
    # Nobody keeps the caller's memory: it could not be resized otherwise.
    target.clear()


class Refusing:
    """A store that asks for fewer requests, for ever: how often each thread has asked."""

    url = "memory://x"

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.again = threading.Event()

    def open_range(self, *_: Any, **__: Any) -> Reply:
        def attempt() -> Reply:
            name = threading.current_thread().name
            self.asked[name] += 1
            if name == SECOND:
                self.again.set()
            elif self.asked[FIRST] == 1:
                self.again.wait()
            raise ThrottledError("fewer, please") if self.asked[FIRST] < 3 else AccessDeniedError("enough")

        return retry.run(attempt, retry.RetryPolicy())


def test_a_second_request_that_fails_is_not_repeated_and_its_error_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_THROTTLED_DELAY_S", 0.001)
    store = Refusing()
    reads, _ = reads_of(store, Hedge(after_s=0.01))
    with pytest.raises(AccessDeniedError, match="enough"):
        reads.read_into("k", 0, [memoryview(bytearray(8))])
    assert store.asked == {FIRST: 3, SECOND: 1}


def test_a_first_request_that_waits_to_be_repeated_stops_when_its_load_has_failed() -> None:
    began = threading.Event()

    class Throttling:
        url = "memory://x"

        def open_range(self, *_: Any, **__: Any) -> Reply:
            def attempt() -> Reply:
                began.set()
                error = TransientStoreError("not now")
                error.wait_s = NEVER_S
                raise error

            return retry.run(attempt, retry.RetryPolicy(attempts=1000, deadline_s=NEVER_S))

    reads, _ = reads_of(Throttling(), Hedge(after_s=NEVER_S))

    def fail() -> None:
        began.wait()
        raise KeyError("another range")

    with pytest.raises(KeyError), TaskGroup(2) as group:
        group.start(lambda: reads.read_into("k", 0, [memoryview(bytearray(8))]))
        group.start(fail)
