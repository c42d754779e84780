"""`bucketpoint.save` and `load`: all ranks or none, by the deadline, whichever rank fails, stalls or dies."""

from __future__ import annotations

import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import bucketpoint as bp
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError
from dcp.deadline import one_call_scenarios as scenarios
from dcp.deadline.one_call_scenarios import state, values
from dcp.ranks import Ranks
from kit import FaultProxy, Stall, always
from kit.kills import Job, Outcome
from services import Service

OLD, NEW = 1.0, 2.0


def saved(url: str, ranks: int = 2, **where: Any) -> None:
    """A checkpoint of so many ranks, which one process saves."""
    merged = state(0, OLD)
    for rank in range(1, ranks):
        merged["model"].update(state(rank, OLD)["model"])
    bp.save(merged, url, **where)


def what_lies_at(url: str, **where: Any) -> float | None:
    """The one value of all that a load finds there; None if there is no checkpoint."""
    found = state(0, 0.0)
    try:
        bp.load(found, url, **where)
    except CheckpointNotFoundError:
        return None
    (value,) = values(found)
    return value


def test_saves_and_loads_in_a_process_alone(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    url = f"file://{tmp_path}/step-1"
    metadata = bp.save(state(0, NEW), url)
    assert "model.shared" in metadata.state_dict_metadata
    assert what_lies_at(url) == NEW
    with pytest.raises(CheckpointNotFoundError):
        bp.load(state(0, 0.0), f"file://{tmp_path}/step-2")
    for wrong in (0, float("nan"), float("inf"), 1e12, "5"):
        with pytest.raises(BucketpointError, match="deadline_s must be a number of seconds above 0"):
            bp.save(state(0, NEW), url, deadline_s=wrong)  # type: ignore[arg-type]
    assert not [warning for warning in recwarn if "torch.distributed is disabled" in str(warning.message)]


def test_raises_our_errors_in_a_process_alone(tmp_path: Path) -> None:
    with pytest.raises(BucketpointError, match="this disk is on fire") as caught:
        bp.save(state(0, NEW), f"file://{tmp_path}/a", planner=scenarios.At(1, scenarios.on_fire))
    assert caught.value.rank == 0
    with pytest.raises(KeyError, match="no such layer"):
        bp.save({"broken": scenarios.Broken()}, f"file://{tmp_path}/a")


def test_leaves_no_threads_behind_a_call(two_ranks: Ranks, tmp_path: Path) -> None:
    for before, after in two_ranks.run(scenarios.threads_after, f"file://{tmp_path}/step-1", 8):
        assert after <= before


def test_raises_an_exception_at_each_item_on_all_ranks_and_harms_nothing(two_ranks: Ranks, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/step-1"
    saved(url)
    first, second = two_ranks.run(scenarios.fail_at_each_item, url)
    assert len(first) == len(second) >= 5
    assert first[-1] is second[-1] is None
    for errors in zip(first[:-1], second[:-1], strict=True):
        for kind, text, rank in errors:
            assert (kind, rank) == ("BucketpointError", 1)
            assert "this disk is on fire" in text
    assert what_lies_at(url) == NEW


def test_tells_ranks_that_wait_for_a_store_of_an_error(two_ranks: Ranks, service: Service, proxy: FaultProxy) -> None:
    # Longer than all else: without being told, rank 0 would come to an error of its own.
    proxy.play(always(Stall(scenarios.HANGS_S), kinds=["PutObject"], keys="*-0-model-*"))
    late = {"deadline_s": 2 * scenarios.HANGS_S, "storage_options": service.at(proxy.url).options}
    first, second = two_ranks.run(partial(scenarios.attempt, by="save", url=service.url("a"), fails=True, **late))
    assert second is not None
    assert first == second
    assert "this disk is on fire" in first[1]
    assert first[2] == 1


@pytest.mark.parametrize("loads", [False, True], ids=["save", "load"])
def test_raises_on_all_ranks_by_the_deadline_if_a_store_stalls_one(
    two_ranks: Ranks, service: Service, proxy: FaultProxy, loads: bool
) -> None:
    url = service.url("a")
    saved(url, storage_options=service.options)
    kind, keys = ("GetObject", "*/data/*") if loads else ("PutObject", "*-1-model-*")
    proxy.play(always(Stall(scenarios.HANGS_S), kinds=[kind], keys=keys))
    by, doing = ("load", "was reading its items") if loads else ("save", "was uploading its items")
    options = service.at(proxy.url).options
    for error in two_ranks.run(partial(scenarios.attempt, by=by, url=url, deadline_s=6.0, storage_options=options)):
        assert f"was not complete after 6 s: rank {0 if loads else 1} {doing}" in error[1]
    assert what_lies_at(url, storage_options=service.options) == OLD


@pytest.mark.parametrize("loads", [False, True], ids=["save", "load"])
def test_names_a_rank_that_stalls_and_raises_there_when_it_goes_on(
    two_ranks: Ranks, tmp_path: Path, loads: bool
) -> None:
    url = f"file://{tmp_path}/step-1"
    saved(url)
    first, second = two_ranks.run(scenarios.stall_until_the_others_raised, url, str(tmp_path), loads)
    assert first[2] == 1
    assert "was not complete after 6 s: rank 1 was" in first[1]
    assert second[0] == "BucketpointError"
    assert what_lies_at(url) == OLD
    # Nothing of it is left in the way of the next call.
    assert two_ranks.run(scenarios.save_and_load, url) == [{OLD}, {OLD}]


def test_names_a_rank_that_never_comes_and_takes_it_back_at_its_next_call(two_ranks: Ranks, tmp_path: Path) -> None:
    (first, again), (_, second) = two_ranks.run(scenarios.stay_away_once, f"file://{tmp_path}/step-1")
    assert "rank 1 does not answer (died, stopped, lost its connection, or never made this call" in first[1]
    assert first[2] == 1
    assert again is None
    assert second is None
    assert what_lies_at(f"file://{tmp_path}/step-1") == 3.0


def test_tells_ranks_at_once_that_they_do_different_things(two_ranks: Ranks, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/step-{{rank}}"
    for error in two_ranks.run(partial(scenarios.attempt, by="save", url=url, deadline_s=2 * scenarios.HANGS_S)):
        assert error[0] == "RanksDisagreeError"
        assert "The ranks make different calls at the same time: rank 0: The save of " in error[1]
        assert "step-0; rank 1: The save of " in error[1]


def test_raises_what_a_state_raises_there_and_tells_the_others(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(scenarios.fail_before_planning, f"file://{tmp_path}/step-1")
    assert second[0] == "KeyError"
    assert first[0] == "BucketpointError"
    assert "KeyError: 'no such layer'" in first[1]
    assert first[2] == 1


def test_raises_the_coordinators_error_on_every_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/step-1"
    saved(url)
    for error in two_ranks.run(partial(scenarios.attempt, by="save", url=url, overwrite=False)):
        assert error[0] == "CheckpointExistsError"
    for error in two_ranks.run(partial(scenarios.attempt, by="load", url=f"{url}-nothing-here")):
        assert error[0] == "CheckpointNotFoundError"


def test_saves_in_two_groups_of_a_job_side_by_side(four_ranks: Ranks, tmp_path: Path) -> None:
    answers = four_ranks.run(scenarios.save_in_two_groups, f"file://{tmp_path}/step")
    assert answers == [{0.0}, {1.0}, {0.0}, {1.0}]


@pytest.mark.parametrize(
    ("number", "loads"),
    [
        pytest.param(signal.SIGKILL, False, id="a save, killed"),
        pytest.param(signal.SIGSTOP, False, id="a save, stopped"),
        pytest.param(signal.SIGKILL, True, id="a load, killed", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, True, id="a load, stopped", marks=pytest.mark.slow),
    ],
)
@pytest.mark.contract
def test_names_a_lost_rank_on_all_others(tmp_path: Path, number: int, loads: bool) -> None:
    url = f"file://{tmp_path}/step-1"
    saved(url, 3)
    # That a connection has closed is seen long before the deadline; of a stopped process nothing is seen.
    deadline_s = 12 if number == signal.SIGSTOP else 2 * scenarios.HANGS_S
    with Job(3) as job:
        job.ready()
        outcomes = job.run(
            scenarios.lose_the_last, url, number, loads, deadline_s, job.groups, timeout_s=2 * scenarios.HANGS_S
        )
    *others, lost = outcomes
    for outcome in others:
        assert outcome.value is not None, outcome
        assert ("12 s" if number == signal.SIGSTOP else "failed") + ": rank 2 does not answer" in outcome.value[1]
        assert outcome.value[2] == 2
    if number == signal.SIGKILL:
        assert lost.died
    else:
        assert lost.value is not None, "it raises too, once it goes on"
        assert lost.value[0] == "BucketpointError"
    assert what_lies_at(url) == OLD


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda one: one.name)
def test_raises_on_ranks_though_the_jobs_store_is_lost_with_rank_0(tmp_path: Path, number: int) -> None:
    url = f"file://{tmp_path}/step-1"
    saved(url, 3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Job(3) as job:
        job.ready()
        for pipe in job._pipes:
            pipe.send((scenarios.lose_the_host_of_the_store, (url, port, number)))
        answers = [job._answer(rank, scenarios.HANGS_S) for rank in (1, 2)]
    for answer in answers:
        assert isinstance(answer, Outcome)
        assert answer.value is not None, answer
        assert "the job's TCP store does not answer" in answer.value[1] or "rank 0 does not answer" in answer.value[1]
    assert what_lies_at(url) == OLD
