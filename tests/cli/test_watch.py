"""Frames of `watch`: what it says of checkpoints, saves under way, the next prune and damage, and what that costs."""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bucketpoint.catalog.catalog import Catalog, open_catalog
from bucketpoint.catalog.observer import LISTED_ATTEMPTS, Observer
from bucketpoint.catalog.policy_file import read_policy
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.cli import run_lines, text
from bucketpoint.cli.commands import watch as module
from bucketpoint.cli.commands.watch import picture
from bucketpoint.errors import BucketpointError, EndpointError
from bucketpoint.format import catalog_keys, keys
from bucketpoint.format.record import DeletionMarker
from cli.conftest import Program, save
from cli.test_retention import STEPS, save_run, write
from cli.test_seen import save_with_torch
from cli.test_terminal import HOSTILE, SHOWN, assert_only_text
from transfer.wrappers import CountingStore


def begin(root: str, step: int, *sizes: int) -> Catalog:
    """Leave what a save leaves that has begun, and whose objects of these sizes are complete."""
    catalog, token = open_catalog(root), keys.new_token()
    url = catalog.url_of(step)
    SaveLog(catalog).begin(url, token)
    for number, size in enumerate(sizes):
        path = keys.data_path(token, 0, "model", number)
        catalog.store.put(catalog.key(f"{catalog.template.folder(step)}/{path}"), [memoryview(bytes(size))])
    return catalog


def test_says_in_a_frame_what_a_crash_would_lose_and_lists_the_newest_first(program: Program, root: str) -> None:
    save_run(root, *STEPS)
    assert program("report", root, "50", "eval/loss=0.5").code == 0
    assert program("pin", root, "10").code == 0
    said = program("watch", root)
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].startswith(f"{root}  20")
    assert re.fullmatch(r"newest whole checkpoint: step 50, \d+ s old", lines[1])
    assert re.fullmatch(
        r"a crash now loses the training since then: committed 20.* UTC, 1\d\.\d kB in 3 objects, "
        r"its save took \d+\.\d s",
        lines[2],
    )
    steps = [int(line.split()[0]) for line in lines if re.match(r"\d+  ", line)]
    assert steps == [50, 40, 30, 20, 10]
    assert "eval/loss=0.5" in said.out
    assert re.search(r"^10 .*pinned$", said.out, re.MULTILINE)
    assert "prune" not in said.out
    found = program("watch", root, "--json").json
    assert (found["newest"]["step"], found["newest"]["objects"], found["attempts"]) == (50, 3, [])
    assert found["policy"] is None


def test_says_what_keeps_each_under_a_policy_and_what_the_next_prune_does(program: Program, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, *STEPS)
    assert program("report", root, "20", "eval/loss=0.5").code == 0
    file = write(tmp_path, root, grace="1h")
    said = program("watch", root, "--policy", str(file)).out
    assert "PROBLEM" not in said
    shutil.copytree(root, tmp_path / "other")
    elsewhere = f"PROBLEM: the policy is for the run at {root}; the lines show what it would do here\n"
    assert elsewhere in program("watch", str(tmp_path / "other"), "--policy", str(file)).out
    assert re.search(r"^50 .*  kept by latest: 2$", said, re.MULTILINE)
    assert re.search(r"^20 .*  kept by best: eval/loss min 1$", said, re.MULTILINE)
    assert re.search(r"^30 .*  kept by no rule$", said, re.MULTILINE)
    assert "the next prune, after the next save:\n  step 10, 30: to get a tombstone, deleted 1 h later\n" in said
    program("prune", str(file))
    said = program("watch", root, "--policy", str(file)).out
    assert re.search(r"^  step 10, 30: deleted after 20.* UTC, in 59 min \d+ s$", said, re.MULTILINE)
    assert re.search(r"^30 .*  to be deleted after 20.* UTC, in 59 min \d+ s$", said, re.MULTILINE)
    said = program("watch", root).out
    assert re.search(
        r"^checkpoints with a tombstone:\n  step 10, 30: deleted after 20.* in 59 min \d+ s$", said, re.MULTILINE
    )
    catalog = open_catalog(root)
    later = replace(catalog, clock=lambda: catalog.clock() + 3601, now=catalog.clock() + 3601)
    document = module.document_of(later, read_policy(str(file)), Observer(later).look())
    size = text.size(2 * document["newest"]["bytes"])
    assert f"  step 10, 30: deleted, {size}" in [*run_lines.lines(document, later.clock())]
    file.write_text(file.read_text().replace("latest: 2", "latest: 3"))
    assert "step 30: the tombstone is withdrawn" in program("watch", root, "--policy", str(file)).out
    found = program("watch", root, "--policy", str(file), "--json").json
    assert [one["step"] for one in found["policy"]["waiting"]] == [10]
    kept = {row["step"]: row["kept_by"] for row in found["checkpoints"]}
    assert kept[50] == ["safety", "latest: 3"]
    assert kept[10] == []


def test_names_a_policy_of_another_run_and_a_plan_that_is_refused(program: Program, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, *STEPS)
    assert program("gc", root, "--name", "llama").code == 0
    said = program("watch", root, "--policy", str(write(tmp_path, root, count=1))).out
    assert "PROBLEM: the policy is of a run without a name, but this is run llama, so it prunes nothing here" in said
    assert "REFUSED: the plan deletes or thins 3 of 5 checkpoints" in said
    assert f"{root} (run llama)  " in said


def test_sees_an_attempt_on_every_store_and_counts_its_own_objects(program: Program, root: str) -> None:
    save_run(root, 10, 20)
    # The objects of the checkpoint that it would replace are not its own.
    begin(root, 20, 100, 200)
    begin(root, 30)
    found = program("watch", root, "--json").json
    assert [(one["step"], one["objects"], one["bytes"]) for one in found["attempts"]] == [(30, 0, 0), (20, 2, 300)]
    said = program("watch", root).out
    assert "no whole object is in the store yet" in said
    # Step 20 is in the table, committed.
    line = r"a save of step 20 is not committed: began \d+ s ago, 2 of 3 objects, 300 B of .*%\) in the store, the last"
    assert re.search(line, said)


def test_counts_the_objects_of_two_saves_to_one_folder_apart(program: Program, tmp_path: Path) -> None:
    root = tmp_path / "run"
    begin(str(root), 30, 1000, 2000)
    for path in [*root.rglob("*__open__*"), *root.rglob("*.distcp")]:
        os.utime(path, (path.stat().st_mtime - 3600,) * 2)
    begin(str(root), 30, 100)
    found = program("watch", str(root), "--json").json["attempts"]
    assert [(one["step"], one["objects"], one["bytes"]) for one in found] == [(30, 1, 100), (30, 2, 3000)]


def test_counts_data_of_a_writer_without_a_log_as_a_live_or_dead_save(program: Program, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_run(str(root), 10)
    (root / "step-20").mkdir()
    (root / "step-20/__0_0.distcp").write_bytes(bytes(500))
    begin(str(root), 5, 100)
    for path in [*root.rglob("*__open__*"), *(root / "step-5").rglob("*.distcp")]:
        os.utime(path, (1e9, 1e9))
    found = program("watch", str(root), "--json").json["attempts"]
    assert [(one["step"], one["token"] is None, one["bytes"], one["live"]) for one in found] == [
        (20, True, 500, True),
        (5, False, None, False),
    ]
    said = program("watch", str(root)).out
    assert "step 20 is not committed: began 0 s ago, by a writer without a log, 1 of 3 objects, 500 B" in said
    assert f"a save is dead for two days or more: step 5; `bucketpoint gc {root}`" in said


def observed(catalog: Catalog) -> tuple[Observer, CountingStore]:
    store = CountingStore(catalog.store)
    return Observer(replace(catalog, store=store)), store  # type: ignore[arg-type]


def test_takes_few_requests_for_a_look_and_reads_no_data(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, *STEPS)
    observer, store = observed(begin(root, 60, 10))
    begin(root, 70, 10)
    observer.look()
    # Notes, records, folders, and one listing for each attempt. The small reads are of the newest checkpoint's
    # `.metadata` and record, and of the two folders without one.
    assert dict(store.calls) == {"list": 2 + 2, "list_folders": 1, "get": 2 + 2}
    store.calls.clear()
    assert len(observer.look().attempts) == 2
    assert dict(store.calls) == {"list": 2 + 2, "list_folders": 1, "get": 1 + 2}
    assert not [key for key in store.keys if "/data/" in key]


def test_reads_commits_without_a_record_once_and_the_newest_each_time(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(str(tmp_path / f"step-{step}"))
    observer, store = observed(open_catalog(str(tmp_path)))
    assert store.calls["get"] == 0
    observer.look()
    assert store.calls["get"] == 7
    observation = observer.look()
    assert store.calls["get"] == 7 + 1
    assert observation.newest is not None
    assert (observation.newest.step, len(observation.snapshot.checkpoints)) == (7, 7)
    save(str(tmp_path / "step-7"), 2.0, overwrite=True)
    again = observer.look().newest
    assert again is not None
    assert again.created >= observation.newest.created
    assert again.mark != observation.newest.mark


def test_lists_only_the_newest_of_many_attempts(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    for step in range(1, LISTED_ATTEMPTS + 4):
        begin(root, step, 10)
    observer, store = observed(open_catalog(root))
    attempts = observer.look().attempts
    assert store.calls["list"] == 2 + LISTED_ATTEMPTS
    assert [one.objects for one in attempts] == [1] * LISTED_ATTEMPTS + [None] * 3
    assert attempts[0].step == LISTED_ATTEMPTS + 3


def test_watches_a_run_without_a_catalog(program: Program, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(str(root / "step-4"))
    save_with_torch(root / "step-5")
    said = program("watch", str(root))
    assert said.code == 0
    assert "newest whole checkpoint: step 5, " in said.out
    size = sum(path.stat().st_size for path in root.glob("**/*.distcp"))
    assert f"\n{text.size(size)} in all\n" in said.out


def test_ends_with_3_at_a_place_with_nothing_but_not_at_a_run_that_has_begun(program: Program, root: str) -> None:
    nothing = program("watch", f"{root}/typo")
    assert nothing.code == 3
    assert f"{root}/typo" in nothing.err
    begin(f"{root}/begun", 10)
    begun = program("watch", f"{root}/begun")
    assert begun.code == 0
    assert "no whole checkpoint: a crash now loses all of the training" in begun.out
    assert "step 10 is not committed" in begun.out
    save(f"{root}/a")
    assert "is that of a checkpoint, not of a run" in program("watch", f"{root}/a").err


def test_reports_damage_of_the_catalog_in_a_line_and_watches_on(program: Program, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_run(str(root), 10, 20, 30)
    catalog = open_catalog(str(root))
    catalog.write(catalog.own_key(catalog_keys.STEPS, "0000000000000040__damaged"), b"x")
    records = {one.step: Path(root, one.key or "") for one in catalog.snapshot().checkpoints}
    (root / "step-30/.metadata").unlink()
    records[20].write_bytes(b'{"version": 1, "bytes"')
    said = program("watch", str(root))
    assert said.code == 0
    lines = [line for line in said.out.splitlines() if line.startswith("PROBLEM: ")]
    assert lines[:2] == [
        "PROBLEM: 1 object of the catalog is neither record nor note: 0000000000000040__damaged",
        "PROBLEM: step 30 has a record, but no .metadata",
    ]
    assert lines[2].startswith("PROBLEM: the record of step 20 cannot be read: The commit record is not JSON")
    assert "newest whole checkpoint: step 20, " in said.out


def test_shows_no_save_under_way_for_what_is_being_deleted(program: Program, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_run(str(root), 10, 20)
    (root / "step-15").mkdir()
    (root / "step-15/.metadata").write_bytes(DeletionMarker("0123456789ab", 1e9).encode())
    assert program("watch", str(root), "--json").json["attempts"] == []


def drawn(document: dict[str, Any], now: float, *failure: BucketpointError, width: int = 200, height: int = 40) -> str:
    console = Console(file=(said := io.StringIO()), width=width, color_system=None)
    console.print(picture(document, now, *failure, height=height))
    return said.getvalue()


def test_shows_hostile_names_as_text(program: Program, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, 10)
    assert program("report", root, "10", f"{HOSTILE}[bold]=0.5").code == 0
    said = program("watch", root)
    assert_only_text(said.out)
    assert SHOWN in said.out
    catalog = open_catalog(root)
    document = module.document_of(catalog, None, Observer(catalog).look())
    assert_only_text(drawn(document, catalog.clock(), width=400))
    # At 80 columns, too, all metrics are there.
    document["checkpoints"][0]["metrics"] = {f"eval/{name}": 0.123456 for name in ("loss", "accuracy", "perplexity")}
    assert drawn(document, catalog.clock(), width=80).count("0.123456") == 3
    document["checkpoints"][0]["metrics"] = {"[bold]x": 1.0}
    assert "[bold]x=1" in drawn(document, catalog.clock())


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-3, "0 s"), (0.9, "0 s"), (59, "59 s"), (60, "1 min"), (723, "12 min 3 s"), (7200, "2 h"), (187_260, "2 d 4 h")],
)
def test_writes_lengths_of_time_with_two_units(seconds: float, said: str) -> None:
    assert run_lines.duration(seconds) == said


def test_calls_a_checkpoint_late_if_it_is_older_than_saves_are_apart() -> None:
    newest = {"step": 1, "created": 0.0, "bytes": 1, "objects": 1, "seconds": None}
    document = {"newest": newest, "interval_s": 100.0, "attempts": []}
    assert [run_lines.is_late(document, now) for now in (150, 201, 3601)] == [False, True, False]
    # Nothing records that a run has ended: saves stopped long ago, and none is under way.
    ended = "the last saves were 1 min 40 s apart, and there was none for 1 h: the run has ended"
    assert [*run_lines.details(document, 3601.0)][-1] == ended
    assert run_lines.is_late({**document, "attempts": [{"live": True}]}, 3601)
    # Neither the first checkpoint nor one of a run that saves each second is late.
    assert not run_lines.is_late({**document, "interval_s": None}, 1e6)
    assert not run_lines.is_late({**document, "interval_s": 1.0}, 59)


@pytest.mark.parametrize("copied", [90_000.0, -1e6], ids=["dated by the copy", "dated by its save"])
def test_takes_no_copy_of_an_older_step_for_a_save_of_the_run(copied: float) -> None:
    saves = {5: copied, 10: 0.0, 20: 60.0}
    run: Any = [SimpleNamespace(step=step, created=created) for step, created in saves.items()]
    assert module.interval(run) == 60
    assert module.interval(run[:1]) is None


def test_shows_fewer_checkpoints_and_all_of_the_rest_on_a_low_terminal(program: Program, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, *range(1, 14))
    catalog = open_catalog(root)
    document = module.document_of(catalog, None, Observer(catalog).look())
    save = {"step": 20, "live": True, "token": "t", "started": None, "objects": None, "bytes": None}
    for height, saves, rows in ((24, 0, 10), (18, 0, 10), (13, 0, 6), (24, 9, 7), (5, 0, 3)):
        shown = drawn({**document, "attempts": [save] * saves}, catalog.clock(), height=height)
        assert len(re.findall(r"^\d+ +\d+ s", shown, re.MULTILINE)) == rows
        assert f"and {13 - rows} older checkpoints" in shown
        assert rows in (3, 10) or shown.count("\n") == height


def test_reports_a_look_that_fails_and_watches_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path / "run")
    save_run(root, 10)
    observer = Observer(open_catalog(root))
    look, failures = observer.look, []
    turns = iter(["fails", "works", "ctrl-c"])

    def sleep(seconds: float) -> None:
        turn = next(turns)
        if turn == "ctrl-c":
            raise KeyboardInterrupt
        if turn == "works":
            save_run(root, 20)
        monkeypatch.setattr(observer, "look", fail if turn == "fails" else look)

    def fail() -> None:
        raise EndpointError("The store is away")

    def pictured(document: dict[str, Any], now: float, failure: EndpointError | None, *, height: int) -> Any:
        failures.append(failure)
        return picture(document, now, failure, height=height)

    monkeypatch.setattr(module, "picture", pictured)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    result = module._live(observer, None, 1)
    assert result.ok
    assert result.document["newest"]["step"] == 20
    assert {failure.message for failure in failures if failure is not None} == {"The store is away"}
    assert failures[0] is failures[-1] is None
    said = drawn({**result.document, "taken": 0.0}, 65.0, EndpointError("The store is away"), width=100)
    assert "Reading the run failed: The store is away. This is its state 1 min 5 s ago" in said


def test_waits_for_a_run_that_has_not_begun(tmp_path: Path) -> None:
    document = module._document(Observer(open_catalog(str(tmp_path / "later"))), None)
    assert document["newest"] is None
    assert "There is no run at this URL" in document["problems"][0]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals here")
def test_ends_with_0_by_ctrl_c_and_leaves_the_last_frame(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, 10)
    ours, theirs = pty.openpty()
    # A shell starts jobs in the background with SIGINT ignored, which processes inherit.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from bucketpoint.cli import app; sys.exit(app.run())"
    )
    watching = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, "watch", root, "--every", "1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(theirs)
    said = b""
    try:
        while b"newest whole checkpoint: step 10, " not in said:
            said += os.read(ours, 65536)
        save_run(root, 20)
        while b"newest whole checkpoint: step 20, " not in said:
            said += os.read(ours, 65536)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(120) == 0
    finally:
        if watching.poll() is None:
            watching.kill()
        watching.wait()
        os.close(ours)
    assert b"Interrupted" not in said
