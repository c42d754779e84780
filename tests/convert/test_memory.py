"""A conversion holds no more bytes than it may, and reads long stretches, whatever the size of what it converts."""

from __future__ import annotations

import itertools
import tracemalloc
from math import prod
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint import BucketWriter
from bucketpoint.convert import plan_conversion, run_conversion
from bucketpoint.convert.payload_reader import Filling, WholeTensor
from bucketpoint.convert.source import Stretch
from bucketpoint.format.tensor_bytes import Box
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


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, whose last dimension is an element's bytes, and the chunks into which it is cut."""
    shape = (*draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)), draw(st.sampled_from([1, 4])))
    axes = []
    for size in shape[:-1]:
        borders = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        axes.append([(low, high - low) for low, high in itertools.pairwise(borders)])
    boxes = itertools.product(*axes, [(0, shape[-1])])
    return shape, [(tuple(o for o, _ in box), tuple(s for _, s in box)) for box in boxes]


@given(grids(), st.data())
def test_fills_any_stretch_of_a_tensor_from_its_chunks_with_few_reads(
    grid: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    class Source:
        def read(self, key: str, start: int, out: memoryview) -> None:
            reads.append(key)
            out[:] = content[int(key)][start : start + len(out)]

    shape, boxes = grid
    whole, reads, content = filled(shape, torch.uint8), list[str](), list[bytes]()
    for box in boxes:
        part = whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))]
        content.append(bytes(part.flatten().tolist()))
    chunks = [(box, Stretch(f"{number}", 0, prod(box[1]))) for number, box in enumerate(boxes)]
    dtype = {1: torch.uint8, 4: torch.int32}[shape[-1]]
    segment = Filling(cast(Any, Source()), 1 << 20).whole(WholeTensor("w", dtype, shape[:-1], tuple(chunks)))
    assert segment.fill is not None
    start = data.draw(st.integers(0, whole.numel() - 1))
    found = bytearray(data.draw(st.integers(1, whole.numel() - start)))
    segment.fill(start, memoryview(found))
    assert bytes(found) == bytes(whole.flatten()[start : start + len(found)].tolist())
    assert len(reads) == len(set(reads))


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
