"""What the ranks of the `ranks` part do: functions that run on every rank at once, in processes of one gloo group.

Whoever calls them measures at the store, too; here is what a rank sees of itself.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bench import state as states
from bench.resident import forget_peak, memory

SMALL = states.Shape(hidden=256, ffn=768, layers=4, vocab=32000)
"""116 MB with both moments, and half of it in two tensors, as in a small Llama."""

LARGE = states.Shape(hidden=512, ffn=1536, layers=6, vocab=24000)
"""About 300 MB with both moments."""

PLACEMENTS = {"replicated": [Replicate()], "rows": [Shard(0)], "columns": [Shard(1)]}


def use(rank: int, world: int, env: dict[str, str]) -> None:
    """Point this process at a server."""
    os.environ.update(env)


def saves(rank: int, world: int, layout: str, planner: str, url: str, rounds: int) -> list[dict[str, int]]:
    """Save a state `rounds` times, through one writer and planner; of each save, what the object collectives moved.

    Args:
        layout: "ddp", plain tensors that all ranks hold; "hsdp", two replicas of rows over the other ranks.
        planner: "bucketpoint", "dcp" or "dcp-lowest".
    """
    from bucketpoint import S3Writer, SavePlanner

    planners = {
        "bucketpoint": SavePlanner,
        "dcp": lambda: DefaultSavePlanner(enable_plan_caching=True),
        "dcp-lowest": lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    }
    state = _saved(layout, world)
    chosen, writer = planners[planner](), S3Writer(progress=False)
    found = []
    for round_ in range(rounds):
        with _object_bytes() as moved:
            dcp.save(state, checkpoint_id=f"{url}/{round_}", storage_writer=writer, planner=chosen)
        found.append({**moved, "items": len(chosen.plan.items)})
    return found


def save_for_loads(rank: int, world: int, kind: str, url: str) -> int:
    """Save what the loads read, by all ranks; the bytes of one replica."""
    from bucketpoint import S3Writer

    whole = states.training_state(LARGE)
    nbytes = states.nbytes(whole)
    dcp.save(_placed(whole, world, kind), checkpoint_id=url, storage_writer=S3Writer(progress=False))
    return nbytes


def load(rank: int, world: int, kind: str, cooperative: str, url: str) -> dict[str, Any]:
    """Load into `kind`'s placement; seconds between two barriers, peak memory over the target, and why that mode."""
    from bucketpoint import S3Reader

    blank = {name: torch.zeros_like(value) for name, value in states.leaves(states.blank_state(LARGE))}
    target = _placed(blank, world, kind)
    del blank
    gc.collect()
    reader = S3Reader(progress=False, cooperative=cooperative)
    forget_peak()
    before = memory()
    dist.barrier()
    begun = time.monotonic()
    dcp.load(target, checkpoint_id=url, storage_reader=reader, planner=DefaultLoadPlanner())
    own_s = time.monotonic() - begun
    dist.barrier()
    ended = time.monotonic()
    after = memory()
    whole = dict(states.leaves(states.training_state(LARGE)))
    wrong = [name for name, value in target.items() if not torch.equal(_full(value), whole[name])]
    return {
        "start": begun,
        "end": ended,
        "seconds": ended - begun,
        "own_s": own_s,
        "peak_bytes": after["VmHWM"] - after["RssFile"] - before["anonymous"],
        "explained": reader.explain(),
        "wrong": wrong,
    }


def _saved(layout: str, world: int) -> Any:
    whole = states.training_state(SMALL)
    if layout == "ddp":
        return whole
    grid = init_device_mesh("cpu", (2, world // 2))
    return {name: distribute_tensor(value, grid, [Replicate(), Shard(0)]) for name, value in states.leaves(whole)}


def _placed(whole: Any, world: int, kind: str) -> dict[str, Any]:
    tensors = dict(states.leaves(whole))
    if kind == "replicated":
        return tensors
    mesh = init_device_mesh("cpu", (world,))
    return {
        name: distribute_tensor(value, mesh, PLACEMENTS[kind if value.ndim > 1 else "rows"])
        for name, value in tensors.items()
    }


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@contextmanager
def _object_bytes() -> Iterator[dict[str, int]]:
    """Bytes of the pickles that this rank sends and receives through object collectives, which are DCP's only ones."""
    moved = {"sent": 0, "received": 0}
    pack: Any = distributed_c10d._object_to_tensor
    unpack: Any = distributed_c10d._tensor_to_object

    def packed(*args: Any, **kwargs: Any) -> Any:
        made = pack(*args, **kwargs)
        moved["sent"] += int(made[0].numel())
        return made

    def unpacked(tensor: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
        moved["received"] += int(size)
        return unpack(tensor, size, *args, **kwargs)

    distributed_c10d._object_to_tensor = packed
    distributed_c10d._tensor_to_object = unpacked
    try:
        yield moved
    finally:
        distributed_c10d._object_to_tensor = pack
        distributed_c10d._tensor_to_object = unpack
