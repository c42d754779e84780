"""Several jobs that save the same step at once: exactly one checkpoint afterwards, and all are told."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.location import Location
from kit import checkpoints
from kit.kills import Job
from services import Service

JOBS = 4


def save(number: int, url: str, options: dict[str, Any], overwrite: bool, planner: Any = None) -> str:
    writer = bp.BucketWriter(overwrite=overwrite, storage_options=options)
    try:
        checkpoints.save(url, number, writer, elements=100_000, planner=planner)
    except dcp.CheckpointException as failed:
        return type(next(iter(failed.failures.values()))[0]).__name__
    return "won"


def save_as_rank(rank: int, world: int, url: str, options: dict[str, Any], overwrite: bool) -> str:
    torch.distributed.barrier()
    return save(rank + 1, url, options, overwrite)


def in_threads(url: str, options: dict[str, Any], overwrite: bool) -> list[str]:
    together = threading.Barrier(JOBS)

    def one(number: int) -> str:
        together.wait(240)
        return save(number, url, options, overwrite)

    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(one, range(1, JOBS + 1)))


def in_processes(url: str, options: dict[str, Any], overwrite: bool) -> list[str]:
    with Job(JOBS) as job:
        job.ready()
        outcomes = job.run(save_as_rank, url, options, overwrite)
    assert not [one.text for one in outcomes if one.text]
    return [one.value for one in outcomes]


@pytest.mark.parametrize("race", [in_threads, pytest.param(in_processes, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_lets_one_of_several_jobs_win_and_tells_the_others(service: Service, race: Any, overwrite: bool) -> None:
    options, url = service.options, service.url("run/step-1")
    told = Counter(race(url, options, overwrite))
    assert sum(told.values()) == JOBS
    if not overwrite:
        assert told["won"] == 1
    # With overwrite=True a job that commits that begins after another's commit replaces that one, as it was asked to.
    assert told["won"] >= 1
    assert set(told) <= {"won", "CheckpointExistsError", "CommitConflictError"}
    assert whole_at(url, options) in set(map(float, range(1, JOBS + 1)))


def whole_at(url: str, options: dict[str, Any]) -> float:
    """The one value of what is committed there, all of it verified."""
    value = checkpoints.load(url, bp.BucketReader(storage_options=options), elements=100_000)
    assert verify(open_checkpoint(Location.of(url, options))).ok
    return value


@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an old one"])
def test_keeps_the_first_commit_of_two_jobs_that_overwrite_and_tells_the_other(service: Service, over: bool) -> None:
    options, url = service.options, service.url("run/step-1")
    if over:
        assert save(9, url, options, overwrite=True) == "won"
    jobs = (1, 2)
    began, may_go = {number: threading.Event() for number in jobs}, {number: threading.Event() for number in jobs}

    class Waits(bp.SavePlanner):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def resolve_data(self, item: Any) -> Any:
            began[self.number].set()
            assert may_go[self.number].wait(240)
            return super().resolve_data(item)

    with ThreadPoolExecutor(len(jobs)) as pool:
        running = {number: pool.submit(save, number, url, options, True, Waits(number)) for number in jobs}
        assert all(event.wait(240) for event in began.values())
        told = {}
        for number in jobs:
            may_go[number].set()
            told[number] = running[number].result(240)
    assert told == {1: "won", 2: "CommitConflictError"}
    assert whole_at(url, options) == 1.0
    # A save that begins now has seen it.
    assert save(9, url, options, overwrite=True) == "won"
    assert whole_at(url, options) == 9.0
