"""A conversion holds no more bytes than it may, whatever the size of what it converts."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint.convert.pipeline as run
from bucketpoint import BucketWriter
from bucketpoint.convert import plan_conversion, run_conversion
from bucketpoint.transfer import TransferOptions
from convert.chunked import GridPlanner
from convert.conftest import load
from dcp.states import assert_same, filled
from kit.servers import S3Server
from transfer.wrappers import CountingStore

safetensors = pytest.importorskip("safetensors.torch")


@pytest.mark.parametrize(
    ("to", "cuts"),
    [("bucketpoint", (1,)), ("bucketpoint", (1, 4)), ("torch", (1,)), ("torch", (1, 4)), ("safetensors", (1, 4))],
)
def test_keeps_memory_within_the_budget(tmp_path: Path, to: str, cuts: tuple[int, ...]) -> None:
    budget = 4 << 20
    value = {"model": {f"w{n}": filled((1024, 2048), torch.float32, seed=n) for n in range(4)}}
    dcp.save(value, storage_writer=BucketWriter(str(tmp_path / "a")), planner=GridPlanner(*cuts), no_dist=True)
    nbytes = sum(tensor.nbytes for tensor in value["model"].values())
    target = tmp_path / ("x.pt" if to == "torch" else "b")
    options = TransferOptions(max_inflight_bytes=budget, connections=4)
    tracemalloc.start()
    plan = plan_conversion(tmp_path / "a", target, to_format=to, transfer=options)
    done = run_conversion(plan, verify=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert nbytes == 8 * budget
    assert done.peak_bytes <= budget
    # Leases are anonymous maps, which tracemalloc does not see: this is everything besides.
    assert peak < budget
    assert done.checked_bytes == nbytes


@pytest.mark.parametrize("source", ["x.pt", "x.safetensors"])
@pytest.mark.parametrize("to", ["bucketpoint", "torch", "safetensors"])
def test_holds_no_tensor_beyond_the_budget_whole(tmp_path: Path, source: str, to: str) -> None:
    budget, value = 4 << 20, {"w": filled((16 << 20,), torch.uint8)}
    torch.save(value, tmp_path / "x.pt")
    safetensors.save_file(value, tmp_path / "x.safetensors")
    target = tmp_path / ("y.pt" if to == "torch" else "b")
    options = TransferOptions(max_inflight_bytes=budget, connections=4)
    tracemalloc.start()
    done = run_conversion(plan_conversion(tmp_path / source, target, to_format=to, transfer=options), verify=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert done.peak_bytes <= budget
    assert peak < budget
    assert done.checked_bytes == (value["w"].nbytes if source == "x.pt" else 0)


def test_converts_into_a_bucket_in_parts_and_within_the_budget(
    minio_root: str, monkeypatch: pytest.MonkeyPatch, minio: S3Server, tmp_path: Path
) -> None:
    value = {"w": filled((6 << 20,), torch.float32)}
    torch.save(value, tmp_path / "a.pt")
    budget = 24 << 20
    options = TransferOptions(max_inflight_bytes=budget, connections=4)
    plan = planned_in_bucket(tmp_path / "a.pt", f"{minio_root}/ours", options, monkeypatch)
    done = run_conversion(plan)
    assert plan.place.store.calls["put_part"] == 5
    assert done.peak_bytes <= budget
    assert_same(load(f"{minio_root}/ours", value), value)


def planned_in_bucket(source: Any, target: str, options: TransferOptions, monkeypatch: pytest.MonkeyPatch) -> Any:
    original = run.open_place
    with monkeypatch.context() as patch:
        patch.setattr(run, "open_place", lambda place: (CountingStore(original(place)[0]), "there/ours"))
        return plan_conversion(source, target, transfer=options)
