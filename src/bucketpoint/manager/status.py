"""Status of a manager: the age of the newest checkpoint, the save under way, and counts of saves."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from bucketpoint.catalog.deletion.worker import PruneWorker
from bucketpoint.manager.running import Running


@dataclass(frozen=True)
class ManagerStatus:
    """Status of a run, from its manager on this rank, without a request to the store.

    Attributes:
        newest_step: step of the newest full checkpoint that this manager has committed, or of the one that it has
            restored; None without one.
        newest_age_s: seconds since the state of that checkpoint was saved or restored: training that a crash loses.
            None without one.
        saving_step: step of the save under way; None if none is.
        saving_s: seconds since that save began; None if none is under way.
        committed: number of saves that were committed.
        failed: number of saves that failed.
        skipped: number of saves that were left out, because another one was under way.
        pruned_s: seconds since the end of the last round of pruning; None on ranks that do not prune, and before the
            first round.
        prune_failure: text of the error of the last round; None if it did its work.
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
    """The newest checkpoint of a manager, and the number of its saves. Threads that end saves record them here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.newest: tuple[int, float] | None = None
        self.committed = self.failed = 0
        self._failed_in_a_row = 0

    def status(self, running: Running, pruning: PruneWorker, *, skipped: int) -> ManagerStatus:
        """Return the status now.

        Args:
            running: the last save.
        """
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
        """Record that training resumes from a checkpoint, even if there were newer ones."""
        with self._lock:
            self.newest = step, time.monotonic()

    def saved(self, step: int, began: float, *, full: bool) -> None:
        """Record a commit of the state of the time `began`, in `time.monotonic` seconds.

        Args:
            full: True if a job can resume from the checkpoint: not if it has only weights.
        """
        with self._lock:
            self.committed += 1
            self._failed_in_a_row = 0
            if full and (self.newest is None or began > self.newest[1]):
                self.newest = step, began

    def lost(self) -> None:
        """Record a failed save."""
        with self._lock:
            self.failed += 1
            self._failed_in_a_row += 1

    def at_risk(self) -> str:
        """Return for a log line how many saves have failed in a row, and what a crash now would lose."""
        newest, failed = self.newest, self._failed_in_a_row
        in_a_row = f"{failed} saves have failed in a row" if failed > 1 else "the save before it was committed"
        if newest is None:
            return f"{in_a_row if failed > 1 else 'it is the first save'}, and this job has committed nothing yet"
        minutes = (time.monotonic() - newest[1]) / 60
        return f"{in_a_row}, and the newest checkpoint, of step {newest[0]}, is {minutes:.0f} min old"
