"""Plans: the action for each checkpoint with its reasons, as objects and as JSON, and the limit on deletions.

A checkpoint is kept if any rule of the policy keeps it, or if it is in the safety set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import repeat
from math import isfinite
from typing import Any, Literal, NamedTuple, TypeAlias

from bucketpoint.retention.policy import RetentionPolicy
from bucketpoint.retention.rows import FULL, CheckpointSet, Row, RuleDecision

PLAN_VERSION = 1

SAFETY = "safety"
"""Name of the safety set in the field `rule` of a reason."""

Action = Literal["keep", "thin", "delete"]


class Reason(NamedTuple):
    """A reason to keep a checkpoint, or not to keep it.

    Attributes:
        rule: the rule as in the policy's text, or `SAFETY`.
        why: text on how the row meets or misses the rule.
    """

    rule: str
    why: str

    def __str__(self) -> str:
        return f"{self.rule} ({self.why})"


Said: TypeAlias = tuple[tuple[Reason, ...], Reason | None]
"""Values of `Entry.reasons` and `Entry.miss`."""


class Entry:
    """The action for one checkpoint. Must not be modified.

    Attributes:
        row: the row from which the plan was made.
        action: `keep` the whole checkpoint, `thin` it to its weights, or `delete` it.
    """

    # Neither a dataclass nor a tuple: texts are made on demand, because a plan may have 100,000 entries, and most texts
    # are never read.
    __slots__ = ("_position", "_say", "action", "row")

    def __init__(self, row: Row, action: Action, say: Callable[[int], Said], position: int = 0) -> None:
        """Store `say`, which makes the texts for a `position` on demand: the same texts at each call."""
        self.row, self.action = row, action
        self._say, self._position = say, position

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """All reasons that keep the checkpoint: the safety set, then the policy's order. Empty if it is deleted."""
        return self._say(self._position)[0]

    @property
    def miss(self) -> Reason | None:
        """The reason why the checkpoint is not kept, or not kept whole, from the rule that came nearest to keeping it.

        None for a kept checkpoint, unless it is full and only rules with `thin` keep it: then why it cannot be thinned.
        """
        return self._say(self._position)[1]

    @property
    def is_ordered(self) -> bool:
        """True if the row has a tombstone for this `action`, or for deletion: an earlier prune has counted it."""
        return self.action != "keep" and self.row.tombstone in ("delete", self.action)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON data, a member of `checkpoints` in `Plan.to_dict`."""
        row = self.row
        reasons, miss = self._say(self._position)
        return {
            **{name: getattr(row, name) for name in _ROW_FIELDS},
            "groups": dict(row.groups),
            "metrics": {name: value if isfinite(value) else str(float(value)) for name, value in row.metrics.items()},
            "action": self.action,
            "reasons": [reason._asdict() for reason in reasons],
            "miss": miss._asdict() if miss else None,
        }

    @classmethod
    def told(cls, row: Row, action: Action, reasons: tuple[Reason, ...], miss: Reason | None = None) -> Entry:
        """Make an entry with the given attributes `row`, `action`, `reasons` and `miss`."""
        return cls(row, action, lambda position: (reasons, miss))

    def __reduce__(self) -> tuple[Any, ...]:
        return Entry.told, (self.row, self.action, *self._say(self._position))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entry):
            return NotImplemented
        return (self.row, self.action, self.reasons, self.miss) == (other.row, other.action, other.reasons, other.miss)

    def __repr__(self) -> str:
        reasons, miss = self._say(self._position)
        return f"Entry({self.row!r}, {self.action!r}, {reasons!r}, {miss!r})"


_ROW_FIELDS = tuple(one.name for one in fields(Row))


@dataclass(frozen=True)
class Plan:
    """The decisions of a policy on a run's checkpoints at one moment.

    A plan covers only the checkpoints in its entries, identified by step and id. Others, such as a later commit of the
    same step, must not be touched.

    Attributes:
        rules: the policy's rules, one line each.
        entries: the entries in the order (step, created, id).
    """

    rules: tuple[str, ...]
    entries: tuple[Entry, ...]

    @cached_property
    def kept(self) -> tuple[Entry, ...]:
        """The entries of checkpoints that stay whole."""
        return tuple(entry for entry in self.entries if entry.action == "keep")

    @cached_property
    def thinned(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.action == "thin")

    @cached_property
    def deleted(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.action == "delete")

    @property
    def freed_bytes(self) -> int:
        """Bytes of data that the plan's deletions and thinnings free."""
        thinned = sum(entry.row.bytes - entry.row.thinned().bytes for entry in self.thinned)
        return sum(entry.row.bytes for entry in self.deleted) + thinned

    def left(self) -> tuple[Row, ...]:
        """Return the rows after all deletions and thinnings of the plan."""
        return tuple(
            entry.row.thinned() if entry.action == "thin" else entry.row
            for entry in self.entries
            if entry.action != "delete"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data. NaN and the infinities become the texts "nan", "inf" and "-inf".

        Keys: `version`; `rules`; `summary` with the counts `keep`, `thin` and `delete`, and `freed_bytes`;
        `checkpoints`, each with the fields of `Row`, `action`, `reasons` (a list of objects with `rule` and `why`) and
        `miss` (such an object, or null).
        """
        return {
            "version": PLAN_VERSION,
            "rules": list(self.rules),
            "summary": {
                "keep": len(self.kept),
                "thin": len(self.thinned),
                "delete": len(self.deleted),
                "freed_bytes": self.freed_bytes,
            },
            "checkpoints": [entry.to_dict() for entry in self.entries],
        }


@dataclass(frozen=True)
class Verdict:
    """Result of `circuit_breaker`: whether a plan may be carried out without confirmation.

    Attributes:
        allowed: True if all deletions and thinnings may be carried out.
        why: text of the reason.
        unasked: number of deletions and thinnings that one prune carries out in any case, oldest first.
    """

    allowed: bool
    why: str
    unasked: int

    def __bool__(self) -> bool:
        return self.allowed


ALWAYS_ALLOWED = 5
"""Number of deletions and thinnings that one prune may always make.

A new checkpoint displaces about one old checkpoint for each rule, and few policies have more than five rules. A
fraction alone would be too strict in a small run: two of three checkpoints are more than half.
"""


def circuit_breaker(plan: Plan, *, count: int, fraction: float, committed: int = 0) -> Verdict:
    """Refuse a plan that deletes or thins more than `count` checkpoints, or more than `fraction` of the existing ones.

    Such a plan is probably the result of a wrong policy. Two allowances spare plans of correct policies: `committed` is
    added to both limits, and the fraction applies only above `ALWAYS_ALLOWED`. Of a refused plan, a prune still carries
    out `ALWAYS_ALLOWED` entries (at most `count`) plus `committed`, so that a backlog shrinks with each prune.
    Entries that an earlier prune has ordered by a tombstone are not counted again; such deletions also do not count as
    existing checkpoints.

    Args:
        plan: the plan to be carried out.
        count: limit on the deleted or thinned checkpoints, as `MaxDelete.count`.
        fraction: limit as a share of the existing checkpoints, between 0 and 1.
        committed: number of checkpoints that the job has committed since its last prune.
    """
    lost = sum(entry.action != "keep" and not entry.is_ordered for entry in plan.entries)
    there = sum(entry.action != "delete" or not entry.is_ordered for entry in plan.entries)
    beyond = lost - committed
    few = committed + min(ALWAYS_ALLOWED, count)
    summary = f"the plan deletes or thins {lost} of {there} checkpoints"
    if beyond > count:
        return Verdict(False, f"{summary}, and max_delete allows {count}", few)
    if beyond > ALWAYS_ALLOWED and beyond > fraction * there:
        return Verdict(False, f"{summary}, and max_delete allows {100 * fraction:.3g} %", few)
    return Verdict(True, f"{summary}, within max_delete", lost)


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
