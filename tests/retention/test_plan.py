"""A plan explains itself, goes through JSON, is linear in its work, and is refused where it takes too much."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import pytest

from bucketpoint.errors import BucketpointError, PolicyError
from bucketpoint.retention import (
    Await,
    Best,
    Entry,
    EveryHours,
    EverySteps,
    Keep,
    Plan,
    Reason,
    RetentionPolicy,
    Row,
    circuit_breaker,
    plan,
    rules,
)
from bucketpoint.retention.plans import unreported
from bucketpoint.retention.rows import Explanation
from retention.cases import HOUR, reported, rows_at, steps

EXAMPLE = RetentionPolicy(
    Keep(
        2,
        best=[Best("loss", "min", 1, wait=Await(timedelta(hours=2), 2))],
        every=[EverySteps(1000, until=3000), EveryHours(24, last=2, thin="weights")],
        within=timedelta(hours=1),
        steps=[1750],
    )
)


def example() -> list[Row]:
    rows = rows_at(*range(0, 6000, 250))
    values = [9.0 - step for step in range(20)]
    values[11] = -50.0
    return reported(rows, "loss", *values, float("nan"), None, None, None)


def told(made: Plan) -> dict[int, tuple[str, str]]:
    return {
        entry.row.step: (entry.action, "; ".join(map(str, entry.reasons)) if entry.reasons else str(entry.miss))
        for entry in made.entries
    }


def test_says_why_for_every_row() -> None:
    made = told(plan(EXAMPLE, example()))
    hours = "every: 24 hours, last 2, thin weights"
    grid = "every: 1000 steps, until 3000"
    assert made[0] == ("keep", f"{grid} (earliest of step 0); {hours} (earliest of the 24 h from 2001-09-09 00:00 UTC)")
    assert made[250] == ("delete", f"{hours} (2nd of the 24 h from 2001-09-09 00:00 UTC; every keeps the earliest)")
    assert made[1250] == ("delete", f"{grid} (2nd of steps 1000 to 1999; every keeps the earliest)")
    assert made[1750] == ("keep", "steps: 1750 (named)")
    assert made[2750] == ("keep", "best: loss min 1 (1st best loss)")
    assert made[4750] == ("delete", "best: loss min 1 (2nd best loss; best keeps 1)")
    assert made[5000] == ("delete", "latest: 2 (4th latest; latest keeps 2)")
    assert made[5250] == ("delete", "latest: 2 (3rd latest; latest keeps 2)")
    assert made[5750][1].startswith("safety (newest); latest: 2 (1st latest)")


def test_names_newest_by_step_and_by_time_apart_only_if_they_differ() -> None:
    def why(*rows: Row) -> dict[int, list[str]]:
        entries = plan(RetentionPolicy(Keep(1)), rows).entries
        return {one.row.step: [reason.why for reason in one.reasons if reason.rule == "safety"] for one in entries}

    first, last = Row(1, 10.0, "a"), Row(2, 20.0, "a")
    assert why(first, last) == {1: [], 2: ["newest"]}
    assert why(replace(first, created=30.0), last) == {1: ["newest by time"], 2: ["newest by step"]}
    assert why(first, replace(last, kind="weights")) == {1: ["newest full checkpoint"], 2: ["newest"]}


@pytest.mark.parametrize(
    ("metrics", "reported", "missing"),
    [
        ({"eval/loss": 1.0}, {"eval/loss"}, ["evl/loss"]),
        ({"eval/loss": 1.0}, {"eval/loss", "evl/loss"}, []),
        ({"evl/loss": float("nan")}, {"evl/loss"}, []),
        ({}, set(), []),
        ({}, {"eval/loss"}, []),
    ],
)
def test_names_a_metric_of_a_rule_that_nobody_reports(
    metrics: dict[str, float], reported: set[str], missing: list[str]
) -> None:
    rows = [replace(row, metrics=metrics) for row in rows_at(1, 2)]
    assert unreported(RetentionPolicy(Keep(1, best=[Best("evl/loss", "min")])), rows, reported) == missing


def test_names_no_metric_that_a_rule_still_waits_for() -> None:
    rows = [replace(row, metrics={"train/loss": 1.0}) for row in rows_at(1, 2)]
    for most, missing in ((2, []), (1, ["eval/loss"])):
        rule = Best("eval/loss", "min", wait=Await(for_=timedelta(days=1), max=most))
        assert unreported(RetentionPolicy(Keep(1, best=[rule])), rows, {"train/loss"}) == missing


def test_decides_nothing_by_tombstones_and_counts_them_once_for_max_delete() -> None:
    rows = rows_at(*range(30))
    ordered = [replace(row, tombstone="delete") if row.step < 20 else row for row in rows]
    policy = RetentionPolicy(Keep(2))
    made, again = plan(policy, rows), plan(policy, ordered)
    assert told(made) == told(again)
    assert not circuit_breaker(made, count=20, fraction=1.0)
    assert circuit_breaker(again, count=20, fraction=1.0)
    # 8 more of the 10 that have none.
    assert not circuit_breaker(again, count=20, fraction=0.5)


def test_says_what_the_first_rule_says_of_a_row_that_no_rule_could_keep() -> None:
    rows = rows_at(1, 2, 3)
    rows[0] = replace(rows[0], kind="export")
    assert told(plan(RetentionPolicy(Keep(1)), rows))[1] == (
        "delete",
        "latest: 1 (of the kind export; latest counts full checkpoints)",
    )


def test_thins_what_only_a_thinning_rule_keeps_and_says_what_it_missed() -> None:
    policy = RetentionPolicy(Keep(1, every=[EverySteps(10, thin="weights")]))
    made = plan(policy, rows_at(10, 20, 21))
    assert [entry.action for entry in made.entries] == ["thin", "thin", "keep"]
    assert str(made.thinned[1].miss) == "latest: 1 (2nd latest; latest keeps 1)"
    assert made.left()[0].kind == "weights"
    assert made.freed_bytes == 4
    # Another rule keeps it whole.
    policy = RetentionPolicy(replace(policy.keep, steps=[10]))
    assert [entry.action for entry in plan(policy, rows_at(10, 20, 21)).entries] == ["keep", "thin", "keep"]


@pytest.mark.parametrize("groups", [{}, {"model": 3}, {"other": 3}])
def test_keeps_a_checkpoint_whole_that_cannot_be_thinned_and_says_so(groups: dict[str, int]) -> None:
    policy = RetentionPolicy(Keep(1, every=[EverySteps(10, thin="weights")]))
    rows = [replace(row, groups=groups) for row in rows_at(10, 20)]
    entry = plan(policy, rows).entries[0]
    assert entry.action == "keep"
    assert entry.miss is not None
    assert "stays whole" in entry.miss.why


def test_writes_a_plan_as_json_of_its_documented_shape_and_pickles_it() -> None:
    made = plan(EXAMPLE, example())
    assert repr(pickle.loads(pickle.dumps(made))) == repr(made)
    data = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert set(data) == {"version", "rules", "summary", "checkpoints"}
    assert set(data["summary"]) == {"keep", "thin", "delete", "freed_bytes"}
    one = data["checkpoints"][1]
    assert set(one) == {
        "step", "created", "id", "kind", "bytes", "groups", "metrics", "pinned", "leased", "restored_from",
        "tombstone", "action", "reasons", "miss",
    }  # fmt: skip
    assert set(one["miss"]) == {"rule", "why"}
    assert data["checkpoints"][20]["metrics"] == {"loss": "nan"}


def test_refuses_a_wrong_policy_and_neither_few_deletions_nor_ordinary_work() -> None:
    wrong = plan(RetentionPolicy(Keep(1)), rows_at(*range(1, 16)))
    refused = circuit_breaker(wrong, count=20, fraction=0.5)
    assert (refused.allowed, refused.unasked) == (False, 5)
    assert "the plan deletes or thins 14 of 15 checkpoints, and max_delete allows 50 %" in refused.why
    assert circuit_breaker(wrong, count=3, fraction=1.0).unasked == 3
    # What the job has committed since the last prune is not what a policy was wrong about.
    assert circuit_breaker(wrong, count=20, fraction=0.5, committed=9).allowed
    assert circuit_breaker(wrong, count=20, fraction=0.5, committed=2).unasked == 7
    for there in range(2, 7):
        assert circuit_breaker(plan(RetentionPolicy(Keep(1)), rows_at(*range(there))), count=20, fraction=0.5)


def test_keeps_latest_and_milestones_under_a_wrong_clock_far_ahead() -> None:
    rows = rows_at(*range(100, 600, 100))
    rows[1] = replace(rows[1], created=9e9)
    policy = RetentionPolicy(Keep(2, every=[EverySteps(300)], within=timedelta(hours=1)))
    assert steps(plan(policy, rows).left()) == [200, 300, 400, 500]


class CountedRow(Row):
    """Counts how often any row is looked at."""

    looks: ClassVar[Counter[str]] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name != "looks" and not name.startswith("__"):
            CountedRow.looks[name] += 1
        return super().__getattribute__(name)


asked: list[int] = []


def remembered(row: Row) -> bool:
    asked.append(row.step)
    return False


def looks(number: int) -> int:
    CountedRow.looks.clear()
    keep = replace(EXAMPLE.keep, match="retention.test_plan:remembered", every=[*EXAMPLE.keep.every, EverySteps(7000)])
    rows = [CountedRow(step, 1e9 + HOUR * step, "a", metrics={"loss": float(-step)}) for step in range(number)]
    plan(replace(EXAMPLE, keep=keep), rows)
    return sum(CountedRow.looks.values())


def test_looks_at_each_row_a_fixed_number_of_times_however_many_there_are() -> None:
    """No rule is quadratic: ten times the rows are ten times the looks, and `match` is asked once for each."""
    asked.clear()
    few = looks(300)
    assert asked == list(range(300))
    assert looks(3000) <= 10.5 * few
    assert few <= 40 * 300


def test_makes_no_words_of_a_plan_before_somebody_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pruner plans after every commit, and the words of 100,000 rows are most of the work."""
    made_of: list[Any] = []

    def explained(*arguments: Any) -> Any:
        made_of.append(arguments)
        return Explanation(*arguments)

    monkeypatch.setattr(rules, "Explanation", explained)
    made = plan(EXAMPLE, example())
    assert len(made.left()) + len(made.deleted) == 24
    assert circuit_breaker(made, count=24, fraction=1.0)
    assert made_of == []
    assert made.deleted[0].miss is not None
    assert len(made_of) == 6
    assert all(entry.miss for entry in made.deleted)
    assert len(made_of) == 6


def test_compares_entries_by_their_words() -> None:
    made, again = plan(EXAMPLE, example()).entries, plan(EXAMPLE, example()).entries
    assert made[:19] == again[:19]
    assert made[1] != made[2]
    miss = Reason("another", "rule")
    assert made[1] != Entry.told(made[1].row, made[1].action, made[1].reasons, miss)


def test_refuses_rows_that_contradict_each_other() -> None:
    row = Row(1, 1.0, "a")
    assert len(plan(EXAMPLE, [row, row, Row(1, 1.0, "a")]).entries) == 1
    with pytest.raises(BucketpointError, match="differ"):
        plan(EXAMPLE, [row, Row(1, 2.0, "a")])


@pytest.mark.parametrize(
    "row",
    [
        Row(-1, 1.0, "a"),
        Row(True, 1.0, "a"),
        Row(1, float("nan"), "a"),
        Row(1, float("inf"), "a"),
        Row(1, 1.0, "a", "new"),
    ],
)
def test_refuses_a_row_that_has_no_place_in_the_order(row: Row) -> None:
    with pytest.raises(BucketpointError):
        plan(EXAMPLE, [row])


def test_ranks_no_integer_too_large_for_a_float_and_nothing_but_numbers() -> None:
    rows = rows_at(1, 2, 3, 4, 5)
    odd: list[Any] = [10**400, "0.1", True, 3, 4.0]
    rows = [replace(row, metrics={"loss": value}) for row, value in zip(rows, odd, strict=True)]
    assert steps(plan(RetentionPolicy(Keep(1, best=[Best("loss", "max", 9)])), rows).left()) == [4, 5]


def failing(row: Row) -> bool:
    raise RuntimeError("no")


def vague(row: Row) -> Any:
    return 1


no_function = 3


@pytest.mark.parametrize("name", ["missing", "failing", "vague", "no_function"])
def test_refuses_a_match_that_gives_no_answer(name: str) -> None:
    policy = RetentionPolicy(Keep(1, match=f"retention.test_plan:{name}"))
    with pytest.raises(PolicyError, match=f"retention.test_plan:{name}"):
        plan(policy, rows_at(1))


def test_imports_a_match_only_when_there_is_something_to_ask() -> None:
    policy = RetentionPolicy(Keep(1, match="no_such_package.policies:keep"))
    assert plan(policy, []).entries == ()
    with pytest.raises(PolicyError, match="cannot be imported"):
        plan(policy, rows_at(1))
