"""The plan of all ranks, and the cache of plans of earlier saves.

It is made over columns if columns hold all items, and else by DCP's own functions, which balance nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan

from bucketpoint.dcp.planning.agreement import agree_on_tensors
from bucketpoint.dcp.planning.columnar.assign import Assignment, assign_items
from bucketpoint.dcp.planning.columnar.encoding import Table, unpack_table
from bucketpoint.dcp.planning.columnar.plan_items import AssignedItems, PlanItems, assigned_items, packed_items
from bucketpoint.dcp.planning.nested_state import IntKeys
from bucketpoint.errors import BucketpointError
from bucketpoint.format.columns import ItemColumns
from bucketpoint.format.metadata.coverage import MAX_CUT_AXES, uncovered
from bucketpoint.format.metadata.template import MetadataTemplate

if TYPE_CHECKING:
    from bucketpoint.format.index.encode import IndexTemplate

KEPT_PLANS = 4
"""Limit on the plans in a cache, one for each structure: two models and two optimizers, saved separately."""

KEPT_CACHES = 8


@dataclass(frozen=True)
class Templates:
    """Templates of metadata and index for items in the same places.

    Attributes:
        layouts: positions of each rank's items.
        indexed: an index was asked for.
        metadata, index: None if they cannot be made of columns.
    """

    layouts: tuple[ItemColumns, ...]
    indexed: bool
    metadata: MetadataTemplate | None
    index: IndexTemplate | None


@dataclass
class GlobalPlan:
    """The decision of the coordinator.

    Attributes:
        items: the items that each rank must write.
        assignment: the assignment over columns; None if DCP's own functions have planned.
        senders: global rank of each rank.
        int_keys: paths of dicts with integer keys, on any rank.
        templates: those of the last save with this plan.
        uncovered: tensors of which the ranks do not hold all: see `uncovered`.
    """

    items: Sequence[AssignedItems] | Sequence[list[Any]]
    metadata: Metadata
    assignment: Assignment | None
    uncovered: Sequence[tuple[str, str]]
    senders: Sequence[int] = ()
    int_keys: Sequence[IntKeys] = ()
    templates: Templates | None = None

    def lists(self) -> list[Any]:
        """Return a list of items for each rank, which the caller may alter."""
        return [PlanItems(columns=each) if isinstance(each, AssignedItems) else list(each) for each in self.items]


class KeptPlan(NamedTuple):
    """A rank's part of a plan: the items that it holds, and those that it was assigned."""

    signature: Hashable
    asked: PlanItems
    items: PlanItems


class PlanCache:
    """Plans of earlier saves, the last used one last.

    Attributes:
        kept: plans of this rank.
        agreed: plans of all ranks, on the coordinator, by a digest of all that they had sent.
        warned: names that were in a warning.
    """

    def __init__(self, identity: str | None = None) -> None:
        self.identity = identity or uuid.uuid4().hex
        self.kept: list[KeptPlan] = []
        self.agreed: dict[bytes, GlobalPlan] = {}
        self.warned: set[str] = set()

    def find(self, signature: Hashable) -> KeptPlan | None:
        """Return the plan of a state; None if there is none, or if its lists of items were altered."""
        kept = next((kept for kept in self.kept if kept.signature == signature), None)
        if kept is None or packed_items(kept.asked) is None or assigned_items(kept.items) is None:
            return None
        return kept

    def keep(self, kept: KeptPlan) -> None:
        """Keep a plan of this rank in place of the last one with its signature."""
        self.kept = [*[each for each in self.kept if each.signature != kept.signature], kept][-KEPT_PLANS:]

    def keep_agreed(self, content: bytes, plan: GlobalPlan) -> None:
        """Keep a plan of all ranks."""
        others = [each for each in self.agreed.items() if each[0] != content]
        self.agreed = dict([*others, (content, plan)][-KEPT_PLANS:])

    def __reduce__(self) -> tuple[Any, ...]:
        # A checkpoint process receives new copies of planner and writer for each save, and keeps the plans that it has
        # made.
        return _cache_of, (self.identity,)


_caches: dict[str, PlanCache] = {}
"""Caches of the planners and writers that were sent to this process."""


def _cache_of(identity: str) -> PlanCache:
    cache = _caches.pop(identity, None) or PlanCache(identity)
    _caches[identity] = cache
    for old in list(_caches)[:-KEPT_CACHES]:
        _caches.pop(old, None)
    return cache


def unpack_tables(plans: Sequence[SavePlan]) -> dict[bytes, Table]:
    """Decode the tables of all ranks, each of them once, by the bytes in which they were sent."""
    every = [packed_items(plan.items) for plan in plans]
    blobs = dict.fromkeys(blob for packed in every if packed is not None for blob in packed.tables)
    return {blob: unpack_table(blob) for blob in blobs}


def plan_globally(
    plans: Sequence[SavePlan],
    tables: Mapping[bytes, Table],
    nodes: Sequence[object],
    apart: Sequence[str] = (),
    *,
    whole: bool = False,
) -> GlobalPlan:
    """Assign the items that all ranks hold to ranks.

    Args:
        nodes, apart: as in `assign_items`.
        whole: as in `AssignedItems`.

    Raises:
        BucketpointError: the chunks that the ranks hold do not make up the tensors.
        RanksDisagreeError: ranks hold different tensors under one name.
    """
    packed = [each for each in (packed_items(plan.items) for plan in plans) if each is not None]
    assignment = assign_items(packed, tables, nodes, apart) if len(packed) == len(plans) else None
    if assignment is None:
        return _plan_of_dcp(plans, frozenset(apart))
    state = assignment.metadata.state_dict_metadata
    lacking = list(uncovered(assignment.metadata, {}))
    # DCP's check takes long for many chunks, so it gets only the tensors that may fail it.
    doubtful = {name for name, _ in lacking}
    doubtful |= {name for name, entry in state.items() if len(getattr(entry, "size", ())) > MAX_CUT_AXES}
    _validate(plans, Metadata({name: state[name] for name in doubtful}))
    items = [AssignedItems(assignment.encode(rank), asked, whole) for rank, asked in enumerate(packed)]
    return GlobalPlan(items, assignment.metadata, assignment, lacking)


def _plan_of_dcp(plans: Sequence[SavePlan], apart: frozenset[str]) -> GlobalPlan:
    agree_on_tensors(plans)
    taken: set[Any] = set()
    held = []
    for plan in plans:
        # A name in `apart`: all its items come from the first rank that has it.
        own = [item for item in plan.items if item.index.fqn not in apart or item.index not in taken]
        taken.update(item.index for item in own)
        held.append(replace(plan, items=own))
    assigned, metadata = create_default_global_save_plan(dedup_save_plans(held))
    _validate(assigned, metadata)
    return GlobalPlan([plan.items for plan in assigned], metadata, None, list(uncovered(metadata, {})))


def _validate(plans: Sequence[SavePlan], metadata: Metadata) -> None:
    """Run DCP's own check: chunks lie within their tensors, do not overlap, and fill them."""
    # Up to torch 2.11 the check returns a bool, from then on a list of faults.
    faults: Any = _validate_global_plan(list(plans), metadata)
    if faults is not True and faults != []:
        why = "; ".join(faults)[:500] if isinstance(faults, list) else "see the log of DCP for the tensor"
        raise BucketpointError(f"The chunks of the ranks overlap, or do not cover the whole tensor: {why}")
