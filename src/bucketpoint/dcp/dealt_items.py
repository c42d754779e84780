"""What a rank is to write, as it crosses back to it: numbers of its own items, and where some are cut. No decisions."""

from __future__ import annotations

import hashlib
from collections import UserList
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from bucketpoint.dcp.balance import rows_of
from bucketpoint.dcp.dealing import answered
from bucketpoint.dcp.plan_columns import PackedItems, unaltered
from bucketpoint.errors import BucketpointError


class DealtItems(UserList[WriteItem]):
    """The items that a rank is dealt, on the coordinator: a list that is made when somebody looks into it.

    Args:
        answer: what tells the rank which of its own they are.
        count: how many.
        asked: all that the rank holds.
    """

    def __init__(self, answer: bytes, count: int, asked: PackedItems) -> None:
        self.asked = asked
        self._answer = answer
        self._count: int | None = count

    def answer(self) -> bytes | None:
        """What the rank is told; None if the list has been looked into, and may have been altered."""
        return None if self._count is None else self._answer

    def anew(self) -> DealtItems:
        """The same, whatever becomes of this list."""
        return DealtItems(self._answer, len(self), self.asked)

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
        return (list, (list(self),)) if self._count is None else (Answer, (self._answer,))


class Answer:
    """The same on the rank, which puts it together with what it holds.

    Looks like no list, so that nobody takes it for an empty one.
    """

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def answer(self) -> bytes:
        return self._answer

    def __iter__(self) -> Any:
        raise BucketpointError(
            "What the coordinator dealt to this rank is known once SavePlanner.finish_plan has been called",
            remedy="Call super().finish_plan(new_plan) before you look into the plan",
        )

    __len__ = __getitem__ = __iter__


def answer_digest(answer: bytes, asked: PackedItems) -> bytes:
    """16 bytes that tell which items these are, and their order."""
    return hashlib.blake2b(asked.digest + answer, digest_size=16).digest()


def items_of(answer: bytes, held: Sequence[WriteItem]) -> list[WriteItem]:
    """A rank's items by what it was told of those that it holds."""
    items = []
    for position, hint, first, rows in answered(answer):
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
    """Items that a rank was dealt: a list like any other, which remembers what they are called.

    Attributes:
        digest: 16 bytes that tell which items these are, and their order, on the rank and on the coordinator.
    """

    def __init__(self, items: Sequence[WriteItem], digest: bytes) -> None:
        super().__init__(items)
        self.digest = digest
        self._made_of = tuple(items)

    @property
    def unaltered(self) -> bool:
        """Whether the items are still those of the digest."""
        return unaltered(self, self._made_of)

    @cached_property
    def order(self) -> dict[int, int]:
        """The position of each item, by the identity of its index."""
        return {id(item.index): at for at, item in enumerate(self._made_of)}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)
