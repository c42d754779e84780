"""Counts of a `Trainer`'s epochs and batches in a checkpoint, rewritten so that any run resumes from them."""

from __future__ import annotations

from typing import Any

_COUNTS = ("ready", "started", "processed", "completed")


def settle(loops: dict[str, Any]) -> None:
    """Rewrite the saved counts of a fit loop for a run that may have another number of batches in an epoch.

    - After the last batch of an epoch the next epoch begins. Lightning compares the saved number of batches with the
      one that an epoch has now, and with `max_steps` it leaves out most of the next epoch.
    - An epoch that was left early, at `max_steps` or by early stopping, goes on. Lightning has counted it as done.
    """
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    current, total = batches["current"], batches["total"]
    if not current["ready"]:
        return
    if batches["is_last_batch"] and current["processed"] == current["ready"]:
        if current["completed"] < current["processed"]:
            # Loggers count the batch once the callbacks of its end have run.
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
        for counts in epochs.values():
            counts.update(dict.fromkeys(_COUNTS, counts["started"]))
        total.update(dict.fromkeys(_COUNTS, total["processed"]))
        current.update(dict.fromkeys(_COUNTS, 0))
        batches["is_last_batch"] = False
    elif epochs["current"]["processed"] == epochs["current"]["ready"]:
        for counts in epochs.values():
            counts["processed"] -= 1
            counts["completed"] = counts["processed"]


def count(progress: Any, done: int) -> None:
    """Let Lightning count the batches of the epoch by their number now: the batch size or the ranks may differ."""
    more = done - progress.processed
    for name in _COUNTS:
        setattr(progress, name, getattr(progress, name) + more)
