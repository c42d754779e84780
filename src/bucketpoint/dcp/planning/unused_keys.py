"""Comparison of a checkpoint's keys with the keys that a load requests: the differences, and probable reasons."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import LoadPlan, Metadata, TensorStorageMetadata

from bucketpoint.errors import first_of

logger = logging.getLogger(__name__)

_NAMED_AT_MOST = 5
_NEIGHBOURS = 4
_COMPARED_AT_MOST = 500
_PARAM_GROUPS = "param_groups."
_WRAPPERS = {"_orig_mod": "torch.compile", "module": "DistributedDataParallel"}


def in_words(unused: Sequence[str]) -> str:
    return f"{len(unused)} keys that the state lacks: {first_of(unused, _NAMED_AT_MOST)}"


@dataclass(frozen=True)
class Unmatched:
    """The parts of one rank's state that the checkpoint lacks, sent to the coordinator with the plan of the rank.

    Attributes:
        lacking: flat names of keys that the checkpoint lacks.
        containers: flat names of the outermost containers (dicts, lists) of which the checkpoint has no key. Among them
            are empty containers, such as the state of an object that creates its state lazily.
        strict: the rank refuses keys of the checkpoint that no rank requests.
    """

    lacking: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    strict: bool = False


def find_unmatched(flat: Iterable[str], nested: Mapping[Any, Any], saved: Collection[str]) -> Unmatched:
    containers: list[str] = []

    def visit(parts: Iterable[tuple[Any, Any]], prefix: str) -> bool:
        """Return True if the checkpoint has a key of the container; then also collect inner containers without one."""
        matched, without = not prefix, []
        for key, value in parts:
            name = f"{prefix}{key}"
            if name in saved:
                matched = True
                continue
            if isinstance(value, Mapping):
                below: Iterable[tuple[Any, Any]] = value.items()
            elif isinstance(value, (list, tuple)):
                below = enumerate(value)
            else:
                continue
            if visit(below, f"{name}."):
                matched = True
            else:
                without.append(name)
        if matched:
            containers.extend(without)
        return matched

    visit(nested.items(), "")
    return Unmatched(tuple(name for name in flat if name not in saved), tuple(containers))


@dataclass(frozen=True)
class KeyDifference:
    """Difference between the keys that all ranks request and the keys of the checkpoint.

    Attributes:
        unused: keys of the checkpoint that no rank requests.
        lacking: requested keys that the checkpoint lacks.
        losses: texts about values that are not loaded although the state seems to need them.
    """

    unused: list[str]
    lacking: list[str]
    losses: list[str]

    def log(self, url: str | None, *, losses_only: bool = False) -> None:
        """Log one line if keys differ; as a warning if there are losses."""
        parts = []
        if self.unused:
            parts.append(f"the checkpoint has {in_words(self.unused)}")
        if self.lacking:
            named = first_of(self.lacking, _NAMED_AT_MOST)
            kept = f"the checkpoint lacks {len(self.lacking)} keys, whose values in the state stay unchanged: {named}"
            parts.append(kept)
        if self.losses or (parts and not losses_only):
            level = logging.WARNING if self.losses else logging.INFO
            logger.log(level, "loading %s: %s", url, "; ".join(self.losses if losses_only else [*parts, *self.losses]))


def compare_keys(
    metadata: Metadata, plans: Iterable[LoadPlan], own: Iterable[str], unmatched: Unmatched
) -> KeyDifference:
    """Compare the keys of a checkpoint with the keys that all ranks request, on the coordinator.

    Args:
        own: keys that this rank requests, with those of empty tensors, which are not in a plan.
        unmatched: `Unmatched` of this rank; those of other ranks are in plans of `LoadPlanner`.
    """
    saved = metadata.state_dict_metadata
    plans = list(plans)
    used = {item.storage_index.fqn for plan in plans for item in plan.items}
    used.update(own)
    unused = [name for name in saved if name not in used]
    everywhere = [unmatched, *(plan.planner_data for plan in plans if isinstance(plan.planner_data, Unmatched))]
    lacking = sorted({name for each in everywhere for name in each.lacking})
    losses: list[str] = []
    if unused:
        loaded = used.difference(lacking)
        wanted = {name for each in everywhere for name in each.containers}.union(lacking)
        renamed = find_renaming(lacking, unused) if lacking else None
        losses += _not_loaded(metadata, unused, wanted, loaded, lacking, renamed)
        if renamed is not None:
            losses.append(f"{renamed}. {renamed.remedy}")
        if lacking and not loaded and not losses:
            losses.append(f"nothing is loaded: {nearest_keys(lacking, unused)}")
    return KeyDifference(unused, lacking, losses)


def _loss(name: str, saved: list[str], lacking: list[str], renamed: Renaming | None, *, optimizer: bool) -> str:
    """Return a text about a container of the state. The checkpoint has keys below it, and none of them is loaded."""
    where = f"below {name!r}" if name else "of the optimizer"
    words = f"none of the {len(saved)} keys {where} is loaded, such as {saved[0]}"
    if lacking:
        return words if renamed else f"{words}: {nearest_keys(lacking, saved)}"
    if optimizer:
        return (
            f"{words}: an optimizer that has made no step has no tensors to load into. torch's "
            "get_optimizer_state_dict makes them, but only while no parameter has a gradient: call it before the first "
            "backward pass, or after optimizer.zero_grad()"
        )
    return (
        f"{words}: the state has no keys there. An object that makes its state at its first use must make it before "
        f"the load; bucketpoint.load(url, keys={name!r}) returns what was saved"
    )


def _not_loaded(
    metadata: Metadata,
    unused: list[str],
    wanted: set[str],
    loaded: set[str],
    lacking: list[str],
    renamed: Renaming | None,
) -> Iterator[str]:
    # torch's optimizer states are recognised by their content, since a program may choose any key for them.
    optimizers = {
        name[:at] for name in loaded if (at := name.find(_PARAM_GROUPS)) == 0 or (at > 0 and name[at - 1] == ".")
    }
    entries = metadata.state_dict_metadata

    def has_tensors(names: Iterable[str]) -> bool:
        return any(isinstance(entries[name], TensorStorageMetadata) for name in names)

    reported: list[str] = []
    if wanted:
        below = _by_prefix(unused, wanted)
        loaded_below = _by_prefix(loaded, below) if below else {}
        lacking_below = _by_prefix(lacking, below) if below else {}
        for name, names in below.items():
            # If only objects are saved, they may be the None values of an optimizer without momentum: nothing is lost.
            if name not in loaded_below and ("." not in name or has_tensors(names)):
                reported.append(name)
                optimizer = f"{name.rpartition('.')[0]}.".lstrip(".") in optimizers
                yield _loss(name, names, lacking_below.get(name, []), renamed, optimizer=optimizer)
    for prefix in optimizers:
        groups = f"{prefix}{_PARAM_GROUPS}"
        names = [name for name in unused if name.startswith(prefix) and not name.startswith(groups)]
        if not names or any(f"{name}.".startswith(prefix) for name in reported) or not has_tensors(names):
            continue
        if not has_tensors(name for name in loaded if name.startswith(prefix) and not name.startswith(groups)):
            yield _loss(prefix.rstrip("."), names, [], renamed, optimizer=True)


def _by_prefix(names: Iterable[str], containers: Collection[str]) -> dict[str, list[str]]:
    """Return the names below each container, without containers that have none."""
    below: dict[str, list[str]] = {}
    for name in names:
        dot = name.find(".")
        while dot >= 0:
            if name[:dot] in containers:
                below.setdefault(name[:dot], []).append(name)
            dot = name.find(".", dot + 1)
    return below


# -- similar names ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Renaming:
    """Segments in names of the checkpoint that the state's names lack, or the reverse.

    Attributes:
        segments: the segments, each followed by a dot.
        in_checkpoint: True if names of the checkpoint have the segments, False if names of the state do.
        count, of: number of the state's names that differ by the segments, and number of names compared.
        example: a name of the state, and the same name in the checkpoint.
    """

    segments: str
    in_checkpoint: bool
    count: int
    of: int
    example: tuple[str, str]

    def __str__(self) -> str:
        here, there = self.example
        wrapper = _WRAPPERS.get(self.segments.rstrip("."))
        added = f", which {wrapper} adds" if wrapper else ""
        side = "checkpoint" if self.in_checkpoint else "state"
        return (
            f"{self.count} of {self.of} compared keys that the checkpoint lacks match its keys that differ only by "
            f"{self.segments!r} in the {side}{added}: the state has {here}, and the checkpoint {there}"
        )

    @property
    def remedy(self) -> str:
        if self.in_checkpoint:
            key = f"{self.segments!r} + name"
        else:
            key = f"name.replace({self.segments!r}, '', 1)"
        wrapper = self.segments.rstrip(".") in _WRAPPERS
        return (
            f"Load into the same tensors under the checkpoint's names, such as {{{key}: value for name, value in "
            "model.state_dict().items()}"
            + ("; torch's get_model_state_dict makes names without it, for saves and loads" if wrapper else "")
        )


def find_renaming(lacking: Sequence[str], unused: Iterable[str]) -> Renaming | None:
    """Return the most frequent difference of missing names from unused names; None if fewer than 10 % differ so."""
    alike = _Alike(unused)
    compared = lacking[:_COMPARED_AT_MOST]
    kinds: Counter[tuple[str, bool]] = Counter()
    examples: dict[tuple[str, bool], tuple[str, str]] = {}
    for name in compared:
        found: dict[tuple[str, bool], str] = {}
        for other in alike.to(name):
            kind = _inserted(name, other)
            if kind is not None:
                found.setdefault(kind, other)
        for kind, other in found.items():
            kinds[kind] += 1
            examples.setdefault(kind, (name, other))
    if not kinds:
        return None
    # Among equally frequent differences, take the shortest: a name may occur again, deeper in the checkpoint.
    (kind, count) = min(kinds.items(), key=lambda pair: (-pair[1], len(pair[0][0])))
    if count * 10 < len(compared):
        return None
    return Renaming(*kind, count, len(compared), examples[kind])


def nearest_keys(lacking: Sequence[str], unused: Iterable[str]) -> str:
    """Return a text with the first missing names and the unused names that are most similar to them."""
    here, there = first_of(lacking, _NAMED_AT_MOST), first_of(nearest(lacking, unused), _NAMED_AT_MOST)
    return f"the state has {here}, and the nearest keys of the checkpoint are {there}"


def nearest(names: Sequence[str], others: Iterable[str]) -> list[str]:
    """Return the names in `others` that are most similar to the first of `names`."""
    alike = _Alike(others)
    pairs = [next(iter(alike.to(name)), None) for name in names[:_NAMED_AT_MOST]]
    return list(dict.fromkeys(other for other in pairs if other is not None))


class _Alike:
    """Search for the names that begin or end like a given name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._sorted = sorted(names)
        self._reversed = sorted(name[::-1] for name in self._sorted)

    def to(self, name: str) -> list[str]:
        """Return some of the names that share the longest beginnings and ends with `name`, the most similar first."""
        found = {*_around(self._sorted, name), *(other[::-1] for other in _around(self._reversed, name[::-1]))}
        return sorted(found, key=lambda other: (-_shared(name, other), len(other), other))


def _around(names: list[str], name: str) -> list[str]:
    at = bisect_left(names, name)
    return names[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]


def _shared(one: str, other: str) -> int:
    """Return the number of characters of the common beginning and the common end."""
    begin = _common(one, other)
    return begin + min(_common(one[::-1], other[::-1]), min(len(one), len(other)) - begin)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    length = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        length += 1
    return length


def _inserted(here: str, there: str) -> tuple[str, bool] | None:
    """Return the segments that only one of two names has, and True if that name is `there`."""
    for shorter, longer, in_checkpoint in ((here, there, True), (there, here, False)):
        parts, more = shorter.split("."), longer.split(".")
        end = _common(parts[::-1], more[::-1])
        begin = min(_common(parts, more), len(parts) - end)
        inserted = more[begin : len(more) - end]
        if not end or len(parts) != begin + end:
            # Segments may be inserted in several places, as in a model whose layers are compiled one by one.
            own = set(parts)
            inserted = list(dict.fromkeys(part for part in more if part not in own))
            if parts != [part for part in more if part in own]:
                continue
        if inserted and not all(part.isdecimal() for part in inserted):
            return "".join(f"{part}." for part in inserted), in_checkpoint
    return None
