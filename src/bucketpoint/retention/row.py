"""The facts on one committed checkpoint that rules may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

FULL = "full"
"""The kind of checkpoints that a job can resume from. No other kind counts as latest."""

WEIGHTS = "weights"

KINDS = (FULL, WEIGHTS, "export", "emergency")

MODEL = "model"
"""The object group that stays when a checkpoint is thinned."""

ORDER = ("step", "created", "id")
"""The attributes that order rows. The order is total, even if clocks were wrong."""


@dataclass(frozen=True)
class Row:
    """One committed checkpoint of one run.

    Attributes:
        step: the training step.
        created: seconds since the epoch at the coordinator's commit.
        id: the attempt's token, or another text that distinguishes two commits of one step. Rows are ordered by (step,
            created, id), which is total.
        kind: one of `KINDS`.
        bytes: bytes of the data.
        groups: bytes by object group, of which `model` stays when a checkpoint is thinned.
        metrics: metrics of the step as reported, NaN and the infinities included.
        pinned: it is kept until its pin is removed.
        leased: a reader holds a lease that has not expired.
        restored_from: the run resumed from it, and has committed no full checkpoint since.
        tombstone: order of an earlier prune by a policy, `delete` or `thin`, which a later prune may withdraw; or None.
            No rule uses it.
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
    def order(self) -> tuple[int, float, str]:
        """The key by which rows are ordered, made of the attributes in `ORDER`."""
        return self.step, self.created, self.id

    @property
    def can_be_thinned(self) -> bool:
        """True if the weights are in separate objects, and there are other objects beside them."""
        return self.kind == FULL and MODEL in self.groups and len(self.groups) > 1

    def thinned(self) -> Row:
        """Return the row of the checkpoint after thinning."""
        left = self.groups[MODEL]
        return replace(self, kind=WEIGHTS, bytes=left, groups={MODEL: left})
