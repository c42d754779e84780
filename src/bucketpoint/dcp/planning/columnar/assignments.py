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
    """The items assigned to a rank, on the coordinator: a list whose items are made on first access.

    Args:
        answer: encoded assignment for the rank.
        count: number of items.
        asked: all items that the rank holds.
    """

    def __init__(self, answer: bytes, count: int, asked: PackedItems) -> None:
        self.asked = asked
        self._answer = answer
        self._count: int | None = count

    def answer(self) -> bytes | None:
        """Return the encoded assignment; None if the list was accessed, as it may have been altered."""
        return None if self._count is None else self._answer

    def anew(self) -> LazyItems:
        """Return a fresh list of the same items, not affected by changes to this one."""
        return LazyItems(self._answer, len(self), self.asked)

    def __len__(self) -> int:
        return super().__len__() if self._count is None else self._count

    def __getattr__(self, name: str) -> Any:
        if name != "data" or self.__dict__.get("_count") is None:
            raise AttributeError(name)
        self.data = items_of(self._answer, self.asked.items())
        self._count = None
        return self.data

    def __copy__(self) -> Any:
        return list(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (list, (list(self),)) if self._count is None else (EncodedAssignment, (self._answer,))


class EncodedAssignment:
    """The assignment as the rank receives it, to be joined with the items that the rank holds.

    Deliberately not a list: an accidental `len()` must fail rather than report zero.
    """

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def answer(self) -> bytes:
        return self._answer

    def __iter__(self) -> Any:
        raise BucketpointError(
            "The items assigned to this rank are known only after SavePlanner.finish_plan",
            remedy="Call super().finish_plan(new_plan) before reading the items of the plan",
        )

    __len__ = __getitem__ = __iter__


def answer_digest(answer: bytes, asked: PackedItems) -> bytes:
    """Return 16 bytes that identify the assigned items and their order."""
    return hashlib.blake2b(asked.digest + answer, digest_size=16).digest()


def items_of(answer: bytes, held: Sequence[WriteItem]) -> list[WriteItem]:
    """Decode an assignment to items, given all items that the rank holds."""
    items = []
    for position, hint, first, rows in decode_assignment(answer):
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
    """Items that a rank was assigned: an ordinary list that remembers the digest of the items.

    Attributes:
        digest: 16 bytes that identify the items and their order, on the rank and on the coordinator.
    """

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
