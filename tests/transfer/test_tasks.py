"""The task group: bounded, first error wins, the rest is dropped, and leaving means that nothing runs any more."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from bucketpoint.stores import retry
from bucketpoint.transfer import TaskGroup


def test_runs_every_task_before_the_block_is_left_also_those_that_tasks_start() -> None:
    seen: list[int] = []
    with TaskGroup(3) as group:
        for number in range(10):
            group.start(lambda number=number: (seen.append(number), group.start(lambda: seen.append(number + 100)))[0])
    assert sorted(seen) == [*range(10), *range(100, 110)]


def test_runs_no_more_tasks_at_once_than_there_are_workers() -> None:
    running = 0
    most = 0
    lock = threading.Lock()
    gate = threading.Barrier(3, timeout=60)

    def task() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait()
        with lock:
            running -= 1

    with TaskGroup(3) as group:
        for _ in range(9):
            group.start(task)
    assert most == 3


def test_runs_tasks_started_in_a_row_at_once_although_a_thread_was_idle() -> None:
    created, together = threading.Barrier(3, timeout=60), threading.Barrier(8, timeout=20)
    with TaskGroup(8) as group:
        for _ in range(2):
            group.start(created.wait)
        created.wait()
        # Both threads are idle, or soon will be, when the eight tasks are started.
        time.sleep(0.2)
        for _ in range(8):
            group.start(together.wait)


def test_raises_the_first_error_and_drops_what_has_not_begun() -> None:
    ran = threading.Event()

    def fail() -> None:
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"), TaskGroup(1) as group:
        group.start(fail)
        group.start(ran.set)
    assert not ran.is_set()


def test_waits_for_what_runs_after_an_error_in_the_block() -> None:
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def task() -> None:
        begun.set()
        release.wait(60)
        ended.set()

    with pytest.raises(ValueError, match="block"), TaskGroup(2) as group:
        group.start(task)
        assert begun.wait(60)
        threading.Timer(0.05, release.set).start()
        raise ValueError("block")
    assert ended.is_set()


def test_finishes_work_begun_while_the_interpreter_exits() -> None:
    program = """
import os, threading, time
from bucketpoint.transfer.tasks import TaskGroup
def late():
    time.sleep(0.5)
    with TaskGroup(2) as group:
        for number in range(4):
            group.start(lambda number=number: os.write(1, b"ran-%d " % number))
threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert sorted(done.stdout.split()) == ["ran-0", "ran-1", "ran-2", "ran-3"], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the process's")
def test_does_not_keep_the_interpreter_if_an_interrupt_left_the_group_open() -> None:
    code = "from bucketpoint.transfer import TaskGroup; TaskGroup(1).start(int)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_lowers_the_priority_of_threads_but_not_of_the_one_that_waits_for_them() -> None:
    found: list[int] = []
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    with TaskGroup(2, nice=19) as group:
        for _ in range(4):
            group.start(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    assert found == [19] * 4
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_runs_every_task_in_a_sandbox_that_forbids_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: int) -> None:
        raise PermissionError("not in here")

    monkeypatch.setattr(os, "setpriority", forbidden)
    ran: list[int] = []
    with TaskGroup(2, nice=19) as group:
        for number in range(4):
            group.start(lambda number=number: ran.append(number))
    assert sorted(ran) == [0, 1, 2, 3]


def test_begins_a_task_that_a_task_starts_at_once_while_the_group_is_being_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A worker that has ended a task begins to wait behind the thread that leaves the group.
    monkeypatch.setattr(retry, "stop_waiting_on", lambda event: time.sleep(0.1))
    both, begun, in_time = threading.Barrier(2, timeout=60), threading.Event(), []

    def starter() -> None:
        both.wait()
        time.sleep(0.5)
        group.start(begun.set)
        in_time.append(begun.wait(5))

    with TaskGroup(2) as group:
        group.start(both.wait)
        group.start(starter)
    assert in_time == [True]
