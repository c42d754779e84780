"""The triggers of saves: steps, minutes, occasions and signals."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from bucketpoint.manager.ranks import Ranks
from bucketpoint.retention.policy import Save, SaveEvery, SaveEveryMinutes

SIGNALS = {
    name: getattr(signal, name.upper()) for name in ("sigterm", "sigusr1", "sigusr2") if hasattr(signal, name.upper())
}
"""Signals by the names that a policy has for them."""

_CALL = "should_save()"


class Signals:
    """Handlers that note signals instead of acting on them, and pass them on to the previous handlers.

    Only the main thread may install handlers (Python's rule): on another thread no signal is noted.

    Attributes:
        seen: `time.monotonic()` of the first signal of each name that has not been answered.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.seen: dict[str, float] = {}
        self._before: dict[str, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        for name in names:
            number = SIGNALS.get(name)
            if number is not None:
                self._before[name] = signal.signal(number, _listener(name, self.seen, self._before))
        # A manager may be dropped without `close`, after an error: then SIGTERM would have no effect any more.
        weakref.finalize(self, _restore, self._before).atexit = False

    def close(self) -> None:
        """Restore the previous handlers. On another thread than the main one they are still called, by ours."""
        _restore(self._before)


def _listener(name: str, seen: dict[str, float], before: Mapping[str, Any]) -> Callable[[int, FrameType | None], None]:
    # It must not hold the Signals, which would then never be dropped.
    def noted(number: int, frame: FrameType | None) -> None:
        seen.setdefault(name, time.monotonic())
        handler = before.get(name)
        if callable(handler):
            handler(number, frame)

    return noted


def _restore(before: dict[str, Any]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for name, handler in before.items():
        signal.signal(SIGNALS[name], handler if handler is not None else signal.SIG_DFL)
    before.clear()


class Triggers:
    """The decision whether a step is saved, the same on every rank.

    All ranks count steps alike. Minutes are counted by the coordinator's clock, and a signal may reach any one rank, so
    the ranks agree on these: one small collective for each call of `due`, and only if the policy has such a trigger.
    """

    def __init__(self, save: Save, ranks: Ranks) -> None:
        self._save = save
        self._ranks = ranks
        self._last_seen: int | None = None
        self._last_save = time.monotonic()
        self._signals = Signals(tuple(name for name in save.on if name in SIGNALS))
        self._minutes = [one.minutes for one in save.every if isinstance(one, SaveEveryMinutes)]
        self.pressing: int | None = None
        """The step that a signal or the end of training asks to save: there may be no later one to save instead."""
        self.stop_asked: float | None = None
        """`time.monotonic()` when SIGTERM came to this rank, or when the ranks agreed on it; None before."""

    def resumed(self, step: int) -> None:
        """Note that training goes on after `step`, which needs no save."""
        self._last_seen = step

    def saved(self) -> None:
        """Note that a save has begun."""
        self._last_save = time.monotonic()

    def due(self, step: int, *, last: bool = False) -> str | None:
        """Return the reasons to save now, as text, or None. All ranks, at the same steps."""
        before = step - 1 if self._last_seen is None else self._last_seen
        reasons = []
        if self._last_seen is None and "first_step" in self._save.on:
            reasons.append("first_step")
        if last and "last_step" in self._save.on:
            reasons.append("last_step")
        for one in self._save.every:
            # If the loop steps over a multiple, the next step that it asks about is saved instead.
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
        listened = [name for name in self._save.on if name in SIGNALS]
        if not self._minutes and not listened:
            return []
        waited = time.monotonic() - self._last_save
        # Of one rank's clock only, so that the largest number is the coordinator's.
        due = [self._ranks.is_coordinator and waited >= 60 * minutes for minutes in self._minutes]
        bits = sum(1 << place for place, is_due in enumerate(due) if is_due)
        (bits, *signals) = self._ranks.most([bits, *(int(name in self._signals.seen) for name in listened)], _CALL)
        reasons = [f"every {minutes} minutes" for place, minutes in enumerate(self._minutes) if bits >> place & 1]
        for name, seen in zip(listened, signals, strict=True):
            came = self._signals.seen.pop(name, time.monotonic()) if seen else None
            # Only the first SIGTERM asks for a save.
            if came is None or (name == "sigterm" and self.stop_asked is not None):
                continue
            if name == "sigterm":
                self.stop_asked = came
            reasons.append(name)
        return reasons
