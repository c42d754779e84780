"""`SavePlanner`: DCP's default planner with duplicates balanced over their holders, and with plans that are made once.

What is written where is `balance.py`'s; here is what crosses ranks, and when it need not. Nothing is uploaded.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import socket
import uuid
from collections import ChainMap
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from bucketpoint.dcp.balance import balanced
from bucketpoint.errors import BucketpointError

KEPT_PLANS = 4
"""States of different structure whose plans one planner keeps: a model and an optimizer saved apart, twice over."""

KEPT_PLANNERS = 8


@dataclass(frozen=True)
class _Local:
    """What a rank sends to the coordinator beside its items, or instead of them.

    Attributes:
        entry: number of the kept plan that this rank's state still fits; None when the items are sent.
        node: which machine the rank is on.
        mappings: DCP's, from flattened names to paths.
    """

    entry: int | None
    node: str
    mappings: Any = None


@dataclass
class _Kept:
    """A rank's own plan that all ranks have agreed upon."""

    entry: int
    signature: Hashable
    plan: SavePlan
    confirmed: bool = True


@dataclass
class _Agreed:
    """The coordinator's side of a kept plan: what each rank had asked for, and what came of it."""

    local_plans: list[SavePlan]
    metadata: Metadata


@dataclass
class _Cache:
    """Everything kept between the saves of one planner. Oldest first; the coordinator forgets later than the ranks."""

    kept: list[_Kept] = field(default_factory=list)
    agreed: dict[int, _Agreed] = field(default_factory=dict)
    numbers: Any = field(default_factory=lambda: itertools.count(1))


class SavePlanner(DefaultSavePlanner):
    """Plans a save so that every replica writes its share, and only once for as long as the state keeps its structure.

    Make it once and pass it to every save, of one state or of several: each structure has a plan of its own. What it
    writes is read by any reader.

    Args:
        flatten_state_dict, flatten_sharded_tensors: as in `DefaultSavePlanner`.
        dedup_replicated_tensors, dedup_save_to_lowest_rank: accepted for its sake; duplicates are always balanced.
        enable_plan_caching: send no plan while the state keeps its structure.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = True,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors)
        self._keep_plans = enable_plan_caching
        self._identity = uuid.uuid4().hex
        self._cache = _Cache()
        self._signature: Hashable = None
        self._hit: _Kept | None = None

    def create_local_plan(self) -> SavePlan:
        """All ranks: the items of this rank's state, or the number of a plan that fits it still."""
        self._signature = (_signature(self.state_dict), tuple(self.mappings.values()))
        node = os.environ.get("GROUP_RANK") or socket.gethostname()
        self._hit = self._find(self._signature) if self._keep_plans else None
        if self._hit is not None:
            # Until finish_plan says that the coordinator knew it: a save that fails in between is planned anew.
            self._hit.confirmed = False
            return SavePlan([], planner_data=_Local(self._hit.entry, node), usable=False)
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, planner_data=_Local(None, node, plan.planner_data))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Coordinator: deal out what several ranks hold; or nothing, if every rank's state is as it was.

        Raises:
            BucketpointError: a rank refers to a plan that the coordinator does not have, or the items of the ranks do
                not make up the tensors.
        """
        entries = {plan.planner_data.entry for plan in all_plans}
        agreed = self._cache.agreed.get(entries.pop()) if len(entries) == 1 else None
        if agreed is not None:
            # A copy: some writers note on it what was stored where.
            self.metadata = dataclasses.replace(agreed.metadata)
            return [SavePlan([], usable=False)] * len(all_plans), self.metadata
        asked = [plan if plan.usable else self._recall(rank, plan) for rank, plan in enumerate(all_plans)]
        nodes = [plan.planner_data.node for plan in all_plans]
        plans, metadata = create_default_global_save_plan(balanced(asked, nodes))
        if self.flatten_state_dict:
            mappings = (plan.planner_data.mappings for plan in asked)
            metadata = dataclasses.replace(metadata, planner_data=dict(ChainMap(*mappings)))
        _validate(plans, metadata)
        entry = next(self._cache.numbers)
        if self._keep_plans:
            self._cache.agreed[entry] = _Agreed(asked, metadata)
            for old in list(self._cache.agreed)[: -2 * KEPT_PLANS]:
                del self._cache.agreed[old]
        self.metadata = dataclasses.replace(metadata)
        return [dataclasses.replace(plan, planner_data=entry) for plan in plans], self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """All ranks: what to write. Reached only when the coordinator has planned, so what it knows may be kept."""
        if new_plan.usable:
            if self._keep_plans:
                others = [kept for kept in self._cache.kept if kept.signature != self._signature]
                self._cache.kept = [*others, _Kept(new_plan.planner_data, self._signature, new_plan)][-KEPT_PLANS:]
            self.plan = new_plan
        elif self._hit is not None:
            self._hit.confirmed = True
            self.plan = self._hit.plan
        else:
            raise BucketpointError("The coordinator planned nothing for a rank that sent it a plan")
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The rows of a tensor that an item names, without a copy; or, of anything else, its pickle."""
        found = _rows(self.state_dict.get(write_item.index.fqn), write_item)
        if found is not None:
            transformed: torch.Tensor = self.transform_object(write_item, found)
            return transformed
        return super().resolve_data(write_item)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_cache"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A checkpoint process is sent the planner again for each save, and keeps what it has planned itself.
        self.__dict__.update(state)
        self._cache = _caches.setdefault(self._identity, _Cache())
        for old in list(_caches)[:-KEPT_PLANNERS]:
            del _caches[old]

    def _find(self, signature: Hashable) -> _Kept | None:
        return next((kept for kept in self._cache.kept if kept.confirmed and kept.signature == signature), None)

    def _recall(self, rank: int, plan: SavePlan) -> SavePlan:
        agreed = self._cache.agreed.get(plan.planner_data.entry)
        if agreed is None or rank >= len(agreed.local_plans):
            raise BucketpointError(
                f"Rank {rank} refers to a plan that the coordinator does not have",
                remedy="Make one SavePlanner on every rank and use it for the same saves, in the same order",
            )
        return agreed.local_plans[rank]


_caches: dict[str, _Cache] = {}
"""Of planners that were sent to this process, by their identity."""


def _signature(state: dict[str, Any]) -> Hashable:
    """All that a plan depends on: names, kinds, shapes, dtypes and placements. No values."""
    return tuple([(name, *_facts(value)) for name, value in state.items()])


def _facts(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    if isinstance(value, DTensor):
        return (value.shape, value.dtype, value.device_mesh, value.placements)
    if isinstance(value, ShardedTensor):
        shards = value.metadata().shards_metadata
        return (value.size(), value.dtype, tuple((*shard.shard_offsets, *shard.shard_sizes) for shard in shards))
    described = getattr(value, "__create_chunk_list__", None)
    if described is not None or hasattr(value, "global_shape"):
        # Several chunks of a whole in one tensor (CheckpointableTensor): told apart by the items that DCP makes of it.
        chunks = (item.tensor_data.chunk for item in _create_write_items("", value) if item.tensor_data is not None)
        return (value.dtype, *((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks))
    return (value.shape, value.dtype)


def _rows(value: Any, item: WriteItem) -> torch.Tensor | None:
    """The part of this rank's tensor that a slice names; None for an item that is no slice."""
    if item.type != WriteItemType.SHARD or item.tensor_data is None or isinstance(value, ShardedTensor):
        return None
    if not isinstance(value, torch.Tensor) or hasattr(value, "global_shape"):
        return None
    if isinstance(value, DTensor):
        local: torch.Tensor = value.to_local()
        _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    else:
        local, offsets = value, (0,) * value.dim()
    chunk = item.tensor_data.chunk
    if tuple(local.shape) == tuple(chunk.sizes):
        return None
    return local.detach().narrow(0, chunk.offsets[0] - offsets[0], chunk.sizes[0])


def _validate(plans: list[SavePlan], metadata: Metadata) -> None:
    """DCP's own check: chunks lie within their tensors, do not overlap, and fill them."""
    # Up to torch 2.11 it says whether, from then on what is wrong.
    found: Any = _validate_global_plan(plans, metadata)
    if found is True or found == []:
        return
    said = "; ".join(found)[:500] if isinstance(found, list) else "DCP logs the tensor"
    raise BucketpointError(f"What the ranks hold does not make up the tensors: {said}")
