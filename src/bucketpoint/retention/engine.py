"""Planning: a checkpoint is kept if any rule of the policy keeps it, or if it is in the safety set."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

from bucketpoint.retention.checkpoint_set import CheckpointSet, RuleDecision
from bucketpoint.retention.plans import SAFETY, Action, Entry, Plan, Reason
from bucketpoint.retention.policy import RetentionPolicy
from bucketpoint.retention.row import FULL, Row


def plan(policy: RetentionPolicy, rows: Iterable[Row]) -> Plan:
    """Make the plan of `policy` for the committed checkpoints of one run, with reasons.

    `rows` must not contain uncommitted checkpoints, or those whose deletion has begun. The plan depends only on the set
    of rows: not on their order, on a clock or on earlier plans. As long as metrics, pins, leases and the results of
    `match` stay the same, keep(A | B) = keep(keep(A) | keep(B)), also for thinned rows: pruners that begin with
    different listings arrive at the same checkpoints.

    Raises:
        PolicyError: `match` cannot be imported, or fails.
        BucketpointError: a row is invalid, contradicts another, or is of a kind that this version does not support.
    """
    universe = CheckpointSet.of(rows)
    judged = [_Judged(rule.label, rule.thins, rule.decide(universe)) for rule in policy.keep.rules()]
    safe: dict[int, list[str]] = {}
    for position, why in _safety_set(universe):
        safe.setdefault(position, []).append(why)
    actions: list[Action] = ["delete"] * len(universe.rows)
    for rule in judged:
        if rule.thins:
            for position in rule.decision.kept:
                actions[position] = "thin" if universe.rows[position].can_be_thinned else "keep"
    for kept in (safe, *(rule.decision.kept for rule in judged if not rule.thins)):
        for position in kept:
            actions[position] = "keep"
    say = partial(_said, universe.rows, judged, safe)
    entries = tuple(map(Entry, universe.rows, actions, repeat(say), range(len(actions))))
    return Plan(tuple(rule.label for rule in judged), entries)


def _safety_set(universe: CheckpointSet) -> Iterator[tuple[int, str]]:
    """Yield the positions that are kept whole under every policy, each with the reason. No setting switches this off.

    Checkpoints committed after the listing are safe because they are not in the plan.
    """
    rows = universe.rows
    if not rows:
        return
    yield from _newest("newest", len(rows) - 1, universe.by_time[-1])
    # By step, as `latest` counts, and by time: after a rollback, the newest commit has a lower step than older ones.
    full_by_step = next((position for position in reversed(range(len(rows))) if rows[position].kind == FULL), None)
    full_by_time = next((position for position in reversed(universe.by_time) if rows[position].kind == FULL), None)
    if full_by_step is not None and full_by_time is not None:
        named = {len(rows) - 1, universe.by_time[-1]}
        full = _newest("newest full checkpoint", full_by_step, full_by_time)
        yield from ((position, why) for position, why in full if position not in named)
    for position, row in enumerate(rows):
        if row.pinned:
            yield position, "pinned"
        if row.leased:
            yield position, "leased by a reader"
        if row.restored_from:
            yield position, "training was restored from it"


def _newest(why: str, by_step: int, by_time: int) -> Iterator[tuple[int, str]]:
    if by_step == by_time:
        yield by_step, why
        return
    yield by_step, f"{why} by step"
    yield by_time, f"{why} by time"


def unreported(policy: RetentionPolicy, rows: Iterable[Row], reported: Collection[str]) -> list[str]:
    """Return the metrics of `best` rules that were never reported, if the checkpoints have other metrics.

    A metric is left out while its rule's `await` keeps every checkpoint: it may still be reported in time.

    Args:
        reported: names of all metrics of the run, including those of steps without a checkpoint.
    """
    universe = CheckpointSet.of(rows)
    if not any(row.metrics for row in universe.rows):
        return []
    rules = [rule for rule in policy.keep.best if rule.metric not in reported]
    missing = [rule.metric for rule in rules if len(rule.decide(universe).kept) < len(universe.rows)]
    return list(dict.fromkeys(missing))


class _Judged(NamedTuple):
    label: str
    thins: bool
    decision: RuleDecision

    def reason(self, position: int) -> Reason:
        return Reason(self.label, self.decision.explanation.why(position))

    def missed(self, position: int) -> Reason:
        return Reason(self.label, self.decision.explanation.miss(position))


def _said(
    rows: Sequence[Row], judged: Sequence[_Judged], safe: Mapping[int, Sequence[str]], position: int
) -> tuple[tuple[Reason, ...], Reason | None]:
    """Return the reasons that keep a position, and the reason why it is not kept, or not kept whole."""
    keeping = [rule for rule in judged if position in rule.decision.kept]
    whole = [Reason(SAFETY, why) for why in safe.get(position, ())]
    whole += [rule.reason(position) for rule in keeping if not rule.thins]
    weights = [rule.reason(position) for rule in keeping if rule.thins]
    row, reasons = rows[position], (*whole, *weights)
    if whole:
        return reasons, None
    if not weights:
        return (), _nearest(judged, position).missed(position)
    if row.can_be_thinned:
        return reasons, _nearest([rule for rule in judged if not rule.thins], position).missed(position)
    if row.kind == FULL:
        return reasons, Reason(reasons[0].rule, "stays whole: its weights share objects with other state")
    return reasons, None


def _nearest(judged: Sequence[_Judged], position: int) -> _Judged:
    """Return the rule that missed a position by the fewest places; of several, the first in the policy."""
    return min(judged, key=lambda rule: rule.decision.explanation.places.get(position, math.inf))
