"""Errors that are not the store's: an exception at each item, and one rank of four that fails, stalls or dies.

Every rank raises, within the process group's timeout, and what was there before is there afterwards.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from bucketpoint.testing import Kill, Script, Stall, always
from bucketpoint.testing.kills import Job, Outcome
from bucketpoint.testing.plugin import MakeProxy
from bucketpoint.testing.servers import S3Server
from bucketpoint.testing.tally import Tally
from faults.saves import Place, state

pytestmark = pytest.mark.slow

OLD, NEW, NEXT = 1, 2, 3
GROUP_TIMEOUT_S = 20.0
GENEROUS_S = 200.0
"""Above the group's timeout by as much as a busy machine may need."""


class FailsAt(DefaultSavePlanner):
    """Raises when the n-th item is asked for."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self.left == 0:
            raise OSError("this disk is on fire")
        self.left -= 1
        return super().resolve_data(write_item)


def error_of(action: Callable[[], None]) -> BaseException | None:
    try:
        action()
    except dcp.CheckpointException as failure:
        return failure
    return None


@pytest.mark.contract
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an old one"])
def test_an_exception_at_each_item_leaves_what_was_there(
    minio: S3Server, fault_proxy: MakeProxy, bucketpoint_tally: Tally, over: bool
) -> None:
    proxy = fault_proxy(minio)
    bucket = minio.make_bucket("items")
    number = 0
    while True:
        place = Place(minio, bucket, f"{number}", 2)
        if over:
            place.save(OLD)
        proxy.clear()
        planner = FailsAt(number)
        error = error_of(lambda place=place, planner=planner: place.through(proxy.url).save(NEW, planner=planner))
        if error is None:
            assert place.load() == NEW
            break
        assert "this disk is on fire" in str(error)
        bucketpoint_tally.made("items at which a save was failed")
        assert place.load() == (OLD if over else None)
        place.sweep()
        assert place.litter(proxy.exchanges) == [], f"item {number}"
        assert place.load(verified=True) == (OLD if over else None)
        place.save(NEXT)
        assert place.load() == NEXT
        number += 1
    assert number >= 5


def fail(rank: int) -> None:
    raise OSError("this disk is on fire")


def stall(rank: int) -> None:
    time.sleep(10_000)


def die(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Afflicted(DefaultSavePlanner):
    """Does something to one rank in the middle of its upload."""

    def __init__(self, rank: int, affliction: Any) -> None:
        super().__init__()
        self.rank, self.affliction = rank, affliction

    def resolve_data(self, write_item: WriteItem) -> Any:
        if int(os.environ["RANK"]) == self.rank and "small" in write_item.index.fqn:
            self.affliction(self.rank)
        return super().resolve_data(write_item)


def save_with(rank: int, world: int, place: Place, planner: SavePlanner) -> None:
    dcp.save(state(world, NEW, own=rank), storage_writer=place.writer(max_attempts=1), planner=planner)


def check(place: Place, outcomes: list[Outcome], seen: Any, *, afflicted: int, over: bool) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank != afflicted:
            assert outcome.text, f"rank {rank} came to {outcome}"
            assert outcome.seconds < GENEROUS_S
    expected = OLD if over else None
    assert place.load() == expected
    place.sweep()
    assert place.load(verified=True) == expected
    assert place.litter(seen) == []
    place.save(NEXT)
    assert place.load() == NEXT


@pytest.mark.parametrize("afflicted", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("affliction", [fail, stall, die], ids=lambda one: one.__name__)
def test_one_rank_of_four_fails_stalls_or_dies(
    minio: S3Server, fault_proxy: MakeProxy, bucketpoint_tally: Tally, affliction: Any, afflicted: int
) -> None:
    proxy = fault_proxy(minio)
    place = Place(minio, minio.make_bucket("ranks"), "run", 4)
    over = afflicted == 0
    if over:
        place.save(OLD)
    planner = Afflicted(afflicted, affliction)
    with Job(4, group_timeout_s=GROUP_TIMEOUT_S) as job:
        job.ready()
        if affliction is stall:
            # The stalled rank says nothing for as long as it is asked; the others are not to wait for it.
            outcomes = job.run(_save_and_leave, place.through(proxy.url), planner, afflicted)
        else:
            outcomes = job.run(save_with, place.through(proxy.url), planner)
    assert outcomes[afflicted].died == (affliction is not fail)
    bucketpoint_tally.made("saves of 4 ranks of which one failed, stalled or died")
    check(place, outcomes, proxy.exchanges, afflicted=afflicted, over=over)


def _save_and_leave(rank: int, world: int, place: Place, planner: SavePlanner, afflicted: int) -> None:
    if rank == afflicted:
        # So that the job ends: this rank alone never would.
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.alarm(int(2 * GROUP_TIMEOUT_S))
    save_with(rank, world, place, planner)


def test_a_store_that_stalls_one_rank_keeps_no_other_waiting(
    minio: S3Server, fault_proxy: MakeProxy, bucketpoint_tally: Tally
) -> None:
    proxy = fault_proxy(minio)
    place = Place(minio, minio.make_bucket("stalled"), "run", 4)
    place.save(OLD)
    proxy.play(always(Stall(2 * GROUP_TIMEOUT_S), kinds=["PutObject", "UploadPart"], keys="*-2-optim-*"))
    with Job(4, group_timeout_s=GROUP_TIMEOUT_S) as job:
        job.ready()
        outcomes = job.run(save_with, place.through(proxy.url), DefaultSavePlanner())
    bucketpoint_tally.made("saves of 4 ranks of which one failed, stalled or died")
    assert all(outcome.text for outcome in outcomes)
    check(place, outcomes, proxy.exchanges, afflicted=2, over=True)


def test_one_rank_is_killed_and_the_others_raise(
    minio: S3Server, fault_proxy: MakeProxy, bucketpoint_tally: Tally
) -> None:
    proxy = fault_proxy(minio)
    place = Place(minio, minio.make_bucket("one"), "run", 4)
    with Job(4, group_timeout_s=GROUP_TIMEOUT_S) as job:
        job.ready()
        killed = Kill(job.groups[3:], others_live=True)
        proxy.play(always(killed, kinds=["UploadPart"], keys="*-3-*", times=1))
        outcomes = job.run(save_with, place.through(proxy.url), DefaultSavePlanner())
    assert outcomes[3].died
    proxy.play(Script())
    bucketpoint_tally.made("saves of 4 ranks of which one failed, stalled or died")
    check(place, outcomes, proxy.exchanges, afflicted=3, over=False)
