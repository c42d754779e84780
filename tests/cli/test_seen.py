"""Checkpoints of plain writers and of torch in `ls`, `overview` and `prune`, and runs that are not there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.format import keys
from bucketpoint.stores import open_store
from cli.conftest import Program, save
from cli.test_retention import save_run, steps_in, write


def save_with_torch(path: Path) -> None:
    dcp.save({"w": torch.ones(10)}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    """A run of a manager's steps 1 to 3, a plain writer's 4 and torch's own 5; 6 never committed."""
    root = tmp_path / "run"
    save_run(str(root), 1, 2, 3)
    save(str(root / "step-4"))
    save_with_torch(root / "step-5")
    (root / "step-6/data").mkdir(parents=True)
    return str(root)


def test_marks_what_has_no_record_and_says_what_records_it(program: Program, mixed: str) -> None:
    listed = program("ls", mixed)
    assert listed.code == 0
    said = f"2 checkpoints without a record (step 4, 5), which no policy deletes: `bucketpoint gc {mixed} --adopt`"
    assert said in listed.out
    rows = {one["step"]: one for one in program("ls", mixed, "--json").json["checkpoints"]}
    assert {step: one["recorded"] for step, one in rows.items()} == {1: True, 2: True, 3: True, 4: False, 5: False}
    sizes = [path.stat().st_size for path in Path(mixed).glob("step-5/*.distcp")]
    assert (rows[5]["bytes"], rows[5]["token"], rows[5]["url"]) == (sum(sizes), None, f"{mixed}/step-5")
    assert program("gc", mixed, "--adopt").code == 0
    assert "without a record" not in program("ls", mixed).out
    # There is nothing left to adopt, which is fine.
    assert program("gc", mixed, "--adopt").code == 0


def test_prints_commands_that_run_as_printed(program: Program, tmp_path: Path) -> None:
    root = tmp_path / "a run"
    save_with_torch(root / "epoch=7")
    assert "--step-dir 'epoch={step}'" in program("ls", str(root)).err
    listed = program("ls", str(root), "--step-dir", "epoch={step}")
    assert "\n1 checkpoint, 1.5" in listed.out
    (printed,) = re.findall("`bucketpoint (.*?)`", listed.out)
    assert program(*shlex.split(printed)).out == f"{root}/epoch=7\n1 checkpoint adopted\n"


def test_counts_pins_and_keeps_what_has_no_record(program: Program, mixed: str, tmp_path: Path) -> None:
    policy = str(write(tmp_path, mixed))
    before = program("overview", mixed, "--policy", policy, "--json").json
    assert before["now"]["checkpoints"] == 5
    assert before["no_record"]["checkpoints"] == 2
    # Two of the three that have a record, and all that have none.
    assert before["what_if"]["checkpoints"] == 4
    data = list(Path(mixed).glob("step-[45]/**/*.distcp"))
    assert before["no_record"]["bytes"] == sum(path.stat().st_size for path in data)
    assert "without a record" in program("overview", mixed).out
    for options, left in ((["--dry-run"], [1, 2, 3, 4, 5]), ([], [2, 3, 4, 5])):
        said = program("prune", policy, *options, "--json")
        assert (said.code, said.json["unrecorded"]) == (0, [f"{mixed}/step-4", f"{mixed}/step-5"])
        assert "2 checkpoints without a record" in program("prune", policy, *options).out
        assert steps_in(program, mixed) == left
    assert [program("pin", mixed, step).code for step in ("5", "6")] == [0, 3]
    assert program("ls", mixed, "--json").json["checkpoints"][-1]["held"] == ["pinned"]


def test_ends_with_3_and_names_the_url_of_a_run_that_is_not_there(program: Program, root: str, tmp_path: Path) -> None:
    url = f"{root}/typo"
    commands = "ls, overview, prune, gc --adopt, gc --name x, pin, show, verify, verify --all, diff, cp"
    for command in commands.split(", "):
        name, *options = command.split()
        given = [str(write(tmp_path, url))] if name == "prune" else [url]
        given += {"diff": [f"{url}-too"], "cp": [f"{url}-too"], "pin": ["5"]}.get(name, [])
        done = program(name, *options, *given)
        assert done.code == 3, done.out
        assert url in done.err, command
    # And nothing was written there.
    assert program("ls", url).code == 3


def test_lists_a_run_that_has_only_begun(program: Program, tmp_path: Path) -> None:
    (tmp_path / "run/step-6").mkdir(parents=True)
    (tmp_path / "run/step-6/__0_0.distcp").write_bytes(b"x")
    done = program("ls", str(tmp_path / "run"))
    assert done.code == 0
    assert done.out.endswith("has no committed checkpoint; --all lists saves that are under way or died\n")
    first, *saves = program("ls", str(tmp_path / "run"), "--all").out.splitlines()
    assert first == f"{tmp_path}/run has no committed checkpoint"
    assert [save.startswith("a save of step 6 began 20") for save in saves] == [True]


def test_lists_saves_with_and_without_a_log(program: Program, mixed: str) -> None:
    catalog = open_catalog(mixed)
    SaveLog(catalog).begin(catalog.url_of(7), keys.new_token())
    (Path(mixed) / "step-6/__0_0.distcp").write_bytes(b"x")
    listed = program("ls", mixed, "--all", "--json").json
    assert [one["step"] for one in listed["checkpoints"]] == [1, 2, 3, 4, 5]
    assert [(one["step"], one["token"] is None) for one in listed["attempts"]] == [(6, True), (7, False)]


def test_lists_the_runs_of_a_bucket(program: Program, root: str) -> None:
    save_run(f"{root}/a", 1)
    save(f"{root}/b/step-1")
    store, prefix = open_store(root)
    for name in ("notes/readme.txt", "export/model.safetensors"):
        store.put(f"{prefix}/{name}", [memoryview(b"x")])
    assert program("ls", root).out == f"{root}/a\n{root}/b\n2 runs\n"
    assert program("ls", root, "--json").json["runs"] == [f"{root}/a", f"{root}/b"]
    assert program("ls", f"{root}/notes").code == 3
