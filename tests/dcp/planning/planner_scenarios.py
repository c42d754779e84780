"""What the ranks of the planner's tests do. Each function runs on every rank at once."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bucketpoint import BucketpointError, BucketReader, BucketWriter
from bucketpoint.dcp.planning.rank_state import rank_state
from bucketpoint.dcp.planning.save_planner import SavePlanner


def planned_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


@contextmanager
def counted() -> Iterator[Counter[int]]:
    """Bytes of all objects that cross ranks, by the rank that sends or gets them, as far as this rank hands them over:
    what is gathered from it, and, on rank 0, what is dealt to each and sent to all."""
    sent: Counter[int] = Counter()
    rank, world = dist.get_rank(), dist.get_world_size()
    gather, scatter, broadcast = dist.gather_object, dist.scatter_object_list, dist.broadcast_object_list

    def gathered(obj: Any, *args: Any, **kwargs: Any) -> Any:
        sent[rank] += len(pickle.dumps(obj))
        return gather(obj, *args, **kwargs)

    def scattered(*args: Any, scatter_object_input_list: Any, **kwargs: Any) -> Any:
        for to, obj in enumerate(scatter_object_input_list or ()):
            sent[to] += len(pickle.dumps(obj))
        return scatter(*args, scatter_object_input_list=scatter_object_input_list, **kwargs)

    def broadcasted(object_list: Any, *args: Any, **kwargs: Any) -> Any:
        if rank == 0:
            for to in range(world):
                sent[to] += len(pickle.dumps(object_list[0]))
        return broadcast(object_list, *args, **kwargs)

    dist.gather_object, dist.scatter_object_list, dist.broadcast_object_list = gathered, scattered, broadcasted
    try:
        yield sent
    finally:
        dist.gather_object, dist.scatter_object_list, dist.broadcast_object_list = gather, scatter, broadcast


def sharded(items: int, fill: float) -> dict[str, Any]:
    """Each rank holds a shard of every tensor."""
    grid = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        f"model.layers.{number}.weight": DTensor.from_local(
            torch.full((16, 3), fill + number), grid, [Shard(0)], run_check=False
        )
        for number in range(items)
    }


def bytes_that_cross(rank: int, world: int, root: str, kind: str, items: int) -> list[dict[int, int]]:
    """The bytes of each of two saves of an unchanged structure, the last of which is loaded by either reader."""
    kinds: dict[str, tuple[Callable[[str], Any], Any]] = {
        "ours": (lambda url: BucketWriter(url, progress=False), SavePlanner()),
        "ours, stock planner": (lambda url: BucketWriter(url, progress=False), DefaultSavePlanner()),
        "ours, stock writer": (lambda url: FileSystemWriter(url.removeprefix("file://")), SavePlanner()),
        "stock": (lambda url: FileSystemWriter(url.removeprefix("file://")), DefaultSavePlanner()),
    }
    make, planner = kinds[kind]
    found = []
    for save in range(2):
        path = f"{root}/{save}"
        state = sharded(items, fill=float(save))
        with counted() as sent:
            returned = dcp.save(state, storage_writer=make(f"file://{path}"), planner=planner)
        assert isinstance(returned, dcp.Metadata)
        found.append(dict(sent))
    for reader in (FileSystemReader(path), BucketReader(f"file://{path}")):
        loaded = sharded(items, fill=-1.0)
        dcp.load(loaded, storage_reader=reader)
        assert all(torch.equal(loaded[name].to_local(), value.to_local()) for name, value in state.items())
    return found


def metadata_by_rank(rank: int, world: int, root: str) -> tuple[str, str]:
    """The kind of what a save returned, and what is said when it is looked into."""
    returned = dcp.save(
        sharded(3, fill=1.0), storage_writer=BucketWriter(f"file://{root}", progress=False), planner=SavePlanner()
    )
    try:
        return type(returned).__name__, ",".join(returned.state_dict_metadata)
    except BucketpointError as error:
        return type(returned).__name__, str(error)


def own_state_comes_back(rank: int, world: int, root: str) -> int:
    state: dict[str, Any] = {"w": torch.ones(10), "loader": rank_state({"position": 10 * rank})}
    dcp.save(state, storage_writer=BucketWriter(f"file://{root}", progress=False), planner=SavePlanner())
    loaded: dict[str, Any] = {"w": torch.zeros(10), "loader": rank_state({"position": None})}
    dcp.load(loaded, storage_reader=BucketReader(f"file://{root}", progress=False))
    position: int = loaded["loader"][f"rank-{rank}"]["position"]
    return position
