"""Forked processes: each has memory, locks, handlers and saves of its own, and leaves those of its parent alone."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import bucketpoint
from bucketpoint import BucketpointError, BucketWriter, CheckpointManager, RetentionPolicy, StagingOptions
from bucketpoint.dcp import error_boundary
from bucketpoint.errors import StagingError
from bucketpoint.forks import no_fork, process_lock, renew_in_child
from bucketpoint.manager.triggers import Signals
from bucketpoint.retention.policy import Keep, Save
from bucketpoint.staging import StagedState, Stager
from bucketpoint.stores.retry import process_budget

FORK = multiprocessing.get_context("fork")


def in_child(work: Callable[[], None], *, within_s: float = 60) -> None:
    """Fork, do some work there, and fail as the child does; also if it does not end."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            # Those of OpenMP do not exist here either.
            torch.set_num_threads(1)
            work()
        except BaseException:  # noqa: BLE001 (reported by the parent)
            os.write(writes, traceback.format_exc().encode())
        os._exit(0)
    os.close(writes)
    until = time.monotonic() + within_s
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read().decode()
    assert not said, said


class Thing:
    """Something that belongs to the process that made it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        renew_in_child(self, Thing._renew)

    def _renew(self) -> None:
        self.owner = os.getpid()


def test_renews_what_lives_in_each_generation_of_children() -> None:
    kept = Thing()
    dropped = weakref.ref(Thing())
    gc.collect()
    assert dropped() is None

    def check() -> None:
        assert kept.owner == os.getpid()

    in_child(lambda: (check(), in_child(check))[0])
    assert kept.owner == os.getpid()


def test_frees_locks_that_other_threads_hold_at_the_fork() -> None:
    lock, entered, leave = process_lock(), threading.Event(), threading.Event()

    def take() -> None:
        assert lock.acquire(blocking=False)
        lock.release()
        assert no_fork.acquire(blocking=False)

    def hold() -> None:
        with lock:
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(60)
    in_child(take)
    assert not lock.acquire(blocking=False)
    leave.set()
    thread.join()


_INTERRUPTED = """
import signal, sys, torch, bucketpoint
folder, interrupted = sys.argv[1], set()
writer = bucketpoint.BucketWriter()

def interrupt(frame, event, argument):
    # A lock of Python code has just been taken for a function of the package, on this thread.
    code, caller = frame.f_code, frame.f_back and frame.f_back.f_code.co_filename
    if event == "c_return" and code.co_filename.endswith(("threading.py", "forks.py")) and "/bucketpoint/" in caller:
        place = caller, frame.f_back.f_lineno
        if place not in interrupted and code.co_name == argument.__name__ in ("acquire", "__enter__"):
            interrupted.add(place)
            signal.raise_signal(signal.SIGINT)

def work():
    bucketpoint.save({"w": torch.ones(9)}, folder + "/save")
    bucketpoint.async_save({"w": torch.ones(9)}, folder + "/async", storage_writer=writer).result(20)
    assert bucketpoint.load(folder + "/save", deadline_s=20)["w"].eq(1).all()

work()
for _ in range(3):
    sys.setprofile(interrupt)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    work()
"""


def test_takes_locks_again_that_an_interrupted_call_was_taking(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _INTERRUPTED, str(tmp_path)], check=True, timeout=300)


def test_counts_requests_of_each_process_by_itself() -> None:
    process_budget().add({"get": 1})

    def check() -> None:
        assert not process_budget().counts

    in_child(check)
    assert process_budget().counts["get"]


@pytest.mark.parametrize("shared", [True, False])
def test_stages_in_memory_of_its_own_in_a_child(shared: bool) -> None:
    stager = Stager(StagingOptions(use_shared_memory=shared))
    staged: Any = stager.stage({"w": torch.full((1000,), 1.0)})

    def stage() -> None:
        mine: Any = stager.stage({"w": torch.full((1000,), 2.0)})
        assert mine["w"].eq(2.0).all()
        with pytest.raises(StagingError, match="forked"):
            staged.items()
        assert stager.staged_bytes == 4032
        stager.close()

    def stage_again() -> None:
        # Threads that copied in the parent do not exist here.
        first: Any = stager.stage({"w": torch.full((1000,), 3.0)})
        assert first["w"].eq(3.0).all()

    in_child(stage)
    assert staged["w"].eq(1.0).all()
    staged = None
    stager.prefault({"w": torch.zeros(1000)})
    in_child(stage_again)
    stager.close()


def test_keeps_other_memory_of_a_child_where_that_of_the_parent_lies() -> None:
    stager = Stager(StagingOptions(use_shared_memory=False))
    staged = [stager.stage({"w": torch.ones(1 << 20)})]

    def drop() -> None:
        # Where the parent's memory lies, other memory may not be.
        own = [torch.full((1 << 20,), 5.0) for _ in range(4)]
        del staged[:]
        gc.collect()
        assert all(tensor.eq(5.0).all() for tensor in own)

    in_child(drop)
    assert isinstance(staged[0], StagedState)
    assert staged[0]["w"].eq(1.0).all()


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Without it no upload begins."""
    event, upload = threading.Event(), BucketWriter._upload
    monkeypatch.setattr(BucketWriter, "_upload", lambda *arguments: (event.wait(60), upload(*arguments))[1])
    yield event
    event.set()


def test_raises_in_a_child_what_waits_for_a_save_of_the_parent(tmp_path: Path, go_on: threading.Event) -> None:
    writer = BucketWriter()
    handle = bucketpoint.async_save(
        {"w": torch.ones(10)}, checkpoint_id=f"{tmp_path}/parent", storage_writer=writer, no_dist=True
    )
    told: list[Future[Any]] = []
    handle.add_done_callback(told.append)

    def wait() -> None:
        with pytest.raises(BucketpointError, match="forked"):
            handle.result()
        assert handle.staged.done()
        assert not told
        assert error_boundary._last is not None
        assert error_boundary._last.failure is None
        go_on.set()
        # Its own save does not wait for the parent's.
        own = bucketpoint.async_save(
            {"w": torch.zeros(10)}, checkpoint_id=f"{tmp_path}/child", storage_writer=writer, no_dist=True
        )
        own.result(60)

    in_child(wait)
    assert not handle.done()
    go_on.set()
    handle.result(60)
    assert bucketpoint.load(f"{tmp_path}/parent")["w"].eq(1).all()
    assert bucketpoint.load(f"{tmp_path}/child")["w"].eq(0).all()
    writer.close()


def test_leaves_a_manager_and_its_save_to_the_parent(tmp_path: Path, go_on: threading.Event) -> None:
    policy = RetentionPolicy(root=str(tmp_path), keep=Keep(latest=1), save=Save(on=("sigterm",)))
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(policy=policy) as manager:
        manager.save(1, {"w": torch.ones(10)})

        def use() -> None:
            assert signal.getsignal(signal.SIGTERM) == before
            with pytest.raises(BucketpointError, match="forked"):
                manager.wait()
            with pytest.raises(BucketpointError, match="forked"), manager:
                manager.save(2, {"w": torch.zeros(10)})
            manager.close()

        in_child(use)
        go_on.set()
        manager.wait()
        assert manager.steps() == [1]


@pytest.fixture
def sigterm() -> Iterator[list[int]]:
    """The previous handler of a program: notes what it gets."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def test_ends_a_process_of_multiprocessing_by_sigterm() -> None:
    signals = Signals(("sigterm",))
    try:
        for _ in range(5):
            process = FORK.Process(target=time.sleep, args=(60,))
            process.start()
            # At once: the signal may come before the child runs any code of its own.
            process.terminate()
            process.join(30)
            assert process.exitcode == -signal.SIGTERM
        assert not signals.seen
        os.kill(os.getpid(), signal.SIGTERM)
        assert list(signals.seen) == ["sigterm"]
    finally:
        signals.close()


def test_restores_handlers_in_any_order_and_never_those_that_were_installed_later(sigterm: list[int]) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    first, second = Signals(("sigterm",)), Signals(("sigterm",))
    first.close()
    signal.raise_signal(signal.SIGTERM)
    assert (list(first.seen), list(second.seen), sigterm) == ([], ["sigterm"], [signal.SIGTERM])
    second.close()
    assert signal.getsignal(signal.SIGTERM) is previous
    third = Signals(("sigterm",))
    noting = signal.getsignal(signal.SIGTERM)
    later: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: (later.append(number), noting(number, frame))[0])  # type: ignore
    third.close()
    signal.raise_signal(signal.SIGTERM)
    assert (later, sigterm) == ([signal.SIGTERM], [signal.SIGTERM] * 2)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="the sender of a signal is not known here")
def test_keeps_the_workers_of_a_data_loader_until_the_parent_ends_them() -> None:
    signals = Signals(("sigterm", "sigusr1"))
    try:
        batches = iter(DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork"))
        next(batches)
        (worker,) = batches._workers  # type: ignore[attr-defined]
        # As a scheduler does, which is no process of the job.
        for name in ("TERM", "USR1"):
            subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
        assert [int(next(batches)) for _ in range(20)] == list(range(1, 21))
        worker.terminate()
        worker.join(30)
        # Torch reports any other as the failure of a worker.
        assert worker.exitcode == 0
    finally:
        signals.close()


_WITHOUT_STREAMS = """
import os, sys, torch, bucketpoint
assert sys.stdin is sys.stdout is sys.stderr is None
url = sys.argv[1]
bucketpoint.save({"w": torch.ones(3)}, url + "/save")
writer = bucketpoint.BucketWriter(transfer=bucketpoint.TransferOptions(background="process"))
state = {"w": torch.ones(1000)}
handle = bucketpoint.async_save(state, checkpoint_id=url + "/async", storage_writer=writer, no_dist=True)
for number in range(3):
    # As a C library warns.
    os.write(number, b"warning")
handle.result()
writer.close()
assert bucketpoint.load(url + "/async")["w"].eq(1).all()
"""


def test_saves_without_standard_streams(tmp_path: Path) -> None:
    def save() -> None:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.close(number)
            setattr(sys, name, None)
        url = str(tmp_path / "async")
        staged: Any = Stager().stage({"w": torch.ones(1000)})
        for number in range(3):
            # As a C library warns.
            os.write(number, b"warning")
        assert staged["w"].eq(1).all()
        # A state that nobody saves goes before the saves of its thread.
        del staged
        for progress in (None, True):
            bucketpoint.save({"w": torch.ones(1000)}, url, progress=progress)
            bucketpoint.load({"w": torch.ones(1000)}, url, progress=progress)

    in_child(save)


@pytest.mark.broad
def test_uploads_by_a_process_without_standard_streams(tmp_path: Path) -> None:
    command = f'exec "{sys.executable}" -W ignore -c "$1" "$2" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", command, "sh", _WITHOUT_STREAMS, str(tmp_path)], timeout=100)
    assert done.returncode == 0
    assert bucketpoint.load(f"{tmp_path}/async")["w"].eq(1).all()
