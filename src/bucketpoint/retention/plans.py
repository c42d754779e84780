"""Plans: the action for each checkpoint with its reasons, a plan's JSON, and the circuit breaker's verdict."""

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
"""The rule's name in reasons that no policy can switch off."""

Action = Literal["keep", "thin", "delete"]


class Reason(NamedTuple):
    """A reason why a checkpoint is kept, or is not.

    Attributes:
        rule: the rule as the policy writes it, or `SAFETY`.
        why: text on the row's relation to the rule.
    """

    rule: str
    why: str

    def __str__(self) -> str:
        return f"{self.rule} ({self.why})"


Said: TypeAlias = tuple[tuple[Reason, ...], Reason | None]
"""The reasons that keep a checkpoint, and the rule that it missed."""


class Entry:
    """The action for one checkpoint. Must not be changed.

    Attributes:
        row: the row as it was when the plan was made.
        action: `keep` it whole, `thin` it to its weights, or `delete` it.
    """

    # Neither a dataclass nor a tuple, so that texts are made on demand: a plan may have 100,000 entries, most of them
    # deletions whose texts are never read.
    __slots__ = ("_position", "_say", "action", "row")

    def __init__(self, row: Row, action: Action, say: Callable[[int], Said], position: int = 0) -> None:
        """Store `say` and `position`: `say(position)` makes the texts on each request, always the same."""
        self.row, self.action = row, action
        self._say, self._position = say, position

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """All reasons that keep the checkpoint, in the order of the policy, safety first. Empty if it is deleted."""
        return self._say(self._position)[0]

    @property
    def miss(self) -> Reason | None:
        """For a deleted one, the rule that came nearest to keeping it. For a thinned one, why not all of it is kept.

        None for a kept one, unless only a rule that thins keeps it: then the reason why it stays whole.
        """
        return self._say(self._position)[1]

    @property
    def is_ordered(self) -> bool:
        """True if an earlier prune has ordered and counted `action`, or a deletion, by the row's tombstone."""
        return self.action != "keep" and self.row.tombstone in ("delete", self.action)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON data: one of the `checkpoints` of `Plan.to_dict`."""
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
        """Return the entry that `to_dict` wrote as `data`."""
        row = {name: content for name, content in data.items() if name not in ("action", "reasons", "miss")}
        row["metrics"] = {name: float(value) for name, value in row["metrics"].items()}
        reasons = tuple(Reason(**reason) for reason in data["reasons"])
        return cls.told(Row(**row), data["action"], reasons, Reason(**data["miss"]) if data["miss"] else None)

    @classmethod
    def told(cls, row: Row, action: Action, reasons: tuple[Reason, ...], miss: Reason | None = None) -> Entry:
        """Make an entry with known texts.

        Args:
            row: as the attribute of that name.
            action: as the attribute of that name.
            reasons: as the attribute of that name.
            miss: as the attribute of that name.
        """
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

    It names every checkpoint that it was made from, by step, time and id. A checkpoint that it does not name was
    committed later or by somebody else, and must not be touched; one of the same step with another id is another
    checkpoint.

    Attributes:
        rules: the policy's rules, one line each.
        entries: in the order (step, created, id), the oldest first.
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
        """Bytes of data that are freed once the plan is carried out."""
        thinned = sum(entry.row.bytes - entry.row.thinned().bytes for entry in self.thinned)
        return sum(entry.row.bytes for entry in self.deleted) + thinned

    def left(self) -> tuple[Row, ...]:
        """Return the rows that remain once the plan is carried out."""
        return tuple(
            entry.row.thinned() if entry.action == "thin" else entry.row
            for entry in self.entries
            if entry.action != "delete"
        )

    def agreed(self, later: Plan) -> Iterator[Entry]:
        """Yield the deletions and thinnings that a later plan of the same run makes too.

        If a plan is carried out some time after it was made, or after a grace, make another plan and do only these: a
        checkpoint that was pinned, leased or replaced since, or whose metric came in, is left alone. By path
        independence, new commits alone remove nothing from a plan.
        """
        again = {(entry.row.step, entry.row.id): entry.action for entry in later.entries}
        for entry in self.entries:
            if entry.action != "keep" and again.get((entry.row.step, entry.row.id)) == entry.action:
                yield entry

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data.

        NaN and the infinities, which JSON lacks, are the texts "nan", "inf" and "-inf".

        Keys: `version`; `rules`; `summary` with the counts `keep`, `thin`, `delete` and `freed_bytes`; `checkpoints`,
        each with the fields of `Row`, `action`, `reasons` (a list of `rule` and `why`) and `miss` (one, or null).
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
        """Return the plan that `to_dict` wrote.

        Raises:
            BucketpointError: the data is malformed, or has another version than `PLAN_VERSION`.
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
    """Verdict of the circuit breaker: whether a plan may be carried out without confirmation.

    Attributes:
        allowed: True if every deletion and thinning may be carried out.
        why: text of the reason.
        unasked: number of them that one prune carries out in any case, the oldest first.
    """

    allowed: bool
    why: str
    unasked: int

    def __bool__(self) -> bool:
        return self.allowed


ALWAYS_ALLOWED = 5
"""Deletions that one prune may always make.

A new checkpoint displaces about one for each rule, and few policies have more rules. In a small run a fraction alone is
too strict: of three checkpoints, two are already more than half.
"""


def circuit_breaker(plan: Plan, *, count: int, fraction: float, committed: int = 0) -> Verdict:
    """Refuse a plan that deletes or thins more than `count` checkpoints, or more than `fraction` of the existing ones.

    Only a wrong policy does that. The normal work of a right one is not refused: the fraction counts only above
    `ALWAYS_ALLOWED`, and as many more checkpoints may go as were committed since the last prune. Under a refused plan,
    `ALWAYS_ALLOWED` checkpoints (at most `count`) and as many as were committed may still go, so that any backlog
    shrinks with each prune. A checkpoint with a tombstone counts neither as lost nor as existing.

    Args:
        plan: the plan that is to be carried out.
        count: limit on the deleted or thinned checkpoints, as `MaxDelete.count`.
        fraction: the same limit as a share of the existing ones, between 0 and 1.
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
