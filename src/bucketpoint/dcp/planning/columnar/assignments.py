"""Wire format of the write assignment that the coordinator returns to a rank: numbers of the rank's items, and cuts."""

from __future__ import annotations

import hashlib
from collections import UserList
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from bucketpoint.dcp.planning.balance import rows_of
from bucketpoint.dcp.planning.columnar.assign import decode_assignment
from bucketpoint.dcp.planning.columnar.encoding import PackedItems, unaltered
from bucketpoint.errors import BucketpointError


class LazyItems(UserList[WriteItem]):
    """The `count` items assigned to a rank, on the coordinator: a list whose items are made on first access."""

    def __init__(self, encoded: bytes, count: int, asked: PackedItems) -> None:
        self._made_of = (encoded, count, asked)

    @property
    def encoded(self) -> bytes | None:
        """The encoded assignment; None if the list was accessed, as it may have been altered."""
        return None if "data" in vars(self) else self._made_of[0]

    def anew(self) -> LazyItems:
        """Return a fresh list of the same items, not affected by changes to this one."""
        return LazyItems(*self._made_of)

    def __len__(self) -> int:
        return self._made_of[1] if self.encoded is not None else super().__len__()

    @cached_property
    def data(self) -> list[WriteItem]:  # type: ignore[override]
        encoded, _, asked = self._made_of
        return items_of(encoded, asked.items())

    def __copy__(self) -> Any:
        return list(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (list, (list(self),)) if self.encoded is None else (EncodedAssignment, (self.encoded,))


class EncodedAssignment:
    """The assignment as the rank receives it, to be joined with the items that the rank holds.

    Deliberately not a list: an accidental `len()` must fail rather than report zero.
    """

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded

    def __iter__(self) -> Any:
        raise BucketpointError(
            "The items assigned to this rank are known only after SavePlanner.finish_plan",
            remedy="Call super().finish_plan(new_plan) before reading the items of the plan",
        )

    __len__ = __getitem__ = __iter__


def assignment_digest(encoded: bytes, asked: PackedItems) -> bytes:
    """Return 16 bytes that identify the assigned items and their order."""
    return hashlib.blake2b(asked.digest + encoded, digest_size=16).digest()


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


class KnownItems(list[WriteItem]):
    """Items that a rank was assigned: an ordinary list that remembers their `assignment_digest`, or `items_digest`."""

    def __init__(self, items: Sequence[WriteItem], digest: bytes) -> None:
        super().__init__(items)
        self.digest = digest
        self._made_of = tuple(items)

    @property
    def unaltered(self) -> bool:
        """True if the items are still those of the digest."""
        return unaltered(self, self._made_of)

    @cached_property
    def order(self) -> dict[int, int]:
        """Position of each item, by the identity (`id`) of the item's index."""
        return {id(item.index): at for at, item in enumerate(self._made_of)}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)
