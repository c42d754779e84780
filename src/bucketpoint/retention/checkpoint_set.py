"""The rows that one plan is made from, in the orders that rules need, and the decisions of rules on them."""

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
    """All committed checkpoints of one run at one moment. Rules name rows by their position in `rows`.

    Attributes:
        rows: in the total order (step, created, id), the oldest first.
        steps, created: the step and the time of creation of each row.
        by_time: positions in the order (created, step, id), the oldest first.
    """

    rows: Sequence[Row]
    steps: Sequence[int]
    created: Sequence[float]
    by_time: Sequence[int]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> CheckpointSet:
        """Make the set of these rows. Their order does not matter, and equal rows count once.

        Raises:
            BucketpointError: a row cannot be put in order, or two different rows claim to be the same checkpoint.
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
        """Time of the last commit, in seconds since the epoch: the engine's only clock."""
        return self.created[self.by_time[-1]] if self.by_time else -math.inf

    def younger(self, age: float) -> int:
        """Return how many rows, the last ones in `by_time`, are at most `age` seconds older than the newest one."""
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
            f"Step {row.step} is of the kind {row.kind!r}, which this version does not know",
            key=row.id,
            remedy="Update bucketpoint before you prune this run",
        )


@dataclass(frozen=True)
class Explanation:
    """Explanation of a rule's decision on each position, for people.

    Attributes:
        why, miss: return a text for why the rule keeps a position, and why it does not.
        places: for each position that missed, the number of places by which it missed: about how many other rows would
            have to go first. Positions that the rule keeps, or would never keep, are not in it.
    """

    why: Callable[[int], str]
    places: Mapping[int, int]
    miss: Callable[[int], str]


@dataclass(frozen=True)
class RuleDecision:
    """Decision of one rule on a set of checkpoints.

    Attributes:
        kept: the positions that the rule keeps.
        explain: makes the explanation on demand: most plans are made by pruners, and not shown.
    """

    kept: AbstractSet[int]
    explain: Callable[[], Explanation]

    @cached_property
    def explanation(self) -> Explanation:
        return self.explain()


def nth(number: int) -> str:
    """Format an ordinal number: 1st, 2nd, 3rd, 4th, ..."""
    return f"{number}th" if number % 100 in (11, 12, 13) else f"{number}{_ENDINGS[number % 10]}"


_ENDINGS = ("th", "st", "nd", "rd", *("th",) * 6)
