"""The changes of a checkpoint since the one before it, by part of the state.

Each rank tallies its items, the coordinator merges the tallies; the record and the log have the outcome.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from bucketpoint.errors import MetadataError
from bucketpoint.format.groups import DEFAULT_RULES, MODEL, OPTIM, GroupRule, deciding

MOMENTS = "moments"
RANDOM = "random"
DATA = "data"
OTHER = "other"
# The kinds MODEL and OPTIM are called as the groups of objects are.

MOST_PARTS = 64
"""More parts than this are joined to one for each kind, so that the record and the log line stay short."""

_MAX_COUNT = 1 << 62
_MAX_NAME = 256
_MAX_URL = 4096
COUNTS = ("items", "nbytes", "changed_items", "changed_nbytes", "new_items", "nonfinite")
"""The counts of a part, in their order in tallies."""


@dataclass(frozen=True)
class PartChanges:
    """The changes in one part of the state.

    Attributes:
        kind: `model`, `moments` (tensors of an optimizer with more than one element), `optim` (all else of an
            optimizer: steps, learning rates), `random` (states of random number generators), `data` (dataloaders) or
            `other`.
        items, nbytes: of the part in this checkpoint.
        changed_items, changed_nbytes: of them, those that are new or differ from the checkpoint before.
        new_items: of the changed items, those that the checkpoint before did not hold.
        nonfinite: values of floating tensors that are NaN or infinite, if `Changes.checked_finite`; else 0.
    """

    kind: str
    items: int = 0
    nbytes: int = 0
    changed_items: int = 0
    changed_nbytes: int = 0
    new_items: int = 0
    nonfinite: int = 0

    def __add__(self, other: PartChanges) -> PartChanges:
        sums = {name: getattr(self, name) + getattr(other, name) for name in COUNTS}
        return PartChanges(self.kind, **sums)


@dataclass(frozen=True)
class Changes:
    """The changes of a checkpoint since the one before it.

    Attributes:
        since: URL of the checkpoint compared with; None if there was none, and all counts as changed.
        parts: by name, the largest first.
        checked_finite: values that are not finite were counted, as versions before 0.3 can.
        copied_nbytes: bytes of unchanged items that the store copied instead of receiving them.
    """

    since: str | None
    parts: Mapping[str, PartChanges] = field(default_factory=dict)
    checked_finite: bool = False
    copied_nbytes: int = 0

    @property
    def items(self) -> int:
        return sum(part.items for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def changed_items(self) -> int:
        return sum(part.changed_items for part in self.parts.values())

    @property
    def changed_nbytes(self) -> int:
        return sum(part.changed_nbytes for part in self.parts.values())

    @property
    def nonfinite(self) -> int | None:
        """Number of values that are NaN or infinite; None if they were not counted."""
        return sum(part.nonfinite for part in self.parts.values()) if self.checked_finite else None

    def describe_nonfinite(self) -> str:
        """Return the numbers of values that are NaN or infinite by part: `12 in model`."""
        found = [f"{part.nonfinite:,} in {_shown(name)}" for name, part in self.parts.items() if part.nonfinite]
        return ", ".join(found) or "none"

    def __str__(self) -> str:
        if self.since is None:
            return "no earlier save to compare with"
        said = [f"{_shown(name)} {_described(part)}" for name, part in self.parts.items()] or ["no items"]
        if self.copied_nbytes:
            said.append(f"{amount(self.copied_nbytes)} copied by the store")
        return "; ".join(said)

    def to_plain(self) -> dict[str, Any]:
        """Return the changes in JSON's terms."""
        parts = {name: asdict(part) for name, part in self.parts.items()}
        told = {"checked_finite": self.checked_finite, "copied_nbytes": self.copied_nbytes}
        return {"since": self.since, "parts": parts, **told}

    @classmethod
    def from_plain(cls, value: Any) -> Changes:
        """Rebuild the changes from data that anybody may have written. Unknown fields are dropped.

        Raises:
            MetadataError: `value` is malformed.
        """
        if type(value) is not dict or type(value.get("parts")) is not dict or len(value["parts"]) > 6 * MOST_PARTS:
            raise MetadataError("The list of what changed is malformed", key="changes")
        since = value.get("since")
        if since is not None and (type(since) is not str or len(since) > _MAX_URL):
            raise MetadataError("The URL of the checkpoint compared with is malformed", key="changes.since")
        checked = value.get("checked_finite")
        if type(checked) is not bool:
            raise MetadataError("The mark of a check for finite values is malformed", key="changes.checked_finite")
        parts = {name: _part_from_plain(name, part) for name, part in value["parts"].items()}
        return cls(since, parts, checked, _count(value.get("copied_nbytes")))


def _part_from_plain(name: Any, value: Any) -> PartChanges:
    if type(name) is not str or len(name) > _MAX_NAME or type(value) is not dict:
        raise MetadataError("A part in the list of what changed is malformed", key="changes.parts")
    kind, counts = value.get("kind"), [_count(value.get(count)) for count in COUNTS]
    wrong = counts[2] > counts[0] or counts[3] > counts[1] or counts[4] > counts[2]
    if type(kind) is not str or len(kind) > _MAX_NAME or wrong:
        raise MetadataError("A part in the list of what changed is malformed", key="changes.parts")
    return PartChanges(kind, *counts)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise MetadataError("A count in the list of what changed is malformed", key="changes.parts")
    return value


def _shown(name: str) -> str:
    """Return the name of a part for a line of a log: names come from the caller's state, and may hold anything."""
    return name if name.isprintable() else repr(name)


def _described(part: PartChanges) -> str:
    if not part.changed_items:
        return "unchanged"
    if part.changed_items == part.items:
        return f"{amount(part.nbytes)}, all changed"
    return (
        f"{amount(part.changed_nbytes)} of {amount(part.nbytes)} in {part.changed_items:,} of {part.items:,} "
        f"{'item' if part.items == 1 else 'items'}"
    )


def amount(nbytes: float) -> str:
    """Format bytes in decimal units, with one digit behind the point: `10.0 MB`."""
    if nbytes < 999.5:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 999.95:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1000:.1f} TB"


# -- parts of a state -------------------------------------------------------------------------------------------------

_UNKNOWN: tuple[tuple[str, re.Pattern[str]], ...] = (
    (RANDOM, re.compile(r"(\w+_)?(rng|random)(_?states?)?")),
    (DATA, re.compile(r"(\w+_)?(data_?)?(loader|dataset)(_?states?)?")),
    (OPTIM, re.compile(r"(\w+_)?optim(izer)?s?(_\w+)?")),
)
"""Kinds of the first segments that no rule knows: `torch_rng_state`, `train_loader`, `optimizer_g`."""

_NUMBERED = re.compile(r"_[0-9]+$")


class StateParts:
    """The parts of a state: the place of each name, decided once for each distinct segment of the names.

    A part is named by what the names have in common up to the first segment that a rule knows. Numbers are left out,
    so that there is no part for each layer or for each rank. The tensors of an optimizer and its other values are two
    parts. Names without a known segment belong to a part by default: tensors of several elements to the
    weights, all else to `other`, because a counter that moves would hide that the weights do not.
    """

    def __init__(self, rules: Sequence[GroupRule] = DEFAULT_RULES) -> None:
        self._rules = tuple(rules)
        self._segments: dict[str, str | None] = {}
        self._unknown: set[str] = set()
        self._heads: dict[str, tuple[str, str] | None] = {}

    def find(self, fqn: str, *, tensor: bool, elements: int) -> tuple[str, str]:
        """Return name and kind of the part to which an item belongs. The name is empty for weights by default."""
        head = fqn.partition(".")[0]
        try:
            known = self._heads[head]
        except KeyError:
            known = self._heads[head] = self._of_head(head)
        # Names of which the first segment decides are nearly all; the others are searched.
        name, kind = known or self._search(fqn) or (("", MODEL) if tensor and elements > 1 else (OTHER, OTHER))
        if kind == OPTIM and tensor and elements > 1 and "scheduler" not in name:
            return f"{name} {MOMENTS}", MOMENTS
        return name, kind

    def _of_head(self, head: str) -> tuple[str, str] | None:
        group = self._group(head)
        if group is not None:
            return _numberless(head, group), _kind(group, head)
        unnumbered = _NUMBERED.sub("", head)
        for kind, pattern in _UNKNOWN:
            if pattern.fullmatch(unnumbered):
                return (head if kind == OPTIM else unnumbered), kind
        return None

    def _search(self, fqn: str) -> tuple[str, str] | None:
        segments = fqn.split(".")
        if self._unknown.issuperset(segments):
            return None
        for number, segment in enumerate(segments):
            group = self._group(segment)
            if group is None:
                continue
            kind, before = _kind(group, segment), segments[:number]
            numeric = next((place for place, each in enumerate(before) if each.isdigit()), None)
            if numeric is None:
                return ".".join([*before, _numberless(segment, group)]), kind
            # `layers.17.module.weight`: one part for all layers.
            shorter = ".".join(before[:numeric])
            return shorter or ("" if kind == MODEL else kind), kind
        return None

    def _group(self, segment: str) -> str | None:
        try:
            return self._segments[segment]
        except KeyError:
            group = self._segments[segment] = deciding(segment, self._rules)[0]
            if group is None:
                self._unknown.add(segment)
            return group


def _kind(group: str, segment: str) -> str:
    if group in (MODEL, OPTIM):
        return group
    unnumbered = _NUMBERED.sub("", segment)
    return next((kind for kind, pattern in _UNKNOWN if kind != OPTIM and pattern.fullmatch(unnumbered)), OTHER)


def _numberless(segment: str, group: str) -> str:
    """Return the segment for the name of a part. Models and optimizers keep their numbers."""
    return segment if group in (MODEL, OPTIM) else _NUMBERED.sub("", segment)


# -- counting ---------------------------------------------------------------------------------------------------------

ItemChange: TypeAlias = Literal["same", "changed", "new"]
"""Change of one item since the last save; `new` if that save did not hold it."""

Tally = dict[tuple[str, str], tuple[int, ...]]
"""What one rank sends: by name and kind of each part, the counts of `PartChanges` in their order."""


def tally(
    entries: Iterable[tuple[str, bool, int, int, ItemChange, int]], rules: Sequence[GroupRule] = DEFAULT_RULES
) -> Tally:
    """Count the items of one rank by part.

    Args:
        entries: of each item: name, whether it is a tensor, the number of elements of the whole tensor, bytes, its
            change since the last save, and the number of values that are not finite.
    """
    find = StateParts(rules).find
    counts: dict[tuple[str, str], list[int]] = {}
    for fqn, tensor, elements, nbytes, change, nonfinite in entries:
        part = find(fqn, tensor=tensor, elements=elements)
        count = counts.get(part)
        if count is None:
            count = counts[part] = [0] * len(COUNTS)
        count[0] += 1
        count[1] += nbytes
        if change != "same":
            count[2] += 1
            count[3] += nbytes
        if change == "new":
            count[4] += 1
        count[5] += nonfinite
    return _bounded({part: tuple(each) for part, each in counts.items()})


def merge(
    tallies: Iterable[Tally], since: str | None, *, checked_finite: bool = False, copied_nbytes: int = 0
) -> Changes:
    """Add up the tallies of all ranks.

    Args:
        since: URL of the save compared with; None if there was none.
        checked_finite: all ranks have counted the values that are not finite.
        copied_nbytes: bytes that the store copied, over all ranks.
    """
    total: Tally = {}
    for each in tallies:
        _add(total, each)
    parts: dict[str, PartChanges] = {}
    taken = {name for name, _ in total}
    for (name, kind), counts in sorted(_bounded(total).items(), key=lambda entry: (-entry[1][1], entry[0])):
        # Weights whose names no rule knows: as torchtitan saves them, or beside a model that has a name.
        shown = name[:_MAX_NAME] or (MODEL if MODEL not in taken else "other tensors")
        part = PartChanges(kind, *counts)
        # One name of two kinds: a rule of the user's own may put a segment into another group. Or names that were cut.
        parts[shown] = parts[shown] + part if shown in parts else part
    return Changes(since, parts, checked_finite, copied_nbytes)


def _bounded(counts: Tally) -> Tally:
    """Return the tally with at most `MOST_PARTS` parts: if there are more, one for each kind."""
    if len(counts) <= MOST_PARTS:
        return counts
    kinds: Tally = {}
    for (_, kind), each in counts.items():
        _add(kinds, {(kind, kind): each})
    return kinds


def _add(total: Tally, counts: Tally) -> None:
    for part, each in counts.items():
        have = total.get(part)
        total[part] = each if have is None else tuple(map(operator.add, have, each))
