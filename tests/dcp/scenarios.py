"""What the ranks of a test do. Each function runs on every rank at once, and asserts on its own rank."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bucketpoint
from bucketpoint import BucketReader, BucketWriter

SHAPES = {"even": (160, 240), "uneven": (13, 7), "narrow": (2, 50), "big": (1031, 613)}


def whole(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) + len(name)


def sharded_state(world: int, *, fill: bool) -> dict[str, Any]:
    """Every placement that the mesh allows, of the same whole tensors on any even number of ranks, and more."""
    mesh, grid = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    state: dict[str, Any] = {"model": {}, "step": torch.tensor(7 if fill else 0), "config": {"name": "x" * fill}}
    placements = {"rows": [Shard(0)], "columns": [Shard(1)], "replicated": [Replicate()]}
    for name in SHAPES:
        source = whole(name) if fill else torch.zeros(SHAPES[name])
        for kind, placement in placements.items():
            state["model"][f"{name}_{kind}"] = distribute_tensor(source, mesh, placement)
        state["model"][f"{name}_grid"] = distribute_tensor(source, grid, [Shard(0), Shard(1)])
        state["model"][f"{name}_hybrid"] = distribute_tensor(source, grid, [Replicate(), Shard(0)])
        state["model"][f"{name}_plain"] = source.clone()
    source = whole("even") if fill else torch.zeros(SHAPES["even"])
    state["model"]["even_first"] = state["model"]["even_tied"] = source.clone()
    state["model"]["even_strided"] = source.repeat_interleave(2, dim=1)[:, ::2]
    state["model"]["empty"] = torch.zeros(0, 5)
    return state


def assert_state(state: dict[str, Any]) -> None:
    assert state["config"] == {"name": "x"}
    assert state["model"].pop("empty").shape == (0, 5)
    for key, value in state["model"].items():
        expected = whole(key.rsplit("_", 1)[0])
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, expected), key
    assert state["step"].item() == 7


def save(rank: int, world: int, url: str, options: dict[str, Any]) -> None:
    dcp.save(sharded_state(world, fill=True), checkpoint_id=url, storage_writer=BucketWriter(storage_options=options))


def save_without_collectives(rank: int, world: int, url: str, options: dict[str, Any]) -> None:
    writer = BucketWriter(storage_options=options)
    dcp.save({"own": torch.full((5,), float(rank))}, checkpoint_id=url, storage_writer=writer, use_collectives=False)
    state = {"own": torch.zeros(5)}
    dcp.load(state, checkpoint_id=url, storage_reader=BucketReader(storage_options=options))
    assert state["own"].tolist() == [float(rank)] * 5


def load_fails_everywhere(rank: int, world: int, url: str, options: dict[str, Any]) -> list[str]:
    try:
        dcp.load({"w": torch.zeros(2)}, checkpoint_id=url, storage_reader=BucketReader(storage_options=options))
    except dcp.CheckpointException as failure:
        return [type(error).__name__ for error, _ in failure.failures.values()]
    raise AssertionError("a load of nothing reported success")


def opentelemetry_after_a_save_and_a_load(rank: int, world: int, url: str) -> list[str]:
    """What of it a process has that imports nothing of it."""
    bucketpoint.async_save({"w": torch.ones(3)}, url).result()
    bucketpoint.load({"w": torch.ones(3)}, url)
    return [name for name in sys.modules if name.startswith("opentelemetry")]
