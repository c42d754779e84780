"""From rows and a policy to a plan: the union of the rules and the safety set. Pure; what a rule keeps is not here."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bucketpoint.retention.plans import SAFETY, Entry, Plan, Reason
from bucketpoint.retention.policy import RetentionPolicy
from bucketpoint.retention.row import FULL, Row
from bucketpoint.retention.safety import safety_set
from bucketpoint.retention.universe import Decision, Universe


def plan(policy: RetentionPolicy, rows: Iterable[Row]) -> Plan:
    """What `policy` says of the committed checkpoints of one run, and why.

    Whatever is not committed, or is on its way out, is not to be among `rows`. The plan depends on the set of rows and
    on nothing else: not on their order, not on a clock, not on an earlier plan. While metrics, pins, leases and
    the answers of `match` stay the same, keep(A | B) = keep(keep(A) | keep(B)), thinned ones included, so pruners that
    see different rows end at the same ones.

    Raises:
        PolicyError: `match` cannot be imported, or fails.
        BucketpointError: rows contradict each other, or are of a kind that this version does not know.
    """
    universe = Universe.of(rows)
    judged = [_Judged(rule.label, rule.thins, rule.decide(universe)) for rule in policy.keep.rules()]
    whole: dict[int, list[Reason]] = {}
    for position, why in safety_set(universe):
        whole.setdefault(position, []).append(Reason(SAFETY, why))
    weights: dict[int, list[Reason]] = {}
    for rule in judged:
        kept = weights if rule.thins else whole
        for position, why in rule.decision.kept.items():
            kept.setdefault(position, []).append(Reason(rule.label, why))
    nearest = _nearest(judged, len(universe.rows))
    whole_rules = [rule for rule in judged if not rule.thins]
    entries = []
    for position, row in enumerate(universe.rows):
        if position in whole:
            entries.append(Entry(row, "keep", (*whole[position], *weights.get(position, ()))))
        elif position in weights:
            closest = min(whole_rules, key=lambda rule: rule.decision.places.get(position, _NEVER))
            entries.append(_weights_only(row, tuple(weights[position]), closest.missed(position)))
        else:
            entries.append(Entry(row, "delete", (), judged[nearest[position]].missed(position)))
    return Plan(tuple(rule.label for rule in judged), tuple(entries))


_NEVER = sys.maxsize


class _Judged(NamedTuple):
    label: str
    thins: bool
    decision: Decision

    def missed(self, position: int) -> Reason:
        return Reason(self.label, self.decision.miss(position))


def _nearest(judged: Sequence[_Judged], rows: int) -> list[int]:
    """For each position, the rule that came nearest to keeping it: the one that missed by the fewest places.

    Among equals, and where no rule counts places, it is the first of the policy.
    """
    behind, nearest = [_NEVER] * rows, [0] * rows
    for number, rule in enumerate(judged):
        for position, places in rule.decision.places.items():
            if places < behind[position]:
                behind[position], nearest[position] = places, number
    return nearest


def _weights_only(row: Row, reasons: tuple[Reason, ...], miss: Reason) -> Entry:
    if row.can_be_thinned:
        return Entry(row, "thin", reasons, miss)
    if row.kind == FULL:
        stays = Reason(reasons[0].rule, "stays whole: its weights are not in objects of their own")
        return Entry(row, "keep", reasons, stays)
    return Entry(row, "keep", reasons)
