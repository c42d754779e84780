"""What ranks do to see on which process groups saves talk. Each function runs on every rank at once."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import bucketpoint
from bucketpoint import BucketWriter, StagingOptions
from bucketpoint.dcp import process_groups
from dcp.saving.async_scenarios import SLOW_S, SlowFileSystem, Training, assert_holds, wait


def messages(group: Any = None) -> int:
    """Number of collectives that this rank has taken part in on a group."""
    pg: Any = group if group is not None else dist.group.WORLD
    return int(pg._get_backend(torch.device("cpu"))._get_sequence_number_for_group())


def kept() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def saves_leave_the_group_alone(rank: int, world: int, root: str, given: str) -> Any:
    """Two saves for one group: what they say on it, and how many groups there are after each."""
    group = dist.new_group() if given == "a group" else None
    seen = []
    for step in range(2):
        before = messages(group), messages()
        url = f"{root}/{step}"
        handle = bucketpoint.async_save(Training(rank, world).run(step), checkpoint_id=url, process_group=group)
        handle.result()
        seen.append((messages(group) - before[0], messages() - before[1], kept()))
        assert_holds(url, step, world)
    if group is not None:
        dist.destroy_process_group(group)
    del group
    return seen, kept()


def training_talks_during_a_slow_upload(rank: int, world: int, root: str, given: str) -> int:
    """Training's collectives of some size on the group that saves are asked for on, for as long as the upload takes."""
    group = dist.new_group() if given == "a group" else None
    writer = BucketWriter(fs=SlowFileSystem(SLOW_S))
    training = Training(rank, world)
    reduced = 0
    for step in range(3):
        handle = bucketpoint.async_save(
            training.run(step), checkpoint_id=f"{root}/{step}", storage_writer=writer, process_group=group
        )
        training.spoil()
        going = torch.ones(1)
        while going.item():
            gradient = torch.ones(65_696)
            dist.all_reduce(gradient, group=group)
            assert gradient.unique().tolist() == [world]
            reduced += 1
            going.fill_(not handle.done())
            dist.all_reduce(going, group=group)
        handle.result()
        assert_holds(f"{root}/{step}", step, world)
    writer.close()
    return reduced


def another_job_in_the_same_processes(rank: int, world: int, root: str) -> None:
    """The default group is destroyed and made again: saves find a group of the new one."""
    for number in range(2):
        url = f"{root}/{number}"
        bucketpoint.async_save(Training(rank, world).run(number), checkpoint_id=url).result()
        assert_holds(url, number, world)
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(f"{root}/store-{number}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def two_halves_of_the_job(rank: int, world: int, root: str) -> None:
    """Each half saves what it has by itself, in another number of saves, and so does the whole job."""
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    own = rank // 2
    for step in range(1 + own):
        url = f"{root}/{own}-{step}"
        state = Training(rank % 2, 2).run(step)
        bucketpoint.async_save(state, checkpoint_id=url, process_group=halves[own]).result()
        assert_holds(url, step, 2)
    bucketpoint.async_save(Training(rank, world).run(7), checkpoint_id=f"{root}/all").result()
    assert_holds(f"{root}/all", 7, world)
    if rank == 3:
        # One rank alone: no other need know.
        bucketpoint.async_save(Training(0, 1).run(8), checkpoint_id=f"{root}/alone", no_dist=True).result()
        assert_holds(f"{root}/alone", 8)


class Log(logging.Handler):
    """Messages of the module that knows the groups, at level WARNING."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self._logger = logging.getLogger(process_groups.__name__)

    def __enter__(self) -> list[str]:
        self._logger.addHandler(self)
        return self.messages

    def __exit__(self, *error: object) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def what_is_logged(rank: int, world: int, root: str, how: str) -> list[str]:
    """Two saves by a bare `dcp.async_save`, or of a kind that may be on the default group, or is on another."""
    arguments: dict[str, Any] = {}
    if how == "group":
        arguments["process_group"] = dist.new_group(backend="gloo")
    staging = StagingOptions(use_async_staging=how == "beside")
    with Log() as said:
        for step in range(2):
            url, state = f"{root}/{step}", Training(rank, world).run(step)
            if how == "save":
                dcp.save(state, checkpoint_id=url, storage_writer=BucketWriter())
            elif how == "bucketpoint":
                bucketpoint.async_save(state, checkpoint_id=url).result()
            elif how == "alone":
                if rank == 0:
                    wait(dcp.async_save(state, checkpoint_id=url, storage_writer=BucketWriter(), no_dist=True))
            else:
                wait(
                    dcp.async_save(state, checkpoint_id=url, storage_writer=BucketWriter(staging=staging), **arguments)
                )
    return said
