"""Saves of a training program: how one that fails is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bucketpoint import BucketpointError, BucketWriter
from bucketpoint.dcp import process_groups
from bucketpoint.integrations.training_state import Saves, job_ranks
from dcp.ranks import Ranks
from dcp.saving.async_scenarios import GatedFileSystem
from manager.agree_scenarios import committed, failing_copy, full_disk, said


def test_shows_that_the_save_fails_despite_ctrl_c_in_a_wait(tmp_path: Path) -> None:
    gated = GatedFileSystem()
    saves = Saves(BucketWriter(fs=gated))
    handle = saves.save(str(tmp_path / "file" / "step-1"), {"weight": torch.ones(3)})
    with mock.patch.object(handle, "result", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        saves.wait()
    (tmp_path / "file").touch()
    gated.gate.set()
    with pytest.raises(BucketpointError):
        saves.wait()
    # It is raised once.
    saves.wait()


def save_where_one_rank_fails(rank: int, world: int, root: str) -> Any:
    """Rank 1 cannot make its state at save 1, and cannot copy it at save 2; save 3 fails for all, and rank 0 knows."""
    saves = Saves(BucketWriter())

    def make() -> dict[str, Any]:
        return {"weight": torch.ones(3)}

    def no_state() -> dict[str, Any]:
        raise ValueError("no state")

    def save(step: int, make: Callable[[], dict[str, Any]] = make) -> str:
        return said(lambda: saves.save(f"{root}/step-{step}", make))

    outcomes = [save(1, no_state if rank == 1 else make)]
    with failing_copy(rank == 1):
        outcomes.append(save(2))
    with full_disk(True):
        outcomes.append(save(3))
        assert saves._last is not None
        saves._last.wait()
    if rank == 0:
        assert said(saves.wait) != "done"
    outcomes += [save(4), said(saves.wait)]
    return outcomes, committed(root)


def test_raises_on_all_ranks_and_goes_on_with_the_next_save(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        results = ranks.run(save_where_one_rank_fails, str(tmp_path))
    no_state = "BucketpointError: Rank 1 failed: ValueError: no state"
    no_copy = "StagingError: Copying the state to host memory failed: no room"
    assert results == [([no_state, no_copy, "done", "done", "done"], ["step-4"])] * 2


def test_saves_in_a_job_of_one_rank(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        saves = Saves(BucketWriter())
        for step in (1, 2):
            saves.save(f"{tmp_path}/run/step-{step}", {"weight": torch.ones(3)})
        saves.wait()
        # The group of the job's ranks waits as long as the job's own.
        group = job_ranks("a test").group
        assert process_groups.timeout_of(group) >= process_groups.timeout_of(None)
    finally:
        dist.destroy_process_group()
    assert committed(str(tmp_path / "run")) == ["step-1", "step-2"]
