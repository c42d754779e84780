"""Requests that fail or fall silent: that part or range is sent a second time, and nothing else."""

from __future__ import annotations

from collections import Counter
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint.errors import CorruptDataError, TransientStoreError
from bucketpoint.stores import Store, open_store, retry
from bucketpoint.stores.retry import READ_ATTEMPTS, retry_transient
from bucketpoint.transfer import BufferPool, Extent, Meter, TransferOptions, fetch, long_reads, plan_requests
from bucketpoint.transfer.long_reads import StallLimits
from kit import CutReply, Delay, Fault, FaultProxy, Refuse, Reset, Slow, Stall, always
from kit.plugin import MakeProxy
from kit.servers import S3Server
from services import S3_AND_GCS, Server, Service, proxy_before

PARTS = 4
OPTIONS = bp.TransferOptions(part_bytes=5 << 20, single_put_bytes=5 << 20, connections=2)

pytestmark = pytest.mark.contract


@pytest.fixture(params=S3_AND_GCS)
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


def test_sends_only_the_part_or_the_range_again_that_failed(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio, always(Reset(), Refuse(500, "InternalError"), kinds=["UploadPart"], skip=1, times=1))
    options, url = minio.at(proxy.url).options, f"s3://{minio.make_bucket()}/run"
    state = {"w": torch.arange(PARTS * (5 << 20) // 4, dtype=torch.int32)}
    dcp.save(state, storage_writer=bp.S3Writer(url, storage_options=options, transfer=OPTIONS), no_dist=True)
    sent = [one.request for one in proxy.exchanges if one.request.kind == "UploadPart"]
    numbers = Counter(parse_qs(urlsplit(one.target).query)["partNumber"][0] for one in sent)
    assert len(numbers) >= PARTS
    assert sorted(numbers.values()) == [1] * (len(numbers) - 1) + [2]
    assert proxy.counts.requests["PutObject"] == 2, "the commit, and its record"

    proxy.clear()
    proxy.play(always(CutReply(), kinds=["GetObject"], keys="*.distcp", skip=1, times=1))
    target = {"w": torch.zeros_like(state["w"])}
    dcp.load(target, storage_reader=bp.S3Reader(url, storage_options=options, transfer=OPTIONS), no_dist=True)
    assert torch.equal(target["w"], state["w"])
    ranges = Counter(one.request.range for one in proxy.exchanges if one.request.key.endswith(".distcp"))
    assert len(ranges) >= PARTS
    assert sorted(ranges.values()) == [1] * (len(ranges) - 1) + [2]


def test_asks_again_for_a_small_object_whose_body_breaks_off(server: Server, fault_proxy: MakeProxy) -> None:
    proxy, bucket = proxy_before(server, fault_proxy), server.make_bucket()
    store = open_store(server.url(bucket), storage_options=server.at(proxy.url).options)[0]
    store.put("small", [memoryview(b"x" * 1000)])
    for options in ({}, {"max_bytes": 1000}, {"first": 10}):
        proxy.clear()
        proxy.play(always(CutReply(), times=READ_ATTEMPTS - 1))
        assert store.get("small", **options)[0] == b"x" * options.get("first", 1000)
        assert proxy.counts.requests == {"GetObject": READ_ATTEMPTS}
    # And no more often where somebody reads it in a loop of their own.
    proxy.clear()
    proxy.play(always(CutReply()))
    with pytest.raises(TransientStoreError):
        retry_transient(lambda: store.get("small"))
    assert proxy.counts.requests == {"GetObject": READ_ATTEMPTS}
    proxy.clear()
    with pytest.raises(CorruptDataError):
        store.get("small", max_bytes=10)
    assert proxy.counts.requests == {"GetObject": 1}


KIB = 1 << 10
DATA = bytes(index % 251 for index in range(600 * KIB))
NEVER_S = 600.0
PIECE = 50 * KIB
SMALL_PARTS = TransferOptions(part_bytes=64 * KIB, connections=4)


def load(store: Store) -> bytes:
    target = bytearray(len(DATA))
    extents = [
        Extent("k", start, start + PIECE, lambda _: None, direct=memoryview(target)[start:][:PIECE], direct_start=start)
        for start in range(0, len(DATA), PIECE)
    ]
    fetch(
        store,
        plan_requests(extents, SMALL_PARTS),
        SMALL_PARTS,
        pool=BufferPool(SMALL_PARTS.max_inflight_bytes),
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
