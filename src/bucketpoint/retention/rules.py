"""The rules of a policy. Each decides from the rows alone which of them it keeps.

Every rule must be path independent: keep(A | B) = keep(keep(A) | keep(B)). Otherwise two pruners with different
listings could delete different checkpoints. Two forms of rules have this property: the first n rows in a fixed total
order (of all rows, or of each cell of a fixed grid), and a test of one row that uses no other value than the time of
the newest row, which is always kept. Unions of such rules have it, too (Aizerman and Malishevski, 1981). A rule that
counts from the oldest row lacks this property.
"""

from __future__ import annotations

import importlib
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import islice
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias

from bucketpoint.errors import PolicyError, PolicyFault
from bucketpoint.retention.rows import FULL, CheckpointSet, Explanation, Row, RuleDecision, nth
from bucketpoint.retention.setting_types import Checked, Key, Text, WholeNumber, written


class RetentionRule:
    """Base of the rules."""

    @property
    def label(self) -> str:
        """The rule as in the policy's text, on one line."""
        raise NotImplementedError

    @property
    def thins(self) -> bool:
        """True if the rule keeps only the weights of checkpoints that no other rule keeps."""
        return False

    def decide(self, universe: CheckpointSet) -> RuleDecision:
        """Return the checkpoints that the rule keeps, with its reasons."""
        raise NotImplementedError


@dataclass(frozen=True)
class Latest(RetentionRule):
    """Rule that keeps the `count` full checkpoints with the highest steps: those that a job can resume from."""

    count: int

    @property
    def label(self) -> str:
        return f"latest: {self.count}"

    def decide(self, universe: CheckpointSet) -> RuleDecision:
        rows = universe.rows
        ranked = [position for position in reversed(range(len(rows))) if rows[position].kind == FULL]

        def explain() -> Explanation:
            ranks = _ranks(ranked)

            def miss(position: int) -> str:
                if position not in ranks:
                    return f"of the kind {rows[position].kind}; latest counts full checkpoints"
                return f"{nth(ranks[position])} latest; latest keeps {self.count}"

            return Explanation(lambda position: f"{nth(ranks[position])} latest", _missed(ranks, self.count), miss)

        return RuleDecision(frozenset(ranked[: self.count]), explain)


@dataclass(frozen=True)
class Await(Checked):
    """Limits on holding checkpoints whose value of the metric is not reported yet."""

    for_: Annotated[timedelta, Key("for"), "held until the newest checkpoint is more recent by this duration"]
    max: Annotated[int, WholeNumber(1), "largest number of held checkpoints; the newest are held"]


@dataclass(frozen=True)
class Best(Checked, RetentionRule):
    """The `count` checkpoints with the best values of one metric. NaN and infinite values are never ranked."""

    metric: Annotated[str, Text("a metric's name", r"\S(.*\S)?"), "name of the metric"]
    mode: Annotated[Literal["min", "max"], "which values are better"]
    count: Annotated[int, WholeNumber(1), "number of kept checkpoints"] = 1
    ties: Annotated[Literal["oldest", "newest"], "preference among equal values"] = "oldest"
    wait: Annotated[Await | None, Key("await"), "hold checkpoints whose value is not reported yet"] = None

    @property
    def label(self) -> str:
        return f"best: {self.metric} {self.mode} {self.count}"

    def decide(self, universe: CheckpointSet) -> RuleDecision:
        rows, metric = universe.rows, self.metric
        ranked, waiting = self.ranked(rows), self._waiting(universe)
        most = self.wait.max if self.wait else 0

        def explain() -> Explanation:
            ranks, waits = _ranks(ranked), _ranks(waiting)

            def why(position: int) -> str:
                if position in ranks:
                    return f"{nth(ranks[position])} best {metric}"
                return f"waits for {metric}, {nth(waits[position])} of at most {most}"

            def miss(position: int) -> str:
                if position in ranks:
                    return f"{nth(ranks[position])} best {metric}; best keeps {self.count}"
                if position in waits:
                    return f"{nth(waits[position])} waiting for {metric}; at most {most} may wait"
                if metric in rows[position].metrics:
                    return f"{metric} is {rows[position].metrics[metric]}, which is never ranked"
                return f"{metric} was never reported" + (f" within {written(self.wait.for_)}" if self.wait else "")

            return Explanation(why, {**_missed(ranks, self.count), **_missed(waits, most)}, miss)

        return RuleDecision(frozenset((*ranked[: self.count], *waiting[:most])), explain)

    def ranked(self, rows: Sequence[Row]) -> list[int]:
        """Return the positions of the rows with a finite value, best first. `rows` must be sorted by `ORDER`."""
        metrics = ((position, row.metrics.get(self.metric)) for position, row in enumerate(rows))
        values = {position: number for position, value in metrics if (number := _finite(value)) is not None}
        # Sorting is stable, also with `reverse`: equal values keep this order.
        by_age = values if self.ties == "oldest" else reversed(values)
        return sorted(by_age, key=values.__getitem__, reverse=self.mode == "max")

    def _waiting(self, universe: CheckpointSet) -> list[int]:
        """Return the positions of the rows without a value that are young enough, newest first.

        The order is by time, so that the last rows expire first. By step, an old row with a high step would expire
        before them, and a row that was dropped earlier would take its place.
        """
        if self.wait is None:
            return []
        young = universe.younger(self.wait.for_.total_seconds())
        newest = islice(reversed(universe.by_time), young)
        rows = universe.rows
        return [at for at in newest if self.metric not in rows[at].metrics]


Thin: TypeAlias = Annotated[Literal["weights"] | None, "keep only the weights of checkpoints that no other rule keeps"]


class _Grid(Checked, RetentionRule):
    thin: str | None

    @property
    def thins(self) -> bool:
        return self.thin is not None


@dataclass(frozen=True)
class EverySteps(_Grid):
    """The earliest checkpoint in each of the cells [k * steps, (k + 1) * steps), k >= 1, and step 0."""

    steps: Annotated[int, WholeNumber(1), "width of the grid"]
    until: Annotated[int | None, WholeNumber(0), "the last step that the rule covers"] = None
    last: Annotated[int | None, WholeNumber(1), "keep only those of the highest cells"] = None
    thin: Thin = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.until is not None and self.until < self.steps:
            message = f"Only step 0 is ever kept: the grid begins at {self.steps}, and the rule ends at {self.until}"
            raise PolicyError.of(PolicyFault(message, "Raise `until`, or remove the rule"))

    @property
    def label(self) -> str:
        return f"every: {self.steps} steps{_bounds(self.until, self.last, self.thin)}"

    def decide(self, universe: CheckpointSet) -> RuleDecision:
        steps, width = universe.steps, self.steps
        # Of the rows below `width`, only step 0 is in a cell.
        zero, first = bisect_right(steps, 0), bisect_left(steps, width)
        end = len(steps) if self.until is None else bisect_right(steps, self.until)
        inside = [*range(min(zero, end)), *range(first, end)]

        def name(cell: int) -> str:
            return f"steps {cell * width} to {(cell + 1) * width - 1}" if cell else "step 0"

        def outside(position: int) -> str:
            if self.until is not None and steps[position] > self.until:
                return f"after step {self.until}, the end of the rule for every {width} steps"
            return f"before step {width}, the start of the rule for every {width} steps"

        return _earliest(inside, [steps[position] // width for position in inside], self.last, name, outside)


@dataclass(frozen=True)
class EveryHours(_Grid):
    """The earliest checkpoint in each cell of a grid of hours, which begins at the epoch in UTC."""

    hours: Annotated[int, WholeNumber(1), "width of the grid; 24 begins at midnight UTC"]
    last: Annotated[int | None, WholeNumber(1), "keep only those of the newest cells"] = None
    thin: Thin = None

    @property
    def label(self) -> str:
        return f"every: {self.hours} hours{_bounds(None, self.last, self.thin)}"

    def decide(self, universe: CheckpointSet) -> RuleDecision:
        width = self.hours * 3600

        def name(cell: int) -> str:
            return f"the {self.hours} h from {_utc(cell * width)}"

        cells = [math.floor(universe.created[position] / width) for position in universe.by_time]
        return _earliest(universe.by_time, cells, self.last, name, lambda position: "outside the grid")


@dataclass(frozen=True)
class Within(RetentionRule):
    """Rule that keeps the checkpoints at most `age` older than the newest one.

    Ages do not count from now, so an idle run loses no checkpoint.
    """

    age: timedelta

    @property
    def label(self) -> str:
        return f"within: {written(self.age)}"

    def decide(self, universe: CheckpointSet) -> RuleDecision:
        by_time, created, newest = universe.by_time, universe.created, universe.newest_created
        too_old = len(by_time) - universe.younger(self.age.total_seconds())

        def why(position: int) -> str:
            return f"{_ago(newest - created[position])} older than the newest"

        def miss(position: int) -> str:
            return f"{why(position)}; within keeps {written(self.age)}"

        return RuleDecision(
            frozenset(by_time[too_old:]),
            lambda: Explanation(why, _ranks(reversed(by_time[:too_old])), miss),
        )


@dataclass(frozen=True)
class Steps(RetentionRule):
    """Rule that keeps the listed steps."""

    steps: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"steps: {', '.join(map(str, self.steps[:5]))}{', ...' if len(self.steps) > 5 else ''}"

    def decide(self, universe: CheckpointSet) -> RuleDecision:
        named = frozenset(self.steps)
        kept = frozenset(position for position, step in enumerate(universe.steps) if step in named)
        return RuleDecision(kept, _same("named", "not among the named steps"))


@dataclass(frozen=True)
class Match(RetentionRule):
    """Rule that keeps the rows for which a function of the user returns True.

    The result must depend on the row alone, and be the same at each call. It must not be True for a thinned row and
    False for the whole one. The function is imported for the first plan, and not when the policy is read.
    """

    path: str

    @property
    def label(self) -> str:
        return f"match: {self.path}"

    def decide(self, universe: CheckpointSet) -> RuleDecision:
        function = self._imported() if universe.rows else None
        kept = frozenset(position for position, row in enumerate(universe.rows) if self._matches(function, row))
        return RuleDecision(kept, _same("matches", "does not match"))

    def _imported(self) -> Any:
        module, _, name = self.path.partition(":")
        try:
            function = attrgetter(name)(importlib.import_module(module))
        except Exception as error:
            raise self._failed(f"cannot be imported: {type(error).__name__}: {error}") from error
        if not callable(function):
            raise self._failed("is not a function")
        return function

    def _matches(self, function: Any, row: Row) -> bool:
        try:
            answer = function(row)
        except Exception as error:
            raise self._failed(f"failed at step {row.step}: {type(error).__name__}: {error}") from error
        if type(answer) is not bool:
            raise self._failed(f"returned {type(answer).__name__} at step {row.step}, not True or False")
        return answer

    def _failed(self, what: str) -> PolicyError:
        remedy = "A plan needs its answer: correct the function, or remove `match` from the policy"
        return PolicyError.of(PolicyFault(f"{self.path} {what}", remedy, ("keep", "match")))


def _finite(value: object) -> float | None:
    """Return a metric as a float if it can be ranked; None for NaN, the infinities and values that are no numbers."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def _ranks(ranked: Iterable[int]) -> dict[int, int]:
    return {position: rank for rank, position in enumerate(ranked, 1)}


def _missed(ranks: Mapping[int, int], count: int) -> dict[int, int]:
    """Return, for each position with a rank above `count`, the difference."""
    return {position: rank - count for position, rank in ranks.items() if rank > count}


def _same(why: str, miss: str) -> Callable[[], Explanation]:
    """Return a function that makes an explanation with the same texts for every row, and without places."""
    return lambda: Explanation(lambda position: why, {}, lambda position: miss)


def _earliest(
    ordered: Sequence[int],
    cells: Sequence[int],
    last: int | None,
    name: Callable[[int], str],
    outside: Callable[[int], str],
) -> RuleDecision:
    """Keep the first position of each cell, but only in the `last` highest cells that are not empty.

    Args:
        ordered: positions in the grid, in the order that decides which is first.
        cells: cell of each position in `ordered`.
        name: returns the text for a cell.
        outside: returns the text for a position that is not in `ordered`.
    """
    # In reverse, because the last assignment of a key stays.
    earliest = dict(zip(reversed(cells), reversed(ordered), strict=True))
    counted = sorted(earliest, reverse=True)[:last]

    def explain() -> Explanation:
        behind = {cell: max(0, rank - (last or rank)) for rank, cell in enumerate(sorted(earliest, reverse=True), 1)}
        cell_of = dict(zip(ordered, cells, strict=True))
        before: Counter[int] = Counter()
        places = {}
        for position, cell in cell_of.items():
            if place := before[cell] + behind[cell]:
                places[position] = place
            before[cell] += 1

        def why(position: int) -> str:
            return f"earliest of {name(cell_of[position])}"

        def miss(position: int) -> str:
            cell = cell_of.get(position)
            if cell is None:
                return outside(position)
            if last is not None and behind[cell]:
                return f"{name(cell)}: {nth(behind[cell] + last)} newest of these; last keeps {last}"
            return f"{nth(places[position] + 1)} of {name(cell)}; every keeps the earliest"

        return Explanation(why, places, miss)

    return RuleDecision(frozenset(earliest[cell] for cell in counted), explain)


def _bounds(until: int | None, last: int | None, thin: str | None) -> str:
    named = {"until": until, "last": last, "thin": thin}
    return "".join(f", {name} {value}" for name, value in named.items() if value is not None)


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size or (unit == "m" and seconds >= size):
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"


def _utc(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s after the epoch"
