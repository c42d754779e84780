"""Saves of a manager: whether they may be made, their state on one rank, failures, and the manager's status."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from bucketpoint.catalog import notes
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.remove import HOLDS, Discard, rolled_back
from bucketpoint.catalog.deletion.worker import PruneWorker
from bucketpoint.catalog.records import process_name, read_record
from bucketpoint.catalog.snapshot import Checkpoint, Snapshot
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
from bucketpoint.forks import Event
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
    settled: Event = field(default_factory=Event)
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


# -- what a save may replace -------------------------------------------------------------------------------------------

Newer = Literal["error", "keep", "discard"]

_SAY_SO = "If training continues from an earlier step, call manager.restore(state, step, rollback=True):"
_OTHER_JOB = (
    "If another job saves to this run, stop it, or give this job a run with another URL: a rollback here would delete "
    "the checkpoints of that job. "
)


class Replacing:
    """Check of each save against the existing checkpoints, on the coordinator.

    After the first check, which lists the run, saves above the highest step send no request. A checkpoint that was
    given up, or has a tombstone, blocks a save only if it is pinned or leased. If it was given up because of damage, it
    never does.

    Attributes:
        rolled_back_to: step that training was rolled back to, which may be saved again until the next commit.
        beside: True if the job was restored with `fresh=True`: saves may have lower steps than existing checkpoints.
    """

    def __init__(self, catalog: Catalog, pruner: PruneWorker) -> None:
        self._catalog = catalog
        self._pruner = pruner
        self._looked = False
        self._highest: int | None = None
        self.rolled_back_to: int | None = None
        self.beside = False
        self._discards: list[Discard] = []

    def restored(self, step: int | None, *, rollback: bool = False, beside: bool = False) -> None:
        """Record that the job resumed from `step`, or from scratch (None). The next save lists the run again."""
        # A rollback stays in effect until the next commit, even if its target is restored again without `rollback`.
        self.rolled_back_to = step if rollback or step == self.rolled_back_to else None
        self._looked, self.beside = False, beside

    def failed(self) -> None:
        """Withdraw the discards of the failed save."""
        self._pruner.forget(self._discards)
        self._discards = []

    def committed(self, step: int) -> None:
        """Record a commit. Called on the thread of the save."""
        self._discards = []
        self._highest = step if self._highest is None else max(step, self._highest)
        self.rolled_back_to = None

    def allowed(self, step: int, *, overwrite: bool, newer: Newer) -> bool | frozenset[str]:
        """Return True if any checkpoint of the step may be replaced, False if none, or the marks of those that may be.

        Two LISTs, three after a rollback, and one small GET for each checkpoint without a record.

        Raises:
            CheckpointExistsError: the step is committed.
            BucketpointError: there are newer checkpoints; or `newer` is not one of its three values.
        """
        if newer not in get_args(Newer):
            raise BucketpointError(
                f"newer= must be one of {', '.join(map(repr, get_args(Newer)))}, not {newer!r}", url=self._catalog.url
            )
        if self._looked and self._highest is not None and step > self._highest:
            return overwrite
        given_up = {discard.name: discard for discard in self._pruner.given_up}
        back = given_up or self.rolled_back_to is not None
        # Only a snapshot with notes shows which checkpoints are pinned or leased.
        snapshot = self._catalog.with_unrecorded(self._catalog.snapshot() if back else self._catalog.steps())
        there = [*snapshot.checkpoints, *(discard.checkpoint for discard in given_up.values())]
        self._looked, self._highest = True, max((checkpoint.step for checkpoint in there), default=None)
        gone = snapshot.going() | given_up.keys()
        # A checkpoint without a record has no id in a snapshot, so its folder identifies it.
        folders = {discard.checkpoint.folder for discard in given_up.values() if discard.checkpoint.key is None}
        gone |= {checkpoint.name for checkpoint in snapshot.unrecorded if checkpoint.folder in folders}
        for checkpoint in snapshot.checkpoints:
            if checkpoint.step == step and not overwrite:
                self._refuse_to_replace(checkpoint, snapshot, gone)
        later = [one for one in snapshot.full if one.step > step and one.name not in gone]
        if later and newer == "error" and not self.beside:
            many = f"{len(later)} checkpoints have higher steps than {step}; the highest is"
            higher = many if len(later) > 1 else f"1 checkpoint has a higher step than {step}:"
            last = max(later, key=lambda one: one.step)
            committer, remedy = self._committer(last)
            raise BucketpointError(
                f"{higher} step {last.step}, committed {committer}; "
                f"training was probably rolled back{', or another job saves to this run' if remedy else ''}",
                url=self._catalog.url,
                remedy="If this job has not restored yet, call manager.restore(state) first. "
                f"{remedy}{_SAY_SO} the newer checkpoints get a tombstone. "
                'save(..., newer="keep") leaves them in place, as the latest',
            )
        if newer == "discard":
            discards = rolled_back(self._catalog, snapshot, step)
            self._discards = [discard for discard in discards if discard.name not in given_up]
            self._pruner.give_up(discards)
        if overwrite:
            return True
        # Marks and not True: a commit of this step by another job, made after this check, must not be replaced.
        marks = {checkpoint.mark for checkpoint in snapshot.checkpoints if checkpoint.step == step}
        marks |= {tombstone.mark for tombstone in snapshot.notes.tombstones if tombstone.step == step}
        marks |= {discard.checkpoint.mark for discard in given_up.values() if discard.checkpoint.step == step}
        return frozenset(marks) or False

    def _refuse_to_replace(self, one: Checkpoint, snapshot: Snapshot, gone: set[tuple[str, str]]) -> None:
        """Raise unless a checkpoint may be replaced without `overwrite=True`: it was given up and is not held."""
        held = sorted(snapshot.held().get(one.step, set()) & HOLDS)
        given_up = one.name in gone or one.step == self.rolled_back_to
        same = [each for each in self._pruner.given_up if each.checkpoint.folder == one.folder]
        damaged = any(each.damaged and (one.key is None or each.checkpoint.id == one.id) for each in same)
        if damaged or (given_up and not held):
            return
        replaces = "save(..., overwrite=True) replaces the checkpoint"
        committer, remedy = self._committer(one)
        status = " and ".join(["committed", *held])
        raise CheckpointExistsError(
            f"Checkpoint already exists at this URL: step {one.step} is {status}, {committer}",
            url=self._catalog.url_of_folder(one.folder),
            remedy=f"{replaces}, even if it is held"
            if given_up
            else f"{remedy}{_SAY_SO} the step may then be saved again. Or: {replaces}",
        )

    def _committer(self, one: Checkpoint) -> tuple[str, str]:
        """Return a text with time and host of a checkpoint's commit, and a remedy if another job may have made it."""
        host = None
        if one.key is not None:
            with contextlib.suppress(BucketpointError):
                record = read_record(self._catalog, one.key)
                host = record.host if record is not None else None
        when = time.strftime("at %Y-%m-%d %H:%M:%S UTC", time.gmtime(one.created))
        if host is None:
            return when, _OTHER_JOB
        name = host if host.isprintable() else repr(host)
        return f"{when} by {name}", "" if host == process_name() else _OTHER_JOB
