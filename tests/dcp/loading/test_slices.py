"""Any box of any tensor, ours or in stock frames, into any target, under any budget: the same as slicing the tensor."""

from __future__ import annotations

import contextlib
import uuid
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from bucketpoint import BucketReader, BucketWriter, TransferOptions
from bucketpoint.dcp import session
from dcp.states import filled, same_bits
from dcp.test_compat import SlicePlanner
from transfer.wrappers import StreamingStore

DTYPES = [torch.int8, torch.bool, torch.bfloat16, torch.float32, torch.complex64]


def streaming() -> Any:
    """Let the readers of the block receive ranges piece by piece."""
    original = session.open_store

    def opened(*args: Any, **kwargs: Any) -> Any:
        store, prefix = original(*args, **kwargs)
        return StreamingStore(store), prefix

    return mock.patch.object(session, "open_store", opened)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    shape = tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True))
    return {
        "shape": shape,
        "offsets": offsets,
        "sizes": sizes,
        "dtype": draw(st.sampled_from(DTYPES)),
        "target": draw(st.sampled_from(["same", "cast", "strided", "permuted"])),
        "saved": draw(st.sampled_from(["contiguous", "permuted"])),
        "writer": draw(st.sampled_from(["ours", "stock"])),
        "streams": draw(st.booleans()),
        "block": draw(st.integers(1, 2000)),
        "options": TransferOptions(
            part_bytes=draw(st.integers(64, 4096)),
            connections=draw(st.integers(1, 4)),
            max_inflight_bytes=draw(st.integers(64, 8192)),
            single_put_bytes=draw(st.integers(64, 4096)),
            coalesce_gap_bytes=draw(st.integers(0, 512)),
            free_gap_bytes=draw(st.integers(0, 128)),
            max_overread=draw(st.sampled_from([1.0, 2.0, 8.0])),
        ),
    }


def target_for(case: dict[str, Any]) -> torch.Tensor:
    sizes, dtype = case["sizes"], case["dtype"]
    if case["target"] == "cast":
        return torch.zeros(sizes, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    if case["target"] == "strided":
        return torch.zeros(tuple(2 * size for size in sizes), dtype=dtype)[tuple(slice(0, 2 * n, 2) for n in sizes)]
    if case["target"] == "permuted":
        return torch.zeros(sizes[::-1], dtype=dtype).permute(*reversed(range(len(sizes))))
    return torch.zeros(sizes, dtype=dtype)


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_a_loaded_box_is_the_box_of_the_tensor(case: dict[str, Any]) -> None:
    whole = filled(case["shape"], case["dtype"])
    if case["dtype"].is_floating_point or case["dtype"].is_complex:
        whole = torch.nan_to_num(whole.to(torch.complex64 if whole.is_complex() else torch.float32)).to(case["dtype"])
    if case["saved"] == "permuted":
        whole = whole.permute(*reversed(range(whole.dim()))).contiguous().permute(*reversed(range(whole.dim())))
    url = f"memory://slices/{uuid.uuid4().hex}"
    if case["writer"] == "ours":
        with mock.patch(
            "bucketpoint.dcp.saving.object_layout.plan_blocks", lambda nbytes, row: min(nbytes, case["block"])
        ):
            writer = BucketWriter(transfer=case["options"])
            dcp.save({"w": whole}, checkpoint_id=url, storage_writer=writer, no_dist=True)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"w": whole}, storage_writer=FsspecWriter(url), no_dist=True)
    target = {"w": target_for(case)}
    planner = SlicePlanner(case["offsets"], case["sizes"])
    reader = BucketReader(transfer=case["options"])
    with streaming() if case["streams"] else contextlib.nullcontext():
        dcp.load(target, checkpoint_id=url, storage_reader=reader, planner=planner, no_dist=True)
    box = whole[tuple(slice(at, at + n) for at, n in zip(case["offsets"], case["sizes"], strict=True))]
    assert same_bits(target["w"], box.to(target["w"].dtype))
