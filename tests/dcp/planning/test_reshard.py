"""Any saved layout into any loaded one: meshes, placements, shapes, dtypes and memory, compared with the tensor."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import bucketpoint as bp
from bucketpoint import BucketReader, BucketWriter, TransferOptions
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.format.index import ref as index_ref
from dcp import reshard_job as job
from dcp.reshard_job import Box, Layout, OnMesh, Pieces, Plain
from dcp.states import filled, same_bits
from transfer.wrappers import StreamingStore, wrap_stores

pytestmark = pytest.mark.contract

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16, 17, 24, 31]
MAX_ELEMENTS = 4000
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
CASTS = {
    torch.float32: [torch.bfloat16, torch.float64, torch.float8_e4m3fn],
    torch.bfloat16: [torch.float32],
    torch.int64: [torch.int32, torch.float32],
    torch.complex64: [torch.complex128],
    torch.float8_e4m3fn: [torch.float32],
}
MEMORY = ["contiguous", "spaced", "reversed"]


@dataclass(frozen=True)
class Case:
    """One tensor: how it is saved, and how it is loaded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    saved: Layout
    loaded: Layout
    saved_memory: str
    loaded_memory: str
    loaded_dtype: torch.dtype


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    shape: list[int] = []
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 2, 2, 3, 3, 4]))):
        room = MAX_ELEMENTS // math.prod(shape)
        shape.append(draw(st.sampled_from([size for size in SIZES if size <= room] or [1])))
    if shape and draw(st.integers(0, 19)) == 0:
        shape[draw(st.integers(0, len(shape) - 1))] = 0
    return tuple(shape)


@st.composite
def on_mesh(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> OnMesh:
    mesh: list[int] = []
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    for axis in range(axes):
        room = world // math.prod(mesh)
        # Mostly as large as the job, as real meshes are; smaller ones leave ranks out.
        fill = axis == axes - 1 and draw(st.integers(0, 3)) > 0
        mesh.append(room if fill else min(room, draw(st.sampled_from([1, 2, 2, 3, 4, 5]))))
    ranks = list(range(world))
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)) for _ in range(2))]
    placements = [draw(st.sampled_from(kinds)) for _ in mesh]
    for dim, size in enumerate(shape):
        axes_of_dim = [axis for axis, placement in enumerate(placements) if placement == Shard(dim)]
        # As FSDP2 cuts what TP has cut. Torch's own arithmetic for strided shards is right for even ones alone.
        if len(axes_of_dim) == 2 and size % math.prod(mesh[axis] for axis in axes_of_dim) == 0 and draw(st.booleans()):
            fsdp, tp = axes_of_dim
            placements[fsdp] = _StridedShard(dim, split_factor=mesh[tp])
    return OnMesh(tuple(mesh), tuple(ranks[: math.prod(mesh)]), tuple(placements))


@st.composite
def in_pieces(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> Pieces:
    """Cut in two again and again, each piece held by any ranks."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if not dims:
            boxes.append((offsets, sizes))
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, sizes[dim] - 1))
        for start, size in ((0, at), (at, sizes[dim] - at)):
            boxes.append(
                (
                    (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
                    (*sizes[:dim], size, *sizes[dim + 1 :]),
                )
            )
    held: list[list[Box]] = [[] for _ in range(world)]
    for box in boxes:
        for rank in draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=3)):
            held[rank].append(box)
    return Pieces(tuple(map(tuple, held)))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> Layout:
    kind = draw(st.sampled_from(["plain", "pieces", "pieces", *["mesh"] * 7]))
    if kind == "plain":
        return Plain()
    return draw(on_mesh(shape, world) if kind == "mesh" else in_pieces(shape, world))


@st.composite
def cases(draw: st.DrawFn, saving: int, loading: int) -> Case:
    shape, dtype = draw(shapes()), draw(st.sampled_from(DTYPES))
    return Case(
        shape,
        dtype,
        draw(layouts(shape, saving)),
        draw(layouts(shape, loading)),
        draw(st.sampled_from(MEMORY)),
        draw(st.sampled_from(MEMORY)),
        draw(st.sampled_from([dtype, dtype, *CASTS.get(dtype, [])])),
    )


worlds = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 16])

transfers = st.builds(
    TransferOptions,
    part_bytes=st.sampled_from([64, 1000, 32 << 20]),
    connections=st.integers(1, 3),
    max_inflight_bytes=st.sampled_from([64, 3000, 64 << 20]),
    single_put_bytes=st.sampled_from([64, 16 << 20]),
    coalesce_gap_bytes=st.sampled_from([0, 200, 1 << 20]),
    free_gap_bytes=st.sampled_from([0, 16, 64 << 10]),
    max_overread=st.sampled_from([1.0, 1.5]),
)


def in_memory(kind: str, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blank memory for `like`, of its shape, and all that lies around it."""
    shape = tuple(like.shape)
    if kind == "spaced":
        around = torch.zeros(tuple(2 * size + 1 for size in shape), dtype=like.dtype)
        return around[tuple(slice(1, None, 2) for _ in shape)], around
    if kind == "reversed":
        around = torch.zeros(shape[::-1], dtype=like.dtype)
        return around.permute(tuple(reversed(range(len(shape))))), around
    around = torch.zeros(shape, dtype=like.dtype)
    return around, around


def values(case: Case, seed: int) -> torch.Tensor:
    """Any bits, unless they are cast: then small whole numbers, which every dtype has."""
    if case.loaded_dtype == case.dtype:
        return filled(case.shape, case.dtype, seed=seed)
    return (torch.arange(math.prod(case.shape)) % 13 + seed % 3).reshape(case.shape).to(case.dtype)


def check(tensors: list[Case], saving: int, loading: int, pair: dict[str, Callable[[str], Any]]) -> None:
    wholes = {f"t{number}": values(case, number) for number, case in enumerate(tensors)}
    named = list(zip(wholes.items(), tensors, strict=True))
    sources: list[dict[str, Any]] = []
    for rank in range(saving):
        with job.as_rank(rank, saving):
            sources.append(
                {key: job.held(case.saved, whole, rank, partial(memory_of, case))[0] for (key, whole), case in named}
            )
    targets: list[dict[str, Any]] = []
    blanks: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for rank in range(loading):
        state: dict[str, Any] = {}
        with job.as_rank(rank, loading):
            for (key, whole), case in named:
                memories = []

                def blank(expected: torch.Tensor, case: Case = case, memories: list[Any] = memories) -> torch.Tensor:
                    view, around = in_memory(case.loaded_memory, expected.to(case.loaded_dtype))
                    memories.append(around)
                    return view

                state[key], parts = job.held(case.loaded, whole, rank, blank)
                for (view, expected), around in zip(parts, memories, strict=True):
                    blanks.append((f"{key} on rank {rank}", view, expected.to(case.loaded_dtype), around))
        targets.append(state)
    with tempfile.TemporaryDirectory() as folder:
        job.save(sources, lambda: pair["writer"](folder), pair["planner"])
        job.load(targets, lambda: pair["reader"](folder), pair["load planner"])
    for name, view, expected, around in blanks:
        assert same_bits(view, expected), name
        view.zero_()
        assert not around.reshape(-1).view(torch.uint8).any(), f"{name}: memory around it was written"


def memory_of(case: Case, expected: torch.Tensor) -> torch.Tensor:
    view, _ = in_memory(case.saved_memory, expected)
    return view.copy_(expected)


@st.composite
def pairs(draw: st.DrawFn) -> dict[str, Any]:
    """A writer and a reader, one of them ours or both."""
    options, other = draw(transfers), draw(transfers)
    writers = {"ours": lambda path: BucketWriter(path, transfer=options), "stock": FileSystemWriter}
    readers = {"ours": lambda path: BucketReader(path, transfer=other), "stock": FileSystemReader}
    writer, reader = draw(st.sampled_from([("ours", "ours"), ("ours", "ours"), ("ours", "stock"), ("stock", "ours")]))
    event(f"{writer} to {reader}")
    return {
        "writer": writers[writer],
        "reader": readers[reader],
        "planner": draw(st.sampled_from([DefaultSavePlanner, SavePlanner, SavePlanner])),
        "load planner": draw(st.sampled_from([DefaultLoadPlanner, bp.LoadPlanner])),
        "block": draw(st.sampled_from([7, 100, 1 << 20])),
        "slice": draw(st.sampled_from([16, 16, 200, 1 << 16])),
        "index": draw(st.booleans()),
        "streams": draw(st.booleans()),
    }


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Case], int, int]:
    saving, loading = draw(worlds), draw(worlds)
    return draw(st.lists(cases(saving, loading), min_size=1, max_size=4)), saving, loading


def any_layout_is_loaded(which: tuple[list[Case], int, int], pair: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plan_blocks = "bucketpoint.dcp.saving.object_layout.plan_blocks"
        patch.setattr(plan_blocks, lambda nbytes, row: min(nbytes, pair["block"]))
        patch.setattr("bucketpoint.dcp.planning.items.MIN_SLICE_BYTES", pair["slice"])
        patch.setattr(index_ref, "INDEX_ITEMS", 1 if pair["index"] else 1 << 30)
        patch.setattr(index_ref, "HEAD_BYTES", 512)
        if pair["streams"]:
            # Replies to ranged reads come piece by piece, as from buckets.
            wrap_stores(patch, StreamingStore)
        check(*which, pair)


@pytest.mark.timeout(600)
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(which=jobs(), pair=pairs())
def test_loads_any_saved_layout_into_any_other(which: tuple[list[Case], int, int], pair: dict[str, Any]) -> None:
    any_layout_is_loaded(which, pair)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=3000, suppress_health_check=[HealthCheck.too_slow])
@given(which=jobs(), pair=pairs())
def test_loads_many_more_layouts(which: tuple[list[Case], int, int], pair: dict[str, Any]) -> None:
    any_layout_is_loaded(which, pair)
