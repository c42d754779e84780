"""Who reads staged memory, until when, and in which order. No memory and no tensors here.

A lease belongs to one staged state. It ends when that state is dropped, when the thread that saves it has ended, or
when that thread goes on to another save: whichever comes first. The order is that of the thread which staged: every
rank runs the same program, so every rank has the same order, and the collectives of two saves cannot interleave.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time

from bucketpoint.errors import StagingError

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_PATIENCE_S = 10.0
_LET_GO_S = 0.005
_tokens = itertools.count(1)


class Lease:
    """One staged state's claim on its memory, and its place in the order of saves.

    Args:
        unread_timeout_s: how long after the copy a state that no save has begun to read holds others back, seconds.

    Attributes:
        label: which save this is, as far as is known: the checkpoint's URL once the save has begun.
        started: when it was staged, `time.monotonic` seconds.
        progress: how far the save is, by whoever knows.
    """

    def __init__(self, unread_timeout_s: float) -> None:
        self.label = "a save that has not begun"
        self.started = time.monotonic()
        self.progress: object = None
        self._unread_timeout_s = unread_timeout_s
        self._end = _Latch()
        self._reader = 0
        self._stager_thread = threading.get_ident()
        self._copied_at: float | None = None
        self._before = _unfinished(_here.staged)
        _here.staged = self

    def __repr__(self) -> str:
        return f"Lease({self.label}, {'ended' if self.ended else 'held'})"

    @property
    def ended(self) -> bool:
        return self._end.is_open

    @property
    def begun(self) -> bool:
        """Whether a save has begun to read."""
        return self._reader != 0

    @property
    def abandoned(self) -> bool:
        """Whether no save has begun to read in time. Whoever holds the staged state keeps its memory."""
        return self._unread_for_s() > self._unread_timeout_s

    def _unread_for_s(self) -> float:
        """Seconds since the copy was complete, if no save has begun to read it."""
        return 0.0 if self.begun or self._copied_at is None else time.monotonic() - self._copied_at

    def end(self) -> None:
        """Nobody reads the memory any more."""
        self._end.open()

    def copied(self) -> None:
        """The copy is complete, and a save may begin to read."""
        self._copied_at = time.monotonic()

    def held_by_state(self) -> object:
        """A token for the staged state to keep: when it is dropped, the lease ends."""
        return _StateHold(self)

    def enter(self) -> None:
        """The current thread saves the staged state: the lease ends with the thread, or with its next save.

        On another thread than the one that staged it waits for its turn too.

        Raises:
            StagingError: the lease has ended, so that the memory may hold another state by now.
        """
        if self.ended:
            raise StagingError(
                "This staged state has been saved, and its memory may hold a newer one",
                remedy="Stage the state again for another save",
            )
        if current_lease() is not self:
            # Nothing here may keep the last hold: that save ends now, and this one may have to wait for it.
            _here.saving = _ThreadHold(self)
            if threading.get_ident() != self._stager_thread:
                let_caller_go()
        _here.entered = True
        if threading.get_ident() != self._stager_thread:
            # A thread of DCP's. Writers that are not ours never call `take_turn`.
            self.wait_for_turn()

    def wait_for_turn(self) -> None:
        """Until every save that the same thread staged earlier has ended, so that this one's collectives are alone."""
        _let_pass(self._before, self.label)
        self._before = None

    def ended_within(self, timeout_s: float) -> bool:
        return self._end.wait(timeout_s)

    def wait(self, who: str) -> bool:
        """Until the lease has ended: True. False: no save began to read in time, and none may be waited for."""
        waiting_since = time.monotonic()
        told = False
        while not self._end.wait(_POLL_S):
            now = time.monotonic()
            if self.abandoned:
                logger.warning(
                    "a state staged %.0f s ago has not been saved; it keeps its memory, and what comes next gets other",
                    now - self.started,
                )
                return False
            if not told and now - waiting_since > _PATIENCE_S:
                told = True
                logger.warning("%s waits for %s, begun %.0f s ago", who, self.label, now - self.started)
        return True

    def wait_if_read(self, grace_s: float) -> bool:
        """Until the lease has ended: True. False: no save has begun to read for `grace_s` since the copy."""
        while not self._end.wait(min(_POLL_S, grace_s)):
            if self._unread_for_s() > grace_s:
                return False
        return True


def let_caller_go() -> None:
    """On a thread that begins to work for a caller: leave the interpreter to it, until training goes on.

    The caller has calls of DCP's to finish. Beside a thread that plans in Python each would take milliseconds.
    """
    time.sleep(_LET_GO_S)


def current_lease() -> Lease | None:
    """The lease of the staged state that the current thread is saving."""
    return _here.saving.lease if _here.saving is not None else None


def last_staged() -> Lease | None:
    """What the current thread staged last and may still be read; whatever it staged before that may be read too."""
    _here.staged = _unfinished(_here.staged)
    return _here.staged


def take_turn(label: str) -> None:
    """Begin a save on the current thread, before its first collective: wait for those that were staged before it.

    Args:
        label: which save this is, for those who will wait for it.
    """
    if _here.entered and _here.saving is not None:
        lease = _here.saving.lease
        lease.label = label
        lease.wait_for_turn()
    else:
        # A state that was never staged: this thread saves it itself, so all that it staged before comes first.
        end_own_save()
        _let_pass(last_staged(), label)
    _here.entered = False


def end_own_save() -> None:
    """The current thread has come back from whatever it was saving."""
    _here.saving = None
    _here.entered = False


class _StateHold:
    """Kept by a staged state."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def __del__(self) -> None:
        self.lease.end()


class _ThreadHold:
    """Kept by the thread that saves. Thread-locals die with their thread, whoever keeps its traceback alive."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.token = next(_tokens)
        lease._reader = self.token

    def __del__(self) -> None:
        # Another thread may have taken over the reading since.
        if self.lease._reader == self.token:
            self.lease.end()


class _Here(threading.local):
    """What this thread is saving, whether that save has yet to take its turn, and what the thread staged last."""

    saving: _ThreadHold | None = None
    entered: bool = False
    staged: Lease | None = None


_here = _Here()


class _Latch:
    """Opens once. Safe to open from a finaliser, which may run on any thread in the middle of anything."""

    def __init__(self) -> None:
        # A raw lock and not an Event: a finaliser that interrupts Event.set() on its own thread would wait for itself.
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        self._unlock()

    def wait(self, timeout_s: float) -> bool:
        if not self.is_open and self._lock.acquire(timeout=timeout_s):
            self._unlock()
        return self.is_open

    def _unlock(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            # Another thread has released it already: open is open.
            return


def _unfinished(lease: Lease | None) -> Lease | None:
    """The lease itself, or the nearest before it that has not ended: a state may be dropped before its elders."""
    while lease is not None and lease.ended:
        lease = lease._before
    return lease


def _let_pass(lease: Lease | None, who: str) -> None:
    """Wait for a lease and for all before it: one that was dropped may have ended before its elders."""
    while lease is not None:
        lease.wait(who)
        lease = lease._before
