"""`Row`: the properties of a committed checkpoint that rules may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

FULL = "full"
"""Kind of the checkpoints that a job can resume from. No other kind counts as latest."""

WEIGHTS = "weights"

KINDS = (FULL, WEIGHTS, "export", "emergency")

MODEL = "model"
"""Object group that thinning keeps."""

ORDER = ("step", "created", "id")
"""Attributes by which rows are sorted. The order is total, even if clocks were wrong."""


@dataclass(frozen=True)
class Row:
    """One committed checkpoint of one run.

    Attributes:
        step: the training step.
        created: seconds since the epoch at the coordinator's commit.
        id: the attempt's token, or another text that distinguishes two commits of one step.
        kind: one of `KINDS`.
        bytes: bytes of the data.
        groups: bytes by object group. Thinning keeps the group `model`.
        metrics: metrics as reported, including NaN and the infinities.
        pinned: True if the step has a pin that has not expired.
        leased: True if a reader has a lease that has not expired.
        restored_from: True if the run resumed from the step, and has committed no full checkpoint since.
        tombstone: order of an earlier prune, `delete` or `thin`, which a later prune may withdraw; or None. No rule
            uses it.
    """

    step: int
    created: float
    id: str
    kind: str = FULL
    bytes: int = 0
    groups: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    leased: bool = False
    restored_from: bool = False
    tombstone: str | None = None

    @property
    def can_be_thinned(self) -> bool:
        """True if the checkpoint has objects of weights and separate objects of other state."""
        return self.kind == FULL and MODEL in self.groups and len(self.groups) > 1

    def thinned(self) -> Row:
        """Return the row of the checkpoint after thinning."""
        left = self.groups[MODEL]
        return replace(self, kind=WEIGHTS, bytes=left, groups={MODEL: left})
