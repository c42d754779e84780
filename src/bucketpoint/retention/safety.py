"""What is kept whatever a policy says. Code and not configuration: no setting may switch it off."""

from __future__ import annotations

from collections.abc import Iterator

from bucketpoint.retention.row import FULL
from bucketpoint.retention.universe import Universe


def safety_set(universe: Universe) -> Iterator[tuple[int, str]]:
    """Positions that must be kept whole, each with the reason.

    What was committed after the universe was read is safe by another way: a plan names every row that it speaks of, and
    whoever carries it out touches no other.
    """
    rows = universe.rows
    if not rows:
        return
    yield len(rows) - 1, "newest by step"
    yield universe.by_time[-1], "newest by time"
    # By step as `latest` counts, and by time as a job writes that went back behind newer steps.
    full_by_step = next((position for position in reversed(range(len(rows))) if rows[position].kind == FULL), None)
    full_by_time = next((position for position in reversed(universe.by_time) if rows[position].kind == FULL), None)
    if full_by_step is not None and full_by_time is not None:
        yield full_by_step, "newest full one by step"
        yield full_by_time, "newest full one by time"
    for position, row in enumerate(rows):
        if not (row.pinned or row.leased or row.restored_from):
            continue
        if row.pinned:
            yield position, "pinned"
        if row.leased:
            yield position, "leased by a reader"
        if row.restored_from:
            yield position, "the run goes on from it"
