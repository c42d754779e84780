"""What ranks do with a manager while an upload is slow on purpose. Each function runs on every rank at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from background import LEAST_BYTES
from bucketpoint.dcp.saving import uploads
from bucketpoint.errors import BucketpointError
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import InFlight, Save, SaveEvery, SaveEveryMinutes
from bucketpoint.stores.local import LocalStore
from manager.manager_scenarios import policy, state, value_of

WAIT_S = 240
"""Against hangs only."""

SOON_S = 0.3


class Gate:
    """Holds the data of uploads back on this rank while it is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._arrived = threading.Event()

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        put = LocalStore.put

        def gated(store: Any, key: str, *args: Any, **kwargs: Any) -> Any:
            if key.endswith(".distcp"):
                self._arrived.set()
                assert self._open.wait(WAIT_S)
            return put(store, key, *args, **kwargs)

        # The gate is in this process.
        threads = mock.patch.object(uploads, "LEAST_BYTES", LEAST_BYTES["thread"])
        with threads, mock.patch.object(LocalStore, "put", gated):
            try:
                yield
            finally:
                self.open()

    def shut(self) -> None:
        self._arrived.clear()
        self._open.clear()

    def arrived(self) -> None:
        """Wait until this rank uploads."""
        assert self._arrived.wait(WAIT_S)

    def open(self) -> None:
        self._open.set()

    def open_soon(self) -> None:
        threading.Timer(SOON_S, self.open).start()


class Training:
    """Collectives of training, on the job's own group, each of another size."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._calls = 0

    def step(self) -> None:
        self._calls += 1
        gradient = torch.ones(1000 * self._calls + 1)
        dist.all_reduce(gradient)
        assert gradient.unique().tolist() == [self._world]


def everything_during_a_save(rank: int, world: int, root: str, when_busy: Any) -> Any:
    """Every method of the manager and every trigger, while the last rank uploads and the others wait for it."""
    save = Save(
        every=(SaveEvery(100), SaveEveryMinutes(5)),
        on=("first_step", "last_step", "sigterm", "sigusr1", "sigusr2"),
        in_flight=InFlight(when_busy=when_busy, timeout=timedelta(seconds=WAIT_S)),
    )
    training, gate = Training(world), Gate()
    found: dict[str, Any] = {}
    with gate.placed():
        manager = CheckpointManager(root, policy=policy(save=save), grace_s=WAIT_S)

        def begin(step: int) -> Any:
            if rank == world - 1:
                gate.shut()
            handle = manager.save(step, state(step, world))
            if rank == world - 1:
                gate.arrived()
            training.step()
            return handle

        def note(name: str, call: Callable[[], Any]) -> None:
            """What a call answers, with collectives of training before and after it, and the save still on its way."""
            training.step()
            found[name] = call()
            training.step()
            assert not handle.done() or not name.startswith("busy")

        def due(step: int, **arguments: Any) -> Callable[[], bool]:
            return lambda: manager.should_save(step, **arguments)

        found["first"] = manager.should_save(1)
        manager.save(1, state(1, world))
        manager.wait()
        handle = begin(10)
        note("busy idle", due(10))
        note("busy steps", due(101))
        now = time.monotonic()
        with mock.patch("bucketpoint.manager.triggers.time.monotonic", return_value=now + 301):
            note("busy minutes", due(102))
        for name in ("sigusr1", "sigusr2"):
            if rank == world - 1:
                os.kill(os.getpid(), getattr(signal, name.upper()))
            note(f"busy {name}", due(103))
        note("busy last", due(104, last=True))
        note("busy listing", manager.steps)
        note("busy report", lambda: manager.report(1, {"eval/loss": 1.0}))
        note("busy pin", lambda: manager.pin(1, reason="kept"))
        note("busy unpin", lambda: manager.unpin(1))
        note("busy prune", lambda: (manager.prune(force=True) is not None) == (rank == 0))
        note("busy wait", lambda: manager.wait(0.01))
        if when_busy == "skip":
            note("busy save", lambda: (manager.save(20, state(20, world)), manager.skipped))
        elif when_busy == "error":
            note("busy save", lambda: error_of(lambda: manager.save(20, state(20, world))))
        gate.open_soon()
        if when_busy == "wait":
            note("save", lambda: manager.save(20, state(20, world)) is not None)
        target = state(0, world)
        note("restore", lambda: manager.restore(target, 1) is not None and value_of(target))
        note("wait", manager.wait)
        handle = begin(30)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        note("busy sigterm", due(105))
        found["stop"] = manager.stop_asked
        gate.open_soon()
        training.step()
        manager.close()
        training.step()
    return found


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except BucketpointError as error:
        return str(error)
    raise AssertionError("nothing was raised")
