"""Names that others have written reach the terminal as text, and never as commands to it."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter
from bucketpoint.cli.app import run
from bucketpoint.cli.text import NOT_FOUND, OUTPUT_FAILED
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Keep, Prune, RetentionPolicy
from bucketpoint.stores import LocalStore
from cli.conftest import Program

HOSTILE = "\x1b]0;title\x07\x1b[2J\r\x9b1m\u202egnp\u2066\x7f\nok: 1 object"
SHOWN = r"\x1b]0;title\x07\x1b[2J\r\x9b1m\u202egnp\u2066\x7f\nok: 1 object"


def save(url: Path, value: float) -> None:
    state = {HOSTILE: torch.full((4,), value), f"only {value} {HOSTILE}": torch.ones(2)}
    dcp.save(state, checkpoint_id=str(url), storage_writer=BucketWriter(), no_dist=True)


def assert_only_text(said: str) -> None:
    assert all(letter.isprintable() or letter == "\n" for letter in said), ascii(said)
    assert "\nok: 1" not in said


def strings(found: Any) -> set[str]:
    """All the text in a JSON document."""
    if isinstance(found, str):
        return {found}
    parts = [*found, *found.values()] if isinstance(found, dict) else found if isinstance(found, list) else []
    return set().union(*map(strings, parts))


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_shows_hostile_names_of_tensors_and_metrics_as_text(program: Program, tmp_path: Path, more: list[str]) -> None:
    root = tmp_path / "run"
    policy = RetentionPolicy(Keep(100), prune=Prune(when="manual"))
    with CheckpointManager(str(root), policy=policy) as manager:
        for step in (1, 2):
            manager.save(step, {HOSTILE: torch.full((3,), float(step)), f"only {step} {HOSTILE}": torch.ones(1)})
    (tmp_path / "policy.yaml").write_text(f"version: 1\nroot: {root}\nkeep: {{latest: 1}}\n")
    assert program("report", str(root), "1", f"loss{HOSTILE}=0.5").code == 0
    assert program("pin", str(root), "1", "--reason", HOSTILE).code == 0
    commands = [
        ["show", str(root / "step-1"), "--tensors"],
        ["diff", str(root / "step-1"), str(root / "step-2")],
        ["ls", str(root)],
        ["prune", "--dry-run", str(tmp_path / "policy.yaml")],
        ["verify", str(root / "step-1")],
        ["cp", str(root / "step-1"), str(tmp_path / "copy")],
    ]
    for command in commands:
        done = program(*command, *more)
        assert_only_text(done.out)
        assert_only_text(done.err)
        if more:
            json.loads(done.out)
        if "--tensors" in command:
            assert (HOSTILE in strings(json.loads(done.out))) if more else (SHOWN in done.out)


def test_shows_hostile_keys_in_errors_tracebacks_and_logs_as_text(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more in ([], ["--debug"], ["--json"]):
        done = program("show", str(tmp_path / HOSTILE), *more)
        assert done.code != 0
        assert_only_text(done.out)
        assert_only_text(done.err.rpartition("Error: ")[2])
        assert SHOWN in done.err
        assert all(letter.isprintable() or letter == "\n" for letter in done.err)
    store = LocalStore(str(tmp_path / "run"))
    save(tmp_path / "run/step-1", 1.0)
    store.put(f"step-1/{HOSTILE}", [memoryview(b"x")])

    def noisy(self: LocalStore, prefix: str, **options: object) -> object:
        logging.getLogger("bucketpoint.anything").warning("found %s", HOSTILE)
        return found(self, prefix, **options)

    found: Callable[..., object] = LocalStore.list
    monkeypatch.setattr(LocalStore, "list", noisy)
    root_logger = logging.getLogger()
    monkeypatch.setattr(root_logger, "handlers", [])
    done = program("ls", str(tmp_path / "run"))
    assert SHOWN in done.err
    assert_only_text(done.out + done.err)


@pytest.mark.parametrize(
    "arguments", [["--version"], ["ls", "--help"], ["ls", "--json", "/nowhere"], ["show", "{saved}"]]
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPIPE, errno.EIO])
def test_exits_with_a_code_of_its_own_if_the_output_is_lost(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1.0)

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    stream = io.StringIO()
    monkeypatch.setattr(stream, "flush", fail)
    monkeypatch.setattr("sys.stdout", stream)
    assert run([argument.format(saved=tmp_path) for argument in arguments]) == OUTPUT_FAILED
    said = capsys.readouterr().err
    # Nobody misses what `head` did not read.
    assert (os.strerror(code) in said) == (code != errno.EPIPE)
    monkeypatch.setattr("sys.stderr", stream)
    assert run(["no such command"]) == OUTPUT_FAILED


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has it")
def test_writes_nothing_behind_an_output_that_is_lost() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bucketpoint", "--version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (74, "Error: The output cannot be written: No space left on device\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_prints_letters_that_the_encoding_of_the_locale_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with CheckpointManager(str(tmp_path), keep=1) as manager:
        manager.save(1, {"\u03bb": torch.ones(1)}, metrics={"\u03bb": 1.0})
    monkeypatch.setattr("sys.stdout", stream)
    for arguments in (["ls", str(tmp_path)], ["show", str(tmp_path), "1"], ["watch", str(tmp_path), "--once"]):
        assert run(arguments) == 0
    # In place of ASCII click writes UTF-8.
    shown = "\u03bb=1" if encoding == "ascii" else "\\u03bb=1"
    assert shown.encode() in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_runs_without_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert run(["ls", "/nowhere"]) == NOT_FOUND
