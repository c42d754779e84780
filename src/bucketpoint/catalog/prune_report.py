"""The report of one prune."""

from __future__ import annotations

from dataclasses import dataclass, field

from bucketpoint.stores import DeleteFailure


@dataclass
class Pruned:
    """Report of one prune. Checkpoints are (step, id).

    Attributes:
        buried: got a tombstone.
        deleted, thinned: gone, and reduced to their weights.
        withdrawn: had a tombstone that is now void: somebody holds on to them, or they were saved anew.
        refused: ordered, and not done, with the reason.
        freed: bytes of data that are gone with those that were deleted or thinned.
        failures: keys that the store did not delete, and why; what has failed is tried again by the next prune.
        stopped: why nothing was done at all: another one prunes, or the newest checkpoint is not whole.
    """

    buried: list[tuple[int, str]] = field(default_factory=list)
    deleted: list[tuple[int, str]] = field(default_factory=list)
    thinned: list[tuple[int, str]] = field(default_factory=list)
    withdrawn: list[tuple[int, str]] = field(default_factory=list)
    refused: dict[tuple[int, str], str] = field(default_factory=dict)
    freed: dict[tuple[int, str], int] = field(default_factory=dict)
    failures: list[DeleteFailure] = field(default_factory=list)
    stopped: str | None = None
