"""What a host of a test does. torch_xla's planners are used as they are; the assertions look at what they were told."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner
from torch_xla.experimental.distributed_checkpoint._helpers import _sharded_cpu_state_dict

from bucketpoint import BucketReader, BucketWriter

Layout = tuple[tuple[int, ...], tuple[int | None, ...]]
"""Shape of the mesh of all devices, and which of its axes each dimension of a tensor is cut along."""

Group = tuple[str, int, int]
"""A file for the ranks of a gloo group to meet at, the rank and the number of ranks."""

SHAPES = {"even": (16, 24), "uneven": (13, 7), "one_row": (1, 9)}
DTYPES = {"even": torch.float32, "uneven": torch.bfloat16, "one_row": torch.int64}


class Watched(SPMDLoadPlanner):
    """Counts what the reader asks of torch_xla's planner."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[ReadItem] = []
        self.resolved: Counter[str] = Counter()
        self.committed: Counter[str] = Counter()

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(central_plan)
        self.items = list(plan.items)
        return plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.resolved[read_item.dest_index.fqn] += 1
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed[read_item.dest_index.fqn] += 1
        super().commit_tensor(read_item, tensor)


class EachOnce(SPMDSavePlanner):
    """torch_xla 2.9 leaves out, on every host, each chunk of which a host has several replicas. Here they have one."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = {item.index: item for item in reversed(plan.items)}
        return dataclasses.replace(plan, items=list(items.values()))


def save(url: str, layout: Layout | None, group: Group | None = None) -> None:
    """Save a state that lies on the devices as `layout` says; None: each tensor whole."""
    with _group(group) as no_dist:
        writer, planner = BucketWriter(url), SPMDSavePlanner()
        dcp.save(_state(layout, fill=True), storage_writer=writer, planner=planner, no_dist=no_dist)


def save_each_once(url: str, layout: Layout) -> None:
    """Save a state of which several devices have the same."""
    dcp.save(_state(layout, fill=True), storage_writer=BucketWriter(url), planner=EachOnce(), no_dist=True)


def save_from_host(url: str, layout: Layout) -> None:
    """Save what torch_xla's asynchronous checkpoints are made of: the shards, copied to the host's memory."""
    state = _sharded_cpu_state_dict(_state(layout, fill=True))
    dcp.save(state, storage_writer=BucketWriter(url), planner=SPMDSavePlanner(), no_dist=True)


def load(url: str, layout: Layout | None, group: Group | None = None) -> dict[str, int]:
    """Load into a state that lies as `layout` says, check it, and return the number of read items of each tensor."""
    state, planner = _state(layout, fill=False), Watched()
    with _group(group) as no_dist:
        dcp.load(state, storage_reader=BucketReader(url), planner=planner, no_dist=no_dist)
    for name, value in _state(None, fill=True)["model"].items():
        assert torch.equal(state["model"][name].cpu(), value.cpu()), name
    assert state["step"] == 7
    assert torch.equal(state["on_host"], torch.arange(5.0))
    asked = Counter(item.dest_index.fqn for item in planner.items)
    del asked["step"]
    assert planner.resolved == asked
    assert planner.committed == asked
    return {name: asked[f"model.{name}"] for name in SHAPES}


def load_plain(url: str) -> None:
    """Load what torch_xla saved on any devices into plain tensors of the host, with DCP's own planner."""
    state = {"model": {name: torch.zeros(shape, dtype=DTYPES[name]) for name, shape in SHAPES.items()}}
    dcp.load(state, storage_reader=BucketReader(url), no_dist=True)
    for name, value in _state(None, fill=True)["model"].items():
        assert torch.equal(state["model"][name], value.cpu()), name


def save_plain(url: str) -> None:
    """Save plain tensors of the host with DCP's own planner."""
    model = {name: _whole(name) for name in SHAPES}
    state = {"model": model, "step": 7, "on_host": torch.arange(5.0)}
    dcp.save(state, storage_writer=BucketWriter(url), no_dist=True)


def _whole(name: str) -> torch.Tensor:
    rows, columns = SHAPES[name]
    return torch.arange(rows * columns).reshape(rows, columns).to(DTYPES[name])


def _state(layout: Layout | None, *, fill: bool) -> dict[str, Any]:
    model = {}
    for name in SHAPES:
        value = _whole(name)
        tensor = (value if fill else torch.zeros_like(value)).to(_device())
        if layout is not None:
            shape, partition = layout
            xs.mark_sharding(tensor, _mesh(shape), partition)
        model[name] = tensor
    on_host = torch.arange(5.0) if fill else torch.zeros(5)
    return {"model": model, "step": 7 if fill else 0, "on_host": on_host}


@functools.cache
def _device() -> torch.device:
    # Before any tensor: in this mode all devices are one.
    xr.use_spmd()
    return torch.device("xla")


def _mesh(shape: tuple[int, ...]) -> xs.Mesh:
    return xs.Mesh(np.arange(xr.global_runtime_device_count()), shape)


@contextmanager
def _group(group: Group | None) -> Iterator[bool]:
    """A gloo group around a save or a load, if one is wanted. Gives the `no_dist` to pass on."""
    if group is None:
        yield True
        return
    store, rank, world = group
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    try:
        yield False
    finally:
        dist.destroy_process_group()
