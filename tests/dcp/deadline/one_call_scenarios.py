"""What ranks do that save and load in one call. Each runs on every rank, and returns what the test compares."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

import bucketpoint as bp
from bucketpoint.dcp import process_groups
from bucketpoint.errors import BucketpointError

HANGS_S = 240.0
"""A limit against hangs alone."""

Told = tuple[str, str, int | None]
"""An error: its kind, what it says, and the rank that it names."""


def state(rank: int, value: float) -> dict[str, Any]:
    """Of one value: what each rank has for itself, and what all have."""
    own = {f"own_{rank}_{number}": torch.full((1000,), value) for number in range(3)}
    return {"model": {**own, "shared": torch.full((64, 8), value)}, "value": value}


def values(found: dict[str, Any]) -> set[float]:
    tensors = {number for tensor in found["model"].values() for number in tensor.unique().tolist()}
    return tensors | {found["value"]}


def told(action: Callable[[], Any]) -> Told | None:
    """The error of an action; None if it has none. Another than ours is told as it is."""
    try:
        action()
    except BucketpointError as error:
        return type(error).__name__, str(error), error.rank
    except BaseException as error:  # noqa: BLE001 (told to the test)
        return type(error).__name__, str(error), None
    return None


def threads() -> int:
    """Threads of this process, those that are not Python's included."""
    folder = Path("/proc/self/task")
    return len(list(folder.iterdir())) if folder.is_dir() else threading.active_count()


class At(DefaultSavePlanner):
    """Does something when this rank's n-th item is asked for."""

    def __init__(self, number: int, action: Callable[[], None] | None) -> None:
        super().__init__()
        self.left, self.action = number, action

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self.left == 0 and self.action is not None:
            self.action()
        self.left -= 1
        return super().resolve_data(write_item)


class ReadsAt(DefaultLoadPlanner):
    """Does something when this rank's first item is to be read."""

    def __init__(self, action: Callable[[], None] | None) -> None:
        super().__init__()
        self.action = action

    def finish_plan(self, central_plan: Any) -> Any:
        if self.action is not None:
            self.action()
        return super().finish_plan(central_plan)


def on_fire() -> None:
    raise OSError("this disk is on fire")


def until_there(path: Path) -> None:
    began = time.monotonic()
    while not path.exists() and time.monotonic() < began + HANGS_S:
        time.sleep(0.05)


# -- scenarios ---------------------------------------------------------------------------------------------------------


def save_and_load(rank: int, world: int, url: str) -> set[float]:
    bp.save(state(rank, 1.0), url)
    target = state(rank, 0.0)
    bp.load(target, url)
    return values(target)


def threads_after(rank: int, world: int, url: str, calls: int) -> tuple[int, int]:
    """How many threads there are after two saves, and after so many more, every other of which fails."""

    def save(fails: bool) -> None:
        planner = At(0, on_fire if rank == 1 and fails else None)
        error = told(lambda: bp.save(state(rank, 1.0), url, planner=planner))
        assert (error is not None) == fails, error

    save(False)
    save(True)
    # The kernel may still count one that has ended.
    time.sleep(1)
    before = threads()
    for number in range(calls):
        save(bool(number % 2))
    began = time.monotonic()
    while threads() > before and time.monotonic() < began + 20:
        time.sleep(0.1)
    return before, threads()


def fail_at_each_item(rank: int, world: int, url: str) -> list[Told | None]:
    """Saves of which rank 1 fails the n-th item, until there are no more items."""
    answers: list[Told | None] = []
    while not answers or answers[-1] is not None:
        planner = At(len(answers), on_fire if rank == 1 else None)
        answers.append(told(lambda planner=planner: bp.save(state(rank, 2.0), url, planner=planner)))
    return answers


def attempt(rank: int, world: int, by: str, url: str, **options: Any) -> Told | None:
    """The error of one call of all ranks, at a URL that may hold `{rank}`; the planner of rank 1 may fail."""
    if options.pop("fails", False):
        options["planner"] = At(0, on_fire if rank == 1 else None)
    return told(lambda: getattr(bp, by)(state(rank, 2.0), url.format(rank=rank), **options))


def call(rank: int, url: str, loads: bool, action: Callable[[], None] | None, deadline_s: float) -> Told | None:
    """A save or a load in the middle of which this rank does something."""
    if loads:
        return told(lambda: bp.load(state(rank, 0.0), url, planner=ReadsAt(action), deadline_s=deadline_s))
    return told(lambda: bp.save(state(rank, 2.0), url, planner=At(1, action), deadline_s=deadline_s))


def stall_until_the_others_raised(rank: int, world: int, url: str, folder: str, loads: bool) -> Told | None:
    """Rank 1 stands still in the middle of its items; it goes on once rank 0 has raised."""
    raised = Path(folder, "raised")
    error = call(rank, url, loads, (lambda: until_there(raised)) if rank == 1 else None, 6)
    if rank == 0:
        raised.touch()
    return error


def stay_away_once(rank: int, world: int, url: str) -> tuple[Told | None, Told | None]:
    """Rank 1 does not make the first call. The second is made by all."""
    first = told(lambda: bp.save(state(rank, 2.0), url, deadline_s=4)) if rank == 0 else None
    dist.barrier()
    return first, told(lambda: bp.save(state(rank, 3.0), url))


class Broken:
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("no such layer")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def fail_before_planning(rank: int, world: int, url: str) -> Told | None:
    own: dict[str, Any] = {"broken": Broken()} if rank == 1 else {}
    return told(lambda: bp.save({**state(rank, 2.0), **own}, url, deadline_s=2 * HANGS_S))


def plant_in_the_store(rank: int, world: int, url: str, data: bytes) -> Told | None:
    """Something that is no rank writes into the store of the call under way, and counts a million failures."""

    def plant() -> None:
        job = dist.PrefixStore("calls", process_groups.store_of(tuple(range(world))))
        call = dist.PrefixStore(str(job.add("of/0", 0)), job)
        call.set("failed/1", data)
        call.add("failures", 1_000_000)
        time.sleep(2.5)

    return told(lambda: bp.save(state(rank, 2.0), url, planner=At(0, plant if rank == 1 else None)))


def save_in_two_groups(rank: int, world: int, url: str) -> set[float]:
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    own = rank % 2
    bp.save(state(rank, float(own)), f"{url}-{own}", process_group=groups[own])
    target = state(rank, 9.0)
    bp.load(target, f"{url}-{own}", process_group=groups[own])
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    return values(target)


# -- on ranks that are lost --------------------------------------------------------------------------------------------


def lose_the_last(
    rank: int, world: int, url: str, number: int, loads: bool, deadline_s: float, pids: Sequence[int]
) -> Told | None:
    """The last rank sends itself a signal in the middle of its items. Rank 0 lets a stopped one go on in the end."""
    lost = world - 1
    error = call(rank, url, loads, (lambda: os.kill(os.getpid(), number)) if rank == lost else None, deadline_s)
    folder = Path(url.removeprefix("file://")).parent
    Path(folder, f"raised-{rank}").touch()
    if rank == 0 and number == signal.SIGSTOP:
        # Not before all the others have found that it does not answer.
        for other in range(lost):
            until_there(Path(folder, f"raised-{other}"))
        os.kill(pids[lost], signal.SIGCONT)
    return error


def lose_the_host_of_the_store(rank: int, world: int, url: str, port: int, number: int) -> Told | None:
    """As without torchrun: the job's TCP store is in rank 0, and goes with it."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    return call(rank, url, False, (lambda: os.kill(os.getpid(), number)) if rank == 0 else None, 10)
