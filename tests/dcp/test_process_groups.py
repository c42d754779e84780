"""Saves never talk on a process group of the caller's, and what one rank meets is told to all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import bucketpoint
from bucketpoint import BucketpointError, BucketWriter, CheckpointManager, RetentionPolicy
from bucketpoint.dcp import meshes
from bucketpoint.retention import Keep
from dcp import process_group_scenarios as scenarios
from dcp import scenarios as save_and_load
from dcp.ranks import Ranks
from kit.kills import Job
from services import Service

pytestmark = pytest.mark.contract


given = pytest.mark.parametrize("given", ["the default group", "a group"])


@given
def test_sends_nothing_over_the_given_group_in_a_save_and_keeps_its_own(
    two_ranks: Ranks, tmp_path: Path, given: str
) -> None:
    for seen, after in two_ranks.run(scenarios.saves_leave_the_group_alone, str(tmp_path), given):
        assert [counted[:2] for counted in seen] == [(0, 0)] * 2
        assert seen[0][2] == seen[1][2]
        # It has used the mesh of the default group, which has the same ranks.
        assert after == seen[1][2] - (given == "a group")


@given
@pytest.mark.parametrize("world", [2, 4])
def test_lets_training_talk_on_that_group_as_long_as_an_upload_takes(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, given: str, world: int
) -> None:
    ranks = two_ranks if world == 2 else four_ranks
    assert min(ranks.run(scenarios.training_talks_during_a_slow_upload, str(tmp_path), given)) > 3


def test_saves_in_parts_of_a_job_alone_and_together(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(scenarios.two_halves_of_the_job, str(tmp_path))


def test_makes_another_mesh_for_a_default_group_that_is_made_again(fresh_ranks: Ranks, tmp_path: Path) -> None:
    fresh_ranks.run(scenarios.another_job_in_the_same_processes, str(tmp_path))


def test_saves_nothing_once_the_default_group_is_destroyed(fresh_ranks: Ranks, tmp_path: Path) -> None:
    outcomes = fresh_ranks.run(scenarios.destroy_during_a_save, str(tmp_path))
    assert outcomes == [[*["RanksDisagreeError"] * 3, "None", "step-1"]] * len(outcomes)


def test_makes_one_mesh_for_calls_of_all_kinds_and_another_after_a_failure(fresh_ranks: Ranks, tmp_path: Path) -> None:
    assert fresh_ranks.run(scenarios.calls_of_all_kinds, str(tmp_path)) == [[1, 2]] * 2


def test_names_the_rank_that_is_lost_in_a_save_by_its_number_in_the_job(tmp_path: Path) -> None:
    with Job(4) as job:
        job.ready()
        first, *others, lost = job.run(scenarios.lose_the_last, str(tmp_path))
    assert (first.value, lost.died) == (None, True)
    for outcome in others:
        assert outcome.value is not None, outcome
        kind, text, rank = outcome.value
        assert (kind, rank) == ("PeerFailedError", 3)
        assert "rank 3 died" in text
        assert "committed only if" in text


def test_names_a_rank_that_cannot_stage_or_plan_by_its_number_and_saves_again(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    for rank, (*errors, last) in enumerate(four_ranks.run(scenarios.fail_in_a_half, str(tmp_path))):
        for error in errors:
            assert f"Rank {rank // 2 * 2 + 1} failed: OSError: no memory left" in error
        assert last == "None"


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_names_ranks_that_disagree_by_their_numbers_in_the_job(four_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for rank, errors in enumerate(four_ranks.run(scenarios.disagree_in_a_half, str(tmp_path), kind)):
        first = rank // 2 * 2
        for error in errors:
            assert f"rank {first}: " in error
            assert f"rank {first + 1}: " in error
            assert f"rank={first + 1}]" in error


def test_connects_ranks_of_a_large_group_when_they_first_talk(four_ranks: Ranks, tmp_path: Path) -> None:
    for made, text in four_ranks.run(scenarios.calls_of_a_large_group, str(tmp_path)):
        assert made == ["bucketpoint_lazy_gloo"] * 2
        assert text is not None
        assert "not this one" in text


def test_refuses_the_mesh_in_a_forked_process(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank, text in enumerate(two_ranks.run(scenarios.save_in_a_fork, str(tmp_path))):
        assert f"was forked from rank {rank}" in text


@pytest.mark.parametrize("stages", ["writer", "torch"])
def test_moves_a_stock_async_save_off_the_default_group(two_ranks: Ranks, tmp_path: Path, stages: str) -> None:
    assert min(two_ranks.run(scenarios.stock_save_beside_training, str(tmp_path), stages)) > 3


# -- several ranks without a process group ----------------------------------------------------------------------------


def alone(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """What torchrun says, in a script that does not call `init_process_group`."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")


def state() -> dict[str, Any]:
    return {"model": {"w": torch.ones(4)}}


def begin_a_manager(url: str) -> None:
    CheckpointManager(url, policy=RetentionPolicy(Keep(1)))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda url: bucketpoint.save(state(), url), id="save"),
        pytest.param(lambda url: bucketpoint.load(state(), url), id="load"),
        pytest.param(lambda url: bucketpoint.async_save(state(), checkpoint_id=url), id="async_save"),
        pytest.param(begin_a_manager, id="manager"),
    ],
)
@pytest.mark.parametrize("rank", [0, 3])
def test_tells_one_of_many_ranks_without_a_process_group_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any, rank: int
) -> None:
    alone(monkeypatch, rank)
    with pytest.raises(BucketpointError, match=rf"rank {rank} of 4 ranks.*init_process_group\(\)"):
        call(f"file://{tmp_path}/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("save", [dcp.save, dcp.async_save])
def test_tells_a_bare_writer_so_on_any_rank_but_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any) -> None:
    alone(monkeypatch, 2)
    with pytest.raises(dcp.CheckpointException, match=r"init_process_group\(\)"):
        begun = save(state(), checkpoint_id=f"file://{tmp_path}/run", storage_writer=BucketWriter())
        begun.result()
    assert list(tmp_path.iterdir()) == []
    alone(monkeypatch, 0)
    dcp.save(state(), checkpoint_id=f"file://{tmp_path}/run", storage_writer=BucketWriter(), no_dist=True)


def test_lets_a_rank_of_a_job_with_a_process_group_save_something_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch, 3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dcp.save(state(), checkpoint_id=f"file://{tmp_path}/run", storage_writer=BucketWriter(), no_dist=True)
        bucketpoint.async_save(state(), checkpoint_id=f"file://{tmp_path}/2", no_dist=True).result()
    finally:
        dist.destroy_process_group()


def test_raises_on_all_ranks_if_one_may_open_too_few_files(fresh_ranks: Ranks, tmp_path: Path) -> None:
    for errors in fresh_ranks.run(scenarios.calls_with_too_few_descriptors, f"file://{tmp_path}"):
        assert len(errors) == 4
        assert all("Rank 1 cannot connect with 2 ranks" in error for error in errors[:3]), errors
        assert "Rank 0 cannot connect with 2 ranks" in errors[3]


def test_names_the_limit_of_open_files_before_ranks_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 1000))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(BucketpointError, match="ulimit -n 4096"):
            meshes.group_beside(None)
    finally:
        dist.destroy_process_group()


pytestmark = pytest.mark.contract


@pytest.fixture
def root(service: Service) -> str:
    return service.url("run")


def test_reads_a_save_without_collectives_on_as_many_ranks(
    two_ranks: Ranks, four_ranks: Ranks, service: Service, root: str
) -> None:
    two_ranks.run(save_and_load.save_without_collectives, f"{root}/each", service.options)
    names = {key.rsplit("/", 1)[-1] for key in service.listed()}
    assert {"__0.metadata", "__1.metadata"} <= names
    answers = four_ranks.run(save_and_load.load_fails_everywhere, f"{root}/each", service.options)
    assert all("MismatchError" in kinds for kinds in answers)


def test_raises_the_reason_on_every_rank_that_loads_nothing(two_ranks: Ranks, service: Service, root: str) -> None:
    answers = two_ranks.run(save_and_load.load_fails_everywhere, f"{root}/nothing", service.options)
    assert answers == [["CheckpointNotFoundError"] * 2] * 2
