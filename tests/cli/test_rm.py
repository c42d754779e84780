"""`rm`: one checkpoint goes, with the safety of a prune, whoever saved it."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.deletion import remove
from bucketpoint.catalog.deletion.lock import acquire
from bucketpoint.catalog.deletion.remove import Removal, plan_removal
from bucketpoint.stores import DeleteFailure, LocalStore, open_store
from cli.conftest import Program, save
from cli.test_retention import save_run, steps_in
from cli.test_seen import save_with_torch


def files(path: Path) -> list[str]:
    return sorted(str(one.relative_to(path)) for one in path.rglob("*") if one.is_file())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_run(str(tmp_path / "run"), 1, 2, 3)
    return tmp_path / "run"


def test_removes_a_checkpoint_with_its_record_and_leaves_the_others_whole(program: Program, root: str) -> None:
    save_run(root, 1, 2, 3)
    save(f"{root}/step-4")
    would = program("rm", f"{root}/step-2", "--dry-run", "--json").json
    assert (would["ok"], would["deleted"], would["dry_run"], would["recorded"]) == (True, False, True, True)
    assert steps_in(program, root) == [1, 2, 3, 4]
    done = program("rm", f"{root}/step-2", "--yes", "--json")
    assert (done.code, done.json["deleted"], done.json["step"]) == (0, True, 2)
    assert steps_in(program, root) == [1, 3, 4]
    assert program("show", f"{root}/step-2").code == 3
    assert program("verify", f"{root}/step-3").code == 0
    assert program("rm", f"{root}/step-2", "--yes").code == 3
    # Of a plain writer, newest whole one: only by force.
    assert program("rm", f"{root}/step-4", "--yes").code == 1
    done = program("rm", f"{root}/step-4/", "--yes", "--force")
    assert done.code == 0
    assert f"deleted {root}/step-4 (saved" in done.out
    assert steps_in(program, root) == [1, 3]
    assert program("gc", root, "--deep", "--older-than", "1h", "--json").json["objects"] == []


@pytest.mark.parametrize("folder", ["step-4", "epoch=1-step=4", "final"])
@pytest.mark.parametrize("writer", ["bucketpoint", "torch"])
def test_leaves_nothing_of_a_plain_checkpoint_of_any_name(
    program: Program, tmp_path: Path, folder: str, writer: str
) -> None:
    path = tmp_path / "run" / folder
    save(str(path)) if writer == "bucketpoint" else save_with_torch(path)
    (path / "notes.txt").write_text("mine")
    assert program("rm", str(path), "--yes").code == 1
    assert program("rm", str(path), "--yes", "--force").code == 0
    assert files(tmp_path / "run") == [f"{folder}/notes.txt"]


def test_removes_a_damaged_newest_without_force_but_no_whole_one_behind_it(program: Program, run: Path) -> None:
    next((run / "step-3").glob("data/**/*.distcp")).unlink()
    refused = program("rm", str(run / "step-2"), "--yes")
    assert refused.code == 1
    assert "newest whole checkpoint" in refused.out
    assert "--force" in refused.out
    assert program("rm", str(run / "step-3"), "--yes").code == 0
    assert steps_in(program, str(run)) == [1, 2]
    assert files(run / "step-3") == []


@pytest.mark.parametrize("damage", [b"", b"not metadata", None], ids=["empty", "other bytes", "gone"])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "plain"])
def test_removes_a_checkpoint_whose_metadata_is_damaged(
    program: Program, run: Path, damage: bytes | None, recorded: bool
) -> None:
    if not recorded:
        shutil.rmtree(run / "step-3")
        save(str(run / "step-3"))
        for record in run.glob("_bucketpoint/step-N/steps/0000000000000003*"):
            record.unlink()
    metadata = run / "step-3/.metadata"
    metadata.unlink() if damage is None else metadata.write_bytes(damage)
    done = program("rm", str(run / "step-3"), "--yes")
    if damage is None and not recorded:
        assert done.code == 3
        assert "gc --deep" in done.err
        return
    assert done.code == 0, done.out
    assert steps_in(program, str(run)) == [1, 2]
    if recorded:
        assert files(run / "step-3") == []


def test_leaves_what_is_pinned_or_about_to_be_deleted_by_another(program: Program, run: Path) -> None:
    assert program("pin", str(run), "1").code == 0
    refused = program("rm", str(run / "step-1"), "--yes", "--json")
    assert (refused.code, refused.json["refused"]) == (1, "it is pinned")
    assert acquire(open_catalog(str(run)), "another") is not None
    busy = program("rm", str(run / "step-2"), "--yes")
    assert busy.code == 1
    assert "another pruner is running" in busy.out
    assert steps_in(program, str(run)) == [1, 2, 3]


def test_says_what_a_store_refuses_to_delete_and_begins_nothing_without_the_right(
    program: Program, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(run)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", lambda self, keys: [DeleteFailure(key, "EACCES", "no") for key in keys])
        refused = program("rm", str(run / "step-1"), "--yes")
    assert refused.code == 4
    assert "role pruner" in refused.err
    assert files(run) == before
    # The data stays, and the checkpoint is gone.
    delete = LocalStore.delete

    def kept(self: LocalStore, keys: Sequence[str]) -> list[DeleteFailure]:
        data = [key for key in keys if "/data/" in key]
        return [*delete(self, [key for key in keys if key not in data]), *(DeleteFailure(k, "EBUSY", "") for k in data)]

    monkeypatch.setattr(LocalStore, "delete", kept)
    done = program("rm", str(run / "step-1"), "--yes")
    assert done.code == 1
    assert done.out.startswith(f"deleted {run}/step-1 (saved ")
    assert "could not be deleted (EBUSY)" in done.out.splitlines()[0]
    assert program("show", str(run / "step-1")).code == 3
    done = program("rm", str(run / "step-2"), "--yes", "--json")
    assert (done.json["ok"], done.json["deleted"], done.json["refused"]) == (False, True, None)
    assert {failure["code"] for failure in done.json["failures"]} == {"EBUSY"}


def test_asks_and_takes_no_for_an_answer(program: Program, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", io.StringIO())
    nobody = program("rm", str(run / "step-1"))
    assert nobody.code == 2
    assert "--yes" in nobody.err
    for answer, code, left in (("n\n", 1, [1, 2, 3]), ("y\n", 0, [2, 3])):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        assert program("rm", str(run / "step-1")).code == code
        assert steps_in(program, str(run)) == left
    for answer, code in (("n\n", 1), ("y\n", 0)):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        done = program("rollback", str(run), "2", "--grace", "1h")
        assert (done.code, f"Delete 1 checkpoint newer than step 2 of {run}?" in done.err) == (code, True)
        assert ("step 3 will be deleted" in done.out) == (code == 0)
    refused = program("rm", str(run / "step-2"), "--yes", "--json").json["refused"]
    assert refused == "it is the newest whole checkpoint of its run that is not due for deletion, as step 3 is"


def test_leaves_a_nested_run_and_what_is_no_checkpoint(program: Program, run: Path) -> None:
    save(str(run / "step-1/finetune/step-7"))
    (run / "step-9").mkdir()
    (run / "step-9/__0_0.distcp").write_bytes(b"x")
    assert program("rm", str(run / "step-9"), "--yes").code == 3
    assert program("rm", str(run), "--yes").code == 3
    assert program("rm", "s3://bucket", "--yes").code == 2
    assert program("rm", str(run / "step-1"), "--yes").code == 0
    assert program("verify", str(run / "step-1/finetune/step-7")).code == 0
    assert (run / "step-9/__0_0.distcp").exists()


def test_removes_all_checkpoints_of_a_run_but_none_in_use(program: Program, root: str) -> None:
    save_run(f"{root}/run", 1, 2, 3)
    save(f"{root}/run/step-4")
    save(f"{root}/other/step-1")
    everything = ("rm", f"{root}/run", "--run")
    would = program(*everything, "--dry-run")
    assert (would.code, would.out.count(f"would delete {root}/run/step-")) == (0, 4)
    assert program("pin", f"{root}/run", "2").code == 0
    refused = program(*everything, "--yes")
    assert (refused.code, refused.out.endswith("/run: step 2 is pinned\n")) == (1, True)
    would = program(*everything, "--dry-run")
    assert (would.code, "would delete" in would.out, would.out.endswith("is pinned\n")) == (1, False, True)
    unnamed = program("rm", f"{root}/run", "--yes")
    assert (unnamed.code, "or pass --run" in unnamed.err) == (3, True)
    assert steps_in(program, f"{root}/run") == [1, 2, 3, 4]
    assert program("pin", f"{root}/run", "2", "--remove").code == 0
    done = program(*everything, "--yes", "--json")
    assert (done.code, len(done.json["deleted"]), done.json["refused"]) == (0, 4, None)
    assert program(*everything, "--yes").code == 3
    store, prefix = open_store(f"{root}/run")
    assert not [info.key for info in store.list(f"{prefix}/") if "/data/" in info.key]
    assert program("verify", f"{root}/other/step-1").code == 0


def test_removes_a_run_whose_newest_checkpoint_is_damaged_and_one_is_gone(
    program: Program, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "step-3/.metadata").write_bytes(b"damaged")

    def planned(place: Any) -> Removal:
        shutil.rmtree(run / "step-2", ignore_errors=True)
        return plan_removal(place)

    monkeypatch.setattr(remove, "plan_removal", planned)
    done = program("rm", str(run), "--run", "--yes", "--json")
    assert (done.code, done.json["refused"]) == (0, None)
    assert not list(run.glob("step-*/.metadata"))
