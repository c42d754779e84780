"""The plans of all ranks, and their metadata: computed over columns if all ranks sent columns, else by DCP's functions.

The result is the same either way; over columns it takes a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan

from bucketpoint.dcp.planning.agreement import agree_on_tensors
from bucketpoint.dcp.planning.balance import balanced
from bucketpoint.dcp.planning.columnar.assign import Assignment, assign_items
from bucketpoint.dcp.planning.columnar.assignments import LazyItems, answer_digest
from bucketpoint.dcp.planning.columnar.encoding import AskedItems, LocalItems, PackedItems, Table, unpack_table
from bucketpoint.dcp.planning.rank_state import own_names, own_names_of
from bucketpoint.dcp.planning.results import items_digest
from bucketpoint.errors import BucketpointError


@dataclass(frozen=True)
class GlobalPlan:
    """The decision of the coordinator.

    Attributes:
        plans: plan of each rank, with the items that the rank must write.
        digests: digest of the items of each plan.
        dealing: the assignment over columns; None if some rank sent items instead.
    """

    plans: list[SavePlan]
    digests: list[bytes]
    metadata: Metadata
    dealing: Assignment | None


class Asked:
    """The plans that all ranks sent, with their columns unpacked once for all ranks."""

    def __init__(self, plans: Sequence[SavePlan]) -> None:
        self.plans = plans
        self._packed = [_packed(plan) for plan in plans]
        blobs = dict.fromkeys(blob for packed in self._packed if packed is not None for blob in packed.tables)
        self._tables: dict[bytes, Table] = {blob: unpack_table(blob) for blob in blobs}

    def own_names(self) -> list[tuple[str, ...]]:
        """Return for each rank the names of the items whose values may differ between ranks."""
        of_table = {blob: own_names_of(table) for blob, table in self._tables.items()}
        return [
            own_names(plan.items) if packed is None else sum((of_table[blob] for blob in packed.tables), ())
            for plan, packed in zip(self.plans, self._packed, strict=True)
        ]

    def global_plan(self, nodes: Sequence[object], *, whole: bool) -> GlobalPlan:
        """Assign all items to ranks.

        Args:
            nodes: as in `balanced`.
            whole: put real items on the plans, for ranks that look at them before the encoded assignment is decoded.

        Raises:
            BucketpointError: the chunks that the ranks hold do not make up the tensors.
            RanksDisagreeError: ranks hold different tensors under one name.
        """
        packed = [each for each in self._packed if each is not None]
        dealing = assign_items(packed, self._tables, nodes) if len(packed) == len(self.plans) else None
        if dealing is None:
            agree_on_tensors(self.plans)
            plans, metadata = create_default_global_save_plan(balanced(self.plans, nodes))
            _validate(plans, metadata)
            return GlobalPlan(plans, [items_digest(plan.items) for plan in plans], metadata, None)
        state = dealing.metadata.state_dict_metadata
        _validate(self.plans, Metadata({name: state[name] for name in dealing.doubtful}))
        answers = [dealing.answer(rank) for rank in range(len(packed))]
        each: list[Any] = [
            LazyItems(answer, dealing.count(rank), mine)
            for rank, (answer, mine) in enumerate(zip(answers, packed, strict=True))
        ]
        if whole:
            each = list(map(list, each))
            digests = list(map(items_digest, each))
        else:
            digests = list(map(answer_digest, answers, packed))
        plans = [replace(plan, items=items) for plan, items in zip(self.plans, each, strict=True)]
        return GlobalPlan(plans, digests, dealing.metadata, dealing)


def _packed(plan: SavePlan) -> PackedItems | None:
    items: Any = plan.items
    return items.packed() if isinstance(items, (LocalItems, AskedItems)) else None


def _validate(plans: Sequence[SavePlan], metadata: Metadata) -> None:
    """Run DCP's own check: chunks lie within their tensors, do not overlap, and fill them."""
    # Up to torch 2.11 the check returns a bool, from then on a list of faults.
    found: Any = _validate_global_plan(list(plans), metadata)
    if found is True or found == []:
        return
    said = "; ".join(found)[:500] if isinstance(found, list) else "see the log of DCP for the tensor"
    raise BucketpointError(f"The chunks of the ranks overlap, or do not cover the whole tensor: {said}")
