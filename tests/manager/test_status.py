"""What a manager says of its run: the training that a crash would lose, the save under way, and counts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from bucketpoint import CheckpointManager, RetentionPolicy
from bucketpoint.retention import InFlight, Keep, Prune, Save
from dcp.saving.async_scenarios import GatedFileSystem

STATE = {"weight": torch.ones(10)}


def policy(when_busy: str = "skip") -> RetentionPolicy:
    return RetentionPolicy(Keep(latest=2), save=Save(in_flight=InFlight(when_busy=when_busy)))  # type: ignore[arg-type]


def test_begins_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", policy=policy()) as manager:
        status = manager.status()
    assert (status.newest_step, status.newest_age_s, status.saving_step, status.saving_s) == (None,) * 4
    assert (status.committed, status.failed, status.skipped, status.pruned_s, status.prune_failure) == (
        0,
        0,
        0,
        None,
        None,
    )


def test_counts_the_age_from_the_call_of_the_save_once_it_is_committed(tmp_path: Path) -> None:
    fs = GatedFileSystem()
    with CheckpointManager(tmp_path / "run", policy=policy(), fs=fs) as manager:
        began = time.monotonic()
        handle = manager.save(3, STATE)
        assert handle is not None
        assert fs.arrived.wait(60)
        assert manager.save(4, STATE) is None
        status = manager.status()
        assert (status.newest_step, status.saving_step, status.skipped) == (None, 3, 1)
        assert status.saving_s is not None
        assert 0 < status.saving_s <= time.monotonic() - began
        fs.gate.set()
        manager.wait()
        committed = time.monotonic()
        status = manager.status()
        assert (status.newest_step, status.saving_step, status.committed) == (3, None, 1)
        assert status.newest_age_s is not None
        assert committed - time.monotonic() + status.newest_age_s >= -1
        assert status.newest_age_s <= time.monotonic() - began


def test_counts_no_checkpoint_of_weights_alone_for_bringing_training_back(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", policy=policy()) as manager:
        manager.save(3, STATE)
        manager.wait()
        manager.save(4, STATE, kind="weights")
        manager.wait()
        status = manager.status()
        restored = manager.restore({"weight": torch.zeros(10)})
    assert restored is not None
    assert (status.newest_step, status.committed) == (restored.step, 2)


def test_counts_as_lost_by_a_crash_what_was_trained_since_a_restore(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", policy=policy()) as manager:
        manager.save(3, STATE)
    with CheckpointManager(tmp_path / "run", policy=policy()) as manager:
        began = time.monotonic()
        manager.restore({"weight": torch.zeros(10)})
        status = manager.status()
        assert status.newest_step == 3
        assert status.newest_age_s is not None
        assert status.newest_age_s <= time.monotonic() - began
        assert status.committed == 0


def test_counts_a_save_that_fails_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    fs = GatedFileSystem()
    fs.gate.set()
    with CheckpointManager(tmp_path / "run", policy=policy("wait"), fs=fs) as manager:
        manager.save(3, STATE)
        manager.wait()
        fs.pipe_file = lambda *args, **kwargs: 1 / 0  # type: ignore[method-assign]
        manager.save(4, STATE)
        with pytest.raises(Exception, match="division"):
            manager.wait()
        status = manager.status()
    assert (status.newest_step, status.committed, status.failed) == (3, 1, 1)


def test_reports_rounds_of_pruning(tmp_path: Path) -> None:
    with CheckpointManager(
        tmp_path / "run", policy=RetentionPolicy(Keep(latest=1), prune=Prune(when="manual"))
    ) as manager:
        manager.save(3, STATE)
        manager.wait()
        assert manager.status().pruned_s is None
        manager.prune()
        status = manager.status()
        assert status.pruned_s is not None
        assert status.pruned_s >= 0
