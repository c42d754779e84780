"""Sorted set of the rows of one plan, and the classes of a rule's decision on it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from bucketpoint.errors import BucketpointError
from bucketpoint.retention.row import KINDS, ORDER, Row


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
            other = distinct.setdefault((row.step, row.id), row)
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
