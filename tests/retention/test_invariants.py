"""The invariants of the engine, over random universes and policies with every rule, thinned rows and wrong clocks.

Each runs with 150 examples, and with 2,000 where slow tests run. What concerns the catalog (what is a row at all) and
the pruner (that it does what the plan says) is checked here for the engine's part alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import Any

import hypothesis.strategies as st
from hypothesis import assume

from bucketpoint.retention import Await, Best, EverySteps, Keep, Plan, RetentionPolicy, Row, circuit_breaker, plan
from bucketpoint.retention.plans import ALWAYS_ALLOWED
from bucketpoint.retention.rows import ORDER
from retention.cases import (
    HOUR,
    SIZE,
    deleted,
    every_rules,
    invariant,
    kept,
    left,
    merged,
    names,
    policies,
    seen,
    tried,
    universes,
    whole,
)

two_parts = st.tuples(universes(), st.lists(st.sampled_from("ab_"), min_size=SIZE, max_size=SIZE))


def parts(split: tuple[list[Row], list[str]]) -> tuple[list[Row], list[Row], list[Row]]:
    """A universe and two parts of it that cover it and may overlap."""
    rows, sides = split
    first = [row for row, side in zip(rows, sides, strict=False) if side != "b"]
    second = [row for row, side in zip(rows, sides, strict=False) if side != "a"]
    return rows, first, second


@invariant(policies, universes())
def test_keeps_or_deletes_every_row_and_none_twice(policy: RetentionPolicy, rows: list[Row]) -> None:
    made = plan(policy, rows)
    assert seen(entry.row for entry in made.entries) == seen(rows)
    assert kept(made) | deleted(made) == names(rows)
    assert not kept(made) & deleted(made)
    for entry in made.entries:
        assert bool(entry.reasons) == (entry.action != "delete")
        assert (entry.miss is None) <= (entry.action == "keep")


@invariant(policies, universes())
def test_keeps_the_newest_and_the_newest_full_checkpoint_whole(policy: RetentionPolicy, rows: list[Row]) -> None:
    made = plan(policy, rows)
    assert bool(made.left()) == bool(rows)
    for those in (rows, [row for row in rows if row.kind == "full"]):
        if those:
            assert names([max(those, key=attrgetter(*ORDER))]) <= whole(made)
            assert names([max(those, key=lambda row: (row.created, row.step, row.id))]) <= whole(made)


@invariant(policies, universes(), st.randoms(use_true_random=False), policies, universes())
def test_ignores_the_order_of_the_listing_and_the_plans_before(
    policy: RetentionPolicy, rows: list[Row], random: Any, other: RetentionPolicy, others: list[Row]
) -> None:
    first = plan(policy, rows).to_dict()
    plan(other, others)
    shuffled = [*rows, *rows[: len(rows) // 2]]  # and a row listed twice counts once
    random.shuffle(shuffled)
    assert plan(policy, shuffled).to_dict() == first


@invariant(policies, two_parts)
def test_keeps_the_same_of_a_universe_as_of_what_is_kept_of_its_parts(
    policy: RetentionPolicy, split: tuple[list[Row], list[str]]
) -> None:
    rows, first, second = parts(split)
    assert seen(left(policy, merged(left(policy, first), left(policy, second)))) == seen(left(policy, rows))


@invariant(policies, universes())
def test_ends_by_pruning_after_each_commit_where_one_prune_ends(policy: RetentionPolicy, rows: list[Row]) -> None:
    there: tuple[Row, ...] = ()
    for row in rows:
        there = left(policy, [*there, row])
    assert seen(there) == seen(left(policy, rows))


@invariant(policies, universes(), st.lists(st.booleans(), min_size=SIZE, max_size=SIZE))
def test_changes_nothing_by_a_crash_within_a_prune(policy: RetentionPolicy, rows: list[Row], done: list[bool]) -> None:
    """And nothing is left to do for a second prune after one that went through."""
    made = plan(policy, rows)
    there = []
    for entry, is_done in zip(made.entries, done, strict=False):
        if entry.action == "thin" and is_done:
            there.append(entry.row.thinned())
        elif not (entry.action == "delete" and is_done):
            there.append(entry.row)
    assert seen(left(policy, there)) == seen(made.left())
    again = plan(policy, made.left())
    assert not again.deleted
    assert not again.thinned


@st.composite
def wider(draw: Any) -> tuple[RetentionPolicy, RetentionPolicy]:
    """A policy, and the same with one more rule or a greater number."""
    keep = draw(policies).keep
    best, every = list(keep.best), list(keep.every)
    for position, rule in enumerate(best):
        wait = rule.wait and Await(rule.wait.for_ + timedelta(hours=draw(st.integers(0, 3))), rule.wait.max + 1)
        best[position] = replace(rule, count=rule.count + draw(st.integers(0, 2)), wait=wait)
    for position, each in enumerate(every):
        if each.last is not None:
            every[position] = replace(each, last=draw(st.none() | st.integers(each.last, each.last + 2)))
    every += draw(st.lists(every_rules, max_size=1))
    within = None if keep.within is None else keep.within + timedelta(hours=draw(st.integers(0, 5)))
    more = tried(keep.latest + draw(st.integers(0, 2)), best, every, within, keep.steps, keep.match)
    assume(more is not None)
    assert more is not None
    return RetentionPolicy(keep), RetentionPolicy(more)


@invariant(wider(), universes())
def test_deletes_no_more_under_another_rule_or_a_greater_count(
    pair: tuple[RetentionPolicy, RetentionPolicy], rows: list[Row]
) -> None:
    narrow, wide = plan(pair[0], rows), plan(pair[1], rows)
    assert deleted(wide) <= deleted(narrow)
    assert whole(narrow) <= whole(wide)


@invariant(policies, universes(), st.integers(0, SIZE))
def test_wants_nothing_again_that_was_dropped(policy: RetentionPolicy, rows: list[Row], cut: int) -> None:
    before, after = plan(policy, rows[:cut]), plan(policy, rows)
    assert deleted(before) <= deleted(after)
    assert not (names(entry.row for entry in before.thinned) & whole(after))


@invariant(policies, universes(), st.integers(0, SIZE - 1), st.sampled_from(["pinned", "leased", "restored_from"]))
def test_keeps_a_row_whole_by_a_pin_or_a_lease_and_changes_no_other(
    policy: RetentionPolicy, rows: list[Row], number: int, flag: str
) -> None:
    assume(rows)
    number %= len(rows)
    name = names([rows[number]])
    with_it = plan(policy, [replace(row, **{flag: row is rows[number] or getattr(row, flag)}) for row in rows])
    without = plan(policy, [replace(row, **{flag: row is not rows[number] and getattr(row, flag)}) for row in rows])
    assert name <= whole(with_it)
    assert whole(with_it) - name == whole(without) - name
    assert deleted(with_it) - name == deleted(without) - name


@invariant(
    universes(flags=False), st.sampled_from(["min", "max"]), st.integers(1, 4), st.sampled_from(["oldest", "newest"])
)
def test_keeps_as_many_of_the_best_as_there_are_and_none_that_is_worse(
    rows: list[Row], mode: str, count: int, ties: str
) -> None:
    made = plan(RetentionPolicy(Keep(1, best=[Best("acc", mode, count, ties)])), rows)  # type: ignore[arg-type]
    label = f"best: acc {mode} {count}"
    best = [entry.row.metrics["acc"] for entry in made.entries if any(why.rule == label for why in entry.reasons)]
    ranked = sorted(
        (value for row in rows if math.isfinite(value := row.metrics.get("acc", math.nan))), reverse=mode == "max"
    )
    assert sorted(best) == sorted(ranked[:count])


@invariant(policies, universes(flags=False), st.sampled_from([math.nan, math.inf, -math.inf, None]))
def test_displaces_no_value_by_what_is_not_finite(
    policy: RetentionPolicy, rows: list[Row], value: float | None
) -> None:
    """Another row without a finite value takes no row's place in `best`."""
    assume(policy.keep.best)
    newcomer = Row(26, 0.0, "new", metrics={} if value is None else {"acc": value, "eval/loss": value})

    def ranked(made: Plan) -> set[tuple[int, str, str]]:
        return {
            (entry.row.step, entry.row.id, why.rule)
            for entry in made.entries
            for why in entry.reasons
            if why.rule.startswith("best") and "waits" not in why.why
        }

    assert ranked(plan(policy, [*rows, newcomer])) == ranked(plan(policy, rows))


@invariant(policies, universes())
def test_treats_min_of_a_metric_as_max_of_its_negative(policy: RetentionPolicy, rows: list[Row]) -> None:
    turned = [replace(best, mode="max" if best.mode == "min" else "min") for best in policy.keep.best]
    mirrored = [replace(row, metrics={name: -value for name, value in row.metrics.items()}) for row in rows]
    other = replace(policy, keep=replace(policy.keep, best=turned, match=None))
    same = replace(policy, keep=replace(policy.keep, match=None))  # the user's function reads the sign
    assert names(left(other, mirrored)) == names(left(same, rows))


@invariant(policies, universes(), st.integers(-3, 3))
def test_changes_nothing_by_shifting_all_clocks_by_whole_cells(
    policy: RetentionPolicy, rows: list[Row], days: int
) -> None:
    shifted = [replace(row, created=row.created + days * 24 * HOUR) for row in rows]
    before, after = plan(policy, rows), plan(policy, shifted)
    assert [entry.action for entry in before.entries] == [entry.action for entry in after.entries]


@invariant(universes(), st.integers(1, 20), st.integers(-(10**6), 10**6))
def test_keeps_the_same_by_within_under_any_shift(rows: list[Row], hours: int, shift: int) -> None:
    policy = RetentionPolicy(Keep(1, within=timedelta(hours=hours)))
    shifted = [replace(row, created=row.created + shift) for row in rows]
    assert names(left(policy, shifted)) == names(left(policy, rows))


@invariant(policies, universes(), st.integers(1, SIZE), st.floats(0.01, 1))
def test_refuses_a_plan_that_exceeds_max_delete(
    policy: RetentionPolicy, rows: list[Row], count: int, fraction: float
) -> None:
    made = plan(policy, rows)
    lost = len(made.deleted) + len(made.thinned)
    too_much = lost > count or (lost > ALWAYS_ALLOWED and lost > fraction * len(rows))
    assert circuit_breaker(made, count=count, fraction=fraction).allowed is not too_much


@invariant(policies, universes(), st.lists(st.integers(0, 12), max_size=6), st.integers(1, SIZE), st.floats(0.01, 1))
def test_shrinks_a_backlog_with_each_prune_whatever_was_saved(
    policy: RetentionPolicy, rows: list[Row], saves: list[int], count: int, fraction: float
) -> None:
    """`saves` are how many were committed before each of the first prunes; then training only prunes."""
    least = min(ALWAYS_ALLOWED, count)
    step = max((row.step for row in rows), default=0)
    time = max((row.created for row in rows), default=0.0)
    rounds = [*saves, *[0] * (len(rows) + sum(saves) + 1)]
    for committed in rounds:
        new = [Row(step + at, time + 60.0 * at, f"new{step + at}") for at in range(1, committed + 1)]
        step, time, rows = step + committed, time + 60.0 * committed, [*rows, *new]
        made = plan(policy, rows)
        wanted = [one for one in made.entries if one.action != "keep"]
        verdict = circuit_breaker(made, count=count, fraction=fraction, committed=committed)
        gone = wanted if verdict else wanted[: verdict.unasked]
        assert len(gone) >= min(len(wanted), committed + least)
        done = {(one.row.step, one.row.id): one.action for one in gone}
        left_over = [(row, done.get((row.step, row.id), "keep")) for row in rows]
        rows = [row.thinned() if action == "thin" else row for row, action in left_over if action != "delete"]
        if not committed and not wanted:
            break
    assert not [one for one in plan(policy, rows).entries if one.action != "keep"]


GENEROUS = RetentionPolicy(Keep(1, best=[Best("acc", "max", 2, wait=Await(timedelta(hours=100), 100))]))


@invariant(universes(flags=False), st.lists(st.integers(0, 20), min_size=SIZE, max_size=SIZE))
def test_loses_nothing_by_late_metrics_that_come_within_the_wait(rows: list[Row], delays: list[int]) -> None:
    """Pruning after each commit and each report ends as if every metric had been known from the start."""
    rows = [replace(row, metrics=row.metrics if "acc" in row.metrics else {"acc": 0.5}) for row in rows]
    events = sorted(
        [(place, 0, row) for place, row in enumerate(rows)]
        + [(place + delay, 1, row) for place, (row, delay) in enumerate(zip(rows, delays, strict=False))],
        key=lambda event: event[:2],
    )
    there: dict[tuple[int, str], Row] = {}
    for _, is_report, row in events:
        key = row.step, row.id
        if not is_report:
            there[key] = replace(row, metrics={})
        elif key in there:
            there[key] = row
        there = {(row.step, row.id): row for row in left(GENEROUS, there.values())}
    assert seen(there.values()) == seen(left(GENEROUS, rows))


def only_weights(row: Row) -> bool:
    return row.kind == "weights"


def test_needs_a_match_that_stays_no_after_thinning_for_path_independence() -> None:
    """The precondition. Without it more is kept than should be, and never less."""
    policy = RetentionPolicy(
        Keep(1, every=[EverySteps(10, last=1, thin="weights")], match="retention.test_invariants:only_weights")
    )
    rows = [Row(step, float(step), "a", groups={"model": 1, "optim": 2}) for step in (10, 11, 20, 21)]
    at_once = names(left(policy, rows))
    bit_by_bit = names(left(policy, [*left(policy, rows[:2]), *rows[2:]]))
    assert at_once < bit_by_bit


def test_waits_by_time_and_not_by_step() -> None:
    """With clocks that disagree, the higher step leaves the window first, and the other is wanted then."""
    policy = RetentionPolicy(Keep(1, best=[Best("acc", "max", wait=Await(timedelta(seconds=2), 1))]))
    early, high, low = Row(1, 8.0, "a"), Row(5, 7.0, "a"), Row(0, 8.5, "a", metrics={"acc": 1.0})
    last = Row(6, 10.0, "a", metrics={"acc": 2.0})
    at_once = left(policy, [early, high, low, last])
    assert {row.step for row in at_once} == {1, 6}
    assert seen(left(policy, [*left(policy, [early, high, low]), last])) == seen(at_once)
