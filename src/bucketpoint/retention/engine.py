"""From rows and a policy to a plan: the union of the rules and the safety set. Pure; what a rule keeps is not here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bucketpoint.retention.plans import SAFETY, Entry, Plan, Reason
from bucketpoint.retention.policy import RetentionPolicy
from bucketpoint.retention.row import FULL, Row
from bucketpoint.retention.rules import Rule
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
    rules = policy.keep.rules()
    decisions = [rule.decide(universe) for rule in rules]
    whole: dict[int, list[Reason]] = {}
    for position, why in safety_set(universe):
        whole.setdefault(position, []).append(Reason(SAFETY, why))
    weights: dict[int, list[Reason]] = {}
    for rule, decision in zip(rules, decisions, strict=True):
        kept = weights if rule.thins else whole
        label = rule.label
        for position, why in decision.kept.items():
            kept.setdefault(position, []).append(Reason(label, why))
    entries = []
    for position, row in enumerate(universe.rows):
        reasons = tuple(whole.get(position, ())) + tuple(weights.get(position, ()))
        if position in whole:
            entries.append(Entry(row, "keep", reasons))
        elif position in weights:
            entries.append(_weights_only(row, reasons, _nearest(position, rules, decisions, thins=False)))
        else:
            entries.append(Entry(row, "delete", (), _nearest(position, rules, decisions)))
    return Plan(tuple(rule.label for rule in rules), tuple(entries))


def _weights_only(row: Row, reasons: tuple[Reason, ...], miss: Reason) -> Entry:
    if row.can_be_thinned:
        return Entry(row, "thin", reasons, miss)
    if row.kind == FULL:
        stays = Reason(reasons[0].rule, "stays whole: its weights are not in objects of their own")
        return Entry(row, "keep", reasons, stays)
    return Entry(row, "keep", reasons)


def _nearest(position: int, rules: Sequence[Rule], decisions: Sequence[Decision], *, thins: bool = True) -> Reason:
    """The rule that missed by the fewest places. Without any that counts places, the first of the policy: `latest`."""
    best: tuple[int, int] | None = None
    for number, decision in enumerate(decisions):
        behind = decision.places.get(position)
        if behind is not None and (best is None or behind < best[0]) and (thins or not rules[number].thins):
            best = behind, number
    number = best[1] if best else 0
    return Reason(rules[number].label, decisions[number].miss(position))
