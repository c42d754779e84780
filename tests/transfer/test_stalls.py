"""Reads from a store that falls silent: they are cut off and sent again, and a slow store is waited for."""

from __future__ import annotations

from collections import Counter

import pytest

from bucketpoint.stores import Store, open_store, retry
from bucketpoint.transfer import BufferPool, Extent, Meter, TransferOptions, fetch, long_reads, plan_requests
from bucketpoint.transfer.long_reads import StallLimits
from kit import Delay, Fault, FaultProxy, Slow, Stall, always
from kit.plugin import MakeProxy
from kit.servers import S3Server
from services import Service, proxy_before

KIB = 1 << 10
DATA = bytes(index % 251 for index in range(600 * KIB))
NEVER_S = 600.0
PIECE = 50 * KIB
OPTIONS = TransferOptions(part_bytes=64 * KIB, connections=4)


def load(store: Store) -> bytes:
    target = bytearray(len(DATA))
    extents = [
        Extent("k", start, start + PIECE, lambda _: None, direct=memoryview(target)[start:][:PIECE], direct_start=start)
        for start in range(0, len(DATA), PIECE)
    ]
    fetch(
        store,
        plan_requests(extents, OPTIONS),
        OPTIONS,
        pool=BufferPool(OPTIONS.max_inflight_bytes),
        meter=Meter("load", store.url, 0, None),
    )
    return bytes(target)


def behind(service: Service, proxy: FaultProxy) -> Store:
    service.write("k", DATA)
    return open_store(service.url(), storage_options=service.at(proxy.url).options)[0]


def test_limits_by_five_seconds_or_four_medians_and_doubles_with_each_attempt() -> None:
    limits = StallLimits()
    assert limits.doubling()() == 5
    for seconds in (0.1, 0.2, 90.0):
        limits.add(seconds)
    assert limits.doubling()() == 5
    limits.add(8.0)
    limits.add(9.0)
    assert limits.doubling()() == 32
    limit_s = limits.doubling()
    assert [limit_s() for _ in range(3)] == [32, 64, 128]
    assert limits.doubling()() == 32


@pytest.mark.contract
@pytest.mark.parametrize("fault", [Stall(NEVER_S), Slow(1000.0)], ids=["answer", "body"])
@pytest.mark.parametrize("server", ["minio", "gcs"])
def test_cuts_off_a_silent_read_and_sends_it_again(
    server: str, fault: Fault, request: pytest.FixtureRequest, fault_proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_reads, "LEAST_S", 0.5)
    served = request.getfixturevalue(server)
    proxy = proxy_before(served, fault_proxy)
    store = behind(Service.on(served), proxy)
    proxy.play(always(fault, kinds=["GetObject"], skip=2, times=2))
    counts = Counter[str]()
    former = retry.count_into(counts)
    try:
        assert load(store) == DATA
    finally:
        retry.count_into(former)
    assert counts["retried"] == 2


@pytest.mark.contract
def test_waits_for_a_store_that_is_slow_as_a_whole(
    minio: S3Server, fault_proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_reads, "LEAST_S", 0.2)
    proxy = proxy_before(minio, fault_proxy)
    store = behind(Service.on(minio), proxy)
    proxy.play(always(Delay(1.0), kinds=["GetObject"]))
    # The first reads are cut off after 0.2, 0.4 and 0.8 s. Then the median is known.
    assert load(store) == DATA
    proxy.clear()
