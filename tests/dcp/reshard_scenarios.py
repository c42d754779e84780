"""What the ranks of the resharding tests do. Each function runs on every rank at once, and asserts on its own rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bucketpoint import BucketReader, BucketWriter, LoadPlanner
from bucketpoint.dcp.planning.save_planner import SavePlanner
from dcp.reshard_job import OnMesh, part

HIDDEN = 24


def whole_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # 7 and 5: what FSDP alone cuts need not divide; what TP cuts too must, for torch.
    return nn.Sequential(nn.Linear(7, HIDDEN), nn.Linear(HIDDEN, 5), nn.Embedding(13, 10))


def sharded_model(rank: int, kind: str, ranks: int, seed: int) -> nn.Module | None:
    """The whole model under one kind of parallelism over the first `ranks` ranks; None on the others."""
    shape, names = {
        "fsdp": ((ranks,), ("dp",)),
        "hsdp": ((2, ranks // 2), ("replicas", "dp")),
        "tp and fsdp": ((2, ranks // 2), ("dp", "tp")),
        "plain": ((ranks,), ("dp",)),
    }[kind]
    # By every rank of the job: groups are made in it.
    mesh = DeviceMesh("cpu", torch.arange(ranks).reshape(shape), mesh_dim_names=names)
    if rank >= ranks:
        return None
    model = whole_model(seed)
    if kind == "plain":
        return model
    if kind == "tp and fsdp":
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        mesh = mesh["dp"]
    return fully_shard(model, mesh=mesh)


def state_of(model: nn.Module) -> dict[str, Any]:
    return {"model": {name: value.detach() for name, value in model.state_dict().items()}}


def assert_is_whole(state: dict[str, Any], seed: int) -> None:
    for name, expected in whole_model(seed).state_dict().items():
        value = state["model"][name]
        if isinstance(value, DTensor):
            # Not `full_tensor`: how it gathers strided shards differs from torch to torch.
            mesh, rank = value.device_mesh, dist.get_rank()
            layout = OnMesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), tuple(value.placements))
            box = layout.box(expected.shape, rank)
            assert box is not None
            value, expected = value.to_local(), part(expected, box)
        assert torch.equal(value, expected), name


def save_model(rank: int, world: int, url: str, kind: str, ranks: int) -> list[str]:
    """Save on the first `ranks` ranks. Returns the placements."""
    group = dist.new_group(list(range(ranks)), backend="gloo")
    model = sharded_model(rank, kind, ranks, seed=1)
    if model is None:
        return []
    state = state_of(model)
    dcp.save(state, checkpoint_id=url, storage_writer=BucketWriter(), planner=SavePlanner(), process_group=group)
    return [str(getattr(value, "placements", None)) for value in state["model"].values()]


def load_model(rank: int, world: int, url: str, kind: str, ranks: int) -> None:
    group = dist.new_group(list(range(ranks)), backend="gloo")
    model = sharded_model(rank, kind, ranks, seed=2)
    if model is None:
        return
    state = state_of(model)
    dcp.load(state, checkpoint_id=url, storage_reader=BucketReader(), process_group=group)
    assert_is_whole(state, seed=1)


def fsdp1_with_fewer_rows_than_ranks(rank: int, world: int, url: str) -> None:
    """One layer lies on all ranks, and one of one row on one rank; beside them is a value, as a trainer's state is."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    class Model:
        def __init__(self, seed: int) -> None:
            torch.manual_seed(seed)
            # torch refuses to look for a device where there is no accelerator.
            layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 1))
            self.module = FullyShardedDataParallel(layers, device_id=torch.device("cpu"))

        def state_dict(self) -> dict[str, Any]:
            return dict(get_model_state_dict(self.module))

        def load_state_dict(self, state: dict[str, Any]) -> None:
            set_model_state_dict(self.module, state)

    saved, loaded = Model(1), Model(2)
    state = {"model": saved, "trainer": {"text": "x"}}
    dcp.save(state, checkpoint_id=url, storage_writer=BucketWriter(), planner=SavePlanner())
    state = {"model": loaded, "trainer": {"text": ""}}
    dcp.load(state, checkpoint_id=url, storage_reader=BucketReader(), planner=LoadPlanner())
    for one, two in zip(saved.module.parameters(), loaded.module.parameters(), strict=True):
        assert torch.equal(one, two)
