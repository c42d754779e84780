"""The safety set: checkpoints that are kept under every policy.

It is code and not configuration: no setting may switch it off.
"""

from __future__ import annotations

from collections.abc import Iterator

from bucketpoint.retention.checkpoint_set import CheckpointSet
from bucketpoint.retention.row import FULL


def safety_set(universe: CheckpointSet) -> Iterator[tuple[int, str]]:
    """Yield the positions that must be kept whole, each with the reason.

    Checkpoints committed after the listing are safe in another way: a plan names its rows, and the pruner touches no
        other.
    """
    rows = universe.rows
    if not rows:
        return
    yield from _newest("newest", len(rows) - 1, universe.by_time[-1])
    # By step, as `latest` counts; and by time, since a job that was rolled back writes lower steps than those that
    # exist.
    full_by_step = next((position for position in reversed(range(len(rows))) if rows[position].kind == FULL), None)
    full_by_time = next((position for position in reversed(universe.by_time) if rows[position].kind == FULL), None)
    if full_by_step is not None and full_by_time is not None:
        named = {len(rows) - 1, universe.by_time[-1]}
        full = _newest("newest full checkpoint", full_by_step, full_by_time)
        yield from ((position, why) for position, why in full if position not in named)
    for position, row in enumerate(rows):
        if row.pinned:
            yield position, "pinned"
        if row.leased:
            yield position, "leased by a reader"
        if row.restored_from:
            yield position, "training was restored from it"


def _newest(why: str, by_step: int, by_time: int) -> Iterator[tuple[int, str]]:
    if by_step == by_time:
        yield by_step, why
        return
    yield by_step, f"{why} by step"
    yield by_time, f"{why} by time"
