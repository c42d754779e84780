"""Errors that are not the store's: an exception at each item, and one rank of four that fails, stalls or dies.

Every rank raises, within the process group's timeout, and what was there before is there afterwards.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from dcp.ranks import Ranks
from faults.saves import Place, slow_on_gcs, state
from kit import FaultProxy, Stall, always
from kit.kills import Job, Outcome
from kit.proxied_connection import RecordedRequest
from kit.tally import Tally
from services import Server

OLD, NEW, NEXT = 1, 2, 3
GROUP_TIMEOUT_S = 15.0
STALLED_S = GROUP_TIMEOUT_S + 5
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
@pytest.mark.parametrize("server", ["minio", "gcs"], indirect=True)
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an old one"])
def test_leaves_what_was_there_after_an_exception_at_each_item(
    server: Server, proxy: FaultProxy, bucketpoint_tally: Tally, over: bool
) -> None:
    bucket = server.make_bucket("items")
    number = 0
    while True:
        place = Place(server, bucket, f"{number}", 2)
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
        left(place, proxy.exchanges, OLD if over else None)
        number += 1
    assert number >= 5


def save_failing(rank: int, world: int, place: Place, failing: int, number: int) -> str | None:
    """What this rank raised, where rank `failing` fails at its n-th item."""
    planner = FailsAt(number) if rank == failing else DefaultSavePlanner()
    save = lambda: dcp.save(state(world, NEW, own=rank), storage_writer=place.writer(), planner=planner)  # noqa: E731
    error = error_of(save)
    return None if error is None else str(error)


@pytest.mark.parametrize("over", [pytest.param(False, marks=pytest.mark.slow), True], ids=["fresh", "over an old one"])
def test_raises_an_exception_at_each_item_of_each_of_four_ranks_on_all(
    server: Server, proxy: FaultProxy, bucketpoint_tally: Tally, four_ranks: Ranks, over: bool
) -> None:
    bucket = server.make_bucket("items")
    for failing in range(4):
        for number in itertools.count():
            place = Place(server, bucket, f"{failing}-{number}", 4)
            if over:
                place.save(OLD)
            proxy.clear()
            texts = four_ranks.run(save_failing, place.through(proxy.url), failing, number)
            if texts == [None] * 4:
                break
            assert all("this disk is on fire" in (text or "") for text in texts), texts
            bucketpoint_tally.made("items at which a save of 4 ranks was failed")
            left(place, proxy.exchanges, OLD if over else None)
        assert number >= 2


def fail(rank: int) -> None:
    raise OSError("this disk is on fire")


def die(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def left(place: Place, seen: Sequence[RecordedRequest], expected: int | None) -> None:
    """What a failed save leaves is what was there before it, and nothing else; and the next one succeeds."""
    assert place.load() == expected
    place.sweep()
    assert place.load(verified=True) == expected
    assert place.litter(seen) == []
    place.save(NEXT)
    assert place.load() == NEXT


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
    dcp.save(state(world, NEW, own=rank), storage_writer=place.writer(**place.server.attempts(1)), planner=planner)


def survived(place: Place, proxy: FaultProxy, planner: SavePlanner, *, afflicted: int, over: bool) -> list[Outcome]:
    """Save on four ranks, of which one is afflicted: the others raise in time, and what was there is there."""
    if over:
        place.save(OLD)
    with Job(4, group_timeout_s=GROUP_TIMEOUT_S) as job:
        job.ready()
        outcomes = job.run(save_with, place.through(proxy.url), planner)
    for rank, outcome in enumerate(outcomes):
        if rank != afflicted:
            assert outcome.text, f"rank {rank} came to {outcome}"
            assert outcome.seconds < GENEROUS_S
    left(place, proxy.exchanges, OLD if over else None)
    return outcomes


@slow_on_gcs
@pytest.mark.parametrize("afflicted", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("affliction", [fail, die], ids=lambda one: one.__name__)
def test_survives_failure_or_death_of_one_rank_of_four(
    server: Server, proxy: FaultProxy, bucketpoint_tally: Tally, affliction: Any, afflicted: int
) -> None:
    place = Place(server, server.make_bucket("ranks"), "run", 4)
    planner = Afflicted(afflicted, affliction)
    outcomes = survived(place, proxy, planner, afflicted=afflicted, over=afflicted == 0)
    assert outcomes[afflicted].died == (affliction is not fail)
    bucketpoint_tally.made("saves of 4 ranks of which one failed, stalled or died")


@slow_on_gcs
def test_keeps_no_other_rank_waiting_if_a_store_stalls_one(
    server: Server, proxy: FaultProxy, bucketpoint_tally: Tally
) -> None:
    place = Place(server, server.make_bucket("stalled"), "run", 4)
    proxy.play(always(Stall(STALLED_S), kinds=["PutObject", "UploadPart"], keys="*-2-optim-*"))
    assert all(outcome.text for outcome in survived(place, proxy, DefaultSavePlanner(), afflicted=2, over=True))
    bucketpoint_tally.made("saves of 4 ranks of which one failed, stalled or died")
