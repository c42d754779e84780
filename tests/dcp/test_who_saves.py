"""The ranks that save are those that made the call, whatever becomes of the process group before the save."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import bucketpoint as bp
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.deletion.state import look_for_damage
from bucketpoint.catalog.records import adopt
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.dcp import meshes
from bucketpoint.errors import CheckpointNotFoundError, CorruptDataError, IncompleteSaveError, RanksDisagreeError
from bucketpoint.format.record import CommitRecord
from bucketpoint.retention import Keep, RetentionPolicy
from dcp.ranks import Ranks
from staging.helpers import held_copies


def leaves_during_its_last_save(rank: int, world: int, root: str) -> list[str]:
    """Begin saves by a manager and without one, destroy all groups before any copy is made, and tell how calls end."""
    sharded = distribute_tensor(torch.arange(64.0), init_device_mesh("cpu", (world,)), [Shard(0)])
    state = {"model": {"w": torch.ones(8), "sharded": sharded}}
    beside = bp.StagingOptions(use_async_staging=True)
    manager = bp.CheckpointManager(root, policy=RetentionPolicy(Keep(latest=1)), staging=beside)
    first = manager.save(1, state)
    first.result()
    writer = bp.BucketWriter(staging=beside)
    with held_copies():
        second = manager.save(2, state)
        handles = [second, bp.async_save(state, checkpoint_id=f"{root}-other/a", storage_writer=writer)]
        dist.destroy_process_group()
    said = []
    for call in (manager.wait, lambda: manager.save(3, state), manager.steps, manager.close):
        try:
            said.append(str(call()))
        except bp.BucketpointError as error:
            said.append(type(error).__name__)
    said += [type(handle.exception()).__name__ for handle in handles if handle is not None]
    # The ranks go on, as those of another job.
    dist.init_process_group("gloo", store=dist.FileStore(f"{root}-store", world), rank=rank, world_size=world)
    assert meshes.mesh_of(None) is None
    bp.save({"w": torch.ones(8)}, f"{root}-other/b")
    assert bp.load(f"{root}-other/b")["w"].tolist() == [1.0] * 8
    return said


def leaves_during_an_upload(rank: int, world: int, root: str) -> str:
    """Destroy all groups once every rank has its plan and has sent nothing; how that save ends."""
    planned, left = threading.Event(), threading.Event()

    class Waiting(bp.BucketWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            planned.set()
            assert left.wait(120)
            return super().write_data(plan, planner)

    handle = bp.async_save({"w": torch.ones(8)}, checkpoint_id=root, storage_writer=Waiting())
    assert planned.wait(120)
    dist.barrier()
    dist.destroy_process_group()
    left.set()
    said = type(handle.exception(120)).__name__
    dist.init_process_group("gloo", store=dist.FileStore(f"{root}-store", world), rank=rank, world_size=world)
    return said


KEEP = RetentionPolicy(Keep(latest=1))


@contextlib.contextmanager
def half_a_state() -> Iterator[dict[str, Any]]:
    """The state of rank 0 of two: half of a tensor."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        yield {"w": DTensor.from_local(torch.ones(32), mesh, [Shard(0)], run_check=False), "b": torch.ones(3)}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def half() -> Iterator[dict[str, Any]]:
    with half_a_state() as state:
        yield state


@pytest.mark.parametrize("kind", ["a sharded tensor", "values of each rank", "a group made again"])
def test_refuses_the_save_of_dcp_whose_group_is_gone(half: dict[str, Any], tmp_path: Path, kind: str) -> None:
    state = {"b": torch.ones(3), "loader": bp.rank_state(7)} if kind == "values of each rank" else half
    writer = bp.BucketWriter(staging=bp.StagingOptions(use_async_staging=True))
    with held_copies():
        begun: Any = dcp.async_save(state, checkpoint_id=str(tmp_path / "a"), storage_writer=writer)
        dist.destroy_process_group()
        if kind == "a group made again":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(CheckpointException) as raised:
        begun.upload_completion.result()
    (error, _) = raised.value.failures[0]
    assert isinstance(error, RanksDisagreeError)
    assert "one of 2 ranks" in error.message
    assert "destroy_process_group" in str(error.remedy)
    assert not (tmp_path / "a").exists()
    writer.close()


@pytest.mark.parametrize("how", ["dcp.save", "bucketpoint.save"])
def test_refuses_to_commit_a_part_without_a_group(half: dict[str, Any], tmp_path: Path, how: str) -> None:
    dist.destroy_process_group()
    with pytest.raises((CheckpointException, IncompleteSaveError), match="w has only 32 of its 64 elements"):
        if how == "dcp.save":
            dcp.save(half, checkpoint_id=str(tmp_path / "a"), storage_writer=bp.BucketWriter())
        else:
            bp.save(half, tmp_path / "a")
    with pytest.raises(CheckpointNotFoundError):
        bp.load(tmp_path / "a")


def test_refuses_to_commit_the_values_of_one_rank_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(CheckpointException, match="loader has the values of 1 of 2 ranks"):
        dcp.save({"loader": bp.rank_state(7, 0)}, checkpoint_id=str(tmp_path / "a"), storage_writer=bp.BucketWriter())
    assert not (tmp_path / "a" / ".metadata").exists()


@pytest.mark.parametrize("how", ["dcp.save", "bucketpoint.async_save"])
def test_saves_a_part_that_was_said_to_be_one(half: dict[str, Any], tmp_path: Path, how: str) -> None:
    url = str(tmp_path / "step-1")
    if how == "dcp.save":
        dcp.save(half, checkpoint_id=url, storage_writer=bp.BucketWriter(), no_dist=True)
    else:
        bp.async_save(half, checkpoint_id=url, no_dist=True).result()
    saved = open_checkpoint(url)
    assert saved.facts["partial"] is True
    assert verify(saved).ok
    assert saved.record.covers
    target = {"w": DTensor.from_local(torch.zeros(32), half["w"].device_mesh, [Shard(0)], run_check=False)}
    dcp.load(target, storage_reader=bp.BucketReader(url), no_dist=True)
    assert target["w"].to_local().sum() == 32


def test_keeps_the_checkpoint_before_a_save_whose_ranks_leave_and_come_again(two_ranks: Ranks, tmp_path: Path) -> None:
    answers = two_ranks.run(leaves_during_its_last_save, str(tmp_path / "run"))
    assert answers == [[*["RanksDisagreeError"] * 3, "None", *["RanksDisagreeError"] * 2]] * 2
    assert sorted(path.parent.name for path in (tmp_path / "run").glob("*/.metadata")) == ["step-1"]


def test_commits_nothing_by_ranks_that_leave_during_the_upload(two_ranks: Ranks, tmp_path: Path) -> None:
    answers = two_ranks.run(leaves_during_an_upload, str(tmp_path / "step-1"))
    assert answers == ["RanksDisagreeError"] * 2
    assert not (tmp_path / "step-1" / ".metadata").exists()


# -- checkpoints that hold a part of their tensors --------------------------------------------------------------------


@pytest.fixture
def run_with_a_part(tmp_path: Path) -> Path:
    """A run of a whole step 1, and of a step 2 of which only rank 0 was saved, by torch's own writer."""
    with bp.CheckpointManager(tmp_path, policy=KEEP) as manager:
        handle = manager.save(1, {"w": torch.arange(64.0), "b": torch.zeros(3)})
        handle.result()
    with half_a_state() as half:
        dcp.save(half, storage_writer=FileSystemWriter(tmp_path / "step-2"), no_dist=True)
    return tmp_path


@pytest.mark.parametrize("recorded", ["not", "by adopt", "by 0.2"])
def test_prunes_nothing_for_a_part_and_restores_the_whole_one(run_with_a_part: Path, recorded: str) -> None:
    report = verify(open_checkpoint(run_with_a_part / "step-2"))
    assert [(each.kind, each.item, each.message) for each in report.damage] == [
        ("missing-item", "w", "has only 32 of its 64 elements")
    ]
    assert verify(open_checkpoint(run_with_a_part / "step-1")).ok
    catalog = open_catalog(str(run_with_a_part))
    if recorded != "not":
        assert adopt(catalog) == ["step-2"]
    if recorded == "by 0.2":
        for path in (run_with_a_part / "_bucketpoint").rglob("*"):
            if path.is_file() and b'"covers"' in path.read_bytes():
                record = dataclasses.replace(CommitRecord.from_json(path.read_bytes()), covers=None)
                path.write_bytes(record.to_json())
    steps = {one.step: one for one in catalog.with_unrecorded(catalog.steps()).checkpoints}
    assert look_for_damage(catalog, steps[1]) is None
    assert "w has only 32 of its 64 elements" in str(look_for_damage(catalog, steps[2]))
    with bp.CheckpointManager(run_with_a_part, policy=KEEP) as manager:
        report = manager.prune(force=True)
        assert recorded == "not" or "w has only 32 of its 64 elements" in str(report)
        state = {"w": torch.zeros(64), "b": torch.zeros(3)}
        restored = manager.restore(state)
        assert restored.step == 1
        assert [step for step, _ in restored.passed] == [2]
        assert state["w"].sum() == torch.arange(64.0).sum()
        with pytest.raises(CorruptDataError, match="w has only 32 of its 64 elements"):
            manager.restore(state, 2)
