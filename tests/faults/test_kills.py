"""The kill matrix: SIGKILL to all ranks after each request of a save, in each way of saving, or to the helper alone.

After each kill the old checkpoint is there or the new one, whole and verified; `gc` leaves nothing else; and the next
save succeeds. The processes are real, they die of a real signal, and the requests before it have arrived.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable

import pytest
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter
from faults.checkpoint_process import fork_beforehand
from faults.saves import Place, committed, save_beside, slow_on_gcs, state
from gcs_server import GCSServer
from kit import FaultProxy, Kill, Script, always
from kit.kills import Job
from kit.tally import Tally
from services import Server
from tiers import sampled

SAMPLE = 6
SEED = 20261121
STARTS_S = 60.0

# Against hangs only: one test makes many kills, each of which forks, saves twice and loads twice.
pytestmark = pytest.mark.timeout(3600)

executors = pytest.mark.parametrize("executor", ["THREAD", "PROCESS", "HELPER"])
bases = pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an old one"])


class Matrix:
    """One way of saving, to be killed anywhere.

    Fresh saves have a run of their own each. The others are all of one run: what follows a kill is the old checkpoint
    of the next.
    """

    def __init__(self, server: Server, proxy: FaultProxy, tally: Tally, world: int, executor: str, over: bool) -> None:
        self.server, self.proxy, self.tally = server, proxy, tally
        self.world, self.executor, self.over = world, executor, over
        self.bucket = server.make_bucket("kills")
        self.values = itertools.cycle(range(1, 250))
        self.old: int | None = None
        # What never changes has an object of its own, which can be copied, from the second save on.
        for _ in range(0 if not over else 2 if executor == "COPY" else 1):
            self.old = next(self.values)
            self.place("").save(self.old)

    def place(self, name: str) -> Place:
        copies = self.executor == "COPY"
        return Place(self.server, self.bucket, "run" if self.over else f"run-{name}", self.world, copies)

    def job(self) -> Job:
        return Job(self.world, before=fork_beforehand if self.executor == "PROCESS" else None)

    def requests(self) -> int:
        """How many requests a save makes that nobody disturbs."""
        place, new = self.place("undisturbed"), next(self.values)
        self.proxy.clear()
        self.proxy.play(Script())
        with self.job() as job:
            job.ready()
            outcomes = job.run(save_beside, place.through(self.proxy.url), new, self.executor)
        assert not [one.text for one in outcomes if one.text or one.died]
        assert place.load() == new
        assert place.litter(self.proxy.exchanges) == []
        self.old = new if self.over else None
        return len(self.proxy.exchanges)

    def kill_after(self, number: int) -> None:
        place, new, newer = self.place(f"{number}"), next(self.values), next(self.values)
        self.proxy.clear()
        with self.job() as job:
            job.ready()
            self.proxy.play(always(Kill(job.groups), skip=number - 1, times=1))
            outcomes = job.run(save_beside, place.through(self.proxy.url), new, self.executor)
        seen = self.proxy.exchanges
        where = f"killed after request {number}"
        assert "kill" in {one.fault for one in seen} or not any(one.died for one in outcomes), where
        if all(one.died for one in outcomes):
            self.tally.made(self.kind)
        expected = new if committed(seen) else self.old
        assert place.load() == expected, where
        place.sweep()
        assert place.load(verified=True) == expected, f"{where}, then swept"
        assert place.litter(seen) == [], where
        place.save(newer)
        assert place.load() == newer, where
        place.sweep()
        assert place.litter(seen) == [], f"{where}, then saved again"
        self.old = newer if self.over else None

    def kill_after_each(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.kill_after(number)

    @property
    def kind(self) -> str:
        ranks = f"{self.world} rank{'s' if self.world > 1 else ''}"
        base = "over an old checkpoint" if self.over else "fresh"
        return f"kills of {ranks}, {self.executor}, {base}{', on GCS' if isinstance(self.server, GCSServer) else ''}"


@executors
@bases
@slow_on_gcs
def test_kills_one_rank_after_each_request(
    server: Server, proxy: FaultProxy, bucketpoint_tally: Tally, executor: str, over: bool
) -> None:
    matrix = Matrix(server, proxy, bucketpoint_tally, 1, executor, over)
    count = matrix.requests()
    assert count >= 10
    matrix.kill_after_each(range(1, count + 1))


@pytest.mark.parametrize("some", [True, False], ids=["some", "each"])
@slow_on_gcs
def test_kills_a_rank_that_has_objects_copied_after_some_requests(
    server: Server, proxy: FaultProxy, bucketpoint_tally: Tally, some: bool
) -> None:
    matrix = Matrix(server, proxy, bucketpoint_tally, 1, "COPY", over=True)
    count = matrix.requests()
    copied = [number for number, one in enumerate(proxy.exchanges, 1) if one.request.kind == "CopyObject"]
    assert copied
    # The copy, the requests beside it, and the last ones, where the commit is.
    matrix.kill_after_each([copied[0] - 1, copied[0], count - 1] if some else range(1, count + 1))


# What the checkpoint process and the helper add is in the matrix of one rank.
SLOW = [pytest.param(executor, marks=pytest.mark.slow) for executor in ("PROCESS", "HELPER")]


@pytest.mark.parametrize("executor", ["THREAD", *SLOW])
@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "each"])
@bases
@slow_on_gcs
def test_kills_four_ranks_after_some_requests(
    server: Server, proxy: FaultProxy, bucketpoint_tally: Tally, executor: str, some: bool, over: bool
) -> None:
    matrix = Matrix(server, proxy, bucketpoint_tally, 4, executor, over)
    count = matrix.requests()
    # The last ones are where the commit is.
    early, late = range(1, count - 5), range(count - 5, count + 1)
    numbers = [*sampled(early, SAMPLE // 2, seed=SEED), *sampled(late, SAMPLE // 2, seed=SEED)]
    matrix.kill_after_each(numbers if some else range(1, count + 1))


def helper_of(writer: BucketWriter) -> int:
    """The process id of a helper that has started and waits for an order."""
    writer.prefault(state(1, 0))
    ends = time.monotonic() + STARTS_S
    # It leads a process group of its own once it runs.
    while (process := writer.uploads.process_id) is None or os.getpgid(process) != process:
        assert time.monotonic() < ends
        time.sleep(0.01)
    return process


@slow_on_gcs
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an old one"])
def test_saves_though_its_helper_is_killed_after_each_request(server: Server, proxy: FaultProxy, over: bool) -> None:
    bucket = server.make_bucket("helper")
    died = requests = 0
    # The first save is not disturbed. Requests of the trainer are counted too: the helper then dies with nothing to do.
    for number in itertools.count():
        if number > requests and number:
            break
        place = Place(server, bucket, "run" if over else f"run-{number}", 1)
        writer = place.through(proxy.url).writer(background="process")
        helper = helper_of(writer)
        proxy.clear()
        proxy.play(always(Kill((helper,), others_live=True), skip=number - 1, times=1) if number else Script())
        dcp.async_save(state(1, 1 + number, own=0), storage_writer=writer, no_dist=True).result()  # type: ignore[union-attr]
        died += writer.uploads.process_id != helper
        requests = requests or len(proxy.exchanges)
        writer.close()
        assert place.load(verified=True) == 1 + number, f"killed after request {number}"
        place.sweep()
        assert place.litter(proxy.exchanges) == [], f"killed after request {number}"
    assert requests >= 9  # with GCS, which has no parts
    assert died >= 3
