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
    save = Save(in_flight=InFlight(when_busy=when_busy))  # type: ignore[arg-type]
    return RetentionPolicy(Keep(latest=2), save=save, prune=Prune(when="manual"))


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


def test_counts_what_training_can_come_back_to_after_a_save_a_restore_and_a_prune(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", policy=policy()) as manager:
        status = manager.status()
        assert (status.newest_step, status.newest_age_s, status.saving_step, status.saving_s) == (None,) * 4
        assert (status.committed, status.failed, status.skipped) == (0, 0, 0)
        assert (status.pruned_s, status.prune_failure) == (None, None)
        manager.save(3, STATE)
        manager.wait()
        # Training cannot go on from weights alone.
        manager.save(4, STATE, kind="weights")
        manager.wait()
        status = manager.status()
        assert (status.newest_step, status.committed, status.pruned_s) == (3, 2, None)
        manager.prune()
        status = manager.status()
        assert status.pruned_s is not None
        assert status.pruned_s >= 0
    with CheckpointManager(tmp_path / "run", policy=policy()) as manager:
        began = time.monotonic()
        manager.restore({"weight": torch.zeros(10)})
        status = manager.status()
        assert (status.newest_step, status.committed) == (3, 0)
        # A crash would lose what was trained since.
        assert status.newest_age_s is not None
        assert status.newest_age_s <= time.monotonic() - began


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
