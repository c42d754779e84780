"""What ranks do that do not agree. Each function runs on every rank at once, and tells how its saves failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bucketpoint import BucketReader, BucketWriter, LoadPlanner, SavePlanner
from bucketpoint.dcp.planning import agreement

PLANNERS: dict[str, Callable[[], Any]] = {
    "ours": SavePlanner,
    "DCP's": DefaultSavePlanner,
    "DCP's, keeping plans": lambda: DefaultSavePlanner(enable_plan_caching=True),
}


def failures(save: Callable[[], Any]) -> list[tuple[str, str]]:
    """Kind and text of what went wrong, on whichever rank."""
    try:
        save()
    except dcp.CheckpointException as error:
        return [(type(failure).__name__, str(failure)) for failure, _ in error.failures.values()]
    return []


def forget_plans() -> None:
    """DCP keeps plans in its class, for all planners of the process."""
    for name in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(dcp.SavePlanner, name).clear()
    dcp.SavePlanner._cached_metadata.clear()


def save_to_places_of_their_own(rank: int, world: int, root: str, kind: str, before: int) -> list[tuple[str, str]]:
    """`before` saves on which the ranks agree, and then one to a URL that each rank makes itself."""
    forget_plans()
    planner, writer = PLANNERS[kind](), BucketWriter(progress=False)
    state = {"w": torch.ones(300, 300), f"only{rank}": torch.ones(5)}
    for save in range(before):
        dcp.save(state, checkpoint_id=f"{root}/before-{save}", storage_writer=writer, planner=planner)
    url = f"{root}/step-of-rank-{rank}"
    return failures(lambda: dcp.save(state, checkpoint_id=url, storage_writer=writer, planner=planner))


def save_unlike_the_others(rank: int, world: int, root: str, what: str) -> list[tuple[str, str]]:
    """Save with a version, with options of the writer or with a planner that other ranks do not have."""
    version = f"0.3.{rank}" if what == "versions" else "0.3.0"
    with mock.patch.object(agreement, "__version__", version):
        options = {"target_object_bytes": 1 << (20 + rank)} if what == "options" else {}
        writer = BucketWriter(f"{root}/x", progress=False, **options)
        planner = SavePlanner() if what == "planners" and rank == 0 else DefaultSavePlanner()
        return failures(lambda: dcp.save({f"only{rank}": torch.ones(5)}, storage_writer=writer, planner=planner))


def save_beside_a_load(rank: int, world: int, root: str, saving: int, ours: bool) -> list[tuple[str, str]]:
    """One rank saves while the other loads, in one process group."""
    state = {"w": torch.ones(3)}
    if rank == saving:
        writer = BucketWriter(f"{root}/x", progress=False)
        return failures(lambda: dcp.save(state, storage_writer=writer, planner=SavePlanner()))
    planner = LoadPlanner() if ours else None
    reader = BucketReader(f"{root}/step-1", progress=False)
    return failures(lambda: dcp.load(state, storage_reader=reader, planner=planner))


def save_tensors_of_their_own(
    rank: int, world: int, root: str, kind: str, layout: str, how: list[Any]
) -> tuple[list[tuple[str, str]], Any, Any]:
    """Each rank holds `w` with a dtype and a shape of its own. How the save failed, what it saved, what was held."""
    dtype, shape = how[rank]
    w: Any = torch.linspace(1, 9, shape[0] * shape[1]).reshape(shape).to(dtype)
    if layout == "sharded":
        w = DTensor.from_local(w, init_device_mesh("cpu", (world,)), [Shard(0)], run_check=False)
    writer = BucketWriter(f"{root}/x", progress=False)
    failed = failures(lambda: dcp.save({"w": w}, storage_writer=writer, planner=PLANNERS[kind]()))
    if failed or layout == "sharded":
        return failed, None, None
    entry = BucketReader(f"{root}/x").read_metadata().state_dict_metadata["w"]
    loaded = torch.zeros(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
    dcp.load({"w": loaded}, storage_reader=BucketReader(f"{root}/x", progress=False), no_dist=True)
    return failed, loaded, w


def load_into_zeros(url: str, reader: BucketReader, **options: Any) -> tuple[list[tuple[str, str]], list[float]]:
    """How a load failed, if it did, and the values that it left."""
    state = {"w": torch.zeros(3)}
    failed = failures(lambda: dcp.load(state, checkpoint_id=url, storage_reader=reader, **options))
    return failed, state["w"].tolist()


def load_places_of_their_own(rank: int, world: int, urls: list[str], planner: Any = None, alone: bool = False) -> Any:
    group = None
    if alone:
        group = [dist.new_group([member], backend="gloo") for member in range(world)][rank]
    return load_into_zeros(urls[rank], BucketReader(progress=False), planner=planner and planner(), process_group=group)


class Between(BucketReader):
    """Reader of two ranks between whose reads of the metadata another save is made at the same URL."""

    def __init__(self, rank: int, save: Callable[[], Any]) -> None:
        super().__init__(progress=False)
        self.save = save
        self.number = rank

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self.number:
            dist.barrier()
            return super().read_metadata(*args, **kwargs)
        metadata = super().read_metadata(*args, **kwargs)
        self.save()
        dist.barrier()
        return metadata


def load_while_another_job_saves(rank: int, world: int, url: str, stock: bool) -> Any:
    def save(value: float) -> None:
        state = {"w": torch.full((3,), value)}
        writer: Any = dcp.FileSystemWriter(url) if stock else BucketWriter(progress=False)
        dcp.save(state, checkpoint_id=url, storage_writer=writer, no_dist=True)

    if rank == 0:
        save(1.0)
    dist.barrier()
    return load_into_zeros(url, Between(rank, lambda: save(2.0)))


def load_with_the_index_on_one_rank(rank: int, world: int, url: str) -> Any:
    reader = BucketReader(progress=False, trusted=bool(rank))
    return *load_into_zeros(url, reader), type(reader.read_metadata().state_dict_metadata).__name__
