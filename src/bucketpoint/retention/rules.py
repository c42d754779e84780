"""The rules: each says which rows it keeps, from the rows alone. No clock, no I/O; what a policy unites is not here.

Every rule is path independent, keep(A | B) = keep(keep(A) | keep(B)), as it is of one of two forms: the first few of a
fixed total order (of all rows, or of each cell of a fixed grid), or a test of one row, whose only outside number is the
time of the newest row, which is always kept. Unions of such rules are path independent again (Aizerman and Malishevski,
1981). A rule of another form, such as one that is anchored on the oldest row left, breaks every pruner but one.
"""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Annotated, Any, Literal, Protocol, TypeAlias

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
        kept, places = _cut(ranked, self.count, "{} latest")

        def miss(position: int) -> str:
            if position not in places:
                return f"of the kind {universe.rows[position].kind}; latest counts full checkpoints"
            return f"{nth(places[position] + self.count)} latest; latest keeps {self.count}"

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
        values = {
            position: sign * value
            for position, row in enumerate(rows)
            if (value := finite(row.metrics.get(self.metric))) is not None
        }
        # Sorting is stable: among equal values the order before decides, which is the total order or its reverse.
        ranked = sorted(values if self.ties == "oldest" else reversed(values), key=values.__getitem__)
        kept, places = _cut(ranked, self.count, f"{{}} best {self.metric}")
        waiting = self._waiting(universe)
        most = self.wait.max if self.wait else 0
        for number, position in enumerate(waiting, 1):
            if number <= most:
                kept[position] = f"waits for {self.metric}, {nth(number)} of at most {most}"
            else:
                places[position] = number - most

        def miss(position: int) -> str:
            if position in values:
                return f"{nth(places[position] + self.count)} best {self.metric}; best keeps {self.count}"
            if position in places:
                return f"{nth(places[position] + most)} to wait for {self.metric}; {most} may"
            if self.metric in rows[position].metrics:
                return f"{self.metric} is {rows[position].metrics[self.metric]}, which is never ranked"
            return f"{self.metric} was never reported" + (f" within {written(self.wait.for_)}" if self.wait else "")

        return Decision(kept, places, miss)

    def ranked(self, rows: Sequence[Row]) -> list[int]:
        """Positions of the rows that have a value to rank, the best first. The rows are in their order."""
        sign = 1 if self.mode == "min" else -1
        age = 1 if self.ties == "oldest" else -1
        values = {
            position: value for position, row in enumerate(rows) if (value := finite(row.metrics.get(self.metric)))
            is not None
        }  # fmt: skip
        return sorted(values, key=lambda position: (sign * values[position], age * position))

    def _waiting(self, universe: Universe) -> list[int]:
        """Rows without a value that are young enough, the newest first.

        By time and not by step: a higher step with an older time would leave the window and let another one in.
        """
        if self.wait is None:
            return []
        since = universe.newest_created - self.wait.for_.total_seconds()
        return [
            position
            for position in reversed(universe.by_time)
            if universe.rows[position].created >= since and self.metric not in universe.rows[position].metrics
        ]


Thin: TypeAlias = Annotated[
    Literal["weights"] | None, Choice("weights"), "keep only the weights of what no other rule keeps"
]


@dataclass(frozen=True)
class EverySteps(Checked):
    """The earliest checkpoint in each of the cells [k * steps, (k + 1) * steps), k >= 1, and step 0."""

    steps: Annotated[int, Whole(1), "width of the grid"]
    until: Annotated[int | None, Whole(0), "the last step that the rule speaks of"] = None
    last: Annotated[int | None, Whole(1), "keep those of the highest cells only"] = None
    thin: Thin = None

    @property
    def thins(self) -> bool:
        return self.thin is not None

    @property
    def label(self) -> str:
        return f"every: {self.steps} steps{_bounds(self.until, self.last, self.thin)}"

    def decide(self, universe: Universe) -> Decision:
        rows, width, until = universe.rows, self.steps, self.until

        def cell_of(position: int) -> int | None:
            step = rows[position].step
            # The cell below the grid's first line holds step 0 alone.
            return None if (until is not None and step > until) or 0 < step < width else step // width

        def name(cell: int) -> str:
            return f"steps {cell * self.steps} to {(cell + 1) * self.steps - 1}" if cell else "step 0"

        def outside(position: int) -> str:
            step = universe.rows[position].step
            if self.until is not None and step > self.until:
                return f"after step {self.until}, where every {self.steps} steps ends"
            return f"before step {self.steps}, where every {self.steps} steps begins"

        return _earliest(range(len(rows)), cell_of, self.last, name, outside)


@dataclass(frozen=True)
class EveryHours(Checked):
    """The earliest checkpoint in each cell of a grid of hours, which begins at the epoch in UTC."""

    hours: Annotated[int, Whole(1), "width of the grid; 24 begins at midnight UTC"]
    last: Annotated[int | None, Whole(1), "keep those of the newest cells only"] = None
    thin: Thin = None

    @property
    def thins(self) -> bool:
        return self.thin is not None

    @property
    def label(self) -> str:
        return f"every: {self.hours} hours{_bounds(None, self.last, self.thin)}"

    def decide(self, universe: Universe) -> Decision:
        width = self.hours * 3600

        def cell_of(position: int) -> int:
            return math.floor(universe.rows[position].created / width)

        def name(cell: int) -> str:
            return f"the {self.hours} h from {_utc(cell * width)}"

        return _earliest(universe.by_time, cell_of, self.last, name, lambda position: "outside the grid")


@dataclass(frozen=True)
class Within:
    """What is at most `age` older than the newest checkpoint: an idle run loses nothing."""

    age: timedelta
    thins = False

    @property
    def label(self) -> str:
        return f"within: {written(self.age)}"

    def decide(self, universe: Universe) -> Decision:
        newest = universe.newest_created
        since = newest - self.age.total_seconds()
        times = {position: universe.rows[position].created for position in universe.by_time}
        kept = {
            position: f"{_ago(newest - created)} older than the newest"
            for position, created in times.items()
            if created >= since
        }
        too_old = universe.by_time[: len(times) - len(kept)]
        places = {position: place for place, position in enumerate(reversed(too_old), 1)}

        def miss(position: int) -> str:
            age = _ago(newest - times[position])
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
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that no float reaches
        return None


def _cut(ranked: Sequence[int], count: int, why: str) -> tuple[dict[int, str], dict[int, int]]:
    """The reasons of the first `count`, and by how many places the others missed."""
    kept = {position: why.format(nth(rank)) for rank, position in enumerate(ranked[:count], 1)}
    return kept, {position: places for places, position in enumerate(ranked[count:], 1)}


def _earliest(
    ordered: Iterable[int],
    cell_of: Callable[[int], int | None],
    last: int | None,
    name: Callable[[int], str],
    outside: Callable[[int], str],
) -> Decision:
    """The first of each cell, in the given order, of the `last` highest cells that have any."""
    cells: dict[int, list[int]] = defaultdict(list)
    for position in ordered:
        cell = cell_of(position)
        if cell is not None:
            cells[cell].append(position)
    names = {cell: name(cell) for cell in cells}
    behind = {cell: max(0, rank - (last or rank)) for rank, cell in enumerate(sorted(cells, reverse=True), 1)}
    kept: dict[int, str] = {}
    places: dict[int, int] = {}
    for cell, (first, *others) in cells.items():
        if behind[cell]:
            places[first] = behind[cell]
        else:
            kept[first] = f"earliest of {names[cell]}"
        places.update(zip(others, range(1 + behind[cell], 1 + behind[cell] + len(others)), strict=True))

    def miss(position: int) -> str:
        cell = cell_of(position)
        if cell is None:
            return outside(position)
        if last is not None and behind[cell]:
            return f"{names[cell]}: {nth(behind[cell] + last)} newest of these; last keeps {last}"
        return f"{nth(places[position] + 1)} of {names[cell]}; every keeps the earliest"

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
