"""What other checkpoint managers got wrong. None of it may happen here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from bucketpoint.errors import PolicyError
from bucketpoint.retention import Await, Best, EveryHours, EverySteps, Keep, RetentionPolicy, Row, plan
from retention.cases import HOUR, left, names, reported, rows_at, steps


def best(count: int = 1, wait: Await | None = None) -> list[Best]:
    return [Best("loss", "min", count, wait=wait)]


def losses(*values: float | None) -> list[Row]:
    """Steps 1, 2, 3, ... with these losses."""
    return reported(rows_at(*range(1, len(values) + 1)), "loss", *values)


AT_HOURS = [Row(step, hour * HOUR, "a") for step, hour in enumerate((0, 6, 10, 12, 23, 24, 31))]
FEW_LOSSES = losses(1.0, None, 3.0, None, None, 2.0, None, None, None, None)

CASES: dict[str, tuple[Keep, list[Row], list[int]]] = {
    # Its modulo keeps nothing of the steps 7, 507, 1007, ...
    "orbax, off the grid": (
        Keep(1, every=[EverySteps(1000)]),
        rows_at(*range(7, 6000, 500)),
        [1007, 2007, 3007, 4007, 5007, 5507],
    ),
    # Its greedy rule, anchored on the oldest survivor, decides anew about all others once that one is gone.
    "orbax, by time": (Keep(1, every=[EveryHours(10)]), AT_HOURS, [0, 2, 4, 6]),
    "orbax, by time, later": (Keep(1, every=[EveryHours(10)]), AT_HOURS[1:], [1, 2, 4, 6]),
    # With losses 1, NaN, 2 it keeps 2 as the best.
    "orbax, NaN": (Keep(1, best()), losses(1.0, math.nan, 2.0, 5.0), [1, 4]),
    # It raises KeyError for a missing key, and keeps what has no metrics at all without bound.
    "orbax, a missing metric": (Keep(1, best(2)), FEW_LOSSES, [1, 6, 10]),
    "orbax, a late metric": (Keep(1, best(2, Await(timedelta(hours=100), 2))), FEW_LOSSES, [1, 6, 9, 10]),
    # After a rollback it says nothing and saves nothing. Here the newest by time stays whatever its step.
    "orbax, a rollback": (Keep(1), rows_at(100, 200, 300, 150), [150, 300]),
    # Its LatestDuration is measured from now, and can drop everything after a pause.
    "orbax, an idle run": (
        Keep(1, within=timedelta(hours=2)),
        [replace(row, created=row.created - 10 * 365 * 86_400) for row in rows_at(1, 2, 3, 4)],
        [2, 3, 4],
    ),
    # It tests the value for truth: a loss of 0.0 counted as none, and was never pruned.
    "torchtnt, zero": (Keep(1, best()), losses(0.5, 0.0, 0.7, 0.9), [2, 4]),
    # Infinite and missing values are untracked there, and stay forever.
    "torchtnt, no rank": (Keep(1, best(9)), losses(math.inf, -math.inf, math.nan, None, 1.0, 2.0), [5, 6]),
    # It drops the oldest by mtime, which a copy of the bucket sets anew. Here 1 is the newest by time.
    "huggingface, a copy": (
        Keep(3),
        [replace(row, created=1e9 - row.step) for row in rows_at(1, 2, 3, 4, 5)],
        [1, 3, 4, 5],
    ),
    # It scores a missing key as -inf, turns the sign for min, and deleted the losses 1 and 2.
    "ray, a missing metric": (Keep(1, best(2)), losses(1.0, 2.0, None, None, 3.0), [1, 2, 5]),
    # Evaluators and trainers race there.
    "openpipe, a reader": (Keep(1), [*rows_at(1, leased=True), *rows_at(2, 3)], [1, 3]),
    "levanter, until": (
        Keep(1, every=[EverySteps(1000, until=3000), EverySteps(5000)]),
        rows_at(*range(0, 12001, 500)),
        [0, 1000, 2000, 3000, 5000, 10000, 12000],
    ),
}


@pytest.mark.parametrize(("keep", "rows", "expected"), CASES.values(), ids=CASES)
def test_keeps_these_steps_unlike_other_managers(keep: Keep, rows: Sequence[Row], expected: list[int]) -> None:
    assert steps(left(RetentionPolicy(keep), rows)) == expected


def test_keeps_what_was_just_saved_under_best_n_alone_unlike_orbax() -> None:
    """With a rising loss and n=2, saves 0 to 3 leave it with 0 and 1."""
    there: list[Row] = []
    for row in losses(1.0, 2.0, 3.0, 4.0):
        there = list(left(RetentionPolicy(Keep(1, best(2))), [*there, row]))
        assert row in there
    assert steps(there) == [1, 2, 4]


def test_takes_no_export_of_weights_for_the_latest_unlike_torchtitan() -> None:
    """Its last save is weights only by default, and a job that resumes from it fails."""
    rows = rows_at(100, 200, 300)
    rows[-1] = replace(rows[-1], kind="weights")
    made = plan(RetentionPolicy(Keep(1)), rows)
    assert steps(made.left()) == [200, 300]
    assert [reason.rule for reason in made.kept[0].reasons] == ["safety", "latest: 1"]


@pytest.mark.parametrize("ties", ["oldest", "newest"])
def test_keeps_the_order_among_equal_times_unlike_gitlab(ties: str) -> None:
    """Its registry sorted tags by times that were equal, and deleted newer ones. The order here is total."""
    rows = [Row(step, 1e9, name, metrics={"loss": 1.0}) for step in (1, 2, 3) for name in ("a", "b")]
    rule = RetentionPolicy(Keep(2, [Best("loss", "min", 1, ties)]))  # type: ignore[arg-type]
    expected = names(left(rule, rows))
    assert expected == {(3, "a"), (3, "b"), (1, "a") if ties == "oldest" else (3, "b")}
    for turn in range(6):
        assert names(left(rule, [*rows[turn:], *rows[:turn]])) == expected


def test_refuses_an_empty_policy_unlike_restic() -> None:
    """It learnt to refuse a policy that keeps nothing."""
    with pytest.raises(PolicyError):
        Keep(0)
    with pytest.raises(TypeError):
        Keep()  # type: ignore[call-arg]
