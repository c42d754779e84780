"""`PlanItems`: the form in which items are sent between ranks, in both directions."""

from __future__ import annotations

import hashlib
from collections import UserList
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from bucketpoint.dcp.planning.balance import rows_of
from bucketpoint.dcp.planning.columnar.assign import decode_assignment
from bucketpoint.dcp.planning.columnar.encoding import PackedItems, pack_items, unaltered
from bucketpoint.errors import BucketpointError


@dataclass(frozen=True)
class AssignedItems:
    """The items that the coordinator assigned to a rank.

    Attributes:
        encoded: the encoded assignment: numbers of the rank's own items, and cuts.
        asked: all items that the rank holds; None on arrival at the rank, which has them.
        whole: send `asked` too, for a planner that reads the items before `SavePlanner.finish_plan`.
    """

    encoded: bytes
    asked: PackedItems | None
    whole: bool = False

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that identify the items and their order."""
        assert self.asked is not None
        return hashlib.blake2b(self.asked.digest + self.encoded, digest_size=16).digest()

    def items(self) -> list[WriteItem]:
        """Decode the items."""
        if self.asked is None:
            raise BucketpointError(
                "The items assigned to this rank are known only after SavePlanner.finish_plan",
                remedy="Call super().finish_plan(new_plan) before reading the items of the plan",
            )
        return items_of(self.encoded, self.asked.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return AssignedItems, (self.encoded, self.asked if self.whole else None)


class PlanItems(UserList[WriteItem]):
    """Items of a plan: a list with a small pickle, which makes its items from columns on first access."""

    def __init__(
        self, items: Iterable[WriteItem] | None = None, columns: PackedItems | AssignedItems | None = None
    ) -> None:
        self._columns = columns
        if items is not None or columns is None:
            self._set(list(items or ()))

    @staticmethod
    def packed(items: Sequence[WriteItem]) -> PlanItems:
        """Return the items of this rank, with columns if columns can hold them."""
        return PlanItems(items, pack_items(items))

    @property
    def columns(self) -> PackedItems | AssignedItems | None:
        """The columns; None if the items cannot be columns, or if the list has been altered since."""
        return self._columns if "data" not in vars(self) or unaltered(self.data, self._made_of) else None

    @cached_property
    def data(self) -> list[WriteItem]:  # type: ignore[override]
        assert self._columns is not None
        return self._set(self._columns.items())

    def _set(self, items: list[WriteItem]) -> list[WriteItem]:
        self._made_of = tuple(items)
        self.data = items
        return items

    def __copy__(self) -> Any:
        return list(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (list, (list(self),)) if self.columns is None else (PlanItems, (None, self.columns))


def packed_items(items: Any) -> PackedItems | None:
    """Return the columns of all items that a rank holds; None if there are none, or the items were altered."""
    columns = items.columns if isinstance(items, PlanItems) else None
    return columns if isinstance(columns, PackedItems) else None


def assigned_items(items: Any) -> AssignedItems | None:
    """Return the columns of the items that a rank was assigned; None if there are none, or the items were altered."""
    columns = items.columns if isinstance(items, PlanItems) else None
    return columns if isinstance(columns, AssignedItems) else None


def items_of(encoded: bytes, held: Sequence[WriteItem]) -> list[WriteItem]:
    """Decode an assignment to items, given all items that the rank holds."""
    items = []
    for position, hint, first, rows in decode_assignment(encoded):
        item = held[position]
        data, index = item.tensor_data, item.index
        if data is None:
            items.append(item)
        elif first < 0:
            items.append(replace(item, index=MetadataIndex(index.fqn, index.offset, hint)))
        else:
            items.append(rows_of(item, data, first, first + rows, hint))
    return items
