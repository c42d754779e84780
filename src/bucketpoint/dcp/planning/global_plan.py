"""The plans of all ranks, and their metadata: computed over columns if all ranks sent columns, else by DCP's functions.

The result is the same either way; over columns it takes a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan

from bucketpoint.dcp.planning.agreement import agree_on_tensors
from bucketpoint.dcp.planning.balance import balanced
from bucketpoint.dcp.planning.columnar.assign import Assignment, assign_items
from bucketpoint.dcp.planning.columnar.assignments import LazyItems, assignment_digest
from bucketpoint.dcp.planning.columnar.encoding import AskedItems, LocalItems, PackedItems, Table, unpack_table
from bucketpoint.dcp.planning.rank_state import Compared
from bucketpoint.dcp.planning.results import items_digest
from bucketpoint.errors import BucketpointError


class GlobalPlan(NamedTuple):
    """The decision of the coordinator.

    Attributes:
        plans: plan of each rank, with the items that the rank must write.
        digests: digest of the items of each plan.
        assignment: the assignment over columns; None if some rank sent items instead.
    """

    plans: list[SavePlan]
    digests: list[bytes]
    metadata: Metadata
    assignment: Assignment | None


def compared_by_rank(plans: Sequence[SavePlan], tables: Mapping[bytes, Table]) -> list[Compared]:
    """Return for each rank the names of the items that are compared between ranks."""
    of_table = {blob: Compared.of_table(table) for blob, table in tables.items()}
    return [
        Compared.of(plan.items) if packed is None else sum((of_table[blob] for blob in packed.tables), Compared())
        for plan, packed in zip(plans, map(packed_items, plans), strict=True)
    ]


def unpack_tables(plans: Sequence[SavePlan]) -> dict[bytes, Table]:
    """Decode the tables of all ranks, each of them once, by the bytes in which they were sent."""
    blobs = dict.fromkeys(blob for packed in map(packed_items, plans) if packed is not None for blob in packed.tables)
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
        nodes, apart: as in `balanced`.
        whole: put real items on the plans, for ranks that look at them before the encoded assignment is decoded.

    Raises:
        BucketpointError: the chunks that the ranks hold do not make up the tensors.
        RanksDisagreeError: ranks hold different tensors under one name.
    """
    packed = [each for each in map(packed_items, plans) if each is not None]
    assignment = assign_items(packed, tables, nodes, apart) if len(packed) == len(plans) else None
    if assignment is None:
        agree_on_tensors(plans)
        assigned, metadata = create_default_global_save_plan(balanced(plans, nodes, apart))
        _validate(assigned, metadata)
        return GlobalPlan(assigned, [items_digest(plan.items) for plan in assigned], metadata, None)
    state = assignment.metadata.state_dict_metadata
    _validate(plans, Metadata({name: state[name] for name in assignment.doubtful}))
    encoded = [assignment.encode(rank) for rank in range(len(packed))]
    every: list[Any] = [
        LazyItems(each, assignment.count(rank), asked)
        for rank, (each, asked) in enumerate(zip(encoded, packed, strict=True))
    ]
    if whole:
        every = list(map(list, every))
    digests = list(map(items_digest, every)) if whole else list(map(assignment_digest, encoded, packed))
    assigned = [replace(plan, items=items) for plan, items in zip(plans, every, strict=True)]
    return GlobalPlan(assigned, digests, assignment.metadata, assignment)


def packed_items(plan: SavePlan) -> PackedItems | None:
    """Return the columns of a plan's items; None if it has none, or they were altered."""
    items: Any = plan.items
    return items.packed() if isinstance(items, (LocalItems, AskedItems)) else None


def _validate(plans: Sequence[SavePlan], metadata: Metadata) -> None:
    """Run DCP's own check: chunks lie within their tensors, do not overlap, and fill them."""
    # Up to torch 2.11 the check returns a bool, from then on a list of faults.
    faults: Any = _validate_global_plan(list(plans), metadata)
    if faults is not True and faults != []:
        why = "; ".join(faults)[:500] if isinstance(faults, list) else "see the log of DCP for the tensor"
        raise BucketpointError(f"The chunks of the ranks overlap, or do not cover the whole tensor: {why}")
