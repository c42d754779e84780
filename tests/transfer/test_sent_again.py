"""What is sent a second time when a request fails: that part, or that range, and nothing else."""

from __future__ import annotations

from collections import Counter
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint.testing import CutReply, CutRequest, Refuse, Reset, always
from bucketpoint.testing.plugin import MakeProxy
from bucketpoint.testing.servers import S3Server

PARTS = 4
OPTIONS = bp.TransferOptions(part_bytes=5 << 20, single_put_bytes=5 << 20, connections=2)

pytestmark = pytest.mark.contract


def test_only_the_part_or_the_range_that_failed_is_sent_again(minio: S3Server, fault_proxy: MakeProxy) -> None:
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


def test_a_body_that_is_cut_short_on_its_way_up_is_sent_again_whole(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio, always(CutRequest(), kinds=["PutObject"], keys="*.distcp", times=1))
    options, url = minio.at(proxy.url).options, f"s3://{minio.make_bucket()}/run"
    dcp.save({"w": torch.ones(1000)}, storage_writer=bp.S3Writer(url, storage_options=options), no_dist=True)
    sent = [one for one in proxy.exchanges if one.request.key.endswith(".distcp")]
    assert [one.request.nbytes for one in sent] == [sent[0].request.nbytes] * 2
