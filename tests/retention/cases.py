"""Random universes and policies, small enough that rows collide in every way, and the invariants' two sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from bucketpoint.retention import Await, Best, EveryHours, EverySteps, Keep, Plan, RetentionPolicy, Row, plan
from bucketpoint.retention.rows import KINDS

QUICK, FULL = 150, 2000

HOUR = 3600

SIZE = 20
"""Rows of a universe at most."""

METRICS = ("eval/loss", "acc")

_VALUES = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 3.0, math.nan, math.inf, -math.inf)
_GROUPS: tuple[dict[str, int], ...] = (
    {},
    {"model": 1},
    {"model": 1, "optim": 2},
    {"model": 1, "optim": 2},
    {"other": 3},
)

_random = random.Random(20261121)
"""Rows and policies come from large fixed pools: 2,000 examples can afford one draw for each, and not thirty."""


def _row(flags: bool) -> Row:
    metrics = {name: _random.choice(_VALUES) for name in METRICS if _random.random() < 0.5}
    pinned, leased, restored_from = (flags and _random.random() < 0.03 for _ in range(3))
    return Row(
        step=_random.randint(0, 25),
        # Clocks that agree with the steps in nothing.
        created=float(_random.randint(-2, 30) * HOUR),
        id=_random.choice("ab"),
        kind=_random.choice(("full", "full", "full", *KINDS)),
        groups=_random.choice(_GROUPS),
        metrics=metrics,
        pinned=pinned,
        leased=leased,
        restored_from=restored_from,
    )


_POOLS = {flags: [_row(flags) for _ in range(3000)] for flags in (False, True)}


def universes(flags: bool = True) -> st.SearchStrategy[list[Row]]:
    rows = st.sampled_from(_POOLS[flags])
    return st.lists(rows, max_size=SIZE, unique_by=lambda row: (row.step, row.id))


def odd_step(row: Row) -> bool:
    """A rule of the user's."""
    return row.step % 7 == 3 or row.metrics.get("acc") == 3.0


def tried(*args: Any, **keywords: Any) -> Keep | None:
    """The rules, or None where they are refused."""
    from bucketpoint.errors import PolicyError

    try:
        return Keep(*args, **keywords)
    except PolicyError:
        return None


def _wait() -> Await | None:
    return Await(timedelta(hours=_random.randint(1, 20)), _random.randint(1, 3)) if _random.random() < 0.5 else None


def _best() -> Best:
    mode, ties = _random.choice(("min", "max")), _random.choice(("oldest", "newest"))
    return Best(_random.choice(METRICS), mode, _random.randint(1, 3), ties, _wait())  # type: ignore[arg-type]


def _every() -> EverySteps | EveryHours:
    last = _random.choice((None, 1, 2, 3))
    thin: Any = _random.choice((None, "weights"))
    if _random.random() < 0.4:
        return EveryHours(_random.choice((1, 2, 3, 6, 24)), last, thin)
    return EverySteps(_random.randint(1, 9), _random.choice((None, _random.randint(9, 25))), last, thin)


def _keep() -> Keep | None:
    """Few rules and small counts, so that most rows hang on one rule: what two keep, one may get wrong unseen."""
    best = [_best() for _ in range(_random.choice((0, 0, 1, 1, 2)))]
    every = [_every() for _ in range(_random.choice((0, 1, 1, 2, 3)))]
    within = timedelta(hours=_random.randint(1, 8)) if _random.random() < 0.25 else None
    match = "retention.cases:odd_step" if _random.random() < 0.2 else None
    return tried(
        _random.choice((1, 1, 2, 3)), best, every, within, _random.sample(range(26), _random.choice((0, 0, 1))), match
    )


every_rules = st.sampled_from([_every() for _ in range(200)])

policies = st.sampled_from([RetentionPolicy(keep) for _ in range(1500) if (keep := _keep()) is not None])


def left(policy: RetentionPolicy, rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows that are there after one prune, thinned ones as they are then."""
    return plan(policy, rows).left()


def merged(*listings: Iterable[Row]) -> list[Row]:
    """What is in the bucket after several pruners: one checkpoint once, and thinned if anybody thinned it."""
    found: dict[tuple[int, str], Row] = {}
    for row in (row for listing in listings for row in listing):
        key = row.step, row.id
        if key not in found or row.kind == "weights":
            found[key] = row
    return list(found.values())


def seen(rows: Iterable[Row]) -> list[str]:
    """Rows for comparison: NaN metrics are not equal to themselves."""
    return sorted(map(repr, rows))


def names(rows: Iterable[Row]) -> set[tuple[int, str]]:
    return {(row.step, row.id) for row in rows}


def kept(made: Plan) -> set[tuple[int, str]]:
    """What stays, whole or thinned."""
    return names(made.left())


def whole(made: Plan) -> set[tuple[int, str]]:
    return names(entry.row for entry in made.kept)


def deleted(made: Plan) -> set[tuple[int, str]]:
    return names(entry.row for entry in made.deleted)


def steps(rows: Iterable[Row]) -> list[int]:
    return sorted(row.step for row in rows)


def rows_at(*numbers: int, every: float = HOUR, **fields: Any) -> list[Row]:
    """Full checkpoints of these steps, committed in this order, one each `every` seconds."""
    made = (Row(step, 1e9 + every * place, f"id{place}", groups={"model": 1, "optim": 2}, bytes=3) for place, step
            in enumerate(numbers))  # fmt: skip
    return [replace(row, **fields) for row in made]


def reported(rows: Sequence[Row], metric: str, *results: float | None) -> list[Row]:
    """The rows with a value each; None for a row that has none."""
    return [
        row if value is None else replace(row, metrics={**row.metrics, metric: value})
        for row, value in zip(rows, results, strict=True)
    ]


def invariant(*strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """A test of `QUICK` examples, and one of `FULL` that is marked slow."""

    def made(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("examples", [QUICK, pytest.param(FULL, marks=pytest.mark.slow)])
        def test(examples: int) -> None:
            settings(max_examples=examples)(given(*strategies)(check))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return made
