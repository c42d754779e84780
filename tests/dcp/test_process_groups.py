"""Saves in the background never talk on a process group of the caller's, and many ranks never work each by itself."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import bucketpoint
from bucketpoint import BucketpointError, BucketWriter, CheckpointManager, RetentionPolicy
from bucketpoint.dcp.process_groups import on_rank_zero
from bucketpoint.retention import Keep
from dcp import process_group_scenarios as scenarios
from dcp.ranks import Ranks

pytestmark = pytest.mark.contract


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    """Ranks that have no group but the default one, and have warned of nothing."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


given = pytest.mark.parametrize("given", ["the default group", "a group"])


@given
def test_a_save_says_nothing_on_the_group_that_it_was_given_and_keeps_its_own(
    two_ranks: Ranks, tmp_path: Path, given: str
) -> None:
    for seen, after in two_ranks.run(scenarios.saves_leave_the_group_alone, str(tmp_path), given):
        assert [counted[:2] for counted in seen] == [(0, 0)] * 2
        assert seen[0][2] == seen[1][2]
        # What is made for a group goes with it: the two of them. The default one's stays.
        assert after == seen[1][2] - (2 if given == "a group" else 0)


@given
@pytest.mark.parametrize("world", [2, 4])
def test_training_may_talk_on_that_group_for_as_long_as_an_upload_takes(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, given: str, world: int
) -> None:
    ranks = two_ranks if world == 2 else four_ranks
    assert min(ranks.run(scenarios.training_talks_during_a_slow_upload, str(tmp_path), given)) > 3


def test_parts_of_a_job_save_by_themselves_and_together(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(scenarios.two_halves_of_the_job, str(tmp_path))


def test_a_default_group_that_is_made_again_has_another_group_beside_it(fresh_ranks: Ranks, tmp_path: Path) -> None:
    fresh_ranks.run(scenarios.another_job_in_the_same_processes, str(tmp_path))


def test_a_bare_async_save_on_the_only_group_warns_once_on_ranks_0_and_1(fresh_ranks: Ranks, tmp_path: Path) -> None:
    for how in ("save", "alone"):
        assert fresh_ranks.run(scenarios.what_is_logged, str(tmp_path / how), how) == [[], []], how
    for said in fresh_ranks.run(scenarios.what_is_logged, str(tmp_path / "beside"), "beside"):
        assert len(said) == 1
        assert 'process_group=dist.new_group(backend="gloo")' in said[0]
        assert "bucketpoint.async_save" in said[0]
    assert fresh_ranks.run(scenarios.what_is_logged, str(tmp_path / "again"), "default") == [[], []]


@pytest.mark.parametrize("how", ["group", "bucketpoint"])
def test_a_save_with_a_group_of_its_own_warns_of_nothing(fresh_ranks: Ranks, tmp_path: Path, how: str) -> None:
    assert fresh_ranks.run(scenarios.what_is_logged, str(tmp_path), how) == [[], []]


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
def test_one_of_many_ranks_without_a_process_group_is_told_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any, rank: int
) -> None:
    alone(monkeypatch, rank)
    with pytest.raises(BucketpointError, match=rf"rank {rank} of 4 ranks.*init_process_group\(\)"):
        call(f"file://{tmp_path}/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("save", [dcp.save, dcp.async_save])
def test_so_is_a_bare_writer_on_any_rank_but_0_which_may_mean_to_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any
) -> None:
    alone(monkeypatch, 2)
    with pytest.raises(dcp.CheckpointException, match=r"init_process_group\(\)"):
        begun = save(state(), checkpoint_id=f"file://{tmp_path}/run", storage_writer=BucketWriter())
        begun.result()
    assert list(tmp_path.iterdir()) == []
    alone(monkeypatch, 0)
    dcp.save(state(), checkpoint_id=f"file://{tmp_path}/run", storage_writer=BucketWriter(), no_dist=True)


def test_a_rank_of_a_job_with_a_process_group_may_save_something_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch, 3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dcp.save(state(), checkpoint_id=f"file://{tmp_path}/run", storage_writer=BucketWriter(), no_dist=True)
        bucketpoint.async_save(state(), checkpoint_id=f"file://{tmp_path}/2", no_dist=True).result()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("raised", [ValueError("no store"), BucketpointError("no store", url="s3://b/run")])
def test_an_error_of_any_kind_on_rank_zero_is_the_same_error_on_all_ranks(raised: Exception) -> None:
    sent: list[bytes] = []

    def send(outcome: Any) -> Any:
        sent.append(pickle.dumps(outcome))
        return outcome

    def fail() -> None:
        raise raised

    with pytest.raises(BucketpointError, match="no store") as here:
        on_rank_zero(fail, 0, send)
    with pytest.raises(BucketpointError, match="no store") as there:
        on_rank_zero(fail, 1, lambda _: pickle.loads(sent[0]))
    assert str(there.value) == str(here.value)
    assert raised in (here.value, here.value.__cause__)
