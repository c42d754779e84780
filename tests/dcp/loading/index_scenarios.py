"""What the ranks of the index's tests do. Each function runs on every rank at once, and asserts on its own rank."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bucketpoint import BucketReader, BucketWriter, LoadPlanner, SavePlanner
from bucketpoint.format.index.view import Entries

TENSORS = 600


def state(world: int, step: int | None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    wholes = [torch.full((8, 2), -1.0 if step is None else float(number + step)) for number in range(TENSORS)]
    return {
        "model": {f"layer{number}": distribute_tensor(whole, mesh, [Shard(0)]) for number, whole in enumerate(wholes)}
    }


def save_twice_and_load(rank: int, world: int, root: str, cooperative: str) -> tuple[str, int]:
    """Returns what the metadata is, and how many tensors it has."""
    writer, planner = BucketWriter(), SavePlanner()
    for step in range(2):
        dcp.save(state(world, step), checkpoint_id=f"{root}/{step}", storage_writer=writer, planner=planner)
    for step in range(2):
        reader, target = BucketReader(cooperative=cooperative), state(world, None)
        dcp.load(target, checkpoint_id=f"{root}/{step}", storage_reader=reader, planner=LoadPlanner())
        for number in range(TENSORS):
            assert target["model"][f"layer{number}"].to_local().unique().tolist() == [float(number + step)]
    entries = reader._metadata.state_dict_metadata
    return ("index" if isinstance(entries, Entries) else "pickle"), len(entries)


def load_stages(rank: int, world: int, url: str, stages: list[dict[str, Any]], ours: bool) -> list[str]:
    """Load the part of this rank, and return what was logged as a warning."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bucketpoint").addHandler(handler)
    try:
        planner = LoadPlanner() if ours else None
        dcp.load(stages[rank], checkpoint_id=url, storage_reader=BucketReader(progress=False), planner=planner)
    finally:
        logging.getLogger("bucketpoint").removeHandler(handler)
    return told
