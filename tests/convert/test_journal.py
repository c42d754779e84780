"""After an interruption no more is made again than was on its way, and nothing of another attempt stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import bucketpoint.convert.journal as notes
from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME
from bucketpoint.convert import ConvertOptions, plan_conversion, run_conversion
from bucketpoint.errors import StoreError
from bucketpoint.stores.base import DeleteFailure
from bucketpoint.stores.local import LocalStore
from convert.conftest import ONE_BY_ONE, behind, killed

pytest.importorskip("safetensors.torch")

COUNT = 8
ITEM = 64 << 10


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {f"w{n}": torch.full((ITEM // 4,), float(n)) for n in range(COUNT)}
    dcp.save(state, storage_writer=FileSystemWriter(str(tmp_path / "a")), no_dist=True)
    return tmp_path / "a"


def planned(
    monkeypatch: pytest.MonkeyPatch, source: Path, target: Path, *, items: int = 1, allowed: float = float("inf")
) -> Any:
    """A plan for files of so many items each, whose target refuses every PUT after those `allowed`."""
    options = ConvertOptions(shard_bytes=items * ITEM)
    with behind(monkeypatch, killed(lambda name, number: name == "put" and number > allowed)):
        return plan_conversion(source, target, to_format="safetensors", options=options, transfer=ONE_BY_ONE)


def stopped(monkeypatch: pytest.MonkeyPatch, source: Path, target: Path, *, allowed: int, items: int = 1) -> int:
    """A conversion whose store is gone after so many PUTs. Return how many files of this size it has written."""
    plan = planned(monkeypatch, source, target, allowed=allowed, items=items)
    with pytest.raises(StoreError, match="killed"):
        run_conversion(plan)
    return sum((target / entry.key).exists() for entry in plan.layout.objects)


def test_notes_small_objects_together_and_repeats_no_more_than_those(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "NOTE_BYTES", 3 * ITEM)
    monkeypatch.setattr(notes, "NOTE_SECONDS", 1e9)
    plan = planned(monkeypatch, source, tmp_path / "whole")
    run_conversion(plan)
    # The index, and notes of what is to come, of three and three and the last two.
    assert plan.place.store.calls["put"] == COUNT + 1 + 4
    target = tmp_path / "b"
    assert stopped(monkeypatch, source, target, allowed=1 + 3 + 1 + 2) == 5
    plan = planned(monkeypatch, source, target)
    assert run_conversion(plan).skipped == 3
    assert plan.place.store.sent < (COUNT - 3 + 0.5) * ITEM


def test_notes_objects_after_a_while_however_small_they_are(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "NOTE_SECONDS", 0.0)
    plan = planned(monkeypatch, source, tmp_path / "b")
    run_conversion(plan)
    assert plan.place.store.calls["put"] == COUNT + 1 + 1 + COUNT


@pytest.mark.parametrize(("items", "names"), [(2, 4), (COUNT, 1)])
def test_removes_shards_of_another_size_once_the_new_set_is_complete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, items: int, names: int
) -> None:
    monkeypatch.setattr(notes, "NOTE_BYTES", 1)
    target = tmp_path / "b"
    target.mkdir()
    # Somebody's own: of another name; of one that was to be written, and was there before; and one that came later.
    last = target / f"model-{COUNT:05d}-of-{COUNT:05d}.safetensors"
    plan = planned(monkeypatch, source, tmp_path / "unused")
    last.write_bytes(bytes(plan.layout.objects[-1].nbytes))
    (target / "model-00001-of-00099.safetensors").write_bytes(b"somebody's")
    # The last of the four is there and not noted.
    assert stopped(monkeypatch, source, target, allowed=8) == 4
    later = target / f"model-{COUNT - 1:05d}-of-{COUNT:05d}.safetensors"
    later.write_bytes(b"somebody's")
    foreign = {last.name, later.name, "model-00001-of-00099.safetensors"}

    # A run of another size that is killed as well: it has done nothing about the first, and the next knows of both.
    if items == 2:
        stopped(monkeypatch, source, target, items=3, allowed=2)
    assert len(list(target.glob(f"*-of-{COUNT:05d}.safetensors"))) == 6

    plan = planned(monkeypatch, source, target, items=items)
    run_conversion(plan, verify=True)
    made = {entry.key for entry in plan.layout.objects} | ({INDEX_NAME} if names > 1 else set())
    assert len(plan.layout.objects) == names
    assert {path.name for path in target.iterdir()} == made | foreign


def test_logs_what_the_store_refuses_to_delete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LocalStore, "delete", lambda _, keys: [DeleteFailure(key, "Denied", "no") for key in keys])
    options = ConvertOptions(shard_bytes=2 * ITEM)
    run_conversion(plan_conversion(source, tmp_path / "b", to_format="safetensors", options=options))
    assert "were not deleted" in caplog.text
