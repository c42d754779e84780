"""What other checkpoint managers got wrong, one test each, named after them. None of it may happen here."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta

import pytest

from bucketpoint.errors import PolicyError
from bucketpoint.retention import Await, Best, EveryHours, EverySteps, Keep, RetentionPolicy, Row, plan
from retention.cases import HOUR, left, names, reported, rows_at, steps


def policy(*args: object, **keywords: object) -> RetentionPolicy:
    return RetentionPolicy(Keep(*args, **keywords))  # type: ignore[arg-type]


def test_keeps_milestones_though_no_save_falls_on_the_grid_unlike_orbax() -> None:
    """Its modulo keeps nothing of the steps 7, 507, 1007, ..."""
    rows = rows_at(*range(7, 6000, 500))
    assert steps(left(policy(1, every=[EverySteps(1000)]), rows)) == [1007, 2007, 3007, 4007, 5007, 5507]


def test_keeps_every_n_seconds_beyond_the_oldest_one_left_unlike_orbax() -> None:
    """Its greedy rule, anchored on the oldest survivor, decides anew about all others once that one is gone."""
    rows = [Row(step, hour * HOUR, "a") for step, hour in enumerate((0, 6, 10, 12, 23, 24, 31))]
    rule = policy(1, every=[EveryHours(10)])
    assert steps(left(rule, rows)) == [0, 2, 4, 6]
    assert steps(left(rule, rows[1:])) == [1, 2, 4, 6]


def test_keeps_the_order_of_the_best_beside_nan_unlike_orbax() -> None:
    """With losses 1, NaN, 2 it keeps 2 as the best."""
    rows = reported(rows_at(1, 2, 3, 4), "loss", 1.0, math.nan, 2.0, 5.0)
    assert steps(left(policy(1, best=[Best("loss", "min")]), rows)) == [1, 4]


def test_raises_nothing_for_a_missing_metric_and_drops_it_in_time_unlike_orbax() -> None:
    """It raises KeyError for a missing key, and keeps what has no metrics at all without bound."""
    rows = reported(rows_at(*range(10)), "loss", 1.0, None, 3.0, None, None, 2.0, None, None, None, None)
    assert steps(left(policy(1, best=[Best("loss", "min", 2)]), rows)) == [0, 5, 9]
    waiting = policy(1, best=[Best("loss", "min", 2, wait=Await(timedelta(hours=100), 2))])
    assert steps(left(waiting, rows)) == [0, 5, 8, 9]


def test_keeps_what_was_just_saved_under_best_n_alone_unlike_orbax() -> None:
    """With a rising loss and n=2, saves 0 to 3 leave it with 0 and 1."""
    there: list[Row] = []
    for row in reported(rows_at(0, 1, 2, 3), "loss", 1.0, 2.0, 3.0, 4.0):
        there = list(left(policy(1, best=[Best("loss", "min", 2)]), [*there, row]))
        assert row in there
    assert steps(there) == [0, 1, 3]


def test_keeps_a_save_that_goes_back_behind_newer_steps_unlike_orbax() -> None:
    """After a rollback it says nothing and saves nothing. Here the newest by time stays whatever its step."""
    rows = rows_at(100, 200, 300, 150)
    assert steps(left(policy(1), rows)) == [150, 300]


def test_measures_within_from_the_newest_and_empties_no_idle_run_unlike_orbax() -> None:
    """Its LatestDuration is measured from now, and can drop everything after a pause."""
    rows = [replace(row, created=row.created - 10 * 365 * 86_400) for row in rows_at(1, 2, 3, 4)]
    assert steps(left(policy(1, within=timedelta(hours=2)), rows)) == [2, 3, 4]


def test_takes_no_export_of_weights_for_the_latest_unlike_torchtitan() -> None:
    """Its last save is weights only by default, and a job that resumes from it fails."""
    rows = rows_at(100, 200, 300)
    rows[-1] = replace(rows[-1], kind="weights")
    made = plan(policy(1), rows)
    assert steps(made.left()) == [200, 300]
    assert [reason.rule for reason in made.kept[0].reasons] == ["safety", "latest: 1"]


def test_counts_a_metric_of_zero_unlike_torchtnt() -> None:
    """It tests the value for truth: a loss of 0.0 counted as none, and was never pruned."""
    rows = reported(rows_at(1, 2, 3, 4), "loss", 0.5, 0.0, 0.7, 0.9)
    assert steps(left(policy(1, best=[Best("loss", "min")]), rows)) == [2, 4]


def test_loses_no_newer_step_to_a_copy_with_new_times_unlike_huggingface() -> None:
    """It drops the oldest by mtime, which a copy of the bucket sets anew."""
    rows = [replace(row, created=1e9 - row.step) for row in rows_at(1, 2, 3, 4, 5)]
    assert steps(left(policy(3), rows)) == [1, 3, 4, 5]  # 1 is the newest by time


def test_prunes_what_has_no_rank_unlike_torchtnt() -> None:
    """Infinite and missing values are untracked there, and stay forever."""
    rows = reported(rows_at(*range(6)), "loss", math.inf, -math.inf, math.nan, None, 1.0, 2.0)
    assert steps(left(policy(1, best=[Best("loss", "min", 9)]), rows)) == [4, 5]


def test_ranks_no_missing_metric_as_best_when_less_is_better_unlike_ray() -> None:
    """It scores a missing key as -inf, turns the sign for min, and deleted the losses 1 and 2."""
    rows = reported(rows_at(1, 2, 3, 4, 5), "loss", 1.0, 2.0, None, None, 3.0)
    assert steps(left(policy(1, best=[Best("loss", "min", 2)]), rows)) == [1, 2, 5]


@pytest.mark.parametrize("ties", ["oldest", "newest"])
def test_keeps_the_order_among_equal_times_unlike_gitlab(ties: str) -> None:
    """Its registry sorted tags by times that were equal, and deleted newer ones. The order here is total."""
    rows = [Row(step, 1e9, name, metrics={"loss": 1.0}) for step in (1, 2, 3) for name in ("a", "b")]
    rule = policy(2, best=[Best("loss", "min", 1, ties)])  # type: ignore[arg-type]
    expected = names(left(rule, rows))
    assert expected == {(3, "a"), (3, "b"), (1, "a") if ties == "oldest" else (3, "b")}
    for turn in range(6):
        assert names(left(rule, [*rows[turn:], *rows[:turn]])) == expected


def test_refuses_an_empty_policy_unlike_restic() -> None:
    """It learnt to refuse a policy that keeps nothing."""
    with pytest.raises(PolicyError):
        policy(0)
    with pytest.raises(TypeError):
        Keep()  # type: ignore[call-arg]


def test_keeps_a_leased_checkpoint_until_its_reader_is_done_unlike_openpipe() -> None:
    """Evaluators and trainers race there."""
    rows = rows_at(1, 2, 3)
    leased = [replace(rows[0], leased=True), *rows[1:]]
    assert steps(left(policy(1), leased)) == [1, 3]


def test_changes_the_grid_where_until_says_unlike_levanter() -> None:
    rule = policy(1, every=[EverySteps(1000, until=3000), EverySteps(5000)])
    assert steps(left(rule, rows_at(*range(0, 12001, 500)))) == [0, 1000, 2000, 3000, 5000, 10000, 12000]
