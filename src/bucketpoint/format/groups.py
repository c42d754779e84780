"""Assignment of items to object groups, by the segments of their names.

Weights and optimizer state are stored in separate objects, so that an old checkpoint can be thinned to its weights by
replacing its metadata and deleting objects.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MODEL = "model"
OPTIM = "optim"
OTHER = "other"

_NUMBERED = re.compile(r"_[0-9]+$")


@dataclass(frozen=True)
class GroupRule:
    """Rule that assigns an item to `group` if `segments` has a segment of its name; `optim` also matches `optim_0`."""

    group: str
    segments: frozenset[str]

    def __init__(self, group: str, segments: Iterable[str]) -> None:
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "segments", frozenset(segments))


DEFAULT_RULES: tuple[GroupRule, ...] = (
    GroupRule(MODEL, ("model", "models", "module", "weights", "model_state", "model_state_dict")),
    GroupRule(
        OPTIM,
        (
            "optim", "optims", "optimizer", "optimizers", "optim_state", "optimizer_state", "optimizer_states",
            "optim_state_dict", "optimizer_state_dict", "lr_scheduler", "lr_schedulers", "scheduler",
        ),
    ),
    GroupRule(OTHER, ("dataloader", "dataset", "train_state", "trainer", "rng", "rng_state", "rng_states")),
)  # fmt: skip
"""Rules for the names that PyTorch's recipes, torchtitan, Lightning and Megatron use."""


def group_of(fqn: str, rules: Sequence[GroupRule] = DEFAULT_RULES, *, tensor: bool = True) -> str:
    """Return the object group of an item.

    The first segment that is in a rule decides, because optimizer keys end with a parameter's name, which may contain
    "model" or "weights". If no segment is in a rule, a tensor counts as a weight, because torchtitan and plain
    `model.state_dict()` saves have their weights at the top level; other values belong to the group "other".
    """
    group, _ = deciding(fqn, rules)
    return group or (MODEL if tensor else OTHER)


def deciding(fqn: str, rules: Sequence[GroupRule] = DEFAULT_RULES) -> tuple[str | None, str]:
    """Return the group of the first segment that is in a rule, and the name up to it; without one, None and `fqn`."""
    groups = _groups_by_segment(tuple(rules))
    segments = fqn.split(".")
    for number, segment in enumerate(segments, 1):
        group = groups.get(segment) or groups.get(_NUMBERED.sub("", segment))
        if group is not None:
            return group, ".".join(segments[:number])
    return None, fqn


@functools.lru_cache(maxsize=16)
def _groups_by_segment(rules: tuple[GroupRule, ...]) -> dict[str, str]:
    return {segment: rule.group for rule in reversed(rules) for segment in rule.segments}
