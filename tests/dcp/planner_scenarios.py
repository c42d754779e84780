"""What the ranks of the planner's tests do. Each function runs on every rank at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bucketpoint import BucketReader, BucketWriter
from bucketpoint.dcp.balance import item_bytes
from bucketpoint.dcp.save_planner import SavePlanner


class CountingPlanner(SavePlanner):
    """Notes how many bytes this rank is to write."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self.sizes.append(sum(map(item_bytes, plan.items)))
        return plan


def balanced_saves(rank: int, world: int, root: str) -> list[int]:
    grid = init_device_mesh("cpu", (2, world // 2))
    whole = {f"layer{number}": torch.randn(3000 + number, 300, generator=_seeded(number)) for number in range(6)}

    def state(fill: bool) -> dict[str, Any]:
        values = {name: value if fill else torch.zeros_like(value) for name, value in whole.items()}
        return {
            "replicated": {name: value.clone() for name, value in values.items()},
            "hybrid": {name: distribute_tensor(value, grid, [Replicate(), Shard(0)]) for name, value in values.items()},
            "step": 3 if fill else 0,
        }

    planner, writer = CountingPlanner(), BucketWriter(progress=False)
    for save in range(3):
        dcp.save(state(fill=True), checkpoint_id=f"file://{root}/{save}", storage_writer=writer, planner=planner)
    for save in range(3):
        for reader, url in ((BucketReader(), f"file://{root}/{save}"), (FileSystemReader(f"{root}/{save}"), None)):
            loaded = state(fill=False)
            dcp.load(loaded, checkpoint_id=url, storage_reader=reader)
            assert loaded["step"] == 3
            for name, value in whole.items():
                assert torch.equal(loaded["replicated"][name], value)
                assert torch.equal(loaded["hybrid"][name].full_tensor(), value)
    return planner.sizes


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)
