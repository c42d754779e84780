"""The plans of all ranks and their metadata: over columns where ranks sent them, by DCP's own functions where not.

What comes out is the same either way; over columns it takes a tenth of the time. Nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan

from bucketpoint.dcp.agreement import agree_on_tensors
from bucketpoint.dcp.balance import balanced
from bucketpoint.dcp.dealing import Dealing, deal
from bucketpoint.dcp.dealt_items import DealtItems, answer_digest
from bucketpoint.dcp.plan_columns import AskedItems, LocalItems, PackedItems, Table, unpack_table
from bucketpoint.dcp.rank_state import own_names, own_names_of
from bucketpoint.dcp.results import items_digest
from bucketpoint.errors import BucketpointError


@dataclass(frozen=True)
class GlobalPlan:
    """What the coordinator decides.

    Attributes:
        plans: what each rank is dealt.
        digests: of the items of each.
        dealing: how it came about, if all ranks sent columns.
    """

    plans: list[SavePlan]
    digests: list[bytes]
    metadata: Metadata
    dealing: Dealing | None


class Asked:
    """What all ranks ask for."""

    def __init__(self, plans: Sequence[SavePlan]) -> None:
        self.plans = plans
        self._packed = [_packed(plan) for plan in plans]
        blobs = dict.fromkeys(blob for packed in self._packed if packed is not None for blob in packed.tables)
        self._tables: dict[bytes, Table] = {blob: unpack_table(blob) for blob in blobs}

    def own_names(self) -> list[tuple[str, ...]]:
        """For each rank the names of the items that may be its own."""
        of_table = {blob: own_names_of(table) for blob, table in self._tables.items()}
        return [
            own_names(plan.items) if packed is None else sum((of_table[blob] for blob in packed.tables), ())
            for plan, packed in zip(self.plans, self._packed, strict=True)
        ]

    def global_plan(self, nodes: Sequence[object], *, whole: bool) -> GlobalPlan:
        """Deal everything out.

        Args:
            nodes: as in `balanced`.
            whole: deal items, to ranks that look at them before they know which of their own they are.

        Raises:
            BucketpointError: the chunks that the ranks hold do not make up the tensors.
            RanksDisagreeError: ranks hold different tensors under one name.
        """
        packed = [each for each in self._packed if each is not None]
        dealing = deal(packed, self._tables, nodes) if len(packed) == len(self.plans) else None
        if dealing is None:
            agree_on_tensors(self.plans)
            plans, metadata = create_default_global_save_plan(balanced(self.plans, nodes))
            _validate(plans, metadata)
            return GlobalPlan(plans, [items_digest(plan.items) for plan in plans], metadata, None)
        state = dealing.metadata.state_dict_metadata
        _validate(self.plans, Metadata({name: state[name] for name in dealing.doubtful}))
        answers = [dealing.answer(rank) for rank in range(len(packed))]
        each: list[Any] = [
            DealtItems(answer, dealing.count(rank), mine)
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
    """DCP's own check: chunks lie within their tensors, do not overlap, and fill them."""
    # Up to torch 2.11 it says whether, from then on what is wrong.
    found: Any = _validate_global_plan(list(plans), metadata)
    if found is True or found == []:
        return
    said = "; ".join(found)[:500] if isinstance(found, list) else "DCP logs the tensor"
    raise BucketpointError(f"What the ranks hold does not make up the tensors: {said}")
