"""The states of the golden checkpoints, and of the tests of the independent reader."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bucketpoint.dcp.saving.object_layout as object_layout
from bucketpoint import BucketWriter, SavePlanner, rank_state
from bucketpoint.format.index import ref as index_ref
from dcp.states import DTYPES, filled
from golden.describe import described

SMALL_BLOCK = 256
"""Bytes of a block for checksums, so that small tensors have tables. A save chooses blocks of 256 KiB and more."""


def small_formats(*, indexed: bool) -> None:
    """Have this process write tables of checksums for small tensors, and an index for few items if `indexed`."""
    object_layout.plan_blocks = lambda nbytes, row_nbytes: min(nbytes, SMALL_BLOCK)  # type: ignore[assignment]
    index_ref.INDEX_ITEMS = 1 if indexed else 1 << 30


def plain_state() -> dict[str, Any]:
    """The tensors and the values of one process."""
    base = filled((24, 20), torch.float32, seed=1)
    return {
        "model": {
            **{f"dtype_{str(dtype)[6:]}": filled((3, 5), dtype, seed=3) for dtype in DTYPES},
            "zero_dim": torch.tensor(2.5, dtype=torch.bfloat16),
            "empty": torch.empty(0, 3),
            "transposed": base.t(),
            "conjugated": filled((6,), torch.complex64, seed=4).conj(),
            "parameter": nn.Parameter(base[:4]),
        },
        "optim": {"state": {0: {"exp_avg": base * 2, "step": torch.tensor(3)}, 1: {"step": torch.tensor(4)}}},
        "step": 17,
        "name": "run é 中",
        "lists": [1, 2.5, None, (torch.arange(5), "x")],
        "ordered": OrderedDict(a=1, b=torch.ones(3)),
        "bytes": b"\x00\xff",
        "numbers": (True, -(1 << 70), 1.5, 2 + 3j),
        "sets": {7},
    }


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return descriptions of the values by the names under which DCP saves them. A collective if there are DTensors."""
    values = flatten_state_dict(state)[0]
    return {
        name: described(value.full_tensor() if isinstance(value, DTensor) else value) for name, value in values.items()
    }


def sharded_state(rank: int, world: int) -> dict[str, Any]:
    """One rank's part: FSDP2 in bfloat16, and each placement, with ranks that hold nothing of a tensor."""
    mesh = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2))
    torch.manual_seed(1)
    model = fully_shard(nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 5)).bfloat16(), mesh=mesh)
    whole = filled((13, 10), torch.float32, seed=2)
    return {
        "model": {
            **{name: value.detach() for name, value in model.state_dict().items()},
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole, mesh, [Shard(1)]),
            "replicated": distribute_tensor(whole[:5], mesh, [Replicate()]),
            "grid": distribute_tensor(whole, grid, [Shard(0), Shard(1)]),
            "hybrid": distribute_tensor(whole, grid, [Replicate(), Shard(0)]),
            "narrow": distribute_tensor(filled((2, 6), torch.float16, seed=5), mesh, [Shard(0)]),
            "plain": whole[0],
        },
        "optim": {"state": {0: {"step": torch.tensor(3.0)}}},
        "loader": rank_state({"position": 100 + rank}),
        "epoch": 4,
    }


def save_sharded(
    rank: int, world: int, url: str, options: dict[str, Any], indexed: bool, collectives: bool = True
) -> dict[str, Any]:
    """Save on each rank, and return the descriptions of what this rank holds."""
    small_formats(indexed=indexed)
    state = sharded_state(rank, world) if collectives else {"own": torch.full((5,), float(rank)), "rank": rank}
    writer = BucketWriter(storage_options=options)
    dcp.save(state, checkpoint_id=url, storage_writer=writer, planner=SavePlanner(), use_collectives=collectives)
    return flat(state)
