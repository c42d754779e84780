"""Programs that end while a save is under way: what is there afterwards, and what their exit status says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bucketpoint
from bucketpoint import CheckpointManager, RetentionPolicy
from bucketpoint.retention.policy import Keep
from dcp.saving.ending_programs import HUNG, Ended, Programs, state

pytestmark = pytest.mark.contract

OLD, NEW = 1, 2

LOST = 120
"""Python's exit status for an error in its last steps."""

NO_THREADS_AT_THE_END = (3, 12) <= sys.version_info < (3, 12, 2)
"""Versions that refuse to start threads once the main program is through. DCP needs some to reach its process."""


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    server = Programs()
    yield server
    server.close()


def run(programs: Programs, root: Path, saver: str, *arguments: str, ranks: int = 1) -> tuple[list[Ended], int]:
    """How programs end that save a new state over an old one, and which is there afterwards, whole."""
    url = f"file://{root}/run"
    if saver == "manager":
        with CheckpointManager(url, policy=RetentionPolicy(Keep(5))) as manager:
            manager.save(OLD, state(OLD))
    else:
        bucketpoint.save(state(OLD), url)
    ended = programs.run(root / "output", url, f"--saver={saver}", *arguments, ranks=ranks)
    found = state(0)
    bucketpoint.load(found, bucketpoint.latest_checkpoint(url) if saver == "manager" else url)
    assert torch.equal(found["model"]["weight"], torch.full((1000,), float(found["step"])))
    for one in ended:
        assert HUNG not in one.output, one.output
    return ended, found["step"]


@pytest.mark.parametrize("saver", ["dcp", "async_save", "manager"])
@pytest.mark.parametrize(("end", "status"), [("falls", 0), ("exit-3", 3), ("raises", 1), ("ctrl-c", -2)])
def test_commits_a_save_that_has_begun_however_the_program_ends(
    programs: Programs, tmp_path: Path, saver: str, end: str, status: int
) -> None:
    (ended,), found = run(programs, tmp_path, saver, f"--end={end}")
    # Python forgets that it was interrupted where something is executed from text later, as dataclasses do.
    expected = {status, 1} if end == "ctrl-c" else {status}
    assert ended.status in expected, ended.output
    assert found == NEW, ended.output


@pytest.mark.parametrize("end", ["falls", "raises"])
def test_commits_with_a_checkpoint_process_where_threads_can_be_started(
    programs: Programs, tmp_path: Path, end: str
) -> None:
    (ended,), found = run(programs, tmp_path, "async_save", f"--end={end}", "--process")
    if NO_THREADS_AT_THE_END and found == OLD:
        assert ended.status == LOST, ended.output
    else:
        assert (ended.status, found) == (int(end == "raises"), NEW), ended.output


@pytest.mark.parametrize(
    ("saver", "arguments", "ranks", "status"),
    [
        pytest.param("async_save", ["--end=falls", "--async-staging"], 1, 0, id="asynchronous staging"),
        pytest.param("async_save", ["--end=raises", "--async-staging"], 1, 1, id="asynchronous staging, an error"),
        pytest.param("async_save", ["--end=falls"], 2, 0, id="two ranks"),
        pytest.param("manager", ["--end=close"], 1, 0, id="a manager that is closed"),
        pytest.param("manager", ["--end=sigterm-noted"], 1, 0, id="a manager after SIGTERM"),
        pytest.param("manager", ["--end=ctrl-c-at-the-end"], 1, 0, id="a manager that waits on after Ctrl-C"),
    ],
)
def test_commits_before_the_end_of_a_program_of_another_kind(
    programs: Programs, tmp_path: Path, saver: str, arguments: list[str], ranks: int, status: int
) -> None:
    ended, found = run(programs, tmp_path, saver, *arguments, ranks=ranks)
    assert ([one.status for one in ended], found) == ([status] * ranks, NEW), [one.output for one in ended]


@pytest.mark.parametrize("saver", ["dcp", "async_save", "manager"])
def test_leaves_the_old_checkpoint_after_sigterm_that_nobody_handles(
    programs: Programs, tmp_path: Path, saver: str
) -> None:
    (ended,), found = run(programs, tmp_path, saver, "--end=sigterm")
    assert (ended.status, found) == (-15, OLD), ended.output


@pytest.mark.parametrize("saver", ["dcp", "async_save", "manager"])
def test_fails_the_exit_status_for_a_last_save_that_fails_after_the_program(
    programs: Programs, tmp_path: Path, saver: str
) -> None:
    (ended,), found = run(programs, tmp_path, saver, "--end=falls", "--store-fails")
    assert (ended.status, found) == (LOST, OLD), ended.output
    assert "The last save was lost" in ended.output
    assert "there is no room left" in ended.output


def test_leaves_a_failure_that_the_program_was_told_to_the_program(programs: Programs, tmp_path: Path) -> None:
    (ended,), found = run(programs, tmp_path, "async_save", "--end=told", "--store-fails")
    assert (ended.status, found) == (0, OLD), ended.output


def test_gives_up_the_last_save_by_ctrl_c_and_says_so(programs: Programs, tmp_path: Path) -> None:
    (ended,), found = run(programs, tmp_path, "async_save", "--end=ctrl-c-at-the-end")
    # Torch's own threads may abort the process.
    assert ended.status != 0 or found == NEW, ended.output
