"""What the ranks of the resharding tests do. Each function runs on every rank at once, and asserts on its own rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bucketpoint import BucketReader, BucketWriter, LoadPlanner
from bucketpoint.dcp.planning.save_planner import SavePlanner
from dcp.reshard_job import OnMesh, part

HIDDEN = 24
ROWS, COLUMNS = 13, 10


def whole_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # 7 and 5: what FSDP alone cuts need not divide; what TP cuts too must, for torch.
    return nn.Sequential(nn.Linear(7, HIDDEN), nn.Linear(HIDDEN, 5), nn.Embedding(ROWS, COLUMNS))


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


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


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


def table() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def sharded_tensors(rank: int, world: int, *, fill: bool) -> dict[str, Any]:
    """The same table as ShardedTensors: by rows, where the last ranks may get none, and in boxes of any size."""
    specs = {
        "rows": ChunkShardingSpec(dim=0, placements=[f"rank:{number}/cpu" for number in range(world)]),
        "columns": ChunkShardingSpec(dim=1, placements=[f"rank:{number}/cpu" for number in reversed(range(world))]),
        "boxes": EnumerableShardingSpec(
            [
                ShardMetadata(shard_offsets=[0, 0], shard_sizes=[5, 3], placement="rank:0/cpu"),
                ShardMetadata(shard_offsets=[5, 0], shard_sizes=[8, 3], placement=f"rank:{world - 1}/cpu"),
                ShardMetadata(shard_offsets=[0, 3], shard_sizes=[1, 7], placement="rank:0/cpu"),
                ShardMetadata(shard_offsets=[1, 3], shard_sizes=[12, 7], placement="rank:1/cpu"),
            ]
        ),
    }
    made = {name: sharded_tensor.zeros(spec, ROWS, COLUMNS) for name, spec in specs.items()}
    for value in made.values() if fill else ():
        for shard in value.local_shards():
            shard.tensor.copy_(shard_of(shard.metadata))
    return made


def shard_of(metadata: Any) -> torch.Tensor:
    (row, column), (rows, columns) = metadata.shard_offsets, metadata.shard_sizes
    return table()[row : row + rows, column : column + columns]


def distributed(world: int) -> dict[str, Any]:
    source = torch.zeros(ROWS, COLUMNS)
    return {
        "rows": distribute_tensor(source, init_device_mesh("cpu", (world,)), [Shard(1)]),
        "columns": distribute_tensor(source, init_device_mesh("cpu", (2, world // 2)), [Shard(0), Replicate()]),
        "boxes": source.clone(),
    }


def shards_and_distributed_tensors_become_each_other(rank: int, world: int, root: str) -> int:
    """Returns how many shards this rank holds."""
    dcp.save(sharded_tensors(rank, world, fill=True), checkpoint_id=f"{root}/sharded", storage_writer=BucketWriter())
    state = distributed(world)
    dcp.load(state, checkpoint_id=f"{root}/sharded", storage_reader=BucketReader())
    assert all(torch.equal(full(value), table()) for value in state.values())
    url = f"{root}/distributed"
    dcp.save(state, checkpoint_id=url, storage_writer=BucketWriter(), planner=SavePlanner())
    loaded = sharded_tensors(rank, world, fill=False)
    dcp.load(loaded, checkpoint_id=url, storage_reader=BucketReader())
    shards = [shard for value in loaded.values() for shard in value.local_shards()]
    assert all(torch.equal(shard.tensor, shard_of(shard.metadata)) for shard in shards)
    return len(shards)


def fsdp1_with_fewer_rows_than_ranks(rank: int, world: int, url: str) -> None:
    """A bias of one row lies on one rank. A value of another rank's own comes with it, as the state of a trainer."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    class Model:
        def __init__(self, seed: int) -> None:
            torch.manual_seed(seed)
            # torch refuses to look for a device where there is no accelerator.
            self.module = FullyShardedDataParallel(torch.nn.Linear(3, 1), device_id=torch.device("cpu"))

        def state_dict(self) -> dict[str, Any]:
            return dict(get_model_state_dict(self.module))

        def load_state_dict(self, state: dict[str, Any]) -> None:
            set_model_state_dict(self.module, state)

    saved, loaded = Model(1), Model(2)
    dcp.save({"model": saved, "trainer": {"text": "x"}}, checkpoint_id=url, storage_writer=BucketWriter())
    values = {"text": ""}
    dcp.load(
        {"model": loaded, "trainer": values}, checkpoint_id=url, storage_reader=BucketReader(), planner=LoadPlanner()
    )
    for one, two in zip(saved.module.parameters(), loaded.module.parameters(), strict=True):
        assert torch.equal(one, two)
