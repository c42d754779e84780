"""The triggers of saves: steps, minutes, occasions and signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.util import register_after_fork
from types import FrameType
from typing import Any

from bucketpoint.forks import renew_in_child
from bucketpoint.manager.ranks import Ranks
from bucketpoint.retention.policy import Save, SaveEvery, SaveEveryMinutes

SIGNALS = {"sigterm": signal.SIGTERM, "sigusr1": signal.SIGUSR1, "sigusr2": signal.SIGUSR2}
"""Signal numbers by their names in a policy."""

_CALL = "should_save()"


class Signals:
    """Signal handlers that record a signal, without ending the process, and call the previous handler.

    Python installs handlers on the main thread only: an object made on another thread records no signal.

    In a forked child the previous handlers are restored, because `multiprocessing` ends its processes by SIGTERM. Only
    the workers of a data loader ignore a SIGTERM, unless their parent sent it: a scheduler sends SIGTERM to all
    processes of a job, and without these workers training would fail before it can save.

    Attributes:
        seen: by name, `time.monotonic()` of the first signal that no save has answered.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.seen: dict[str, float] = {}
        self._listeners: list[_Listener] = []
        self._numbers: frozenset[int] = frozenset()
        self._mask: set[int] | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        self._listeners += [_Listener(name, self.seen) for name in names]
        # After an error, a manager may be dropped without `close`: with its handlers, SIGTERM would have no effect.
        weakref.finalize(self, _restore, self._listeners).atexit = False
        if self._listeners:
            renew_in_child(self, Signals._in_child, before=Signals._hold_back, in_parent=Signals._let_in)
            register_after_fork(self, Signals._in_process)

    def close(self) -> None:
        """Restore the previous handlers. Outside the main thread, the new handlers stay and call them."""
        _restore(self._listeners)

    def _hold_back(self) -> None:
        # Blocked during the fork: a signal that reached the child before its handlers are restored would be lost, and
        # the parent would wait for the child forever.
        self._numbers = frozenset(listener.number for listener in self._listeners)
        if self._numbers:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)

    def _let_in(self) -> None:
        mask, self._mask = self._mask, None
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _in_child(self) -> None:
        self.close()
        self._let_in()

    def _in_process(self) -> None:
        """Protect a data loader's worker from SIGTERM. Called in each process that `multiprocessing` has forked."""
        target = getattr(multiprocessing.current_process(), "_target", None)
        if self._numbers and getattr(target, "__name__", "") == _LOADER and hasattr(signal, "sigwaitinfo"):
            # A thread and not a handler: torch sets a handler in a worker, and Python's handlers do not get the sender.
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
            threading.Thread(target=_obey_parent, args=(self._numbers,), daemon=True).start()


_LOADER = "_worker_loop"
"""Name of the function that workers of `DataLoader` and of torchdata's `StatefulDataLoader` run."""


def _obey_parent(numbers: frozenset[int]) -> None:
    while True:
        came = signal.sigwaitinfo(numbers)
        if came.si_signo == signal.SIGTERM and came.si_pid == os.getppid():
            # Exit status 0 as with torch's handler: any other would be reported as a worker's failure.
            os._exit(0)


class _Listener:
    """Handler of one signal. Must have no reference to its `Signals`, which would then never be freed."""

    def __init__(self, name: str, seen: dict[str, float]) -> None:
        self.number = SIGNALS[name]
        self._name = name
        self._seen: dict[str, float] | None = seen
        self._before: Any = signal.signal(self.number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._seen is not None:
            self._seen.setdefault(self._name, time.monotonic())
        if callable(self._before):
            self._before(number, frame)
        elif self._seen is None and self._before is not signal.SIG_IGN:
            # A handler that was installed later has called this one, which no longer records: take the default action.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def restore(self) -> None:
        """Stop recording, and restore the previous handler unless another one was installed later."""
        self._seen = None
        before: Any = self._before
        while isinstance(before, _Listener) and before._seen is None:
            before = before._before
        self._before = before
        current: Any = signal.getsignal(self.number)
        if current is self:
            signal.signal(self.number, before if before is not None else signal.SIG_DFL)


def _restore(listeners: list[_Listener]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for listener in listeners:
        listener.restore()
    listeners.clear()


class Triggers:
    """Decision whether a step is saved, the same on every rank.

    Steps need no communication. Minutes count by the coordinator's clock, and a signal may reach any rank: if the
    policy has such triggers, each call of `due` makes one small collective.
    """

    def __init__(self, save: Save, ranks: Ranks) -> None:
        self._save = save
        self._ranks = ranks
        self._last_seen: int | None = None
        self._last_save = time.monotonic()
        self._listened = [name for name in save.on if name in SIGNALS]
        self._signals = Signals(self._listened)
        self._minutes = [one.minutes for one in save.every if isinstance(one, SaveEveryMinutes)]
        self.pressing: int | None = None
        """Step of a save for a signal or the end of training, which must not be skipped: it may be the last."""
        self.stop_asked: float | None = None
        """`time.monotonic()` at which SIGTERM reached this rank, or this rank learned of it in `due`; None before."""

    @property
    def unanswered(self) -> bool:
        """True if SIGTERM reached this rank, or another before the last call of `due`, and no save has begun since."""
        came = self.stop_asked if self.stop_asked is not None else self._signals.seen.get("sigterm")
        return came is not None and self._last_save < came

    def resumed(self, step: int) -> None:
        """Record that training resumed at `step`; no save is due for it."""
        self._last_seen = step

    def saved(self) -> None:
        """Record that a save has begun."""
        self._last_save = time.monotonic()

    def due(self, step: int, *, last: bool = False) -> str | None:
        """Return the reasons to save now, as text; None without one. All ranks, at the same steps."""
        before = step - 1 if self._last_seen is None else self._last_seen
        reasons = []
        if self._last_seen is None and "first_step" in self._save.on:
            reasons.append("first_step")
        if last and "last_step" in self._save.on:
            reasons.append("last_step")
        for one in self._save.every:
            # If the loop skips a multiple, the next step for which it calls `due` is saved instead.
            if isinstance(one, SaveEvery) and step // one.steps > before // one.steps:
                reasons.append(f"every {one.steps} steps")
        self._last_seen = max(before, step)
        agreed = self._agreed()
        reasons += agreed
        if "last_step" in reasons or not SIGNALS.keys().isdisjoint(agreed):
            self.pressing = step
        return ", ".join(reasons) or None

    def close(self) -> None:
        self._signals.close()

    def _agreed(self) -> list[str]:
        if not self._minutes and not self._listened:
            return []
        waited = time.monotonic() - self._last_save
        # Other ranks pass 0, so that the maximum is the coordinator's number.
        due = [self._ranks.is_coordinator and waited >= 60 * minutes for minutes in self._minutes]
        bits = sum(1 << place for place, is_due in enumerate(due) if is_due)
        (bits, *signals) = self._ranks.most(
            [bits, *(int(name in self._signals.seen) for name in self._listened)], _CALL
        )
        reasons = [f"every {minutes} minutes" for place, minutes in enumerate(self._minutes) if bits >> place & 1]
        for name, seen in zip(self._listened, signals, strict=True):
            came = self._signals.seen.pop(name, time.monotonic()) if seen else None
            # Only the first SIGTERM triggers a save.
            if came is None or (name == "sigterm" and self.stop_asked is not None):
                continue
            if name == "sigterm":
                self.stop_asked = came
            reasons.append(name)
        return reasons
