"""Start and end of a helper: what it inherits, what meets it meanwhile, and who waits for its end."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bucketpoint.errors import HelperProcessError, HelperUnavailableError
from bucketpoint.stores import LocalStore
from bucketpoint.transfer import Meter, ObjectSource, Segment, TransferOptions
from bucketpoint.transfer.helper import messages, process, start
from bucketpoint.transfer.helper.process import UploadHelper
from transfer.helper.orders import MIB, filled_arena, has_ended, meter, stop, upload_of, view_of, wait_until


@pytest.fixture
def helper() -> Iterator[UploadHelper]:
    helper = UploadHelper()
    yield helper
    helper.close()


def upload_nothing(helper: UploadHelper, folder: Path) -> int:
    helper.upload(upload_of(str(folder), [ObjectSource("a", [])]), meter())
    assert helper.process_id is not None
    return helper.process_id


class Changing(UserDict[str, str]):
    """Variables that another thread sets while they are read."""

    failures = 3

    def keys(self) -> Any:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("dictionary changed size during iteration")
        return super().keys()


def test_starts_like_the_trainer_and_fails_by_nothing_odd_in_it(
    helper: UploadHelper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "_args_from_interpreter_flags", lambda: ["-E", "-X", "utf8"])
    monkeypatch.setattr(sys, "path", [None, tmp_path, *sys.path])
    changing = Changing(os.environ)
    monkeypatch.setattr(os, "environ", changing)
    # Another rank makes the folder meanwhile.
    real, answers = LocalStore.identity.fget, iter([f"file://{tmp_path}"])
    assert real is not None
    monkeypatch.setattr(LocalStore, "identity", property(lambda self: next(answers, None) or real(self)))
    socket.setdefaulttimeout(0.05)
    try:
        process = upload_nothing(helper, tmp_path)
    finally:
        socket.setdefaulttimeout(None)
    assert changing.failures == 0
    arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    assert arguments[1:4] == [b"-E", b"-X", b"utf8"]
    before = os.umask(0o077)
    try:
        helper.upload(upload_of(str(tmp_path), [ObjectSource("b/secret", [])]), meter())
    finally:
        os.umask(before)
    assert (tmp_path / "a").exists()
    assert (tmp_path / "b/secret").stat().st_mode & 0o777 == 0o600


def test_refuses_another_bucketpoint(helper: UploadHelper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was installed since this program was started, or that another path leads to."""
    monkeypatch.setattr(messages, "__version__", "0.0.1")
    with pytest.raises(HelperUnavailableError, match=r"imports bucketpoint .*0\.0\.1"):
        upload_nothing(helper, tmp_path)
    assert helper.process_id is None


def test_takes_relative_paths_of_imports_as_the_trainers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "src", "/elsewhere"])
    assert start._paths() == [str(tmp_path), str(tmp_path / "src"), "/elsewhere"]


def test_ignores_and_hides_a_signal_to_the_job_while_it_starts(
    helper: UploadHelper, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    helper.start_soon()
    wait_until(lambda: helper.process_id is not None)
    first = helper.process_id
    assert first is not None
    # Through all of its start, the imports and the interpreter's own.
    for _ in range(20):
        os.kill(first, signal.SIGINT)
        os.kill(first, signal.SIGTERM)
        time.sleep(0.01)
    assert upload_nothing(helper, tmp_path) == first
    assert capfd.readouterr().err == ""


def test_retries_after_a_failure_to_start_that_may_pass(
    helper: UploadHelper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*arguments: Any, **settings: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", busy)
        with pytest.raises(HelperProcessError, match="temporarily") as raised:
            upload_nothing(helper, tmp_path)
    assert not isinstance(raised.value, HelperUnavailableError)
    upload_nothing(helper, tmp_path)


@pytest.mark.broad
def test_replaces_a_process_that_stops_in_the_middle_of_a_message(
    helper: UploadHelper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Twelve of these are longer than the helper's own 5 s, so that the second one may be slow.
    monkeypatch.setattr(process, "SIGN_OF_LIFE_S", 0.5)
    arena = filled_arena(8 * MIB)
    # The answer, a checksum for each block, is larger than the buffers of the channel.
    source = ObjectSource("a", [Segment(arena.nbytes, view_of(arena, 0, arena.nbytes), block_nbytes=32)])
    stopped: list[int] = []

    class Stopping(Meter):
        def add(self, nbytes: int, *, requests: int = 1) -> None:
            super().add(nbytes, requests=requests)
            if self.done_bytes == arena.nbytes and not stopped:
                stopped.append(helper.process_id or 0)
                # Nobody receives meanwhile, so that the answer fills the channel.
                time.sleep(2)
                stop(stopped[0])

    options = TransferOptions(single_put_bytes=1 << 30)
    (done,) = helper.upload(upload_of(str(tmp_path), [source], arena, options=options), Stopping("save", "x", 0, None))
    assert has_ended(stopped[0])
    assert len(done.block_crcs[0]) == arena.nbytes // 32


def test_keeps_others_out_of_the_start_when_the_wait_of_a_fork_is_interrupted() -> None:
    entered, leave = threading.Event(), threading.Event()

    def starting() -> None:
        with start.no_fork:
            entered.set()
            leave.wait(30)

    starter = threading.Thread(target=starting)
    starter.start()
    entered.wait(30)
    with pytest.raises(RuntimeError):
        # What `os.fork` does afterwards, although it could not acquire it.
        start.no_fork.release()
    assert not start.no_fork.acquire(blocking=False)
    leave.set()
    starter.join()


def test_leaves_nothing_of_it_after_ctrl_c_in_the_wait_for_its_end(helper: UploadHelper, tmp_path: Path) -> None:
    first = upload_nothing(helper, tmp_path)
    stop(first)
    # A shell that starts the tests in the background lets them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            helper.close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert has_ended(first)
    assert upload_nothing(helper, tmp_path) != first


def test_ends_a_helper_that_is_dropped_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "END_S", 60.0)
    helper = UploadHelper()
    first = upload_nothing(helper, tmp_path)
    stop(first)
    del helper
    # Whoever waits for it waits until it has been killed.
    assert not has_ended(first)
    os.kill(first, signal.SIGCONT)
    wait_until(lambda: not Path(f"/proc/{first}").exists())
