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
from bucketpoint.retention import Keep
from dcp import process_group_scenarios as scenarios
from dcp import scenarios as save_and_load
from dcp.ranks import Ranks
from kit.kills import Job
from services import Service

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(
    ("how", "world"), [("the default group", 4), ("a group", 2), ("stock", 2), ("stock, staged by torch", 2)]
)
def test_lets_training_talk_on_the_group_of_a_save_which_says_nothing_there(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, how: str, world: int
) -> None:
    ranks = two_ranks if world == 2 else four_ranks
    for talked, groups in ranks.run(scenarios.training_talks_beside_saves, str(tmp_path), how):
        assert talked > 3
        # A save for a group has used the mesh of the default group, which has the same ranks.
        assert groups == [groups[0], groups[0], groups[0] - (how == "a group")]


def test_makes_one_mesh_for_calls_of_all_kinds_and_another_after_a_failure(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(scenarios.calls_of_all_kinds, str(tmp_path)) == [[1, 2]] * 2


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


def test_names_a_rank_of_a_half_that_cannot_stage_or_plan_and_saves_in_all_parts(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    for staging, planning, last in four_ranks.run(scenarios.fail_in_a_half, str(tmp_path))[2:]:
        for error in (staging, planning):
            assert "Rank 3 failed: OSError: no memory left" in error
        assert last == "None"


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_names_ranks_that_disagree_by_their_numbers_in_the_job(four_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for errors in four_ranks.run(scenarios.disagree_in_a_half, str(tmp_path), kind)[2:]:
        for error in errors:
            assert all(text in error for text in ("rank 2: ", "rank 3: ", "rank=3]"))


def test_connects_ranks_of_a_large_group_when_they_first_talk(four_ranks: Ranks, tmp_path: Path) -> None:
    for made, text in four_ranks.run(scenarios.calls_of_a_large_group, str(tmp_path)):
        assert made == ["bucketpoint_lazy_gloo"] * 2
        assert text is not None
        assert "not this one" in text


def test_refuses_the_mesh_in_a_forked_process(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank, text in enumerate(two_ranks.run(scenarios.save_in_a_fork, str(tmp_path))):
        assert f"was forked from rank {rank}" in text


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


def test_raises_on_all_ranks_if_one_may_open_too_few_files(two_ranks: Ranks, tmp_path: Path) -> None:
    for errors in two_ranks.run(scenarios.calls_with_too_few_descriptors, f"file://{tmp_path}"):
        assert len(errors) == 4
        assert any("ulimit -n 4096" in error for error in errors)
        assert all("Rank 1 cannot connect with 2 ranks" in error for error in errors[:3]), errors
        assert "Rank 0 cannot connect with 2 ranks" in errors[3]


def test_saves_without_collectives_and_raises_on_every_rank_why_a_load_fails(
    two_ranks: Ranks, four_ranks: Ranks, service: Service
) -> None:
    each, nothing = service.url("run/each"), service.url("run/nothing")
    two_ranks.run(save_and_load.save_without_collectives, each, service.options)
    names = {key.rsplit("/", 1)[-1] for key in service.listed()}
    assert {"__0.metadata", "__1.metadata"} <= names
    answers = four_ranks.run(save_and_load.load_fails_everywhere, each, service.options)
    assert all("MismatchError" in kinds for kinds in answers)
    answers = two_ranks.run(save_and_load.load_fails_everywhere, nothing, service.options)
    assert answers == [["CheckpointNotFoundError"] * 2] * 2
