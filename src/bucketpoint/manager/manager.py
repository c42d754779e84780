"""`CheckpointManager`: what a training loop calls. Ties catalogue, policy, saves and loads together; decides little."""

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
from bucketpoint.catalog.policy_file import read_policy
from bucketpoint.catalog.pruning import PruneWorker, Round
from bucketpoint.catalog.run import open_run
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.catalog.snapshot import Snapshot
from bucketpoint.dcp import BucketWriter, SaveHandle, SavePlanner, async_save, program_end
from bucketpoint.errors import BucketpointError
from bucketpoint.manager.loading import attempt
from bucketpoint.manager.ranks import Ranks
from bucketpoint.manager.replacing import Newer, Replacing
from bucketpoint.manager.restoring import Restored, Wanted, restored
from bucketpoint.manager.running import Running
from bucketpoint.manager.triggers import Triggers
from bucketpoint.retention import RetentionPolicy
from bucketpoint.retention.row import FULL
from bucketpoint.staging import Stager, StagingOptions
from bucketpoint.transfer import TransferOptions

logger = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other's uploads at least, torch's default."""


class CheckpointManager:
    """The checkpoints of one run: saved beside training, restored, and kept as a policy says.

    All ranks make one, with the same arguments, and call `save`, `should_save`, `restore`, `steps`, `wait` and `close`
    at the same points of the program. `report`, `pin` and `unpin` may be called on any.

    Args:
        root: URL of the run; by default the policy's.
        policy: what is kept, and when saves are made; or the YAML file that says so, which each rank reads.
        process_group: the ranks; None for all of the job. The manager makes a gloo group of its own.
        storage_options, fs, transfer, staging: as for `BucketWriter`.
        trusted: as for `BucketReader`.
        git_sha, config_hash: of what the job runs, for the record.
        grace_s: how long the scheduler waits between SIGTERM and SIGKILL, in seconds: `close` waits for the last save
            until then.
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
    ) -> None:
        policy = policy if isinstance(policy, RetentionPolicy) else read_policy(policy)
        self.policy = policy
        self.catalog = open_run(policy, root, storage_options=storage_options, fs=fs)
        self._store_arguments = {"storage_options": storage_options, "fs": fs, "transfer": transfer}
        self._reading = {"trusted": trusted}
        self._facts = {"git_sha": git_sha, "config_hash": config_hash}
        self._grace_s = grace_s
        self._ranks = Ranks(process_group, timeout=max(_COLLECTIVE_TIMEOUT, 2 * policy.save.in_flight.timeout))
        self._stager = Stager(staging)
        self._planner = SavePlanner()
        self._triggers = Triggers(policy.save, self._ranks)
        self._pruner = PruneWorker(self.catalog, policy)
        self._running: Running | None = None
        self._replacing = Replacing(self.catalog, self._pruner)
        self.skipped = 0
        self._closed = False
        atexit.register(_at_exit, weakref.ref(self))

    # -- saving -------------------------------------------------------------------------------------------------------

    def should_save(self, step: int, *, last: bool = False) -> bool:
        """Whether the policy's `save:` wants this step, for any reason. All ranks, at every step.

        Where it has time or signal triggers, one small collective each time.

        Args:
            last: training ends with this step.
        """
        why = self._triggers.due(step, last=last)
        if why is not None and self._ranks.is_coordinator:
            logger.info("step %d is to be saved: %s", step, why)
        return why is not None

    @property
    def stop_asked(self) -> bool:
        """Whether SIGTERM has come, to any rank, and `should_save` has said so: save, leave the loop, `close`."""
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
        """Save a state beside training. All ranks. None if the policy says to skip while another save is on its way.

        Args:
            metrics: of this step, as far as they are known: those of the coordinator count.
            overwrite: replace a checkpoint of this step.
            newer: what becomes of checkpoints of higher steps, which are there if training was rolled back: an
                `"error"` is raised, they are left alone (`"keep"`: they stay the latest), or they get a tombstone
                once this one is committed (`"discard"`). `restore(..., rollback=True)` says it for all saves to come.

        Raises:
            BucketpointError: the save before this one failed, which was not known yet; or it has not ended within the
                policy's timeout; or there are newer checkpoints.
            CheckpointExistsError: this step is committed.
            StagingError: the state cannot be copied.
        """
        self._refuse_if_closed()
        if not self._make_room(step):
            return None
        replaces = self._ranks.told(lambda: self._replacing.allowed(step, overwrite=overwrite, newer=newer))
        log = SaveLog(
            self.catalog,
            kind,
            dict(metrics or {}),
            pruner=self._pruner,
            **self._facts,
        )
        url = self.catalog.url_of(step)
        overwrites = bool(replaces)
        writer = BucketWriter(url, overwrite=overwrites, log=log, staging=self._stager.options, **self._store_arguments)
        if isinstance(replaces, frozenset):
            writer.replaces_only = replaces
        try:
            handle = async_save(
                state,
                checkpoint_id=url,
                storage_writer=writer,
                planner=self._planner,
                process_group=self._ranks.group,
                async_stager=self._stager,
            )
        except BaseException:
            self._replacing.failed()
            raise
        self._triggers.saved()
        self._running = Running(step, handle)
        after = functools.partial(_ended, weakref.ref(self), self._running)
        handle.add_done_callback(after)
        return handle

    def _make_room(self, step: int) -> bool:
        """Whether a save may begin: the last one has ended, well. All ranks come to the same."""
        running, how = self._running, self.policy.save.in_flight
        if running is None:
            return True
        when_busy = "wait" if step == self._triggers.pressing else how.when_busy
        if when_busy == "wait":
            running.wait(how.timeout.total_seconds())
        busy, failed = self._ranks.most([int(not running.handle.done()), int(running.failed and not running.told)])
        if failed:
            # Others may still be on their way to the same end.
            running.wait(how.timeout.total_seconds())
            self._running = None
            raise running.error
        if not busy:
            self._running = None
            return True
        if when_busy == "skip":
            self.skipped += 1
            logger.info("step %d is not saved: step %d is still on its way", step, running.step)
            return False
        raise BucketpointError(
            f"Step {step} cannot be saved: step {running.step} is still on its way",
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
        """Load a checkpoint into a state, in place. All ranks. None if the run has none yet.

        Args:
            which: `"latest"`, `"best"` by the policy's first `best` rule, or a step. Of the first two, one that is
                damaged is passed over, which is logged as an error, and the next one is tried. The next commit sets
                aside what was passed over: a save of its step may replace it, and it goes after its grace.
            metric: for `"best"`: which of the policy's metrics.
            fresh: begin from scratch although there are traces of checkpoints and none can be loaded.
            rollback: go back for good: saves behind newer checkpoints, and of this very step, are no mistake, and the
                next commit gives the newer ones a tombstone. What is pinned or leased stays.
            planner: a load planner; by default `LoadPlanner`.

        Raises:
            CheckpointNotFoundError: the step that was named is not there.
            IncompleteCheckpointError: there is no checkpoint, and folders in which one may have been.
            CorruptDataError: all checkpoints are damaged, or the one that was named.
            MismatchError: the state is another one than was saved.
            UnsafeDataError: it was saved with what the allow-list refuses.
        """
        self._refuse_if_closed()
        if rollback and self._running is not None:
            # What it commits is among what is given up.
            self._running.wait(self.policy.save.in_flight.timeout.total_seconds())
        reading = {"planner": planner, **self._store_arguments, **self._reading}
        found = restored(
            self.catalog,
            self.policy,
            self._ranks,
            Wanted(which, metric, fresh, rollback=rollback),
            lambda step, url: attempt(state, url, self._ranks, **reading),
            self._pruner,
        )
        rolled_back_to = found.step if found is not None and rollback else None
        self._replacing.restored(rolled_back_to, beside=fresh)
        if found is not None:
            self._triggers.resumed(found.step)
        return found

    # -- what there is ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of all full checkpoints, with a record or without, the oldest first.

        All ranks; the coordinator asks the store.
        """

        def listed() -> list[int]:
            snapshot: Snapshot = self.catalog.with_unrecorded(self.catalog.steps())
            return [one.step for one in snapshot.checkpoints if one.kind == FULL]

        return self._ranks.told(listed)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note metrics of a step, at any time. On whichever ranks call it, the coordinator writes."""
        if self._ranks.is_coordinator:
            notes.report(self.catalog, step, metrics)

    def pin(self, step: int, *, reason: str = "") -> None:
        """Keep a step whatever the policy says. The coordinator writes."""
        if self._ranks.is_coordinator:
            notes.pin(self.catalog, step, reason=reason)

    def unpin(self, step: int) -> None:
        """Take back all pins of a step. The coordinator writes."""
        if self._ranks.is_coordinator:
            notes.unpin(self.catalog, step)

    def prune(self, *, force: bool = False) -> Round | None:
        """Carry out the policy now. The coordinator prunes, and returns what came of it; other ranks return None."""
        if not self._ranks.is_coordinator:
            return None
        return self._pruner.now(force=force)

    @property
    def pruning(self) -> PruneWorker:
        """What pruning beside training came to, on the coordinator."""
        return self._pruner

    # -- ending -------------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the save under way, at most `timeout` seconds. Whether it has ended.

        Raises:
            BucketpointError: it failed.
        """
        running = self._running
        if running is None:
            return True
        if not running.wait(timeout):
            return False
        # Kept until all ranks have agreed on it, in `_make_room`: each may wait for another time.
        if running.failed and not running.told:
            running.told = True
            raise running.error
        return True

    def close(self) -> None:
        """Wait for the save under way and for pruning, and return all memory. All ranks.

        After SIGTERM it waits no longer than `grace_s` allows, and logs whether the last save was committed.

        Raises:
            BucketpointError: the last save failed, or was not committed in time.
        """
        if self._closed:
            return
        self._closed = True
        running, left = self._running, self._left_s()
        try:
            if not self.wait(left):
                assert running is not None
                raise BucketpointError(
                    f"Step {running.step} was not committed in the {self._grace_s} s after SIGTERM",
                    url=running.handle.url,
                    remedy="Give the job more time to end, or save more often",
                )
            if running is not None and not running.failed and self.stop_asked and self._ranks.is_coordinator:
                logger.warning("SIGTERM: step %d is committed", running.step)
            self._pruner.drain(self._left_s())
        finally:
            self._triggers.close()
            if running is None or running.handle.done():
                self._stager.close()
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _left_s(self) -> float | None:
        """Seconds until the scheduler loses patience; None for as long as it takes."""
        asked = self._triggers.stop_asked
        if asked is None or self._grace_s is None:
            return None
        return max(0.0, asked + self._grace_s - time.monotonic())

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise BucketpointError("This manager is closed", remedy="Make another one")


def _ended(manager: weakref.ref[CheckpointManager], running: Running, handle: SaveHandle) -> None:
    alive = manager()
    if alive is not None and handle.failure() is None:
        alive._replacing.committed(running.step)
    elif alive is not None:
        alive._replacing.failed()
    running.settled.set()


def _at_exit(manager: weakref.ref[CheckpointManager]) -> None:
    """A program that ends without `close` has its last save waited for, and is told what became of it."""
    alive = manager()
    if alive is None or alive._closed:
        return
    try:
        alive.close()
    except Exception as error:  # noqa: BLE001 (the interpreter exits, and nobody is there to catch it)
        logger.error("the last save: %s", error)
        program_end.lose(alive.catalog.url, error)
