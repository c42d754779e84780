"""A manager's save under way on one rank, the effect of its failure on training, and the manager's status."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from bucketpoint.catalog import notes
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.worker import PruneWorker
from bucketpoint.dcp.async_save import SaveHandle, begin_save
from bucketpoint.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    BucketpointError,
    CheckpointExistsError,
    CommitConflictError,
    CredentialsError,
    InvalidURLError,
    OtherRunError,
    PolicyError,
    RanksDisagreeError,
    WrongRegionError,
)
from bucketpoint.manager.ranks import Ranks

logger = logging.getLogger(__name__)

_NEVER_WARNED = (
    RanksDisagreeError,
    CommitConflictError,
    CheckpointExistsError,
    OtherRunError,
    InvalidURLError,
    BucketNotFoundError,
    WrongRegionError,
    PolicyError,
)
"""Errors that later saves would repeat: of the program, its configuration, or a second job in the run."""

_OUTAGES_ONCE_COMMITTED = (AccessDeniedError, CredentialsError)
"""Errors of a wrong configuration before the first commit, and of an outage after it, such as an expired token."""


@dataclass
class Running:
    """State of the save under way on this rank.

    Attributes:
        full: True if a job can resume from the checkpoint.
        settled: set after the callback `note_end` has run. The handle is not enough: a future wakes waiting threads
            before it runs its callbacks.
    """

    step: int
    handle: SaveHandle
    full: bool = True
    settled: threading.Event = field(default_factory=threading.Event)
    _metrics: list[Mapping[str, float]] | None = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def none(cls) -> Running:
        """Return a successful save with step -1, as a placeholder for no save."""
        none = cls(-1, SaveHandle(None))
        none.handle.set_result(Metadata({}))
        none.settled.set()
        return none

    @property
    def failed(self) -> bool:
        return self.handle.failure() is not None

    @property
    def received(self) -> bool:
        """True if the program has received the save's error on this rank."""
        return self.failed and self.handle._told

    @property
    def error(self) -> BaseException:
        """The error of the save, on this rank or another."""
        error = self.handle.failure()
        return error or BucketpointError(f"The save of step {self.step} failed on another rank", url=self.handle.url)

    def receive(self) -> BaseException:
        """Return the error to raise, and record that the program has received it, so that it is raised only once."""
        self.handle._note_told()
        return self.error

    def hold_back(self, metrics: Mapping[str, float]) -> bool:
        """Keep metrics until the save's commit, to report them with its token. Return False if the save has ended."""
        with self._lock:
            if self._metrics is None:
                return False
            self._metrics.append(metrics)
            return True

    def held_back(self) -> list[Mapping[str, float]]:
        """Return the kept metrics, and keep no more."""
        with self._lock:
            metrics, self._metrics = self._metrics or [], None
            return metrics

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the save and for `settled`, at most `timeout` seconds each. Return True if both have ended."""
        return self.handle.wait(timeout) and self.settled.wait(timeout)


def begin_together(
    ranks: Ranks,
    what: str,
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    url: str,
    *,
    begun: Callable[[SaveHandle], None] = lambda handle: None,
    **options: Any,
) -> SaveHandle:
    """Begin a save on all ranks. If one rank cannot make or copy its state, raise its error on all ranks.

    Args:
        what: the call as in the program's text, for messages.
        state: the state, or a function that makes it.
        begun: called with the handle once the save is under way on this rank, even if it then fails on another.
        options: as for `async_save`.

    Raises:
        BucketpointError: a rank could not make or copy its state, and no save is under way on any rank; or a rank was
            missing at the timeout, or was interrupted.
    """

    def made() -> dict[str, Any]:
        given = state() if callable(state) else state
        return {name: value.state_dict() if isinstance(value, Stateful) else value for name, value in given.items()}

    plain = ranks.together(what, made)
    try:
        handle = begin_save(plain, checkpoint_id=url, process_group=ranks.members, **options)
        begun(handle)
    except BaseException as error:
        ranks.leave_others(what, error)
        raise
    (failed,) = ranks.most([int(handle._unstaged() is not None)], what)
    if not failed:
        return handle
    # The save fails in its first collective, on all ranks.
    handle.wait(ranks.limit_s)
    handle._note_told()
    raise handle._unstaged() or handle.failure() or BucketpointError("The state of a rank could not be copied", url=url)


def may_be_warned(error: BaseException, *, committed: bool) -> bool:
    """Return True if training can continue after this error of a save, under `on_failure: warn`.

    Args:
        committed: True if this process has committed a save of the run before.
    """
    never = _NEVER_WARNED if committed else (*_NEVER_WARNED, *_OUTAGES_ONCE_COMMITTED)
    return isinstance(error, Exception) and not isinstance(error, never)


def note_end(manager: weakref.ref[Any], catalog: Catalog, running: Running, handle: SaveHandle) -> None:
    """Report the kept metrics of an ended save, and record its outcome in the manager, if that still exists."""
    for metrics in running.held_back():
        try:
            notes.report(catalog, running.step, metrics)
        except BucketpointError as lost:
            logger.warning("the metrics of step %d were not reported: %s", running.step, lost)
    alive, error = manager(), handle.failure()
    if alive is not None and error is None:
        alive._standing.saved(running.step, handle.begun_s, full=running.full)
        alive._replacing.committed(running.step)
    elif alive is not None:
        alive._standing.lost()
        alive._replacing.failed()
        alive._warn(running.step, error)
    running.settled.set()


@dataclass(frozen=True)
class ManagerStatus:
    """Status of a run as recorded by its manager on this rank.

    Attributes:
        newest_step: step of the newest full checkpoint that this manager has committed or restored; None without one.
        newest_age_s: seconds since the save of that checkpoint began, or since its restore: the training time that a
            crash now would lose. None without a checkpoint.
        saving_step: step of the save under way; None without one.
        saving_s: seconds since that save began; None without one.
        committed: number of committed saves.
        failed: number of failed saves.
        skipped: number of saves that were skipped because another one was under way.
        pruned_s: seconds since the end of the last round of pruning; None before the first round, and on ranks other
            than the coordinator.
        prune_failure: text of the error of the last round; None if it succeeded.
    """

    newest_step: int | None
    newest_age_s: float | None
    saving_step: int | None
    saving_s: float | None
    committed: int
    failed: int
    skipped: int
    pruned_s: float | None
    prune_failure: str | None


class Standing:
    """Thread-safe record of a manager's newest checkpoint and of its counts of saves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.newest: tuple[int, float] | None = None
        self.committed = self.failed = 0
        self._failed_in_a_row = 0

    def status(self, running: Running, pruning: PruneWorker, *, skipped: int) -> ManagerStatus:
        newest, now, failure = self.newest, time.monotonic(), pruning.failure
        under_way = None if running.handle.done() else running
        return ManagerStatus(
            newest_step=newest[0] if newest is not None else None,
            newest_age_s=now - newest[1] if newest is not None else None,
            saving_step=under_way.step if under_way is not None else None,
            saving_s=now - under_way.handle.begun_s if under_way is not None else None,
            committed=self.committed,
            failed=self.failed,
            skipped=skipped,
            pruned_s=now - pruning.ended if pruning.ended is not None else None,
            prune_failure=str(failure) if failure is not None else None,
        )

    def restored(self, step: int) -> None:
        """Record that training resumes from the checkpoint of `step`, even if a newer one was recorded."""
        with self._lock:
            self.newest = step, time.monotonic()

    def saved(self, step: int, began: float, *, full: bool) -> None:
        """Record the commit of a save that began at `began`, in `time.monotonic` seconds. `full`: as for `Running`."""
        with self._lock:
            self.committed += 1
            self._failed_in_a_row = 0
            if full and (self.newest is None or began > self.newest[1]):
                self.newest = step, began

    def lost(self) -> None:
        with self._lock:
            self.failed += 1
            self._failed_in_a_row += 1

    def at_risk(self) -> str:
        """Return a text for logs: the number of consecutive failed saves, and the age of the newest checkpoint."""
        newest, failed = self.newest, self._failed_in_a_row
        in_a_row = f"{failed} saves have failed in a row" if failed > 1 else "the save before it was committed"
        if newest is None:
            return f"{in_a_row if failed > 1 else 'it is the first save'}, and this job has committed nothing yet"
        minutes = (time.monotonic() - newest[1]) / 60
        return f"{in_a_row}, and the newest checkpoint, of step {newest[0]}, is {minutes:.0f} min old"
