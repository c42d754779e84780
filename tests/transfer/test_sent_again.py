"""What is sent a second time when a request fails: that part, or that range, and nothing else."""

from __future__ import annotations

from collections import Counter
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint.errors import CorruptDataError, TransientStoreError
from bucketpoint.stores import open_store
from bucketpoint.stores.retry import READ_ATTEMPTS, retry_transient
from kit import CutReply, CutRequest, Refuse, Reset, always
from kit.plugin import MakeProxy
from kit.servers import S3Server
from services import S3_AND_GCS, Server, proxy_before

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


def test_sends_a_body_again_whole_that_is_cut_short_on_its_way_up(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio, always(CutRequest(), kinds=["PutObject"], keys="*.distcp", times=1))
    options, url = minio.at(proxy.url).options, f"s3://{minio.make_bucket()}/run"
    dcp.save({"w": torch.ones(1000)}, storage_writer=bp.S3Writer(url, storage_options=options), no_dist=True)
    sent = [one for one in proxy.exchanges if one.request.key.endswith(".distcp")]
    assert [one.request.nbytes for one in sent] == [sent[0].request.nbytes] * 2


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
