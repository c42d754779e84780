"""`CheckpointManager`, the interface of a training loop: it joins a run's catalog, policy, saves and loads."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

from typing_extensions import Self

from bucketpoint.catalog import notes
from bucketpoint.catalog.deletion.prune_worker import PruneWorker, Round
from bucketpoint.catalog.policy_file import policy_of
from bucketpoint.catalog.run import open_run, refuse_other_root
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.dcp import BucketWriter, OnCommit, SaveHandle, SavePlanner, async_save
from bucketpoint.dcp.arguments import check_types, whole_step
from bucketpoint.dcp.saving.earlier_saves import EarlierSaves
from bucketpoint.dcp.saving.stale import OnStale
from bucketpoint.dcp.saving.uploads import Uploads
from bucketpoint.dcp.writer import Unchanged
from bucketpoint.errors import BucketpointError
from bucketpoint.manager.at_exit import close_at_exit
from bucketpoint.manager.loading import attempt
from bucketpoint.manager.ranks import Ranks
from bucketpoint.manager.replacing import Newer, Replacing
from bucketpoint.manager.restoring import Restored, restored
from bucketpoint.manager.running import Running, note_end
from bucketpoint.manager.status import ManagerStatus, Standing
from bucketpoint.manager.triggers import Triggers
from bucketpoint.retention import RetentionPolicy
from bucketpoint.retention.row import FULL
from bucketpoint.staging import Stager, StagingOptions
from bucketpoint.transfer import TransferOptions

logger = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Least timeout of the manager's collectives, in which ranks wait for each other's uploads: torch's default."""


class CheckpointManager:
    """Manager of one run's checkpoints: saves them beside training, restores them, and keeps those that a policy names.

    All ranks construct a manager, with the same arguments, and call `save`, `should_save`, `restore`, `steps`, `wait`
    and `close` at the same points of the program. `report`, `pin` and `unpin` may be called on any rank.

    Args:
        root: URL of the run; by default the policy's `root`. If both are given, they must be the same place.
        policy: the policy, which says which checkpoints are kept and when saves are made; or its YAML file, which each
            rank reads.
        process_group: the ranks; None for all ranks of the job. The manager makes a gloo group of its own.
        storage_options, fs, transfer, staging, unchanged, on_stale, check_finite: as for `BucketWriter`.
        trusted: as for `BucketReader`.
        on_commit: as for `async_save`.
        git_sha, config_hash: commit and configuration of the job's program, for the commit record.
        grace_s: seconds that the scheduler waits between SIGTERM and SIGKILL: after SIGTERM `close` waits no longer
            than that for the last save. None: no limit.

    Raises:
        BucketpointError: an argument has a wrong type, or `root` and the policy's `root` are not the same place.
        RanksDisagreeError: the policy says on some ranks that other steps are saved than on others.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        policy: RetentionPolicy | str | os.PathLike[str],
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
        on_stale: OnStale = None,
        check_finite: bool = False,
        on_commit: OnCommit | None = None,
    ) -> None:
        check_types(policy=policy, transfer=transfer)
        policy = self.policy = policy_of(policy)
        self.catalog = open_run(policy, root, storage_options=storage_options, fs=fs)
        refuse_other_root(policy, self.catalog, storage_options=storage_options, fs=fs)
        self._store_arguments = {"storage_options": storage_options, "fs": fs, "transfer": transfer}
        self._trusted = trusted
        self._facts = {"git_sha": git_sha, "config_hash": config_hash}
        self._grace_s = grace_s
        self._ranks = Ranks(process_group, timeout=max(_COLLECTIVE_TIMEOUT, 2 * policy.save.in_flight.timeout))
        # Each rank reads its own copy of the policy's file. Ranks that save at other steps would wait for each other
        # until the group's timeout.
        self._ranks.refuse_unless_same("`save:` of the policy", policy.save)
        self._stager = Stager(staging)
        self._uploads = Uploads(transfer or TransferOptions())
        own: dict[str, Any] = {"staging": self._stager.options, "unchanged": unchanged, "on_stale": on_stale}
        self._writer_arguments = {**self._store_arguments, **own, "check_finite": check_finite}
        self._earlier_saves = EarlierSaves()
        self._saving: dict[str, Any] = {"planner": SavePlanner(), "async_stager": self._stager, "on_commit": on_commit}
        self._triggers = Triggers(policy.save, self._ranks)
        self.pruning = PruneWorker(self.catalog, policy)
        """The worker that prunes beside training, with the result of its last round. It works on the coordinator."""
        self._running: Running | None = None
        self._replacing = Replacing(self.catalog, self.pruning)
        self._standing = Standing()
        self.skipped = 0
        self._closed = False
        atexit.register(close_at_exit, weakref.ref(self))

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
        state: dict[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        kind: str = FULL,
        newer: Newer = "error",
    ) -> SaveHandle | None:
        """Save a state beside training. All ranks. Return None if another save is under way and the policy says skip.

        Args:
            metrics: metrics of this step, as far as they are known. Only the coordinator's are used.
            overwrite: replace a checkpoint of this step.
            kind: `"full"`, of which a job can resume; or `"weights"`, `"export"` or `"emergency"`, which `keep: latest`
                does not count.
            newer: treatment of checkpoints of higher steps, which exist if training was rolled back: `"error"` raises,
                `"keep"` leaves them alone (they stay the latest), `"discard"` gives them a tombstone once this save is
                committed. `restore(..., rollback=True)` discards them for all later saves.

        Raises:
            BucketpointError: the save before this one failed, and no call has raised that error yet; or it is still
                under way, after the policy's timeout or with `when_busy: error`; or there are newer checkpoints; or an
                argument is wrong, such as a metric that is no number.
            CheckpointExistsError: this step is committed.
            StagingError: the state cannot be copied.
        """
        self._refuse_if_closed()
        check_types(state=state)
        step = whole_step(step)
        if not self._make_room(step):
            return None
        url = self.catalog.url_of(step)

        def admitted() -> tuple[dict[str, float], bool | frozenset[str]]:
            known = notes.checked_metrics(metrics or {})
            return known, self._replacing.allowed(step, overwrite=overwrite, newer=newer)

        known, replaces = self._ranks.on_coordinator(admitted)
        # Whatever fails from here on must take back what this save was to discard.
        try:
            log = SaveLog(self.catalog, kind, known, pruner=self.pruning, **self._facts)
            writer = BucketWriter(url, overwrite=bool(replaces), log=log, **self._writer_arguments)
            writer.uploads, writer.earlier_saves = self._uploads, self._earlier_saves
            if isinstance(replaces, frozenset):
                writer.replaces_only = replaces
            handle = async_save(
                state,
                checkpoint_id=url,
                storage_writer=writer,
                process_group=self._ranks.group,
                **self._saving,
            )
        except BaseException:
            self._replacing.failed()
            raise
        self._triggers.saved()
        self._running = Running(step, handle, kind == FULL)
        handle.add_done_callback(functools.partial(note_end, weakref.ref(self), self._running))
        return handle

    def _make_room(self, step: int) -> bool:
        """Return True if a save may begin: the last one has ended without failure. All ranks get the same answer."""
        running, how = self._running, self.policy.save.in_flight
        if running is None:
            return True
        pressing = step == self._triggers.pressing
        when_busy = "wait" if pressing else how.when_busy
        if when_busy == "wait":
            running.wait(how.timeout.total_seconds())
        busy, failed = self._ranks.most([int(not running.handle.done()), int(running.failed and not running.reported)])
        if failed or not busy:
            # On other ranks the save may still be on its way to the same failure. And a save that has ended may not
            # have noted its outcome yet, which must not come after what the next save notes.
            running.wait(how.timeout.total_seconds())
            self._running = None
            # An error would end a pressing job without its last checkpoint. That of the save before is logged.
            if failed and not pressing:
                raise running.error
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
                damaged checkpoint is logged as an error and passed over, and the next one is tried. The next commit
                sets the passed-over checkpoints aside: a save of the same step may replace them, and they are deleted
                after their grace.
            metric: for `"best"`: the metric to rank by, one of the policy's.
            fresh: begin from scratch if there are traces of checkpoints and none can be loaded.
            rollback: go back for good: later saves of this step, and of steps below existing checkpoints, are no
                errors, and the next commit gives the newer checkpoints a tombstone. Pinned and leased checkpoints stay.
                Until that commit, another `restore` does not load them, unless by their number: that undoes the
                rollback.
            planner: a load planner; by default `LoadPlanner`.

        Raises:
            CheckpointNotFoundError: there is no checkpoint of the named step.
            IncompleteCheckpointError: there is no checkpoint, but folders in which one may have been.
            CorruptDataError: the named checkpoint is damaged.
            BucketpointError: all checkpoints are damaged.
            MismatchError: the state does not match the saved one.
            UnsafeDataError: the checkpoint was saved with types that the allow-list refuses.
        """
        self._refuse_if_closed()
        check_types(state=state)
        which = which if isinstance(which, str) else whole_step(which)
        if rollback and self._running is not None:
            # The running save may commit a newer step, which must then be given up too.
            self._running.wait(self.policy.save.in_flight.timeout.total_seconds())
            if self._ranks.most([int(not self._running.handle.done())])[0]:
                raise BucketpointError(
                    f"The run cannot be rolled back while the save of step {self._running.step} is still running",
                    url=self._running.handle.url,
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
            lambda: [checkpoint.step for checkpoint in self.catalog.with_unrecorded(self.catalog.steps()).full]
        )

    def status(self) -> ManagerStatus:
        """Return what is known of the run now. Any rank may call it, at any time, from any thread: it waits for nothing
        and asks no store.
        """
        return self._standing.status(self._running, self.pruning, skipped=self.skipped)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note metrics of a step, at any time. Any ranks may call it; only the coordinator writes."""
        step = whole_step(step)
        if self._ranks.is_coordinator:
            notes.report(self.catalog, step, metrics)

    def pin(self, step: int, *, reason: str = "") -> None:
        """Keep a step whatever the policy says. Only the coordinator writes.

        Args:
            reason: text that is stored with the pin, for those who look at the run later.

        Raises:
            CheckpointNotFoundError: on the coordinator: there is no checkpoint of the step, and none is being saved.
        """
        step = whole_step(step)
        if self._ranks.is_coordinator:
            if self._running is None or self._running.step != step or self._running.failed:
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
            BucketpointError: the save failed.
        """
        running = self._running
        if running is None:
            return True
        if not running.wait(timeout):
            return False
        # The save is forgotten only when all ranks agree on its end, in `_make_room`: each rank may wait for another
        # time.
        if running.failed and not running.reported:
            running.reported = True
            raise running.error
        return True

    def close(self) -> None:
        """Wait for the save under way and for pruning, and release all memory. All ranks.

        After SIGTERM `close` waits no longer than `grace_s` allows. The coordinator then logs that the last save is
        committed.

        Raises:
            BucketpointError: the last save failed, or was not committed in time.
        """
        if self._closed:
            return
        running = self._running
        if running is not None:
            # Ctrl-C here leaves the manager open, so that the next close waits again and raises the save's error.
            running.wait(self._left_s())
        self._closed = True
        try:
            if not self.wait(0.0):
                assert running is not None
                raise BucketpointError(
                    f"Step {running.step} was not committed within {self._grace_s} s of SIGTERM",
                    url=running.handle.url,
                    remedy="Give the job more time between SIGTERM and SIGKILL (grace_s), or save more often",
                )
            if running is not None and not running.failed and self.stop_asked and self._ranks.is_coordinator:
                logger.warning("SIGTERM: step %d is committed", running.step)
            self.pruning.drain(self._left_s())
        finally:
            self._triggers.close()
            if running is None or running.handle.done():
                self._stager.close()
                self._uploads.close()
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _left_s(self) -> float | None:
        """Return the seconds until the scheduler's SIGKILL; None for no limit."""
        asked = self._triggers.stop_asked
        if asked is None or self._grace_s is None:
            return None
        return max(0.0, asked + self._grace_s - time.monotonic())

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise BucketpointError("The CheckpointManager is closed", remedy="Make a new CheckpointManager")
