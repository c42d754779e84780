"""`CheckpointManager`, the interface of a training loop: it joins a run's catalog, policy, saves and loads."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any

from typing_extensions import Self

from bucketpoint.catalog import notes
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.prune import Round
from bucketpoint.catalog.deletion.worker import PruneWorker
from bucketpoint.catalog.policy_file import policy_of
from bucketpoint.catalog.run import open_run, refuse_other_root
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.dcp import program_end
from bucketpoint.dcp.arguments import check_types, checked_seconds, whole_step
from bucketpoint.dcp.async_save import SaveHandle
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.dcp.saving.commit_info import OnCommit
from bucketpoint.dcp.saving.earlier_saves import EarlierSaves
from bucketpoint.dcp.saving.uploads import Uploads
from bucketpoint.dcp.writer import BucketWriter, Unchanged
from bucketpoint.errors import BucketpointError, StoreError
from bucketpoint.forks import renew_in_child
from bucketpoint.location import Location
from bucketpoint.manager.loading import attempt
from bucketpoint.manager.ranks import Ranks
from bucketpoint.manager.replacing import Newer, Replacing
from bucketpoint.manager.restoring import Restored, restored
from bucketpoint.manager.running import Running, begin_together, may_be_warned, note_end
from bucketpoint.manager.status import ManagerStatus, Standing
from bucketpoint.manager.triggers import Triggers
from bucketpoint.retention import RetentionPolicy
from bucketpoint.retention.row import FULL
from bucketpoint.staging import Stager, StagingOptions
from bucketpoint.transfer import TransferOptions

logger = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Least timeout of the collectives of loads, in which ranks wait for each other's reads: torch's default."""


class CheckpointManager:
    """Manager of one run's checkpoints: saves them beside training, restores them, and keeps those of a policy.

    All ranks construct a manager, with the same arguments, and call `save`, `should_save`, `restore`, `steps`, `wait`
    and `close` at the same points of the program. `report`, `pin` and `unpin` may be called on any rank.

    Args:
        root: URL of the run; by default the policy's `root`. If both are given, they must be the same place.
        policy: the policy, which decides what is kept and when to save; or its YAML file, which each rank reads.
        keep, best, every: a small policy, in place of `policy`: number of the latest checkpoints to keep; the metric
            whose lowest value is kept besides ("eval/acc:max": the highest); and the steps between saves. With `every`,
            `should_save` also saves the last step, and the next one after SIGTERM.
        process_group: the ranks; None for all ranks of the job. The manager makes its own gloo group.
        storage_options, fs, transfer, staging, unchanged: as for `BucketWriter`.
        trusted: as for `BucketReader`.
        on_commit: as for `async_save`.
        git_sha, config_hash: commit and configuration of the job's program, for the commit record.
        grace_s: seconds that the scheduler waits between SIGTERM and SIGKILL: after SIGTERM `close` waits at most this
            long for the last save. None: no limit.

    Raises:
        BucketpointError: an argument has a wrong type, there are both `policy` and `keep`, or neither, or `root` and
            the policy's `root` are not the same place.
        RanksDisagreeError: the policies of the ranks would save different steps.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        policy: RetentionPolicy | str | os.PathLike[str] | None = None,
        keep: int | None = None,
        best: str | None = None,
        every: int | None = None,
        process_group: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        fs: Any = None,
        transfer: TransferOptions | None = None,
        staging: StagingOptions | Any = None,
        trusted: bool = False,
        git_sha: str | None = None,
        config_hash: str | None = None,
        grace_s: float | None = None,
        unchanged: Unchanged = "send",
        on_commit: OnCommit | None = None,
    ) -> None:
        def prepared() -> tuple[RetentionPolicy, Catalog, Stager, Uploads]:
            check_types(transfer=transfer)
            if grace_s is not None:
                checked_seconds("grace_s", grace_s)
            read = policy_of(policy, keep, best, every)
            place = Location.of(read.root if root is None else root, storage_options, fs)
            catalog = open_run(read, place)
            refuse_other_root(read, catalog, place)
            return read, catalog, Stager(staging), Uploads(transfer or TransferOptions())

        self._ranks = Ranks(members=process_group)
        made = self._ranks.together("CheckpointManager()", prepared)
        self.policy, self.catalog, self._stager, self._uploads = made
        self._store_arguments = {"storage_options": storage_options, "fs": fs, "transfer": transfer}
        self._trusted = trusted
        self._facts = {"git_sha": git_sha, "config_hash": config_hash}
        self._grace_s = grace_s
        save = self.policy.save
        self._ranks.connect("CheckpointManager()", timeout=save.in_flight.timeout, collectives=_COLLECTIVE_TIMEOUT)
        # Each rank reads its own copy of the policy's file. If they differ, ranks would wait for each other until the
        # timeout.
        self._ranks.refuse_unless_same("`save:` of the policy", save, "CheckpointManager()")
        own: dict[str, Any] = {"staging": self._stager.options, "unchanged": unchanged}
        self._writer_arguments = {**self._store_arguments, **own}
        self._earlier_saves = EarlierSaves()
        self._saving: dict[str, Any] = {"planner": SavePlanner(), "async_stager": self._stager, "on_commit": on_commit}
        self._triggers = Triggers(save, self._ranks)
        self.pruning = PruneWorker(self.catalog, self.policy)
        """The worker that prunes beside training, with the result of its last round. It works on the coordinator."""
        self._running = Running.none()
        self._replacing = Replacing(self.catalog, self.pruning)
        self._standing = Standing()
        self.skipped = 0
        self._closed = False
        atexit.register(_close_at_exit, weakref.ref(self))
        renew_in_child(self, CheckpointManager._leave_to_parent)

    # -- saving -------------------------------------------------------------------------------------------------------

    def should_save(self, step: int, *, last: bool = False) -> bool:
        """Return True if the policy's `save:` asks to save this step, for any reason. All ranks, at every step.

        If the policy has time or signal triggers, each call costs one small collective.

        Args:
            last: True if training ends with this step.
        """
        why = self._triggers.due(step, last=last)
        if why is not None and self._ranks.is_coordinator:
            logger.info("step %d will be saved: %s", step, why)
        return why is not None

    @property
    def stop_asked(self) -> bool:
        """True once SIGTERM has reached any rank and `should_save` has reported it: save, leave the loop, `close`."""
        return self._triggers.stop_asked is not None

    def save(
        self,
        step: int,
        state: dict[str, Any] | Callable[[], dict[str, Any]],
        *,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        kind: str = FULL,
        newer: Newer = "error",
    ) -> SaveHandle | None:
        """Save a state beside training. All ranks. Return None if another save is under way and the policy says skip.

        Args:
            state: the state, or a function that makes it, which is called if a save begins.
            metrics: metrics of this step that are known. Only the coordinator's are used.
            overwrite: replace a checkpoint of this step.
            kind: `"full"`, of which a job can resume; or `"weights"`, `"export"` or `"emergency"`, which `keep: latest`
                does not count.
            newer: treatment of checkpoints of higher steps, which exist if training was rolled back: `"error"` raises,
                `"keep"` leaves them alone (they stay the latest), `"discard"` gives them a tombstone once this save is
                committed. `restore(..., rollback=True)` discards them for all later saves.

        An error on one rank is raised on all of them. With `on_failure: warn` in the policy a save that fails is
        logged and counted instead: the call that would raise its error returns None, or makes the next save.

        Raises:
            BucketpointError: the previous save failed, and the program has not received that error on any rank;
                or it is still under way, after the policy's timeout or with `when_busy: error`; or there are newer
                checkpoints; or an argument is wrong, such as a metric that is no number; or the state of a rank cannot
                be made; or a rank did not make this call within the policy's timeout.
            CheckpointExistsError: this step is committed.
            StagingError: the state of a rank cannot be copied.
        """
        self._refuse_if_closed()
        call = f"save({step!r})"

        def checked() -> int:
            if not inspect.isroutine(state):
                check_types(state=state)
            return whole_step(step)

        step = self._ranks.together(call, checked)
        if not self._make_room(step, call):
            return None
        url = self.catalog.url_of(step)

        def admitted() -> tuple[dict[str, float], bool | frozenset[str]]:
            known = notes.checked_metrics(metrics or {})
            return known, self._replacing.allowed(step, overwrite=overwrite, newer=newer)

        try:
            known, replaces = self._ranks.on_coordinator(admitted, call)
        except StoreError as error:
            self._not_saved(step, error)
            return None

        def writer_of_save() -> BucketWriter:
            log = SaveLog(self.catalog, kind, known, pruner=self.pruning, **self._facts)
            only = replaces if isinstance(replaces, frozenset) else None
            given = {"overwrite": bool(replaces), "log": log, **self._writer_arguments}
            return BucketWriter.of_run(url, self._uploads, self._earlier_saves, replaces_only=only, **given)

        # Any failure from here on must withdraw this save's discards.
        try:
            saving = {"storage_writer": self._ranks.together(call, writer_of_save), **self._saving}
        except BaseException:
            self._replacing.failed()
            raise

        def begun(handle: SaveHandle) -> None:
            self._triggers.saved()
            self._running = Running(step, handle, kind == FULL)
            handle.add_done_callback(functools.partial(note_end, weakref.ref(self), self.catalog, self._running))

        try:
            return begin_together(self._ranks, call, state, url, begun=begun, **saving)
        except BaseException as error:  # noqa: BLE001 (the state's own errors, in a process alone; and interrupts)
            self._not_saved(step, error)
            return None

    def _make_room(self, step: int, call: str) -> bool:
        """Return True if a save may begin: the last one has ended, and its error is not raised. The same on all
        ranks."""
        running, how = self._running, self.policy.save.in_flight
        timeout_s = how.timeout.total_seconds()
        pressing = step == self._triggers.pressing
        when_busy = "wait" if pressing else how.when_busy
        if when_busy == "wait":
            running.wait(timeout_s)
        error = running.handle.failure()
        fatal = error is not None and not self._warns(error)
        here = [not running.handle.done(), error is not None, running.received, fatal, running.step]
        # Each rank may have waited for the save up to its limit, before it waits for the others.
        limit_s = 3 * timeout_s if when_busy == "wait" else None
        # A rank that was interrupted may have no save where the others have one.
        busy, failed, received, raises, running.step = self._ranks.most(list(map(int, here)), call, limit_s=limit_s)
        if failed or not busy:
            # On other ranks the save may still be on its way to the same failure. And an ended save may not have
            # recorded its outcome yet, which must come before the next save's.
            running.wait(timeout_s)
            self._running = Running.none()
            # An error would end a job under SIGTERM without its last checkpoint. The previous save's error is logged.
            if raises and not received and not pressing:
                raise running.receive()
            if failed and not running.received:
                running.receive()
                logger.warning("the save of step %d has failed: %s", running.step, running.error)
            return True
        if when_busy == "skip":
            self.skipped += 1
            logger.info("step %d is not saved, because the save of step %d is still running", step, running.step)
            return False
        raise BucketpointError(
            f"Step {step} cannot be saved, because the save of step {running.step} is still running",
            url=running.handle.url,
            remedy="Save less often, or set save: {in_flight: {when_busy: skip}}",
        )

    def _not_saved(self, step: int, error: BaseException) -> None:
        """Raise the error of a save unless the policy warns. Count the save, if it has ended."""
        if self._running.step != step:
            self._replacing.failed()
            self._standing.lost()
            self._warn(step, error)
        elif isinstance(error, Exception):
            # All ranks raise it, so that none needs to raise the save's error later.
            self._running.receive()
        if not self._warns(error):
            raise error

    def _warns(self, error: BaseException) -> bool:
        """Return True if training continues after this error of a save."""
        return self.policy.save.on_failure == "warn" and may_be_warned(error, committed=self._standing.committed > 0)

    def _warn(self, step: int, error: BaseException) -> None:
        """Log the failure of a save if training continues after it."""
        if self._ranks.is_coordinator and self._warns(error):
            logger.error(
                "step %d was not saved, and training goes on (on_failure: warn); %s: %s",
                step,
                self._standing.at_risk(),
                error,
            )

    # -- restoring ----------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: dict[str, Any],
        which: str | int = "latest",
        *,
        metric: str | None = None,
        fresh: bool = False,
        rollback: bool = False,
        planner: Any = None,
    ) -> Restored | None:
        """Load a checkpoint into a state, in place. All ranks. Return None if the run has none yet.

        Args:
            which: `"latest"`, `"best"` (by the policy's first `best` rule), or a step. For `"latest"` and `"best"`, a
                damaged checkpoint is logged as an error, and the next one is tried. The next commit sets the damaged
                checkpoints aside: a save of the same step may replace them, and they are deleted after their grace.
            metric: for `"best"`: the metric to rank by, one of the policy's.
            fresh: begin from scratch if there are traces of checkpoints and none can be loaded.
            rollback: discard newer checkpoints: later saves of this step, and of steps below existing checkpoints, are
                no errors, and the next commit gives the newer checkpoints a tombstone. Pinned and leased checkpoints
                stay. Until that commit, another `restore` loads them only by number, which undoes the rollback.
            planner: a load planner; by default `LoadPlanner`.

        Raises:
            CheckpointNotFoundError: there is no checkpoint of the named step.
            IncompleteCheckpointError: there is no checkpoint, but there are folders that may have held one.
            CorruptDataError: the named checkpoint is damaged.
            BucketpointError: all checkpoints are damaged.
            MismatchError: the state does not match the saved one.
            UnsafeDataError: the checkpoint was saved with types that the allow-list refuses.
        """
        self._refuse_if_closed()
        call = f"restore({which!r})"

        def checked() -> str | int:
            check_types(state=state)
            return which if isinstance(which, str) else whole_step(which)

        which = self._ranks.together(call, checked)
        if rollback:
            # The running save may commit a newer step, which must then be given up too.
            timeout_s, running = self.policy.save.in_flight.timeout.total_seconds(), self._running
            running.wait(timeout_s)
            (busy,) = self._ranks.most([-1 if running.handle.done() else running.step], call, limit_s=3 * timeout_s)
            if busy >= 0:
                raise BucketpointError(
                    f"The run cannot be rolled back while the save of step {busy} is still running",
                    url=self.catalog.url_of(busy),
                    remedy="Wait for the save to end, and call restore again",
                )
        reading = {"planner": planner, "trusted": self._trusted, **self._store_arguments}
        checkpoint = restored(
            self.catalog,
            self.policy,
            self._ranks,
            lambda step, url: attempt(state, url, self._ranks, **reading),
            self.pruning,
            which,
            metric=metric,
            fresh=fresh,
            rollback=rollback,
        )
        self._replacing.restored(checkpoint.step if checkpoint else None, rollback=rollback, beside=fresh)
        if checkpoint is not None:
            self._triggers.resumed(checkpoint.step)
            self._standing.restored(checkpoint.step)
        return checkpoint

    # -- what there is ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of all full checkpoints, with a record or without, oldest first.

        All ranks; only the coordinator asks the store.
        """
        return self._ranks.on_coordinator(
            lambda: [checkpoint.step for checkpoint in self.catalog.with_unrecorded(self.catalog.steps()).full],
            "steps()",
        )

    def status(self) -> ManagerStatus:
        """Return the run's current status. Any rank and thread may call it. Never blocks, and sends no request."""
        return self._standing.status(self._running, self.pruning, skipped=self.skipped)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report metrics of a step, at any time. Any ranks may call it; only the coordinator writes, and raises.

        They are metrics of the step's present checkpoint, or of the one whose save is under way: one that later
        replaces it has none of them.
        """
        step = whole_step(step)
        if self._ranks.is_coordinator:
            known, running = notes.checked_metrics(metrics), self._running
            if running.step == step and running.hold_back(known):
                return
            try:
                notes.report(self.catalog, step, known)
            except StoreError as error:
                if not self._warns(error):
                    raise
                logger.error("the metrics of step %d are lost (on_failure: warn): %s", step, error)

    def pin(self, step: int, *, reason: str = "") -> None:
        """Keep a step whatever the policy says. Only the coordinator writes.

        Args:
            reason: text that is stored with the pin, for those who look at the run later.

        Raises:
            CheckpointNotFoundError: on the coordinator: there is no checkpoint of the step, and none is being saved.
        """
        step = whole_step(step)
        if self._ranks.is_coordinator:
            if self._running.step != step or self._running.failed:
                notes.refuse_missing(self.catalog, step)
            notes.pin(self.catalog, step, reason=reason)

    def unpin(self, step: int) -> None:
        """Take back all pins of a step. Only the coordinator writes. Raises as `pin`, unless there is a pin."""
        step = whole_step(step)
        if self._ranks.is_coordinator and not notes.unpin(self.catalog, step):
            notes.refuse_missing(self.catalog, step)

    def prune(self, *, force: bool = False) -> Round | None:
        """Carry out the policy now.

        The coordinator prunes and returns a report of the round; other ranks return None.

        Args:
            force: carry out a plan that `max_delete` refuses, too.
        """
        return self.pruning.now(force=force) if self._ranks.is_coordinator else None

    # -- ending -------------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the save under way, at most `timeout` seconds. Return True if it has ended, or if there is none.

        Raises:
            BucketpointError: the save failed, the program has not received its error on this rank, and the policy does
                not warn.
        """
        running = self._running
        if not running.wait(timeout):
            return False
        # The save is dropped only when all ranks agree on its end, in `_make_room`: ranks may wait for different times.
        if running.failed and not running.received and not self._warns(running.error):
            raise running.receive()
        return True

    def close(self) -> None:
        """Wait for the save under way and for pruning, and release all memory. All ranks.

        After SIGTERM `close` waits at most `grace_s` from the signal. The coordinator then logs that the last save is
        committed; a rank logs a WARNING if no save has begun since the signal.

        If the policy warns of failed saves, and the last save failed, the exit status of the program is 120.

        Raises:
            BucketpointError: the last save failed, as `wait` raises it, or was not committed in time.
        """
        if self._closed:
            return
        running = self._running
        # Ctrl-C here leaves the manager open, so that the next close waits again and raises the save's error.
        running.wait(self._left_s())
        self._closed = True
        if self._triggers.unanswered:
            newest = self.status().newest_step
            there = (
                f"the newest checkpoint is step {newest}" if newest is not None else "this job has committed nothing"
            )
            logger.warning("SIGTERM: no save has begun since the signal, and %s", there)
        try:
            if not self.wait(0.0):
                raise BucketpointError(
                    f"Step {running.step} was not committed within {self._grace_s} s of SIGTERM",
                    url=running.handle.url,
                    remedy="Give the job more time between SIGTERM and SIGKILL (grace_s), or save more often",
                )
            saved = running.step >= 0 and not running.failed and not self._triggers.unanswered
            if saved and self.stop_asked and self._ranks.is_coordinator:
                logger.warning("SIGTERM: step %d is committed", running.step)
            self.pruning.drain(self._left_s())
        finally:
            self._triggers.close()
            if running.handle.done():
                self._stager.close()
                self._uploads.close()
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except BucketpointError as failure:
            # The exception that ends training is the one to raise.
            logger.error("the last save failed: %s", failure)

    def _leave_to_parent(self) -> None:
        # The save under way, the collectives and the records of a fork's manager are the parent's.
        self._closed = True
        self._running = replace(self._running, settled=threading.Event())
        self._running.settled.set()

    def _left_s(self) -> float | None:
        """Return the seconds until the scheduler's SIGKILL; None for no limit."""
        asked = self._triggers.stop_asked
        if asked is None or self._grace_s is None:
            return None
        return max(0.0, asked + self._grace_s - time.monotonic())

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise BucketpointError(
                "The CheckpointManager is closed, or was made before this process was forked",
                remedy="Make a new CheckpointManager",
            )


def _close_at_exit(manager: weakref.ref[CheckpointManager]) -> None:
    """Close the manager of a program that ends without `close`: wait for its last save, and report an error."""
    alive = manager()
    if alive is None or alive._closed:
        return
    try:
        alive.close()
    except Exception as error:  # noqa: BLE001 (the interpreter exits, and nobody is there to catch it)
        logger.error("the last save failed: %s", error)
        program_end.lose(alive.catalog.url, error)
