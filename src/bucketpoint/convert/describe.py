"""DCP's description of a state dict: its items, and the metadata of a save of the state by one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from bucketpoint.errors import MismatchError


@dataclass(frozen=True)
class Described:
    """A state as DCP sees it. `tensors` and `objects` are the state's own values, by the items that they become."""

    metadata: Metadata
    tensors: dict[MetadataIndex, torch.Tensor]
    objects: dict[MetadataIndex, Any]


def describe(state: Mapping[str, Any]) -> Described:
    """Describe a state as DCP's default planner does. Tensors may be on the `meta` device.

    Raises:
        MismatchError: two keys of the state are the same once it is flattened.
    """
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(dict(state), is_coordinator=True)
        (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    except ValueError as error:
        raise MismatchError(f"DCP cannot save this state: {error}") from None
    tensors: dict[MetadataIndex, torch.Tensor] = {}
    objects: dict[MetadataIndex, Any] = {}
    for item in plan.items:
        value = planner.state_dict[item.index.fqn]
        if item.type is WriteItemType.BYTE_IO:
            objects[item.index] = value
        elif isinstance(value, torch.Tensor):
            tensors[item.index] = value
    return Described(metadata, tensors, objects)
