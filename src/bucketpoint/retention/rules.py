"""The rules: each says which rows it keeps, from the rows alone. No clock, no I/O; what a policy unites is not here.

Every rule is path independent, keep(A | B) = keep(keep(A) | keep(B)), as it is of one of two forms: the first few of a
fixed total order (of all rows, or of each cell of a fixed grid), or a test of one row, whose only outside number is the
time of the newest row, which is always kept. Unions of such rules are path independent again (Aizerman and Malishevski,
1981). A rule of another form, such as one that is anchored on the oldest row left, breaks every pruner but one.
"""

from __future__ import annotations

import importlib
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Annotated, Any, Literal, Protocol

from bucketpoint.errors import Fault, PolicyError
from bucketpoint.retention.row import FULL, Row
from bucketpoint.retention.shapes import Checked, Choice, Duration, Key, Record, Text, Whole, written
from bucketpoint.retention.universe import Decision, Universe, nth


class Rule(Protocol):
    """What a plan asks of a rule."""

    @property
    def label(self) -> str:
        """The rule as its policy writes it, on one line."""
        ...

    @property
    def thins(self) -> bool:
        """What only such rules keep is thinned to its weights."""
        ...

    def decide(self, universe: Universe) -> Decision: ...


@dataclass(frozen=True)
class Latest:
    """The `count` full checkpoints with the highest steps. Other kinds never count: a job cannot resume from them."""

    count: int
    thins = False

    @property
    def label(self) -> str:
        return f"latest: {self.count}"

    def decide(self, universe: Universe) -> Decision:
        ranked = [position for position, row in enumerate(universe.rows) if row.kind == FULL][::-1]
        ranks, kept, places = _cut(ranked, self.count, "{} latest")

        def miss(position: int) -> str:
            if position not in ranks:
                return f"of the kind {universe.rows[position].kind}; latest counts full checkpoints"
            return f"{nth(ranks[position])} latest; latest keeps {self.count}"

        return Decision(kept, places, miss)


@dataclass(frozen=True)
class Await(Checked):
    """How long checkpoints without a value are held for it."""

    for_: Annotated[timedelta, Key("for"), Duration(), "held until the newest checkpoint is this much younger"]
    max: Annotated[int, Whole(1), "at most so many are held, the newest ones"]


@dataclass(frozen=True)
class Best(Checked):
    """The `count` checkpoints with the best values of one metric. NaN and infinite values are never ranked."""

    metric: Annotated[str, Text("a metric's name", r"\S(.*\S)?"), "the name that values are reported under"]
    mode: Annotated[Literal["min", "max"], Choice("min", "max"), "which values are better"]
    count: Annotated[int, Whole(1), "how many are kept"] = 1
    ties: Annotated[Literal["oldest", "newest"], Choice("oldest", "newest"), "who wins among equal values"] = "oldest"
    wait: Annotated[Await | None, Key("await"), Record(Await), "hold checkpoints whose value is not reported yet"] = (
        None
    )

    thins = False

    @property
    def label(self) -> str:
        return f"best: {self.metric} {self.mode} {self.count}"

    def decide(self, universe: Universe) -> Decision:
        rows = universe.rows
        sign = 1 if self.mode == "min" else -1
        age = 1 if self.ties == "oldest" else -1
        values = {
            position: value for position, row in enumerate(rows) if (value := finite(row.metrics.get(self.metric)))
            is not None
        }  # fmt: skip
        ranked = sorted(values, key=lambda position: (sign * values[position], age * position))
        ranks, kept, places = _cut(ranked, self.count, f"{{}} best {self.metric}")
        waiting = self._waiting(universe) if self.wait else []
        held = {position: number for number, position in enumerate(waiting, 1)}
        for position, number in held.items():
            if self.wait and number <= self.wait.max:
                kept[position] = f"waits for {self.metric}, {nth(number)} of at most {self.wait.max}"
            elif self.wait:
                places[position] = number - self.wait.max

        def miss(position: int) -> str:
            if position in ranks:
                return f"{nth(ranks[position])} best {self.metric}; best keeps {self.count}"
            if position in held:
                return f"{nth(held[position])} to wait for {self.metric}; {self.wait.max if self.wait else 0} may"
            if self.metric in rows[position].metrics:
                return f"{self.metric} is {rows[position].metrics[self.metric]}, which is never ranked"
            return f"{self.metric} was never reported" + (f" within {written(self.wait.for_)}" if self.wait else "")

        return Decision(kept, places, miss)

    def _waiting(self, universe: Universe) -> list[int]:
        """Rows without a value that are young enough, the newest first.

        By time and not by step: a higher step with an older time would leave the window and let another one in.
        """
        assert self.wait is not None
        since = universe.newest_created - self.wait.for_.total_seconds()
        return [
            position
            for position in reversed(universe.by_time)
            if universe.rows[position].created >= since and self.metric not in universe.rows[position].metrics
        ]


@dataclass(frozen=True)
class EverySteps(Checked):
    """The earliest checkpoint in each of the cells [k * steps, (k + 1) * steps), k >= 1, and step 0."""

    steps: Annotated[int, Whole(1), "width of the grid"]
    until: Annotated[int | None, Whole(0), "the last step that the rule speaks of"] = None
    last: Annotated[int | None, Whole(1), "keep those of the highest cells only"] = None
    thin: Annotated[
        Literal["weights"] | None, Choice("weights"), "keep only the weights of what no other rule keeps"
    ] = None

    @property
    def thins(self) -> bool:
        return self.thin is not None

    @property
    def label(self) -> str:
        return f"every: {self.steps} steps{_bounds(self.until, self.last, self.thin)}"

    def decide(self, universe: Universe) -> Decision:
        cells: dict[int, list[int]] = defaultdict(list)
        for position, row in enumerate(universe.rows):
            if (self.until is None or row.step <= self.until) and (row.step >= self.steps or row.step == 0):
                cells[row.step // self.steps].append(position)

        def name(cell: int) -> str:
            return f"steps {cell * self.steps} to {(cell + 1) * self.steps - 1}" if cell else "step 0"

        def outside(position: int) -> str:
            step = universe.rows[position].step
            if self.until is not None and step > self.until:
                return f"after step {self.until}, where every {self.steps} steps ends"
            return f"before step {self.steps}, where every {self.steps} steps begins"

        return _earliest(cells, self.last, name, outside)


@dataclass(frozen=True)
class EveryHours(Checked):
    """The earliest checkpoint in each cell of a grid of hours, which begins at the epoch in UTC."""

    hours: Annotated[int, Whole(1), "width of the grid; 24 begins at midnight UTC"]
    last: Annotated[int | None, Whole(1), "keep those of the newest cells only"] = None
    thin: Annotated[
        Literal["weights"] | None, Choice("weights"), "keep only the weights of what no other rule keeps"
    ] = None

    @property
    def thins(self) -> bool:
        return self.thin is not None

    @property
    def label(self) -> str:
        return f"every: {self.hours} hours{_bounds(None, self.last, self.thin)}"

    def decide(self, universe: Universe) -> Decision:
        width = self.hours * 3600
        cells: dict[int, list[int]] = defaultdict(list)
        for position in universe.by_time:
            cells[math.floor(universe.rows[position].created / width)].append(position)

        def name(cell: int) -> str:
            return f"the {self.hours} h from {_utc(cell * width)}"

        return _earliest(cells, self.last, name, lambda position: "")


@dataclass(frozen=True)
class Within:
    """What is at most `age` older than the newest checkpoint: an idle run loses nothing."""

    age: timedelta
    thins = False

    @property
    def label(self) -> str:
        return f"within: {written(self.age)}"

    def decide(self, universe: Universe) -> Decision:
        seconds = self.age.total_seconds()
        since = universe.newest_created - seconds
        times = [universe.rows[position].created for position in universe.by_time]
        kept, places = {}, {}
        for position, created in zip(universe.by_time, times, strict=True):
            if created >= since:
                kept[position] = f"{_ago(times[-1] - created)} older than the newest"
            else:
                # So many are too new for it: without them it would be within.
                places[position] = max(1, len(times) - bisect_right(times, created + seconds))

        def miss(position: int) -> str:
            age = _ago(times[-1] - universe.rows[position].created)
            return f"{age} older than the newest; within keeps {written(self.age)}"

        return Decision(kept, places, miss)


@dataclass(frozen=True)
class Steps:
    """Named steps, forever."""

    steps: tuple[int, ...]
    thins = False

    @property
    def label(self) -> str:
        return f"steps: {', '.join(map(str, self.steps[:5]))}{', ...' if len(self.steps) > 5 else ''}"

    def decide(self, universe: Universe) -> Decision:
        named = frozenset(self.steps)
        kept = {position: "named" for position, row in enumerate(universe.rows) if row.step in named}
        return Decision(kept, {}, lambda position: "not among the named steps")


@dataclass(frozen=True)
class Match:
    """What a function of the user's says yes to: of one row, the same at each call, and never yes to a row only since
    it was thinned. It is imported when a plan needs it, and not when the policy is read.
    """

    path: str
    thins = False

    @property
    def label(self) -> str:
        return f"match: {self.path}"

    def decide(self, universe: Universe) -> Decision:
        if not universe.rows:
            return Decision({}, {}, lambda position: "")
        function = self.load()
        kept = {position: "matches" for position, row in enumerate(universe.rows) if self._asked(function, row)}
        return Decision(kept, {}, lambda position: "does not match")

    def load(self) -> Callable[[Row], bool]:
        """The function.

        Raises:
            PolicyError: it cannot be imported.
        """
        module, _, name = self.path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except Exception as error:
            raise self._failed(f"cannot be imported: {type(error).__name__}: {error}") from error
        if not callable(found):
            raise self._failed("is not a function")
        return found  # type: ignore[no-any-return]

    def _asked(self, function: Callable[[Row], bool], row: Row) -> bool:
        try:
            answer = function(row)
        except Exception as error:
            raise self._failed(f"failed at step {row.step}: {type(error).__name__}: {error}") from error
        if type(answer) is not bool:
            raise self._failed(f"returned {type(answer).__name__} at step {row.step}, and not True or False")
        return answer

    def _failed(self, what: str) -> PolicyError:
        remedy = "Nothing is planned without its answer: put it right, or take `match` out of the policy"
        return PolicyError.of(Fault(f"{self.path} {what}", remedy, ("keep", "match")))


def finite(value: object) -> float | None:
    """A metric that can be ranked, or None: NaN, the infinities and what is no number have no place in an order."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that no float reaches
        return None


def _cut(ranked: Sequence[int], count: int, why: str) -> tuple[dict[int, int], dict[int, str], dict[int, int]]:
    """Ranks from 1, the reasons of the first `count`, and by how many places the others missed."""
    ranks = dict(zip(ranked, range(1, len(ranked) + 1), strict=True))
    kept = {position: why.format(nth(rank)) for rank, position in enumerate(ranked[:count], 1)}
    return ranks, kept, dict(zip(ranked[count:], range(1, len(ranked) + 1), strict=False))


def _earliest(
    cells: Mapping[int, Sequence[int]],
    last: int | None,
    name: Callable[[int], str],
    outside: Callable[[int], str],
) -> Decision:
    """The first of each cell, of the `last` highest cells that have any."""
    kept: dict[int, str] = {}
    places: dict[int, int] = {}
    seats: dict[int, tuple[int, int, int]] = {}
    for rank, cell in enumerate(sorted(cells, reverse=True), 1):
        behind = max(0, rank - last) if last is not None else 0
        for seat, position in enumerate(cells[cell]):
            if seat or behind:
                places[position] = seat + behind
                seats[position] = cell, rank, seat
            else:
                kept[position] = f"earliest of {name(cell)}"

    def miss(position: int) -> str:
        if position not in seats:
            return outside(position)
        cell, rank, seat = seats[position]
        if last is not None and rank > last:
            return f"{name(cell)}: {nth(rank)} newest of these; last keeps {last}"
        return f"{nth(seat + 1)} of {name(cell)}; every keeps the earliest"

    return Decision(kept, places, miss)


def _bounds(until: int | None, last: int | None, thin: str | None) -> str:
    named = {"until": until, "last": last, "thin": thin}
    return "".join(f", {name} {value}" for name, value in named.items() if value is not None)


def _ago(seconds: float) -> str:
    """A span for reading, with one unit."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size or (unit == "m" and seconds >= size):
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"


def _utc(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s after the epoch"
