"""`SavePlanner`: DCP's default save planner, extended to balance duplicates over their holders and to cache plans.

`balance.py` decides which rank writes which item. This module decides which data ranks exchange, and when none need be.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import socket
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from bucketpoint.dcp.planning.agreement import rank_of
from bucketpoint.dcp.planning.columnar.assignments import (
    EncodedAssignment,
    KnownItems,
    LazyItems,
    assignment_digest,
    items_of,
)
from bucketpoint.dcp.planning.columnar.encoding import LocalItems, content_digest, merged_mappings, pack_mappings
from bucketpoint.dcp.planning.global_plan import compared_by_rank, packed_items, plan_globally, unpack_tables
from bucketpoint.dcp.planning.local_chunks import is_partial
from bucketpoint.dcp.planning.nested_state import IntKeys, int_keys_of
from bucketpoint.dcp.planning.plan_cache import (
    KEPT_PLANS,
    CachedPlan,
    KeptPlan,
    PlanCache,
    PlannedMetadata,
    WriterMeta,
    stock,
)
from bucketpoint.dcp.planning.rank_state import compared_digests, differing, differing_replicas
from bucketpoint.dcp.planning.results import AssignedPlan, items_digest
from bucketpoint.dcp.planning.write_items import is_plain, rows_of_item, signature_of, write_items
from bucketpoint.dcp.process_groups import this_rank
from bucketpoint.errors import BucketpointError, RanksDisagreeError, first_fault, first_of
from bucketpoint.format.columns import ItemColumns

logger = logging.getLogger(__name__)

_NAMED_AT_MOST = 5

KEPT_PLANNERS = 8


class _Local(NamedTuple):
    """Data that a rank sends to the coordinator beside its items, or instead of them.

    Attributes:
        entry: digest of the kept plan that this rank's state still fits; None if the items are sent.
        sender: global rank, whatever the process group.
        node: name of the rank's node.
        mappings: DCP's mappings from flattened names to paths: see `pack_mappings`.
        digests: digests of the values that may differ between ranks.
        int_keys: paths of dicts with integer keys.
    """

    entry: bytes | None
    sender: int
    node: str
    mappings: tuple[bytes, ...] = ()
    digests: bytes = b""
    int_keys: tuple[IntKeys, ...] = ()


class SavePlanner(DefaultSavePlanner):
    """Save planner that balances replicated data over the ranks that hold it, and reuses plans.

    A plan is made only once for as long as the structure of the state does not change. Make one planner and pass it to
    every save, of one state or of several: it keeps a plan for each structure. Any reader can read the checkpoints.

    Args:
        flatten_state_dict, flatten_sharded_tensors: as in `DefaultSavePlanner`.
        dedup_replicated_tensors, dedup_save_to_lowest_rank: accepted for compatibility; duplicates are always balanced.
        enable_plan_caching: send no plan while the structure of the state does not change.
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
        self._sends_items = False
        self._set_cache(PlanCache())
        self._writer_is_ours = False
        self._signature: Hashable = None
        self._hit: KeptPlan | None = None
        self._int_keys: tuple[IntKeys, ...] = ()
        self._asked = LocalItems([])

    @classmethod
    def with_plans(cls, cache: PlanCache) -> SavePlanner:
        """Return a planner for one save, which reuses plans of earlier saves.

        Unlike a planner that is kept, it sends its items at each save, so that no rank depends on what others have
        kept: they may have made their writers anew.
        """
        planner = cls()
        planner._sends_items = True
        planner._set_cache(cache)
        return planner

    def _set_cache(self, cache: PlanCache) -> None:
        self._cache, self._identity = cache, cache.identity

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state to save, and the writer's `storage_meta`, on all ranks."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._int_keys = int_keys_of(state_dict) if self.flatten_state_dict else ()
        self._writer_is_ours = isinstance(storage_meta, WriterMeta)

    def create_local_plan(self) -> SavePlan:
        """Return a plan with the items of this rank's state, or the digest of a cached plan that fits it. On all ranks.

        Raises:
            BucketpointError: a DTensor is a partial sum, or a value cannot be planned, with its key.
        """
        try:
            return self._planned_here()
        except BucketpointError:
            raise
        except Exception as error:
            raise first_fault(error, self.state_dict.items(), self._plan_alone) from error

    def _plan_alone(self, key: str, value: Any) -> None:
        signature_of({key: value})
        LocalItems(write_items({key: value}, True))

    def _planned_here(self) -> SavePlan:
        _refuse_partial(self.state_dict)
        self._signature = (signature_of(self.state_dict), tuple(self.mappings.values()), self._int_keys)
        node = os.environ.get("GROUP_RANK") or socket.gethostname()
        sender = this_rank()
        self._hit = self._find(self._signature) if self._keep_plans else None
        if self._hit is not None and not self._sends_items:
            # Until finish_plan learns that the coordinator knows the plan: a save that fails before is planned anew.
            self._hit.confirmed = False
            self._asked = self._hit.asked
            return SavePlan([], planner_data=_Local(self._hit.entry, sender, node), usable=False)
        if self._hit is not None and self._hit.asked.packed() is not None:
            items = self._hit.asked
        else:
            items = LocalItems(write_items(self.state_dict, self.is_coordinator))
        self._asked = items
        mappings = pack_mappings(self.mappings) if self.flatten_state_dict else ()
        digests = compared_digests(items, self.state_dict)
        local = _Local(None, sender, node, mappings, digests, self._int_keys)
        self.plan = SavePlan(items, planner_data=local)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign the items to ranks; or reuse the cached plan, if every rank's state still fits it. On the coordinator.

        Raises:
            BucketpointError: a rank refers to a plan that the coordinator does not have, or the items of the ranks do
                not make up the tensors.
            RanksDisagreeError: a rank plans with another planner, or ranks hold different tensors under one name.
        """
        strangers = [rank for rank, plan in enumerate(all_plans) if not isinstance(plan.planner_data, _Local)]
        if strangers:
            raise RanksDisagreeError(
                f"{len(strangers)} of the {len(all_plans)} ranks of this save do not use SavePlanner",
                rank=rank_of(strangers[0], all_plans[strangers[0]]),
                remedy="Pass the same kind of planner on all ranks",
            )
        senders = [plan.planner_data.sender for plan in all_plans]
        entries = {plan.planner_data.entry for plan in all_plans}
        agreed = self._cache.agreed.get(entries.pop()) if len(entries) == 1 else None
        if agreed is None or agreed.senders != senders:
            agreed = self._agree(all_plans, senders)
            lists: list[Any] = [plan.items for plan in agreed.plans]
            fresh: list[Any] = [items.anew() if isinstance(items, LazyItems) else list(items) for items in lists]
            assigned = [replace(plan, items=items) for plan, items in zip(agreed.plans, fresh, strict=True)]
        else:
            assigned = [SavePlan([], usable=False)] * len(senders)
        # `storage_data`, where writers put data of this save, is taken from the new plans and never cached.
        assigned = [
            replace(plan, planner_data=self._known(agreed, rank), storage_data=all_plans[rank].storage_data)
            for rank, plan in enumerate(assigned)
        ]
        # A copy, as some writers add to the metadata the place of each item.
        self.metadata = stock(agreed.metadata)
        if self._writer_is_ours:
            self.metadata = PlannedMetadata(**vars(self.metadata), agreed=agreed, known=tuple(agreed.layouts))
        return assigned, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's items to write. Called after the coordinator has planned, so the plan may be cached."""
        known = new_plan.planner_data
        if not isinstance(known, AssignedPlan):
            raise BucketpointError(
                "A plan of SavePlanner came back without its planner_data", remedy="Keep it unchanged"
            )
        self._cache.coordinators.add(known.coordinator)
        hit = self._hit if self._hit is not None and self._hit.entry == known.entry else None
        if hit is not None and (not new_plan.usable or hit.is_unaltered):
            hit.confirmed = True
            # The items are those of the cached plan; the coordinator's knowledge about them may be new.
            self.plan = replace(hit.plan, planner_data=known, storage_data=new_plan.storage_data)
        elif new_plan.usable:
            self.plan = replace(new_plan, items=self._own_items(new_plan))
            if self._keep_plans:
                others = [kept for kept in self._cache.kept if kept.signature != self._signature]
                mine = KeptPlan(known.entry, self._signature, self._asked, self.plan)
                self._cache.kept = [*others, mine][-KEPT_PLANS:]
        else:
            raise BucketpointError("The coordinator returned no assignment to a rank that sent a plan")
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the rows of a tensor that an item names, without a copy; for any other value, the pickle."""
        rows = rows_of_item(self.state_dict.get(write_item.index.fqn), write_item)
        if rows is not None:
            transformed: torch.Tensor = self.transform_object(write_item, rows)
            return transformed
        return super().resolve_data(write_item)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor, the shard of a tensor, or the value that an item names."""
        value: Any = self.state_dict.get(index.fqn)
        if is_plain(value) and index.offset in (None, (0,) * value.dim()):
            return value
        return super().lookup_object(index)

    def __getstate__(self) -> dict[str, Any]:
        # Only the configuration: attributes of one save may hold the whole state.
        return {name: value for name, value in self.__dict__.items() if name not in _OF_ONE_SAVE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A checkpoint process receives the planner anew for each save, and keeps the plans that it made in `_caches`.
        self.__dict__.update(state)
        self.mappings, self._signature, self._hit, self._asked = {}, None, None, LocalItems([])
        self._int_keys = ()
        self._cache = _caches.setdefault(self._identity, PlanCache(self._identity))
        for old in list(_caches)[:-KEPT_PLANNERS]:
            del _caches[old]

    def _find(self, signature: Hashable) -> KeptPlan | None:
        if len(self._cache.coordinators) > 1 and not self._sends_items:
            # The planner is used in several process groups: this rank cannot know which plans this coordinator has.
            return None
        return next((kept for kept in self._cache.kept if kept.confirmed and kept.signature == signature), None)

    def _own_items(self, plan: SavePlan) -> KnownItems:
        """Return the items that the coordinator assigned to this rank."""
        items: Any = plan.items
        encoded = items.encoded if isinstance(items, (EncodedAssignment, LazyItems)) else None
        if encoded is None:
            return KnownItems(items, items_digest(items))
        asked = self._asked.packed()
        if asked is None:
            raise BucketpointError("The write items of this rank were changed after they were sent to the coordinator")
        return KnownItems(items_of(encoded, self._asked), assignment_digest(encoded, asked))

    def _agree(self, all_plans: list[SavePlan], senders: list[int]) -> CachedPlan:
        """Assign the items of all ranks, and keep the resulting plan."""
        asked = [plan if plan.usable else self._recall(rank, plan) for rank, plan in enumerate(all_plans)]
        tables = unpack_tables(asked)
        sent = [plan.usable for plan in all_plans]
        compared = list(itertools.compress(compared_by_rank(asked, tables), sent))
        digests = [plan.planner_data.digests for plan in itertools.compress(all_plans, sent)]
        self._warn_of_lost_values(differing(compared, digests), "values for these keys")
        # Never a tensor in parts of several ranks' tensors. All from one rank, so that they fit each other.
        apart = differing_replicas(compared, digests)
        self._warn_of_lost_values(apart, "tensors under these names")
        nodes = [plan.planner_data.node for plan in all_plans]
        content = _content(asked, senders, nodes, apart) if self._sends_items else None
        for kept in self._cache.agreed.values():
            if content is not None and kept.content == content:
                return kept
        # A subclass with its own `finish_plan` may look into the plan before it is decoded, and must find items there.
        whole = type(self).finish_plan is not SavePlanner.finish_plan
        plans, digests, metadata, assignment = plan_globally(asked, tables, nodes, apart, whole=whole)
        if self.flatten_state_dict:
            merged = merged_mappings([plan.planner_data.mappings for plan in asked])
            metadata = replace(metadata, planner_data=merged)
        mappings = dict.fromkeys(blob for plan in asked for blob in plan.planner_data.mappings)
        int_keys = sorted({paths for plan in asked for paths in plan.planner_data.int_keys}, key=str)
        entry = content_digest(repr(senders).encode(), *digests, *mappings, repr(int_keys).encode())
        layouts: list[ItemColumns | None] = [None] * len(plans)
        agreed = CachedPlan(entry, senders, asked, plans, digests, metadata, assignment, int_keys, layouts, content)
        if self._keep_plans:
            self._cache.agreed.pop(entry, None)
            self._cache.agreed[entry] = agreed
            for old in list(self._cache.agreed)[: -2 * KEPT_PLANS]:
                del self._cache.agreed[old]
        return agreed

    def _warn_of_lost_values(self, lost: list[str], what: str) -> None:
        news = [name for name in lost if name not in self._cache.warned]
        if news:
            self._cache.warned.update(news)
            logger.warning(
                "ranks have different %s, and only that of one rank is saved: %s. "
                "To save that of each rank, wrap it: state[key] = rank_state(value)",
                what,
                first_of(news, _NAMED_AT_MOST),
            )

    def _known(self, agreed: CachedPlan, rank: int) -> AssignedPlan:
        """Return the facts that the coordinator knows about a rank's plan, which the rank need not report."""
        if not self._writer_is_ours:
            return AssignedPlan(agreed.entry, this_rank())
        layout = agreed.layouts[rank]
        return AssignedPlan(agreed.entry, this_rank(), agreed.digests[rank], layout.digest if layout else None)

    def _recall(self, rank: int, plan: SavePlan) -> SavePlan:
        agreed = self._cache.agreed.get(plan.planner_data.entry)
        sender = plan.planner_data.sender
        if agreed is None or sender not in agreed.senders:
            raise BucketpointError(
                f"Rank {sender} refers to a plan that the coordinator does not have",
                remedy="Make one SavePlanner on every rank and use it for the same saves, in the same order, and "
                "another one for another process group",
            )
        # The plan may come from another process group, in which the same process had another rank.
        same = rank < len(agreed.senders) and agreed.senders[rank] == sender
        return agreed.asked[rank if same else agreed.senders.index(sender)]


_OF_ONE_SAVE = {
    "_asked",
    "_cache",
    "_hit",
    "_int_keys",
    "_signature",
    "mappings",
    "metadata",
    "plan",
    "global_plan",
    "is_coordinator",
    "state_dict",
}

_caches: dict[str, PlanCache] = {}
"""Plans of the planners that were sent to this process, by the planner's identity."""


def _content(
    asked: Sequence[SavePlan], senders: Sequence[int], nodes: Sequence[str], apart: Sequence[str]
) -> bytes | None:
    """Return a digest of all that the coordinator makes a plan of; None if some rank did not send columns."""
    described = []
    for plan in asked:
        packed = packed_items(plan)
        if packed is None:
            return None
        described += [packed.digest, *plan.planner_data.mappings, repr(plan.planner_data.int_keys).encode()]
    return content_digest(repr((senders, nodes, apart)).encode(), *described)


def _refuse_partial(state: dict[str, Any]) -> None:
    """Refuse partial sums: torch 2.9 saves one rank's addend as the tensor, newer versions do not name the tensor."""
    partial = [
        f"{name} has the placements {list(value.placements)}" for name, value in state.items() if is_partial(value)
    ]
    if partial:
        raise BucketpointError(
            f"Tensors with Partial placements have no values to save: {'; '.join(partial[:_NAMED_AT_MOST])}",
            remedy="Redistribute such tensors to Replicate() or Shard() before the save",
        )
