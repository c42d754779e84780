"""`CheckpointManager`: saves, restores and prunes a run's checkpoints from a training loop."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from bucketpoint.dcp import error_boundary
from bucketpoint.dcp.async_save import SaveHandle
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.dcp.saving.earlier_saves import EarlierSaves
from bucketpoint.dcp.saving.uploads import Uploads
from bucketpoint.dcp.session import check_types, checked_seconds, whole_step
from bucketpoint.dcp.stats import OnCommit
from bucketpoint.dcp.writer import BucketWriter, Unchanged
from bucketpoint.errors import BucketpointError, StoreError
from bucketpoint.forks import Event, renew_in_child
from bucketpoint.location import Location
from bucketpoint.manager.ranks import Ranks
from bucketpoint.manager.restoring import Restored, attempt, restored
from bucketpoint.manager.saving import (
    ManagerStatus,
    Newer,
    Replacing,
    Running,
    Standing,
    begin_together,
    may_be_warned,
    note_end,
)
from bucketpoint.manager.triggers import Triggers
from bucketpoint.retention import RetentionPolicy
from bucketpoint.retention.rows import FULL
from bucketpoint.staging import Stager, StagingOptions
from bucketpoint.stores.retry import ongoing_outage
from bucketpoint.transfer import TransferOptions

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Manager of one run's checkpoints: saves beside training, restores, and deletes by a retention policy.

    All ranks construct a manager with the same arguments, and call `save`, `should_save`, `restore`, `steps`, `wait`
    and `close` at the same points of the program. `report`, `pin` and `unpin` may be called on any rank.

    Args:
        root: URL of the run; by default the policy's `root`. If both are given, they must be the same place.
        policy: the retention policy, or the path of its YAML file, which each rank reads.
        keep, best, every: a small policy in place of `policy`. `keep`: number of latest checkpoints to keep. `best`:
            metric; the checkpoint with its lowest value is kept too ("eval/acc:max": the highest). `every`: steps
            between saves; `should_save` then also asks for a save at the last step and after SIGTERM.
        process_group: group of the ranks; None for all ranks of the job. The manager makes a separate gloo group.
        storage_options, fs, transfer, staging, unchanged: as for `BucketWriter`.
        trusted: as for `BucketReader`.
        on_commit: as for `async_save`.
        git_sha, config_hash: commit and configuration of the job's program, for the commit record.
        grace_s: seconds between the scheduler's SIGTERM and SIGKILL, the longest time that `close` waits for the last
            save after SIGTERM. None: no limit.

    Raises:
        BucketpointError: an argument has a wrong type, or both `policy` and `keep` are given, or neither, or `root` and
            the policy's `root` are different places.
        RanksDisagreeError: the policies of the ranks have different settings of saves.
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

        self._ranks = Ranks("CheckpointManager()", process_group)
        made = self._ranks.together("CheckpointManager()", prepared)
        self.policy, self.catalog, self._stager, self._uploads = made
        self._store_arguments = {"storage_options": storage_options, "fs": fs, "transfer": transfer}
        self._trusted = trusted
        self._facts = {"git_sha": git_sha, "config_hash": config_hash}
        self._grace_s = grace_s
        save = self.policy.save
        self._ranks.limit(save.in_flight.timeout)
        # Each rank reads the policy's file. If the copies differed, some ranks would save and wait for the others.
        self._ranks.refuse_unless_same("`save:` of the policy", save, "CheckpointManager()")
        own: dict[str, Any] = {"staging": self._stager.options, "unchanged": unchanged}
        self._writer_arguments = {**self._store_arguments, **own}
        self._earlier_saves = EarlierSaves()
        self._saving: dict[str, Any] = {"planner": SavePlanner(), "async_stager": self._stager, "on_commit": on_commit}
        self._triggers = Triggers(save, self._ranks)
        self.pruning = PruneWorker(self.catalog, self.policy)
        """Worker that prunes beside training, on the coordinator, with the report of its last round."""
        self._running = Running.none()
        self._replacing = Replacing(self.catalog, self.pruning)
        self._standing = Standing()
        self.skipped = 0
        self._closed = False
        atexit.register(_close_at_exit, weakref.ref(self))
        renew_in_child(self, CheckpointManager._leave_to_parent)

    # -- saving -------------------------------------------------------------------------------------------------------

    def should_save(self, step: int, *, last: bool = False) -> bool:
        """Return True if a trigger in the policy's `save:` asks for a save of this `step`. All ranks, at every step.

        If the policy has triggers by time or signal, each call costs one small collective.

        Args:
            last: True if training ends with this step.
        """
        why = self._triggers.due(step, last=last)
        if why is not None and self._ranks.is_coordinator:
            logger.info("step %d will be saved: %s", step, why)
        return why is not None

    @property
    def stop_asked(self) -> bool:
        """True after SIGTERM on any rank, once `should_save` has seen it: save, leave the loop and call `close`."""
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
        """Save a state beside training. All ranks. Return None if another save is under way with `when_busy: skip`.

        Args:
            step: the training step, in the name of the checkpoint's folder.
            state: the state, or a function that makes it, which is called if a save begins.
            metrics: metrics of this step that are known already. Only those of the coordinator are used.
            overwrite: replace a checkpoint of this step.
            kind: `"full"`, from which a job can resume; or `"weights"`, `"export"` or `"emergency"`, which
                `keep: latest` does not count.
            newer: treatment of checkpoints of higher steps, which exist after a rollback: `"error"` raises, `"keep"`
                leaves them in place as the latest, `"discard"` gives them a tombstone after this save's commit. After
                `restore(..., rollback=True)` the next commit discards them.

        An error on one rank is raised on all ranks. With `on_failure: warn` in the policy, a failed save is logged and
        counted instead: this call returns None, or, if the previous save failed, continues with the new one.

        Raises:
            BucketpointError: the previous save failed, and no rank of the program has received the error yet; or it is
                still under way, after the policy's timeout or with `when_busy: error`; or there are newer checkpoints;
                or an argument is wrong, such as a metric that is no number; or the state of a rank cannot be made; or a
                rank did not make this call within the policy's timeout.
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
            given = {"overwrite": bool(replaces), **self._writer_arguments}
            return BucketWriter.of_run(url, log, self._uploads, self._earlier_saves, replaces_only=only, **given)

        # If the save fails from here on, its discards must be withdrawn.
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
        """Return True, the same on all ranks, if no save is under way; False if this one is skipped.

        Raise the error of the previous save, unless it was raised before or the policy warns.
        """
        running, how = self._running, self.policy.save.in_flight
        timeout_s = how.timeout.total_seconds()
        pressing = step == self._triggers.pressing
        when_busy = "wait" if pressing else how.when_busy
        if when_busy == "wait":
            running.wait(timeout_s)
        error = running.handle.failure()
        fatal = error is not None and not self._warns(error)
        here = [not running.handle.done(), error is not None, running.received, fatal, running.step]
        # Other ranks may wait for the save up to its limit before they make this collective call.
        limit_s = 3 * timeout_s if when_busy == "wait" else None
        # The step is agreed too: a rank that was interrupted may have no save where others have one.
        busy, failed, received, raises, running.step = self._ranks.most(list(map(int, here)), call, limit_s=limit_s)
        if failed or not busy:
            # A save that failed on another rank fails on this one, too. Its outcome must be recorded before that of the
            # next save.
            running.wait(timeout_s)
            self._running = Running.none()
            # After SIGTERM the error is logged and not raised: otherwise the job would end without a last checkpoint.
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
        """Raise the error of a save unless the policy warns. Count the failure of a save that did not begin."""
        if self._running.step != step:
            self._replacing.failed()
            self._standing.lost()
            self._warn(step, error)
        elif isinstance(error, Exception):
            # All ranks raise the error now, so no later call must raise it again.
            self._running.receive()
        if not self._warns(error):
            raise error

    def _warns(self, error: BaseException) -> bool:
        return self.policy.save.on_failure == "warn" and may_be_warned(error, committed=self._standing.committed > 0)

    def _warn(self, step: int, error: BaseException) -> None:
        if self._ranks.is_coordinator and self._warns(error):
            logger.error(
                "step %d was not saved, and training continues (on_failure: warn); %s: %s",
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
        """Load a checkpoint into a state, in place. All ranks. Return None if the run has no checkpoint yet.

        Args:
            state: the state, whose tensors are overwritten.
            which: `"latest"`, `"best"` (by the policy's first `best` rule), or a step. For `"latest"` and `"best"`, a
                damaged checkpoint is logged as an error, and the next one is tried. After the next commit the damaged
                ones get a tombstone; a save of their step may replace them.
            metric: for `"best"`: the metric of the policy's `best` rule to use, if not the first.
            fresh: begin from scratch if there are traces of checkpoints but none can be loaded.
            rollback: discard newer checkpoints: later saves may have this step, and steps below existing checkpoints,
                and the next commit gives the newer checkpoints a tombstone, except pinned and leased ones. Until that
                commit, `restore` loads them only by their step, which undoes the rollback.
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
            # The save under way may commit a newer step, which the rollback must discard too.
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

    # -- checkpoints of the run ---------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of all full checkpoints, with or without a record, in ascending order. All ranks.

        Only the coordinator sends requests.
        """
        return self._ranks.on_coordinator(
            lambda: [checkpoint.step for checkpoint in self.catalog.with_unrecorded(self.catalog.steps()).full],
            "steps()",
        )

    def status(self) -> ManagerStatus:
        """Return the run's current status. Callable on any rank and thread. Never blocks and sends no request."""
        return self._standing.status(self._running, self.pruning, skipped=self.skipped)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report metrics of a step, at any time. Callable on any rank; only the coordinator writes, and raises.

        The metrics belong to the step's present checkpoint, or to the save under way: a checkpoint that later replaces
        it does not inherit them.
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
        """Pin a step: no policy deletes its checkpoint. Only the coordinator writes.

        Args:
            reason: text that is stored with the pin, for people.

        Raises:
            CheckpointNotFoundError: on the coordinator: there is no checkpoint of the step, and none is being saved.
        """
        step = whole_step(step)
        if self._ranks.is_coordinator:
            if self._running.step != step or self._running.failed:
                notes.refuse_missing(self.catalog, step)
            notes.pin(self.catalog, step, reason=reason)

    def unpin(self, step: int) -> None:
        """Remove all pins of a step. Only the coordinator writes. Without a pin, raises as `pin`."""
        step = whole_step(step)
        if self._ranks.is_coordinator and not notes.unpin(self.catalog, step):
            notes.refuse_missing(self.catalog, step)

    def prune(self, *, force: bool = False) -> Round | None:
        """Carry out the policy now, on the coordinator, and return the report. Other ranks return None.

        Args:
            force: carry out the whole plan, even if `max_delete` refuses it.
        """
        return self.pruning.now(force=force) if self._ranks.is_coordinator else None

    # -- ending -------------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the save under way, at most `timeout` seconds. Return True if it has ended, or if there is none.

        Raises:
            BucketpointError: the save failed, this rank has not raised its error before, and the policy does not warn.
        """
        running = self._running
        if not running.wait(timeout):
            return False
        # `self._running` stays until all ranks agree in `_make_room` that it has ended: their timeouts may differ.
        if running.failed and not running.received and not self._warns(running.error):
            raise running.receive()
        return True

    def close(self) -> None:
        """Wait for the save under way and for pruning, and release all memory. All ranks.

        After SIGTERM `close` waits at most until `grace_s` seconds after the signal. The coordinator then logs that the
        last save is committed; a rank logs a WARNING if no save has begun since the signal.

        With `on_failure: warn`, the exit status of the program is 120 if the last save failed.

        Raises:
            BucketpointError: the last save failed, as for `wait`, or was not committed in time.
        """
        if self._closed:
            return
        running = self._running
        # After Ctrl-C here the manager is still open: the next `close` waits again and raises the save's error.
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
                why, remedy = ongoing_outage()
                raise BucketpointError(
                    f"Step {running.step} was not committed within {self._grace_s} s of SIGTERM{why and f': {why}'}",
                    url=running.handle.url,
                    remedy=remedy or "Give the job more time between SIGTERM and SIGKILL (grace_s), or save more often",
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
            # The exception that ends training takes precedence.
            logger.error("the last save failed: %s", failure)

    def _leave_to_parent(self) -> None:
        # In a forked process: the save under way, the collectives and the catalog's records are the parent's.
        self._closed = True
        self._running = replace(self._running, settled=Event())
        self._running.settled.set()

    def _left_s(self) -> float | None:
        """Return the seconds until the scheduler's SIGKILL; None before SIGTERM, or without `grace_s`."""
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
    """Close the manager of a program that ends without `close`: wait for the last save, and log its error."""
    alive = manager()
    if alive is None or alive._closed:
        return
    try:
        alive.close()
    except Exception as error:  # noqa: BLE001 (the interpreter exits, and nobody is there to catch it)
        logger.error("the last save failed: %s", error)
        error_boundary.lose(alive.catalog.url, error)
