"""The rows that one plan is made of, in the orders that rules need, and what a rule says of them. No rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from bucketpoint.errors import BucketpointError
from bucketpoint.retention.row import KINDS, ORDER, Row


@dataclass(frozen=True)
class Universe:
    """All committed checkpoints of one run at one moment. Rules name rows by their position in `rows`.

    Attributes:
        rows: in the total order (step, created, id), the oldest first.
        by_time: positions in the order (created, step, id), the oldest first.
    """

    rows: Sequence[Row]
    by_time: Sequence[int]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Universe:
        """The same for any order of `rows`; equal rows count once.

        Raises:
            BucketpointError: a row cannot be put in order, or two that differ claim to be the same checkpoint.
        """
        given = list(rows)
        for row in given:
            _check(row)
        given.sort(key=attrgetter("step"))
        if len({row.step for row in given}) < len(given):
            given.sort(key=attrgetter(*ORDER))
            given = list(_distinct(given))
        return cls(given, sorted(range(len(given)), key=[row.created for row in given].__getitem__))

    @property
    def newest_created(self) -> float:
        """Seconds since the epoch of the checkpoint that was committed last: the engine's only clock."""
        return self.rows[self.by_time[-1]].created if self.by_time else -math.inf


def _distinct(ordered: Iterable[Row]) -> Iterator[Row]:
    same_step: dict[str, Row] = {}
    before = None
    for row in ordered:
        if row.step != before:
            same_step.clear()
            before = row.step
        other = same_step.get(row.id)
        if other is None:
            same_step[row.id] = row
            yield row
        elif other != row and repr(other) != repr(row):  # NaN metrics differ from themselves
            raise BucketpointError(
                f"Two records of step {row.step} have the id {row.id!r} and differ",
                remedy="Rebuild the records from the checkpoints' metadata",
            )


def _check(row: Row) -> None:
    if type(row.step) is not int or row.step < 0 or type(row.id) is not str:
        raise BucketpointError(f"{row.step!r} is no step, or {row.id!r} no id", key=str(row.id))
    if not math.isfinite(row.created):
        raise BucketpointError(f"Step {row.step} has no time of creation: {row.created!r}", key=row.id)
    if row.kind not in KINDS:
        raise BucketpointError(
            f"Step {row.step} is of the kind {row.kind!r}, which this version does not know",
            key=row.id,
            remedy="Update bucketpoint before anything is deleted here",
        )


@dataclass(frozen=True)
class Decision:
    """What one rule says of a universe.

    Attributes:
        kept: why, in words, for each position that the rule keeps.
        places: for positions that missed, by how many places they did: how many others would have to go, about.
            Positions that the rule would never keep are in neither.
        miss: why the rule does not keep a position, in words.
    """

    kept: Mapping[int, str]
    places: Mapping[int, int]
    miss: Callable[[int], str]


def nth(number: int) -> str:
    """1st, 2nd, 3rd, 4th, ..."""
    return f"{number}th" if number % 100 in (11, 12, 13) else f"{number}{_ENDINGS[number % 10]}"


_ENDINGS = ("th", "st", "nd", "rd", *("th",) * 6)
