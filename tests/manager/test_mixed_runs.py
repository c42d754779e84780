"""A manager in a run into which plain writers save too."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketpointError, BucketWriter, CheckpointExistsError, CheckpointManager, latest_checkpoint
from bucketpoint.catalog import restore_candidates
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.deletion.worker import prune_by
from bucketpoint.catalog.restore_candidates import roll_back
from bucketpoint.retention import Keep, Prune, RetentionPolicy
from manager.manager_scenarios import saved, state, value_of

POLICY = RetentionPolicy(Keep(latest=2), prune=Prune(when="manual", grace=timedelta(0)))


def save_plainly(root: str, step: int) -> None:
    dcp.save(state(step), storage_writer=BucketWriter(f"{root}/step-{step}"), no_dist=True)


@pytest.mark.parametrize("writer", ["bucketpoint", "torch"])
def test_restores_and_continues_from_the_newest_of_a_mixed_run(tmp_path: Path, writer: str) -> None:
    root = str(tmp_path / "run")
    with CheckpointManager(root, policy=POLICY) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    if writer == "torch":
        dcp.save(state(4), storage_writer=dcp.FileSystemWriter(f"{root}/step-4"), no_dist=True)
    else:
        save_plainly(root, 4)
    assert latest_checkpoint(root) == f"{root}/step-4"
    with CheckpointManager(root, policy=POLICY) as manager:
        target = state(0)
        restored = manager.restore(target)
        assert restored is not None
        assert (restored.step, value_of(target)) == (4, 4.0)
        assert manager.steps() == [1, 2, 3, 4]
        with pytest.raises(CheckpointExistsError):
            manager.save(4, state(4))
        saved(manager, 5)
        round_ = manager.prune(force=True)
        assert round_ is not None
        assert {step for step, _ in round_.done.deleted} == {1, 2}
        # What has no record stays.
        assert manager.steps() == [3, 4, 5]


def test_saves_a_plain_step_again_where_the_caller_says_so(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_plainly(root, 4)
    with CheckpointManager(root, policy=POLICY) as manager:
        manager.save(4, state(44), overwrite=True)
    with CheckpointManager(root, policy=POLICY) as manager:
        target = state(0)
        assert manager.restore(target, 4) is not None
        assert value_of(target) == 44.0
        assert manager.steps() == [4]


@pytest.mark.parametrize("damage", ["no metadata", "no data", "rolled back"])
def test_replaces_a_plain_step_that_was_given_up_in_the_next_save_of_it(tmp_path: Path, damage: str) -> None:
    root = str(tmp_path / "run")
    with CheckpointManager(root, policy=POLICY) as manager:
        manager.save(3, state(3))
    for step in (4, 5):
        save_plainly(root, step)
        if damage == "no metadata":
            (tmp_path / f"run/step-{step}/.metadata").write_bytes(b"not metadata")
        elif damage == "no data":
            for path in (tmp_path / f"run/step-{step}/data").rglob("*.distcp"):
                path.unlink()
    with CheckpointManager(root, policy=POLICY) as manager:
        restored = manager.restore(state(0), 3, rollback=True) if damage == "rolled back" else manager.restore(state(0))
        assert restored is not None
        assert restored.step == 3
        manager.save(4, state(44))
        manager.wait()
        target = state(0)
        assert manager.restore(target) is not None
        assert value_of(target) == 44.0


def test_records_what_the_rollback_command_gives_up_and_goes_back_to(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    for step in (3, 4, 5):
        save_plainly(root, step)
    catalog = open_catalog(root)
    assert roll_back(catalog, 4, grace=3600.0, dry_run=True).steps == [5]
    assert catalog.steps().checkpoints == ()
    assert roll_back(catalog, 4, grace=3600.0).steps == [5]
    assert latest_checkpoint(root) == f"{root}/step-4"
    assert [one.step for one in catalog.steps().checkpoints] == [4, 5]


def test_gives_up_nothing_if_a_prune_deletes_the_step_of_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = open_catalog(str(tmp_path / "run"))
    with CheckpointManager(catalog.url, keep=3) as manager:
        for step in (3, 4, 5):
            manager.save(step, state(step))
    looked, policy = (
        restore_candidates.look_for_damage,
        RetentionPolicy(Keep(latest=1), prune=Prune(grace=timedelta(0))),
    )

    def look(*given: Any) -> str | None:
        try:
            return looked(*given)
        finally:
            prune_by(catalog, policy, holder="another")

    monkeypatch.setattr(restore_candidates, "look_for_damage", look)
    with pytest.raises(BucketpointError):
        roll_back(catalog, 4, grace=0.0)
    assert latest_checkpoint(catalog.url) == f"{catalog.url}/step-5"
