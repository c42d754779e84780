"""Staged states, the leases on their memory, and the order of their saves.

The lease of a staged state ends when the state is dropped, when the thread that saves it has ended, or when that thread
begins another save, whichever comes first. Each thread's staged states are saved in the order of staging. All ranks
run the same program, so they have the same order, and the collectives of two saves cannot interleave.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from bucketpoint.errors import StagingError
from bucketpoint.forks import renew_in_child
from bucketpoint.telemetry import current_context

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_PATIENCE_S = 10.0
_LET_GO_S = 0.005


@dataclass(frozen=True)
class SavingRanks:
    """The ranks for which a state is staged, recorded because the process group may be destroyed before the save.

    Attributes:
        job: number of ranks in the default process group; None if it does not matter.
        together: number of ranks that save together; None if only DCP knows the group.
        alone: the caller passed `no_dist`: this rank saves its part alone.
        rank: number of this rank in the job.
    """

    job: int | None
    together: int | None = None
    alone: bool = False
    rank: int = 0

    @staticmethod
    def of_job() -> SavingRanks:
        """Return the ranks of the default process group; a single rank without one."""
        if dist.is_available() and dist.is_initialized():
            return SavingRanks(dist.get_world_size(), rank=dist.get_rank())
        return SavingRanks(1)


class SharedMemory:
    """Memory of this process with a file descriptor, mappable by other processes. A finalizer closes the descriptor."""

    def __init__(self, address: int, nbytes: int, descriptor: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False


class Lease:
    """Claim of one staged state on its memory, and its place in the order of saves.

    Args:
        unread_timeout_s: seconds from the copy until a state that no save has begun to read stops blocking others.

    Attributes:
        label: name of the save: the checkpoint's URL once the save has begun.
        started: time of the staging, `time.monotonic` seconds.
        progress, times: progress of the save, and its times and counts, set by the code that runs the save.
        blocked_s: seconds for which the staging call lasted; None until it returns, and in a checkpoint process.
        context: OpenTelemetry's context at the staging of the state.
        memory: the staging memory, if another process can map it.
        beside_training: True if the save runs in the trainer, False in a checkpoint process.
        after_commit: functions that still read the memory once the save has ended; None if nobody would call them.
    """

    def __init__(self, unread_timeout_s: float) -> None:
        self.label = "a save that has not begun"
        self.started = time.monotonic()
        self.progress: object = None
        self.times: object = None
        self.context = current_context()
        self.blocked_s: float | None = None
        self.nbytes = 0
        self.memory: SharedMemory | None = None
        self.beside_training = True
        self.after_commit: list[Callable[[], object]] | None = None
        self.ranks = _here.ranks or SavingRanks.of_job()
        self._unread_timeout_s = unread_timeout_s
        # Locked until the lease ends. Not an Event: a finalizer may interrupt any thread at any point, and would
        # deadlock if it interrupted `set()` of the same Event.
        self._held = threading.Lock()
        self._held.acquire()
        self.ended = False
        self._reader = 0
        self._stager_thread = threading.get_ident()
        self._copied_at: float | None = None
        self._inherited = False
        self._before = _unfinished(_here.staged)
        _here.staged = self
        renew_in_child(self, Lease._leave_to_parent)

    def __repr__(self) -> str:
        return f"Lease({self.label}, {'ended' if self.ended else 'held'})"

    @property
    def begun(self) -> bool:
        """True if a save has begun to read."""
        return self._reader != 0

    @property
    def abandoned(self) -> bool:
        """True if no save has begun to read in time. The memory then stays with the holder of the staged state."""
        return self._unread_for_s() > self._unread_timeout_s

    def _unread_for_s(self) -> float:
        """Return the seconds since the copy was complete, if no save has begun to read it; else 0."""
        return 0.0 if self.begun or self._copied_at is None else time.monotonic() - self._copied_at

    def finish(self) -> None:
        """Call the functions of `after_commit`, whose errors are logged, and end the lease."""
        try:
            for copy in self.after_commit or ():
                try:
                    copy()
                except Exception:
                    # If this error were raised, waits for the save would never end.
                    logger.exception("%s: its bytes were not copied on this node", self.label)
        finally:
            self.after_commit = None
            self.end()

    def end(self) -> None:
        """End the lease: the memory is no longer read. Does nothing before `finish`, if that has functions to call."""
        if self.after_commit:
            return
        self.memory = None
        # A handle that the program keeps must not keep the program's spans and other contents of the context alive.
        self.context = None
        self.ended = True
        self._let_in()

    def _let_in(self) -> None:
        # Another thread may have released the lock already.
        with contextlib.suppress(RuntimeError):
            self._held.release()

    def _leave_to_parent(self) -> None:
        # A save that is under way at a fork belongs to the parent, with its memory.
        self._inherited = True
        self.after_commit = None
        self.end()

    @property
    def copy_s(self) -> float:
        """Seconds from the staging call to the end of the copy; 0 until then."""
        return max((self._copied_at or 0.0) - self.started, 0.0)

    def copied(self) -> None:
        """Record that the copy is complete, so that a save may begin to read."""
        self._copied_at = time.monotonic()

    def enter(self) -> None:
        """Make the current thread the reader of the staged state: the lease ends with the thread, or its next save.

        If another thread staged the state, also wait for this save's turn.

        Raises:
            StagingError: the lease has ended, so the memory may hold another state.
        """
        if self._inherited:
            raise StagingError(
                "The state was staged by the process that this one was forked from, in memory of that process",
                remedy="Stage the state in the process that saves it",
            )
        if self.ended:
            raise StagingError(
                "The staged state has been saved already, and its memory may hold a newer state",
                remedy="Stage the state again for another save",
            )
        if current_lease() is not self:
            # Drops the last reference to the thread's previous hold, which ends the thread's earlier save: this save
            # may have to wait for that end.
            _here.saving = _ThreadHold(self)
            if threading.get_ident() != self._stager_thread:
                let_caller_go()
        _here.entered = True
        if threading.get_ident() != self._stager_thread:
            # A thread of DCP. Writers of other packages never call `take_turn`, so the thread waits here.
            self.wait_for_turn()

    def wait_for_turn(self) -> None:
        """Wait for the saves that the same thread staged earlier, so that no other save's collectives interleave."""
        _let_pass(self._before, self.label)
        self._before = None

    def ended_within(self, timeout_s: float) -> bool:
        if not self.ended and self._held.acquire(timeout=timeout_s):
            self._let_in()
        return self.ended

    def wait(self, who: str, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the lease has ended. Return False if no save began to read in time.

        Raises:
            StagingError: `stopped` returned True.
        """
        waiting_since = time.monotonic()
        warned = False
        while not self.ended_within(_POLL_S):
            now = time.monotonic()
            if stopped():
                raise StagingError(
                    f"{who} gave up waiting for {self.label}, begun {now - self.started:.0f} s ago",
                    remedy="Wait for the earlier save first, or allow more time",
                )
            if self.abandoned:
                logger.warning(
                    "a state staged %.0f s ago has not been saved; its memory stays reserved, so saves use more",
                    now - self.started,
                )
                return False
            if not warned and now - waiting_since > _PATIENCE_S:
                warned = True
                logger.warning("%s waits for %s, begun %.0f s ago", who, self.label, now - self.started)
        return True

    def wait_if_read(self, grace_s: float) -> bool:
        """Wait until the lease has ended. Return False if no save begins to read within `grace_s` after the copy."""
        while not self.ended_within(min(_POLL_S, grace_s)):
            if self._unread_for_s() > grace_s:
                return False
        return True


@contextlib.contextmanager
def staged_for(ranks: SavingRanks) -> Iterator[None]:
    """Record these ranks on the states that the current thread stages."""
    _here.ranks, before = ranks, _here.ranks
    try:
        yield
    finally:
        _here.ranks = before


def let_caller_go() -> None:
    """Sleep for a moment on a thread that begins to work for a caller, so that the caller gets the GIL.

    The caller still has calls of DCP to finish. Each would take milliseconds while this thread plans in Python.
    """
    time.sleep(_LET_GO_S)


def current_lease() -> Lease | None:
    """Return the lease of the staged state that the current thread is saving, or None."""
    return _here.saving.lease if _here.saving is not None else None


def last_staged() -> Lease | None:
    """Return the latest lease of the current thread's staged states that has not ended, or None."""
    _here.staged = _unfinished(_here.staged)
    return _here.staged


def take_turn(label: str, stopped: Callable[[], bool] = lambda: False) -> None:
    """Begin a save on the current thread, before its first collective: wait for the saves that were staged before it.

    Args:
        label: name of the save, for the log lines of saves that wait for it.
        stopped: returns True once the wait must end. Used only if the state was never staged.
    """
    if _here.entered and _here.saving is not None:
        lease = _here.saving.lease
        lease.label = label
        lease.wait_for_turn()
    else:
        # The state was never staged: this thread saves it directly, after all states that it staged before.
        end_own_save()
        _let_pass(last_staged(), label, stopped)
    _here.entered = False


def end_own_save() -> None:
    """End the current thread's hold on its lease: the thread has returned from its save."""
    _here.saving = None
    _here.entered = False


class StagedState(dict[Any, Any]):
    """A state dict in staging memory, which is not reused until the state is dropped or its save has ended.

    DCP calls `items()` once, on the saving thread, before the first collective of the save. This call enters the lease.
    In a checkpoint process the state arrives in the same memory, with a new lease.
    """

    def __init__(self, state: dict[Any, Any], lease: Lease, on_pickle: Callable[[], None] | None = None) -> None:
        super().__init__(state)
        self.lease = lease
        self._on_pickle = on_pickle

    def __del__(self) -> None:
        self.lease.end()

    def items(self) -> Any:
        self.lease.enter()
        return super().items()

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return {copy.deepcopy(key, memo): copy.deepcopy(self[key], memo) for key in self}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the state for DCP's checkpoint process, after a wait for the turn of its save."""
        from bucketpoint.staging.process import crossing, dead_checkpoint_process

        self.lease.enter()
        self.lease.wait_for_turn()
        dead = dead_checkpoint_process()
        if dead is not None:
            raise dead
        plain = crossing({key: self[key] for key in self})
        if self._on_pickle is not None:
            self._on_pickle()
        ranks = self.lease.ranks
        # The default group of the checkpoint process joins the ranks that save together.
        ranks = replace(ranks, job=None if ranks.alone else ranks.together)
        return _arrived, (plain, self.lease.label, ranks)


def _arrived(state: dict[Any, Any], label: str, ranks: SavingRanks) -> StagedState:
    """Rebuild the state in the checkpoint process, with a lease for the thread that unpickles and then saves it."""
    lease = Lease(unread_timeout_s=math.inf)
    lease.label = label
    lease.beside_training = False
    lease.ranks = ranks
    return StagedState(state, lease)


class _ThreadHold:
    """Thread-local mark of the saving thread, whose finalizer ends the lease.

    Thread-locals are freed with their thread, even if a traceback of the thread is kept alive.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        lease._reader = id(self)

    def __del__(self) -> None:
        # If another thread has become the reader, this thread must not end the lease.
        if self.lease._reader == id(self):
            self.lease.end()


class _Here(threading.local):
    """State of a thread: its running save, whether that save must still take its turn, its last lease, its ranks."""

    ranks: SavingRanks | None = None
    saving: _ThreadHold | None = None
    entered: bool = False
    staged: Lease | None = None


_here = _Here()


def _unfinished(lease: Lease | None) -> Lease | None:
    """Return the latest lease, up to this one, that has not ended: leases may end in any order."""
    while lease is not None and lease.ended:
        lease = lease._before
    return lease


def _let_pass(lease: Lease | None, who: str, stopped: Callable[[], bool] = lambda: False) -> None:
    """Wait for a lease and for all before it: the lease of a dropped state may end before older ones."""
    while lease is not None:
        lease.wait(who, stopped)
        lease = lease._before
