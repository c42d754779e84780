"""A conversion holds no more bytes than it may, and reads long stretches, whatever the size of what it converts."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter
from bucketpoint.convert import plan_conversion, run_conversion
from bucketpoint.convert.payload_reader import Box, Filling
from bucketpoint.convert.source import Stretch
from bucketpoint.transfer import TransferOptions
from convert.chunked import GridPlanner
from convert.conftest import behind, load
from dcp.states import assert_same, filled
from transfer.wrappers import CountingStore

safetensors = pytest.importorskip("safetensors.torch")


CUTS = {"one chunk each": (1,), "chunks of columns": (1, 4)}


@pytest.mark.parametrize("to", ["bucketpoint", "torch", "safetensors"])
@pytest.mark.parametrize("source", [*CUTS, "x.pt", "x.safetensors"])
def test_keeps_memory_within_the_budget_and_holds_no_tensor_whole(tmp_path: Path, source: str, to: str) -> None:
    budget, place = 4 << 20, tmp_path / source
    value = {f"w{n}": filled((1024, 2048), torch.float32, seed=n) for n in range(2)}
    nbytes = sum(tensor.nbytes for tensor in value.values())
    assert nbytes == 2 * value["w0"].nbytes == 4 * budget
    if source in CUTS:
        dcp.save(value, storage_writer=BucketWriter(str(place)), planner=GridPlanner(*CUTS[source]), no_dist=True)
    elif source == "x.pt":
        torch.save(value, place)
    else:
        safetensors.save_file(value, place)
    target = tmp_path / ("y.pt" if to == "torch" else "b")
    options = TransferOptions(max_inflight_bytes=budget, connections=4)
    tracemalloc.start()
    done = run_conversion(plan_conversion(place, target, to_format=to, transfer=options), verify=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert done.peak_bytes <= budget
    # Leases are anonymous maps, which tracemalloc does not see: this is everything besides.
    assert peak < budget
    assert done.checked_bytes == (0 if source == "x.safetensors" else nbytes)


def test_reads_rows_of_several_chunks_without_cutting_them_to_elements() -> None:
    class Source:
        def read(self, key: str, start: int, out: memoryview) -> None:
            reads.append(len(out))
            out[:] = data[key][start : start + len(out)]

    whole, reads = bytes(range(240)) * 20, list[int]()
    data = {"a": whole[:1200], "b": whole[1200:]}
    last, first = Box((10, 0, 0), (30, 30, 4)), Box((0, 0, 0), (10, 30, 4))
    boxes = [(last, Stretch("b", 0, 3600)), (first, Stretch("a", 0, 1200))]
    segment = Filling(cast(Any, Source()), 1 << 20).whole((40, 30), 4, boxes)
    assert segment.fill is not None
    found = bytearray(len(whole))
    for start in range(0, len(whole), 777):
        segment.fill(start, memoryview(found)[start : start + 777])
    assert bytes(found) == whole
    assert len(reads) == 8  # One of the seven parts lies in both chunks.


def test_converts_into_a_bucket_in_parts_and_within_the_budget(
    minio_root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value = {"w": filled((6 << 20,), torch.float32)}
    torch.save(value, tmp_path / "a.pt")
    budget = 24 << 20
    options = TransferOptions(max_inflight_bytes=budget, connections=4)
    with behind(monkeypatch, CountingStore):
        plan: Any = plan_conversion(tmp_path / "a.pt", f"{minio_root}/ours", transfer=options)
    done = run_conversion(plan)
    assert plan.place.store.calls["put_part"] == 5
    assert done.peak_bytes <= budget
    assert_same(load(f"{minio_root}/ours", value), value)
