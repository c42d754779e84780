"""The report of one prune."""

from __future__ import annotations

from dataclasses import dataclass, field

from bucketpoint.stores import DeleteFailure


@dataclass
class Pruned:
    """Report of one prune. Checkpoints are (step, id).

    Attributes:
        buried: got a tombstone.
        deleted, thinned: were deleted, and were reduced to their weights.
        withdrawn: had a tombstone that is now void: the policy keeps them, they are held, or they were saved anew.
        refused: were ordered to go and were left, with the reason.
        freed: bytes of data that were removed with each deleted or thinned checkpoint.
        metrics: names of all metrics that the run has values of.
        failures: keys that the store did not delete, with the reason; the next prune tries them again.
        gone: steps with a record whose checkpoint something else has removed or replaced. No rule counts them.
        ahead: steps that were saved by a machine whose clock was ahead, and by how many seconds.
        now: the store's time of the round; None if it tells none.
        stopped: the reason why nothing was done at all: another pruner is at work, or the newest checkpoint is not
            whole.
    """

    buried: list[tuple[int, str]] = field(default_factory=list)
    deleted: list[tuple[int, str]] = field(default_factory=list)
    thinned: list[tuple[int, str]] = field(default_factory=list)
    withdrawn: list[tuple[int, str]] = field(default_factory=list)
    refused: dict[tuple[int, str], str] = field(default_factory=dict)
    freed: dict[tuple[int, str], int] = field(default_factory=dict)
    metrics: frozenset[str] = frozenset()
    failures: list[DeleteFailure] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    ahead: dict[int, float] = field(default_factory=dict)
    now: float | None = None
    stopped: str | None = None
