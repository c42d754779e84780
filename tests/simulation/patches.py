"""What of the product is replaced in a simulation: clocks, chance, threads, the store's client. Nothing else."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any
from unittest import mock

from tests.simulation.bucket import View
from tests.simulation.facts import Op
from tests.simulation.scheduler import START, here

from bucketpoint.catalog import catalog
from bucketpoint.catalog.deletion import lock
from bucketpoint.catalog.deletion import worker as pruning
from bucketpoint.stores import retry, s3
from bucketpoint.transfer import long_reads, pieces, upload

# The package has a class of that name.
managing = importlib.import_module("bucketpoint.manager.manager")


class InlineGroup:
    """`TaskGroup` on the caller's own thread: one request of a rank after another."""

    def __init__(self, workers: int, *, name: str = "", nice: int = 0) -> None:
        self._queue: list[Callable[[], None]] = []
        self._error: BaseException | None = None

    @property
    def cancelled(self) -> bool:
        return self._error is not None

    def start(self, task: Callable[[], None]) -> None:
        if self._error is None:
            self._queue.append(task)

    def cancel(self, error: BaseException) -> None:
        self._error = self._error or error
        self._queue.clear()

    def __enter__(self) -> InlineGroup:  # noqa: PYI034 (Self needs Python 3.11)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.cancel(error)
            return
        while self._queue:
            try:
                self._queue.pop(0)()
            except BaseException as raised:
                self.cancel(raised)
                raise


class SimulatedThread:
    """A thread of the process that starts it."""

    def __init__(self, *, target: Callable[[], Any], name: str = "", daemon: bool = False) -> None:
        self._target, self._name, self._task = target, name, None

    def start(self) -> None:
        found = here()
        assert found is not None
        scheduler, task = found
        self._task = scheduler.spawn(task.process, self._name, self._target, task.op)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        found, mine = here(), self._task
        if found is not None and mine is not None:
            found[0].wait(found[1], lambda: mine.ended, float("inf") if timeout is None else timeout)


class _Threading:
    Thread = SimulatedThread

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class _Workers(dict):  # type: ignore[type-arg]
    """Each process has prune workers of its own."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get((_process(), key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__((_process(), key), value)


def _process() -> int:
    found = here()
    return id(found[1].process) if found is not None else 0


def _labelled(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """What a prune worker does is an operation of its own."""

    def labelled(*given: Any, **named: Any) -> Any:
        found = here()
        if found is None or found[1].op is None or found[1].op.kind == kind:
            return call(*given, **named)
        _, task = found
        outer = task.op
        policy = given[1] if kind == "prune" else None
        task.op = Op(kind, outer.actor, f"beside {outer.kind} {outer.text}", policy=policy)
        try:
            return call(*given, **named)
        finally:
            task.op = outer

    return labelled


def _clocks() -> dict[str, Callable[..., Any]]:
    real = {name: getattr(time, name) for name in ("time", "monotonic", "sleep", "clock_gettime")}

    def now() -> float:
        found = here()
        return real["time"]() if found is None else found[1].process.clock(found[0].now)

    def monotonic() -> float:
        found = here()
        return real["monotonic"]() if found is None else found[0].now - START + 1000.0

    def clock_gettime(which: int) -> float:
        if here() is None:
            return real["clock_gettime"](which)
        return now() if which == time.CLOCK_REALTIME else monotonic()

    def sleep(seconds: float) -> None:
        found = here()
        if found is None:
            real["sleep"](seconds)
        else:
            found[0].sleep(found[1], seconds)

    return {"time": now, "monotonic": monotonic, "clock_gettime": clock_gettime, "sleep": sleep}


def _urandom(real: Callable[[int], bytes]) -> Callable[[int], bytes]:
    def urandom(count: int) -> bytes:
        found = here()
        return real(count) if found is None else found[0].random.randbytes(count)

    return urandom


class _Random:
    @staticmethod
    def uniform(low: float, high: float) -> float:
        found = here()
        assert found is not None
        return found[0].random.uniform(low, high)


def _pause(seconds: float) -> None:
    found = here()
    assert found is not None
    found[0].sleep(found[1], seconds)


def _store(root: str, options: Any) -> View:
    found = here()
    assert found is not None
    return found[0].view


class _Options:
    @staticmethod
    def from_storage_options(options: Any) -> None:
        return None


def _failed(real: Callable[..., Any]) -> Callable[..., Any]:
    def failed(self: Any, error: Any) -> None:
        found = here()
        if found is not None and "bug in bucketpoint" in str(error):
            found[0].stop(error.__cause__ or error)
        real(self, error)

    return failed


def _begin_together(ranks: Any, what: str, state: Any, url: str, *, begun: Any, **named: Any) -> Any:
    found = here()
    assert found is not None
    handle = found[1].async_save(state, checkpoint_id=url, **named)
    begun(handle)
    return handle


class _NoExit:
    @staticmethod
    def register(*given: Any) -> None:
        return None


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """For as long as this lasts, simulated threads live in their simulation, and all others in the world."""
    clocks = _clocks()
    level = logging.root.manager.disable
    with contextlib.ExitStack() as stack:

        def put(where: Any, name: str, what: Any) -> None:
            stack.enter_context(mock.patch.object(where, name, what))

        defaults = tuple(clocks["time"] if one is time.time else one for one in catalog.Catalog.__init__.__defaults__)  # type: ignore[misc, arg-type]
        put(catalog.Catalog.__init__, "__defaults__", defaults)
        for name, clock in clocks.items():
            put(time, name, clock)
        put(os, "urandom", _urandom(os.urandom))
        put(retry, "pause", _pause)
        put(retry, "random", _Random)
        put(s3, "S3Store", _store)
        put(s3, "S3Options", _Options)
        for module in (upload, pieces, long_reads):
            put(module, "TaskGroup", InlineGroup)
        put(pruning.Throttle, "rest", lambda self: None)
        put(pruning, "threading", _Threading())
        put(pruning, "stand_back", lambda nice: None)
        put(pruning, "_workers", _Workers())
        put(pruning, "prune_by", _labelled("prune", pruning.prune_by))
        put(pruning, "sweep", _labelled("sweep", pruning.sweep))
        put(pruning.PruneWorker, "_failed", _failed(pruning.PruneWorker._failed))
        put(managing, "begin_together", _begin_together)
        put(managing, "atexit", _NoExit)
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, level)
        yield


def forget() -> None:
    """Before each run: what a process of the real world would keep between them."""
    pruning._workers.clear()
    retry._budgets.clear()
    lock._granted.clear()
