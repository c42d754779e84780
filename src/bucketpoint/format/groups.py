"""Which object group an item belongs to, by the segments of its name. Pure functions over strings.

Weights and optimizer state go to separate objects, so that an old checkpoint can be thinned to its weights by replacing
its metadata and deleting objects.
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
    """Items whose name has one of `segments` between its dots, numbered (`optimizer_0`) or not, belong to `group`."""

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
"""The names of PyTorch's recipes, torchtitan, Lightning and Megatron."""


def group_of(fqn: str, rules: Sequence[GroupRule] = DEFAULT_RULES, *, tensor: bool = True) -> str:
    """The group of an item.

    The first segment from the left that any rule knows decides: optimizer keys go on with the name of a parameter, in
    which "model" or "weights" may occur. Without one, a tensor is taken for a weight, as torchtitan and plain
    `model.state_dict()` saves have their weights at the top level, and bytes belong to no part in particular.
    """
    group, _ = deciding(fqn, rules)
    return group or (MODEL if tensor else OTHER)


def deciding(fqn: str, rules: Sequence[GroupRule] = DEFAULT_RULES) -> tuple[str | None, str]:
    """The group by the first segment that any rule knows, and the name up to that segment; None without one."""
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
