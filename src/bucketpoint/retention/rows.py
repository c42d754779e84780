"""`Row`, the properties of a checkpoint that rules may use; the sorted set of a plan's rows; decisions of a rule."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter

from bucketpoint.errors import BucketpointError

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
    def name(self) -> tuple[int, str]:
        """Step and id, which together name one commit of the run."""
        return self.step, self.id

    @property
    def can_be_thinned(self) -> bool:
        """True if the checkpoint has objects of weights and separate objects of other state."""
        return self.kind == FULL and MODEL in self.groups and len(self.groups) > 1

    def thinned(self) -> Row:
        """Return the row of the checkpoint after thinning."""
        left = self.groups[MODEL]
        return replace(self, kind=WEIGHTS, bytes=left, groups={MODEL: left})


@dataclass(frozen=True)
class CheckpointSet:
    """All committed checkpoints of one run at one moment. Rules refer to a row by its position in `rows`.

    Attributes:
        rows: the rows in the total order (step, created, id).
        steps, created: step and time of commit of each row, in the same order.
        by_time: positions in the order (created, step, id).
    """

    rows: Sequence[Row]
    steps: Sequence[int]
    created: Sequence[float]
    by_time: Sequence[int]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> CheckpointSet:
        """Make the set of rows in any order. Equal rows count once.

        Raises:
            BucketpointError: a row has an invalid field, or two different rows have the same step and id.
        """
        distinct: dict[tuple[int, str], Row] = {}
        for row in rows:
            _check(row)
            other = distinct.setdefault(row.name, row)
            if other is not row and other != row and repr(other) != repr(row):  # NaN metrics differ from themselves
                raise BucketpointError(
                    f"Two records of step {row.step} have the same id {row.id!r} but differ",
                    remedy="Rebuild the records from the checkpoints' metadata",
                )
        given = sorted(distinct.values(), key=attrgetter(*ORDER))
        steps = [row.step for row in given]
        created = [row.created for row in given]
        return cls(given, steps, created, sorted(range(len(given)), key=created.__getitem__))

    @property
    def newest_created(self) -> float:
        """Time of the last commit, in seconds since the epoch. Rules measure ages from it, and not from now."""
        return self.created[self.by_time[-1]] if self.by_time else -math.inf

    def younger(self, age: float) -> int:
        """Return the number of rows at most `age` seconds older than the newest. They are the last in `by_time`."""
        since = self.newest_created - age
        return len(self.by_time) - bisect_left(self.by_time, since, key=self.created.__getitem__)


def _check(row: Row) -> None:
    if type(row.step) is not int or row.step < 0 or type(row.id) is not str:
        raise BucketpointError(
            f"A record has the step {row.step!r} and the id {row.id!r}, which are not a step and an id", key=str(row.id)
        )
    if not math.isfinite(row.created):
        raise BucketpointError(f"Step {row.step} has no time of creation: {row.created!r}", key=row.id)
    if row.kind not in KINDS:
        raise BucketpointError(
            f"Step {row.step} is of the kind {row.kind!r}, which this version does not support",
            key=row.id,
            remedy="Update bucketpoint before you prune this run",
        )


@dataclass(frozen=True)
class Explanation:
    """Explanation of a rule's decision on each position, for people.

    Attributes:
        why, miss: functions that return a text for a position: why the rule keeps it, and why the rule does not.
        places: by position, about how many other rows would have to be removed before the rule keeps it. Positions
            that the rule keeps or would never keep are missing.
    """

    why: Callable[[int], str]
    places: Mapping[int, int]
    miss: Callable[[int], str]


@dataclass(frozen=True)
class RuleDecision:
    """Decision of one rule on a set of checkpoints.

    Attributes:
        kept: positions that the rule keeps.
        explain: function that makes the explanation, which most plans never need.
    """

    kept: AbstractSet[int]
    explain: Callable[[], Explanation]

    @cached_property
    def explanation(self) -> Explanation:
        return self.explain()


def nth(number: int) -> str:
    return f"{number}th" if number % 100 in (11, 12, 13) else f"{number}{_ENDINGS[number % 10]}"


_ENDINGS = ("th", "st", "nd", "rd", *("th",) * 6)
