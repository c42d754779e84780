"""Plans: the action for each checkpoint with its reasons, as objects and as JSON, and the limit on deletions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import isfinite
from typing import Any, Literal, NamedTuple, TypeAlias

from bucketpoint.errors import BucketpointError
from bucketpoint.retention.row import Row

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
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        """Return the entry from `data`, its form by `to_dict`."""
        row = {name: content for name, content in data.items() if name not in ("action", "reasons", "miss")}
        row["metrics"] = {name: float(value) for name, value in row["metrics"].items()}
        reasons = tuple(Reason(**reason) for reason in data["reasons"])
        return cls.told(Row(**row), data["action"], reasons, Reason(**data["miss"]) if data["miss"] else None)

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

    def agreed(self, later: Plan) -> Iterator[Entry]:
        """Yield the deletions and thinnings that the plan `later`, of the same run, contains too.

        To carry out a plan some time after it was made, make another plan and carry out only these entries: checkpoints
        that were pinned, leased or replaced meanwhile, or got a metric, are spared. By path independence, new commits
        alone remove no deletion from a plan.
        """
        again = {(entry.row.step, entry.row.id): entry.action for entry in later.entries}
        for entry in self.entries:
            if entry.action != "keep" and again.get((entry.row.step, entry.row.id)) == entry.action:
                yield entry

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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan from `data`, its form by `to_dict`.

        Raises:
            BucketpointError: `data` is malformed, or its version is not `PLAN_VERSION`.
        """
        if data.get("version") != PLAN_VERSION:
            raise BucketpointError(
                f"The plan has version {data.get('version')!r}, and this bucketpoint reads version {PLAN_VERSION}",
                remedy="Make the plan again",
            )
        try:
            return cls(tuple(data["rules"]), tuple(map(Entry.from_dict, data["checkpoints"])))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BucketpointError(f"The plan is malformed: {error!r}", remedy="Make the plan again") from error


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

    Such a plan is probably the result of a wrong policy. Two allowances spare the plans of a right one: `committed` is
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
