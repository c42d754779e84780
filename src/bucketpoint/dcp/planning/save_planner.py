"""`SavePlanner`: DCP's default save planner, extended to balance replicated data over ranks and to reuse plans.

At each save, every rank sends its items as columns from its cache, and the coordinator looks up the plan by a digest of
all columns. So no rank depends on the cache of another rank.
"""

from __future__ import annotations

import io
import logging
import os
import socket
import threading
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_write_item_for_tensor
from torch.distributed.tensor import DTensor, Partial

from bucketpoint.dcp.planning.agreement import merged_mappings, rank_of
from bucketpoint.dcp.planning.global_plan import (
    GlobalPlan,
    PlanCache,
    PlannedMetadata,
    WriterMeta,
    plan_globally,
    stock,
    unpack_tables,
    with_last,
)
from bucketpoint.dcp.planning.items import (
    AssignedItems,
    PlanItems,
    assigned_items,
    content_digest,
    items_of,
    pack_items,
    pack_mappings,
    packed_items,
)
from bucketpoint.dcp.planning.nested_state import IntKeys, int_keys_of
from bucketpoint.dcp.planning.rank_state import compared_digests, differences
from bucketpoint.dcp.process_groups import is_initialized
from bucketpoint.errors import BucketpointError, RanksDisagreeError, first_fault, first_of

logger = logging.getLogger(__name__)

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def is_plain(value: Any) -> bool:
    """Return True for a tensor of torch's class without added attributes, which is certainly not a shard.

    From torch 2.15 on, DCP checks each tensor against the `Protocol` of shards. This takes most of the time of
    planning, during which the GIL is held.
    """
    return type(value) in _PLAIN and not value.__dict__


def is_partial(value: Any) -> TypeGuard[DTensor]:
    """Return True for a DTensor that is a partial sum, of which each rank holds an addend."""
    return isinstance(value, DTensor) and any(isinstance(placement, Partial) for placement in value.placements)


def write_items(state: dict[str, Any], is_coordinator: bool) -> list[WriteItem]:
    """Return the items of a rank's flat state, as DCP makes them."""
    items: list[WriteItem] = []
    for name, value in state.items():
        if is_plain(value):
            items.append(_create_write_item_for_tensor(name, value))
        else:
            items += create_default_local_save_plan({name: value}, is_coordinator).items
    return items


def signature_of(state: dict[str, Any]) -> Hashable:
    """Return the facts on which a plan depends: names, types, shapes, dtypes and placements, but no values."""
    return tuple([(name, *_facts(value)) for name, value in state.items()])


def _facts(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    if isinstance(value, DTensor):
        return (value.shape, value.dtype, value.device_mesh, value.placements)
    if isinstance(value, ShardedTensor):
        shards = value.metadata().shards_metadata
        return (value.size(), value.dtype, tuple((*shard.shard_offsets, *shard.shard_sizes) for shard in shards))
    if hasattr(value, "__create_chunk_list__") or hasattr(value, "global_shape"):
        # The tensor holds several chunks of a larger tensor (CheckpointableTensor).
        chunks = _create_chunk_list(value)
        return (value.dtype, *((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks))
    return (value.shape, value.dtype)


def rows_of_item(value: Any, item: WriteItem) -> torch.Tensor | None:
    """Return the item's rows of this rank's tensor; None if the item is not a slice."""
    if item.type != WriteItemType.SHARD or item.tensor_data is None or isinstance(value, ShardedTensor):
        return None
    if not isinstance(value, torch.Tensor) or hasattr(value, "global_shape"):
        return None
    chunk = item.tensor_data.chunk
    # A DTensor has one piece or several (torchrec's wrapper); any other tensor is a whole.
    whole = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
    pieces_of = getattr(value, "__create_chunk_list__", lambda: [whole])
    local_of = getattr(value, "__get_tensor_shard__", lambda index: value)
    for piece in pieces_of():
        first = chunk.offsets[0] - piece.offsets[0] if chunk.offsets else 0
        beside = (*piece.offsets[1:], *piece.sizes[1:]) != (*chunk.offsets[1:], *chunk.sizes[1:])
        if beside or first < 0 or (chunk.sizes and first + chunk.sizes[0] > piece.sizes[0]):
            continue
        if tuple(piece.sizes) == tuple(chunk.sizes):
            return None
        local = local_of(MetadataIndex(item.index.fqn, piece.offsets))
        rows: torch.Tensor = local.detach().narrow(0, first, chunk.sizes[0])
        return rows
    return None


_NAMED_AT_MOST = 5


class _Local(NamedTuple):
    """Data that a rank sends to the coordinator with its items.

    Attributes:
        node: id of the rank's node.
        mappings: DCP's mappings from flattened names to paths: see `pack_mappings`.
        digests: digests of the values that may differ between ranks.
        int_keys: paths of dicts with integer keys.
    """

    node: str
    mappings: tuple[bytes, ...]
    digests: bytes
    int_keys: tuple[IntKeys, ...]


class SavePlanner(DefaultSavePlanner):
    """Save planner that balances replicated data over the ranks that hold it, and reuses plans.

    A plan is reused until the structure of the state changes. Make one planner for each thread that saves, and pass it
    to every save, also of different states: it caches one plan for each structure. Any DCP reader can read the
    checkpoints.

    Args:
        flatten_state_dict, flatten_sharded_tensors: as in `DefaultSavePlanner`.
        dedup_replicated_tensors, dedup_save_to_lowest_rank: ignored, because replicated data is always balanced.
        enable_plan_caching: reuse the plan while the structure of the state does not change.
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
        self._thread = 0
        self._cache = PlanCache()
        self._writer_is_ours = False
        self._signature: Hashable = None
        self._int_keys: tuple[IntKeys, ...] = ()
        self._asked = PlanItems()

    @classmethod
    def with_plans(cls, cache: PlanCache) -> SavePlanner:
        """Return a planner for one save, which reuses plans of earlier saves."""
        planner = cls()
        planner._cache = cache
        return planner

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the state to save and the writer's `storage_meta`. Called on all ranks."""
        self._thread = threading.get_ident()
        self._int_keys = int_keys_of(state_dict) if self.flatten_state_dict else ()
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._writer_is_ours = isinstance(storage_meta, WriterMeta)

    def create_local_plan(self) -> SavePlan:
        """Return a plan with the items of this rank's state. Called on all ranks.

        Raises:
            BucketpointError: a DTensor is a partial sum, a value cannot be planned, or a save on another thread uses
                this planner.
        """
        self._refuse_two_threads()
        try:
            _refuse_partial(self.state_dict)
            self._signature = (signature_of(self.state_dict), tuple(self.mappings.values()), self._int_keys)
            items, _ = self._cache.kept.get(self._signature, (None, None)) if self._keep_plans else (None, None)
            if items is None or packed_items(items) is None:
                own = write_items(self.state_dict, self.is_coordinator)
                items = PlanItems(own, pack_items(own))
            self._asked = items
            mappings = pack_mappings(self.mappings) if self.flatten_state_dict else ()
            # Without a process group, there is no other rank to compare with.
            digests = compared_digests(items, self.state_dict) if is_initialized() else b""
        except BucketpointError:
            raise
        except Exception as error:
            raise first_fault(error, self.state_dict.items(), _plan_alone) from error
        node = os.environ.get("GROUP_RANK") or socket.gethostname()
        local = _Local(node, mappings, digests, self._int_keys)
        self.plan = SavePlan(cast(Any, items), planner_data=local)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign the items to ranks, or reuse an earlier plan for the same items. Called on the coordinator.

        Raises:
            BucketpointError: the ranks' chunks overlap, or do not cover their tensors.
            RanksDisagreeError: a rank uses another planner, or ranks hold different tensors or structures
                under one name.
        """
        strangers = [rank for rank, plan in enumerate(all_plans) if not isinstance(plan.planner_data, _Local)]
        if strangers:
            raise RanksDisagreeError(
                f"{len(strangers)} of the {len(all_plans)} ranks of this save do not use SavePlanner",
                rank=rank_of(strangers[0], all_plans[strangers[0]].storage_data),
                remedy="Pass the same kind of planner on all ranks",
            )
        plan = self._agree(all_plans)
        # `storage_data` holds a writer's data for the current save, so it comes from the new plans, not the cache.
        assigned = [
            replace(asked, items=items, planner_data=None) for asked, items in zip(all_plans, plan.lists(), strict=True)
        ]
        # Copy the metadata, because some writers add the location of each item to it.
        self.metadata = stock(plan.metadata)
        if self._writer_is_ours:
            self.metadata = PlannedMetadata(**vars(self.metadata), plan=plan)
        return assigned, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's items to write. Called after the coordinator has planned."""
        self._refuse_two_threads()
        assigned = assigned_items(new_plan.items)
        if assigned is None:
            self.plan = new_plan
            return self.plan
        asked = packed_items(self._asked)
        if asked is None:
            raise BucketpointError("The write items of this rank were changed after they were sent to the coordinator")
        columns = AssignedItems(assigned.encoded, asked)
        _, items = self._cache.kept.get(self._signature, (None, None))
        if items is None or assigned_items(items) != columns:
            items = PlanItems(items_of(assigned.encoded, self._asked), columns)
        if self._keep_plans:
            self._cache.kept = with_last(self._cache.kept, self._signature, (self._asked, items))
        self.plan = replace(new_plan, items=cast(Any, items))
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the item's rows of a tensor, without a copy, or the pickle of any other value."""
        # Writers of other packages may call this on their threads: torch's ignores an error there, and loses the items.
        if self._writer_is_ours:
            self._refuse_two_threads()
        rows = rows_of_item(self.state_dict.get(write_item.index.fqn), write_item)
        if rows is not None:
            transformed: torch.Tensor = self.transform_object(write_item, rows)
            return transformed
        return super().resolve_data(write_item)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor, the shard of a tensor, or the object at an index."""
        value: Any = self.state_dict.get(index.fqn)
        if is_plain(value) and index.offset in (None, (0,) * value.dim()):
            return value
        return super().lookup_object(index)

    def __getstate__(self) -> dict[str, Any]:
        # Only the configuration is pickled: the attributes of one save may hold the whole state.
        return {**self.__dict__, **_OF_ONE_SAVE}

    def _refuse_two_threads(self) -> None:
        """Raise if another thread has set up this planner, because its state would be saved in place of ours."""
        if self._thread != threading.get_ident():
            raise BucketpointError(
                "Saves on two threads use one SavePlanner at the same time",
                remedy="Make a SavePlanner for each thread that saves",
            )

    def _agree(self, plans: list[SavePlan]) -> GlobalPlan:
        every: list[_Local] = [plan.planner_data for plan in plans]
        tables = unpack_tables(plans)
        # If replicas differ, slices of several ranks would mix them, so the first rank saves the whole tensor.
        values, apart = differences(plans, tables, [local.digests for local in every]) if len(plans) > 1 else ([], [])
        self._warn_of_lost_values(values, "values for these keys")
        self._warn_of_lost_values(apart, "tensors under these names")
        content = _content(plans, apart) if self._keep_plans else None
        plan = self._cache.agreed.get(content) if content is not None else None
        if plan is None:
            plan = plan_globally(plans, tables, [local.node for local in every], apart)
            merged = merged_mappings(plans, plan.metadata)
            if self.flatten_state_dict:
                plan.metadata = replace(plan.metadata, planner_data=merged)
            plan.int_keys = sorted({paths for local in every for paths in local.int_keys}, key=str)
        if content is not None:
            self._cache.agreed = with_last(self._cache.agreed, content, plan)
        return plan

    def _warn_of_lost_values(self, lost: list[str], what: str) -> None:
        news = [name for name in lost if name not in self._cache.warned]
        if news:
            self._cache.warned.update(news)
            logger.warning(
                "ranks have different %s, but only one rank's value is saved: %s. "
                "To save the value of each rank, use state[key] = rank_state(value)",
                what,
                first_of(news, _NAMED_AT_MOST),
            )


_OF_ONE_SAVE: dict[str, Any] = {
    "_asked": PlanItems(),
    "_int_keys": (),
    "_signature": None,
    "_thread": 0,
    "mappings": {},
    "metadata": None,
    "plan": None,
    "global_plan": None,
    "is_coordinator": False,
    "state_dict": None,
}


def _plan_alone(key: str, value: Any) -> None:
    signature_of({key: value})
    pack_items(write_items({key: value}, True))


def _content(plans: Sequence[SavePlan], apart: Sequence[str]) -> bytes | None:
    """Return a digest of all facts on which a plan depends; None if some rank did not send columns."""
    described = [repr(apart).encode()]
    for plan in plans:
        packed, local = packed_items(plan.items), plan.planner_data
        if packed is None:
            return None
        described += [packed.digest, *local.mappings, repr((local.node, local.int_keys)).encode()]
    return content_digest(*described)


def _refuse_partial(state: dict[str, Any]) -> None:
    """Raise for partial sums: torch 2.9 saves one rank's addend as the tensor, and newer errors name no tensor."""
    partial = [
        f"{name} has the placements {list(value.placements)}" for name, value in state.items() if is_partial(value)
    ]
    if partial:
        raise BucketpointError(
            f"Tensors with Partial placements have no values to save: {'; '.join(partial[:_NAMED_AT_MOST])}",
            remedy="Redistribute such tensors to Replicate() or Shard() before the save",
        )
