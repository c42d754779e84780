"""The kill matrix: SIGKILL to all ranks after each request of a save, in each way of saving.

After each kill the old checkpoint is there or the new one, whole and verified; `gc` leaves nothing else; and the next
save succeeds. The store is MinIO, as the real process dies and the real requests arrive.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from bucketpoint.testing import FaultProxy, Kill, Script, always
from bucketpoint.testing.kills import Job, sampled
from bucketpoint.testing.plugin import MakeProxy
from bucketpoint.testing.servers import S3Server
from bucketpoint.testing.tally import Tally
from faults.checkpoint_process import fork_beforehand
from faults.saves import Place, committed, save_beside

OLD, KILLED, NEXT = 1, 2, 3
SAMPLE = 6
SEED = 20261121

# Against hangs only: one test makes many kills, each of which forks, saves three times and loads three times.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

executors = pytest.mark.parametrize("executor", ["THREAD", "PROCESS"])
bases = pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an old one"])


class Matrix:
    """One way of saving, to be killed anywhere."""

    def __init__(
        self, server: S3Server, proxy: FaultProxy, tally: Tally, world: int, executor: str, over: bool
    ) -> None:
        self.server, self.proxy, self.tally = server, proxy, tally
        self.world, self.executor, self.over = world, executor, over
        self.bucket = server.make_bucket("kills")

    def place(self, name: str) -> Place:
        place = Place(self.server, self.bucket, name, self.world)
        if self.over:
            place.save(OLD)
        self.proxy.clear()
        return place

    def job(self) -> Job:
        return Job(self.world, before=fork_beforehand if self.executor == "PROCESS" else None)

    def requests(self) -> int:
        """How many requests a save makes that nobody disturbs."""
        place = self.place("undisturbed")
        self.proxy.play(Script())
        with self.job() as job:
            job.ready()
            outcomes = job.run(save_beside, place.through(self.proxy.url), KILLED, self.executor)
        assert not [one.text for one in outcomes if one.text or one.died]
        assert place.load() == KILLED
        assert place.litter(self.proxy.exchanges) == []
        return len(self.proxy.exchanges)

    def kill_after(self, number: int) -> None:
        place = self.place(f"kill-{number}")
        with self.job() as job:
            job.ready()
            self.proxy.play(always(Kill(job.groups), skip=number - 1, times=1))
            outcomes = job.run(save_beside, place.through(self.proxy.url), KILLED, self.executor)
        seen = self.proxy.exchanges
        where = f"killed after request {number}"
        assert "kill" in {one.fault for one in seen} or not any(one.died for one in outcomes), where
        if all(one.died for one in outcomes):
            self.tally.made(f"kills of {self.world} rank{'s' if self.world > 1 else ''}, {self.executor}")
        expected = KILLED if committed(seen) else OLD if self.over else None
        assert place.load() == expected, where
        place.sweep()
        assert place.load(verified=True) == expected, f"{where}, then swept"
        assert place.litter(seen) == [], where
        place.save(NEXT)
        assert place.load() == NEXT, where
        place.sweep()
        assert place.litter(seen) == [], f"{where}, then saved again"

    def kill_after_each(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.kill_after(number)


@pytest.mark.contract
@executors
@bases
def test_one_rank_is_killed_after_each_request(
    minio: S3Server, fault_proxy: MakeProxy, bucketpoint_tally: Tally, executor: str, over: bool
) -> None:
    matrix = Matrix(minio, fault_proxy(minio), bucketpoint_tally, 1, executor, over)
    count = matrix.requests()
    assert count >= 10
    matrix.kill_after_each(range(1, count + 1))


@executors
@bases
def test_four_ranks_are_killed_after_some_requests(
    minio: S3Server, fault_proxy: MakeProxy, bucketpoint_tally: Tally, executor: str, over: bool
) -> None:
    matrix = Matrix(minio, fault_proxy(minio), bucketpoint_tally, 4, executor, over)
    count = matrix.requests()
    # The last ones are where the commit is.
    early, late = range(1, count - 5), range(count - 5, count + 1)
    matrix.kill_after_each([*sampled(early, SAMPLE // 2, seed=SEED), *sampled(late, SAMPLE // 2, seed=SEED)])


@pytest.mark.slow
@executors
@bases
def test_four_ranks_are_killed_after_each_request(
    minio: S3Server, fault_proxy: MakeProxy, bucketpoint_tally: Tally, executor: str, over: bool
) -> None:
    matrix = Matrix(minio, fault_proxy(minio), bucketpoint_tally, 4, executor, over)
    matrix.kill_after_each(range(1, matrix.requests() + 1))
