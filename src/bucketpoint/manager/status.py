"""Status of a manager: newest checkpoint, save under way, counts of saves."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from bucketpoint.catalog.deletion.worker import PruneWorker
from bucketpoint.manager.running import Running


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
