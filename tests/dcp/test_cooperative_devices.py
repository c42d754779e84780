"""Ranks that load together and hand on bytes from device to device: what arrives, how it is checked, how they fail.

Real processes. Host memory stands in for a device's and gloo for NCCL; where there are two GPUs, they are used too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bucketpoint import BucketpointError, BucketReader, TransferOptions
from dcp import cooperative_scenarios, device_scenarios
from dcp.cooperative_scenarios import SMALL, expected_tensor
from dcp.ranks import Ranks
from dcp.test_cooperative import DIES_WITHIN_S, NBYTES, SHAPE, data_files, save_alone


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/step-1"


@pytest.mark.contract
@pytest.mark.parametrize("options", [None, pytest.param(SMALL, marks=pytest.mark.slow)], ids=["default", "small"])
def test_a_new_world_size_and_every_placement_are_loaded(
    four_ranks: Ranks, two_ranks: Ranks, url: str, options: TransferOptions | None
) -> None:
    four_ranks.run(cooperative_scenarios.save, url)
    for ranks in (four_ranks, two_ranks):
        together = ranks.run(cooperative_scenarios.load, url, "stock", options, "group")
        there = ranks.run(device_scenarios.load_sharded, url, options)
        # What is read over gaps differs a little, as what goes to devices is never received in place.
        assert sum(each["read"] for each in there) <= 1.02 * sum(each["read"] for each in together)
        assert [each["gets"] for each in there] == [1] + [0] * (ranks.world - 1)
        assert sum(each["by_device"] for each in there) > 0
        assert all("From device to device" in each["text"] for each in there)


ODD = {"big": (1023, 1501), "other": (3001, 397), **{f"small.{index}": (index + 1, 7) for index in range(100)}}


@pytest.mark.parametrize(
    "dtypes",
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("uint8", "uint8"), ("float32", "bfloat16")],
    ids="-to-".join,
)
def test_replicas_read_each_byte_once_and_send_it_from_device_to_device(
    four_ranks: Ranks, url: str, dtypes: tuple[str, str]
) -> None:
    kind = getattr(torch, dtypes[0])
    save_alone(url, {name: expected_tensor(shape, kind) for name, shape in ODD.items()})
    distinct = kind.itemsize * sum(expected_tensor(shape).numel() for shape in ODD.values())
    options = TransferOptions(part_bytes=1 << 20, connections=4, max_inflight_bytes=4 << 20)
    answers = four_ranks.run(device_scenarios.load_replicas, url, ODD, dtypes, options)
    read = [each["read"] for each in answers]
    # Of single bytes, what lies between the small tensors weighs more.
    assert distinct <= sum(read) <= (1.05 if kind.itemsize == 1 else 1.02) * distinct
    for each in answers:
        assert each["by_device"] + each["read"] == sum(read)
        # Between hosts go the checksums alone.
        assert each["by_host"] < 0.01 * distinct
        assert each["fetched_back"] == 0
        assert 0 < each["device_peak"] <= options.max_inflight_bytes
        assert 0 < each["peak"] <= options.max_inflight_bytes


@pytest.mark.parametrize("layout", ["1", "0", "hsdp"])
def test_columns_rows_and_hybrid_shards_of_saved_rows_read_each_byte_once(
    four_ranks: Ranks, url: str, layout: str
) -> None:
    four_ranks.run(cooperative_scenarios.save_rows, url, SHAPE)
    answers = four_ranks.run(device_scenarios.load_placed_on_devices, url, SHAPE, layout)
    assert NBYTES <= sum(each["read"] for each in answers) <= 1.02 * NBYTES
    assert (sum(each["by_device"] for each in answers) > 0) == (layout != "0")
    assert all(each["fetched_back"] == 0 for each in answers)


def test_what_a_rank_keeps_in_host_memory_reaches_it_there_and_other_ranks_on_their_devices(
    four_ranks: Ranks, url: str
) -> None:
    save_mixed(url)
    plain = NBYTES + 2 * NBYTES
    answers = four_ranks.run(device_scenarios.load_mixed, url, SHAPE)
    assert sum(each["read"] for each in answers) <= 1.1 * plain
    # Of each tensor two ranks have it on their devices, and each has read about a quarter itself.
    assert all(each["by_device"] > 0.5 * NBYTES for each in answers)


def save_mixed(url: str) -> None:
    state = {
        "step": 41,
        "config": {"name": "llama"},
        "one": expected_tensor((300, 300)),
        "two": expected_tensor((300, 300)),
        "strided": expected_tensor((200, 200)),
        "none": torch.zeros(0, 5),
        "big": expected_tensor(SHAPE),
        "wide": expected_tensor(SHAPE, torch.float64),
    }
    save_alone(url, state)


@st.composite
def boxes(draw: st.DrawFn) -> Any:
    shape = (draw(st.integers(1, 60)), draw(st.integers(1, 60)))
    found = []
    for _ in range(4):
        at = [draw(st.integers(0, size - 1)) for size in shape]
        size = [draw(st.integers(1, size - start)) for size, start in zip(shape, at, strict=True)]
        found.append((at, size))
    options = TransferOptions(
        part_bytes=draw(st.integers(64, 4096)),
        connections=draw(st.integers(1, 4)),
        max_inflight_bytes=draw(st.integers(2048, 16384)),
        coalesce_gap_bytes=draw(st.integers(0, 512)),
        free_gap_bytes=draw(st.integers(0, 128)),
    )
    return shape, found, options, draw(st.sets(st.integers(0, 3)))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=boxes())
def test_any_boxes_on_any_ranks_are_loaded(
    four_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, case: Any
) -> None:
    shape, found, options, host = case
    url = f"file://{tmp_path_factory.mktemp('boxes')}/step"
    save_alone(url, {"w": expected_tensor(shape), "v": expected_tensor(shape)}, transfer=TransferOptions())
    four_ranks.run(device_scenarios.load_boxes, url, shape, found, options, sorted(host))


def test_bytes_that_were_altered_at_the_store_are_named_on_every_rank(four_ranks: Ranks, url: str) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    (file,) = data_files(url)
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(NBYTES // 2)
        byte = opened.read(1)[0]
        opened.seek(NBYTES // 2)
        opened.write(bytes([byte ^ 1]))
    # The ETag of a local file would tell at once, and nothing would be exchanged.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    for found, by_device in four_ranks.run(device_scenarios.load_damaged, url, SHAPE):
        assert by_device > 0
        assert set(found) == {0, 1, 2, 3}
        # A rank that still waits for its device when another has checked quotes that one.
        kinds = {kind for kind, _ in found.values()}
        assert {"CorruptDataError"} <= kinds <= {"CorruptDataError", "PeerFailedError"}
        assert all("Checksum mismatch in w" in text for _, text in found.values())


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ((1, 2, 3, 3), "two ranks have the same device"),
        ((1, 0, 3, 4), "rank 1 has no CUDA device with NCCL"),
        ((1, 2, 3, 4), "nothing that ranks share goes to their current devices"),
    ],
)
def test_where_devices_cannot_be_used_bytes_go_through_host_memory_and_explain_says_why(
    four_ranks: Ranks, url: str, found: tuple[int, ...], reason: str
) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    for by_device, text in four_ranks.run(device_scenarios.load_where_devices_are, url, SHAPE, found):
        assert by_device == 0
        assert f"Through host memory: {reason}" in text


@pytest.mark.parametrize("way", ["auto", "host"])
def test_nobody_exchanges_between_devices_who_has_not_asked_for_it(two_ranks: Ranks, url: str, way: str) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    for by_device, text in two_ranks.run(device_scenarios.load_with, url, SHAPE, [way, way]):
        assert by_device == 0
        assert f'Through host memory: exchange="{way}"' in text


def test_ranks_that_exchange_differently_are_refused_on_every_rank(two_ranks: Ranks, url: str) -> None:
    save_alone(url, {"w": expected_tensor((8, 8))})
    for found in two_ranks.run(device_scenarios.load_with, url, (8, 8), ["device", "host"]):
        assert set(found) == {0, 1}
        assert all("cannot load together" in text for _, text in found.values())


@pytest.mark.parametrize("way", ["xyz", "", "nccl", True])
def test_a_way_that_is_not_known_is_refused(way: Any) -> None:
    with pytest.raises(BucketpointError, match="is not known") as caught:
        BucketReader("file:///tmp/x", exchange=way)
    assert "'device'" in str(caught.value)


@pytest.mark.parametrize(("what", "within_s"), [("failed", 300.0), ("failed, unnoticed", 300.0), ("stands still", 5.0)])
def test_a_rank_whose_device_fails_or_stands_still_makes_all_raise(
    four_ranks: Ranks, url: str, what: str, within_s: float
) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    answers = four_ranks.run(device_scenarios.one_rank_in_trouble, url, SHAPE, 1, what, within_s)
    for rank, (kind, text, took) in enumerate(answers):
        assert took < DIES_WITHIN_S
        if what == "failed, unnoticed":
            assert "the device is on fire" in text
            assert (kind == "PeerFailedError") == (rank != 1)
        elif what == "failed" and rank == 1:
            assert "the device is on fire" in text
    # The same ranks load well afterwards.
    assert min(four_ranks.run(device_scenarios.load_again, url, SHAPE)) > 0


def test_a_rank_that_is_killed_while_devices_exchange_makes_all_others_raise(url: str) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    ranks = Ranks(3)
    try:
        for pipe in ranks._pipes:
            pipe.send((0, device_scenarios.one_rank_in_trouble, (url, SHAPE, 1, "killed", 30.0)))
        started = time.monotonic()
        for rank in (0, 2):
            assert ranks._pipes[rank].poll(DIES_WITHIN_S), f"rank {rank} still waits"
            _, failed, answer, _ = ranks._pipes[rank].recv()
            assert not failed, answer
            assert answer[0] in ("BucketpointError", "PeerFailedError")
        assert time.monotonic() - started < DIES_WITHIN_S
    finally:
        ranks.close()


def test_a_rank_that_is_killed_unnoticed_by_the_devices_is_given_up_in_time(url: str) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    ranks = Ranks(3)
    try:
        for pipe in ranks._pipes:
            pipe.send((0, device_scenarios.one_rank_in_trouble, (url, SHAPE, 1, "killed, unnoticed", 4.0)))
        for rank in (0, 2):
            assert ranks._pipes[rank].poll(DIES_WITHIN_S), f"rank {rank} still waits"
            _, failed, answer, _ = ranks._pipes[rank].recv()
            assert not failed, answer
            assert "exchange between devices" in answer[1]
    finally:
        ranks.close()


# -- NCCL -------------------------------------------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_torch_has_what_an_nccl_group_of_our_own_needs() -> None:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    needed = ("_start_coalescing", "_end_coalescing", "send", "recv", "allreduce", "abort")
    assert [name for name in needed if not hasattr(ProcessGroupNCCL, name)] == []
    assert hasattr(ProcessGroupNCCL.Options, "_timeout")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_of_one_gpu_load_together_without_nccl(two_ranks: Ranks, url: str, dtype: str) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE), "host": expected_tensor(SHAPE)})
    answers = two_ranks.run(device_scenarios.load_on_one_gpu, url, SHAPE, dtype)
    assert sum(each["read"] for each in answers) <= 1.02 * 2 * NBYTES
    for each in answers:
        assert each["by_device"] > 0.4 * NBYTES
        assert 0 < each["peak"] <= SMALL.max_inflight_bytes


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_a_group_of_nccl_is_made_waited_for_and_aborted(two_ranks: Ranks) -> None:
    two_ranks.run(device_scenarios.meet_alone_over_nccl)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_load_together_over_nccl(two_ranks: Ranks, url: str, dtype: str) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE), "host": expected_tensor(SHAPE)})
    answers = two_ranks.run(device_scenarios.load_on_gpus, url, SHAPE, dtype)
    assert sum(each["read"] for each in answers) <= 1.02 * 2 * NBYTES
    for each in answers:
        assert "From device to device" in each["text"]
        assert 0 < each["device_peak"] <= SMALL.max_inflight_bytes
