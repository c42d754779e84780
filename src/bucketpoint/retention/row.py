"""What the rules know of one committed checkpoint. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

FULL = "full"
"""What a job can resume from. Of the other kinds none counts as latest."""

WEIGHTS = "weights"

KINDS = (FULL, WEIGHTS, "export", "emergency")

MODEL = "model"
"""The object group that stays when a checkpoint is thinned."""

ORDER = ("step", "created", "id")
"""The attributes that put rows in order: a total one, whatever clocks did."""


@dataclass(frozen=True)
class Row:
    """One committed checkpoint of one run.

    Attributes:
        step: the training step.
        created: seconds since the epoch at the coordinator's commit.
        id: the attempt's token, or whatever else tells two commits of one step apart. Rows are ordered by
            (step, created, id), which is total.
        kind: one of `KINDS`.
        bytes: of the data.
        groups: bytes by object group, of which `model` stays when a checkpoint is thinned.
        metrics: what was reported for the step, as it was reported: NaN and the infinities are there too.
        pinned: somebody wants it kept until they say otherwise.
        leased: somebody reads it now, and their lease has not run out.
        restored_from: the run goes on from it, and has committed no full checkpoint since.
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

    @property
    def order(self) -> tuple[int, float, str]:
        """The key of the total order of rows, that of `ORDER`."""
        return self.step, self.created, self.id

    @property
    def can_be_thinned(self) -> bool:
        """Its weights lie in objects of their own, and something else lies beside them."""
        return self.kind == FULL and MODEL in self.groups and len(self.groups) > 1

    def thinned(self) -> Row:
        """The row that is left when only the weights stay."""
        left = self.groups[MODEL]
        return replace(self, kind=WEIGHTS, bytes=left, groups={MODEL: left})
