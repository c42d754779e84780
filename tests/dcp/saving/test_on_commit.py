"""What a program is told of a commit: `on_commit` of `async_save` and of the manager."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

import bucketpoint
from bucketpoint import BucketpointError, BucketWriter, CommitInfo
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Keep, RetentionPolicy
from dcp.ranks import Ranks
from dcp.saving.async_scenarios import FailingPlanner, told_of_commits


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


def test_loads_the_checkpoint_in_on_commit_before_the_handle_is_done(root: str) -> None:
    told: list[tuple[CommitInfo, float, bool]] = []

    def on_commit(info: CommitInfo) -> None:
        loaded = {"weight": torch.zeros(1000)}
        bucketpoint.load(loaded, info.url)
        told.append((info, float(loaded["weight"].sum()), handles[0].done() if handles else False))

    handles: list[bucketpoint.SaveHandle] = []
    handles.append(bucketpoint.async_save({"weight": torch.ones(1000)}, f"{root}/step-1", on_commit=on_commit))
    handles[0].result()
    ((info, total, done),) = told
    assert (info.url, info.step, dict(info.metrics)) == (f"{root}/step-1", None, {})
    # The data, and the headers of its object.
    assert 4000 < info.nbytes < 5000
    assert (total, done) == (1000, False)
    assert 0 < info.blocked_s <= info.commit_s


def test_tells_step_and_metrics_from_a_manager(root: str) -> None:
    told: list[CommitInfo] = []
    policy = RetentionPolicy(Keep(latest=2))
    with CheckpointManager(f"{root}/run", policy=policy, on_commit=told.append) as manager:
        for step in (3, 7):
            manager.save(step, {"weight": torch.full((10,), float(step))}, metrics={"loss": 1 / step})
    assert [(info.url, info.step, dict(info.metrics)) for info in told] == [
        (manager.catalog.url_of(3), 3, {"loss": 1 / 3}),
        (manager.catalog.url_of(7), 7, {"loss": 1 / 7}),
    ]


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_tells_the_coordinator_alone_of_the_bytes_of_all_ranks(two_ranks: Ranks, root: str, executor: str) -> None:
    first, second = two_ranks.run(told_of_commits, root, executor)
    ((url, nbytes),) = first
    assert url == f"{root}/step-1"
    assert 2 * 4000 < nbytes < 2 * 5000
    assert second == []


@pytest.mark.parametrize("kind", [ConnectionError, SystemExit, CheckpointException])
def test_logs_an_error_of_on_commit_without_failing_the_save(
    root: str, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def on_commit(info: CommitInfo) -> None:
        raise kind("the tracker is away", {}) if kind is CheckpointException else kind("the tracker is away")

    with caplog.at_level(logging.ERROR, logger="bucketpoint"):
        bucketpoint.async_save({"weight": torch.ones(3)}, f"{root}/step-1", on_commit=on_commit).result(60)
    assert "is committed, but on_commit raised" in caplog.text
    assert "the tracker is away" in caplog.text


def test_tells_nothing_of_a_save_that_failed(root: str) -> None:
    told: list[CommitInfo] = []
    save = bucketpoint.async_save(
        {"weight": torch.ones(3)}, f"{root}/step-1", planner=FailingPlanner("upload"), on_commit=told.append
    )
    assert save.exception() is not None
    assert told == []


@pytest.mark.parametrize("given", ["a name", FileSystemWriter])
def test_refuses_what_cannot_be_told(root: str, given: object) -> None:
    foreign = given is FileSystemWriter
    with pytest.raises(BucketpointError, match="function of one argument"):
        bucketpoint.async_save(
            {"weight": torch.ones(3)},
            f"{root}/step-1",
            storage_writer=FileSystemWriter(f"{root}/step-1") if foreign else BucketWriter(),
            on_commit=print if foreign else given,  # type: ignore[arg-type]
        )
