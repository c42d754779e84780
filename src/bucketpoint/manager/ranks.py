"""The ranks that use one manager together: a gloo group of their own, and the values that they agree on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bucketpoint.dcp import meshes, process_groups
from bucketpoint.errors import RanksDisagreeError

T = TypeVar("T")


class Ranks:
    """All ranks of a group, or this process alone if torch.distributed is not initialised.

    The group is a new gloo group, so that no collective of training can mix with the manager's. Saves beside training
    use another one, which all saves and loads of these ranks share, because the manager's ranks communicate while a
    save is under way. Constructing `Ranks` is a collective call.

    Args:
        members: torch's group of the ranks; None for all ranks of the job.
        timeout: longest time that a rank waits for another in one collective.

    Raises:
        BucketpointError: there are several ranks and no process group.
    """

    def __init__(self, members: Any = None, *, timeout: timedelta) -> None:
        self.group: Any = None
        self.rank, self.world = 0, 1
        process_groups.refuse_a_rank_alone("A checkpoint manager")
        if process_groups.is_initialized():
            self.group = process_groups.new_group(members, timeout)
            # Made now, while all ranks are here, and not at the first save.
            meshes.group_beside(self.group)
            self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def on_coordinator(self, find: Callable[[], T]) -> T:
        """Run `find` on the coordinator alone. Return its result, or raise its error, on every rank."""
        if self.world == 1:
            return find()
        return process_groups.on_rank_zero(find, self.rank, self._broadcast)

    def _broadcast(self, value: Any) -> Any:
        held = [value]
        dist.broadcast_object_list(held, group_src=0, group=self.group)
        return held[0]

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest value of each number among all ranks."""
        if self.world == 1:
            return list(numbers)
        agreed = torch.tensor(list(numbers), dtype=torch.int64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in agreed.tolist()]

    def refuse_unless_same(self, what: str, value: object) -> None:
        """Compare a value, by its text, with those of the other ranks.

        Raises:
            RanksDisagreeError: they are not all the same. Raised on every rank.
        """
        digest = zlib.crc32(repr(value).encode())
        if self.most([digest, -digest]) != [digest, -digest]:
            raise RanksDisagreeError(
                f"{what} is not the same on all ranks. On rank {self.rank} it is {value!r}"[:500],
                remedy="Give every rank the same policy",
            )

    def close(self) -> None:
        """Leave the group. Not a collective call."""
        if self.group is not None:
            process_groups.leave(self.group)
        self.group = None
        self.world = 1
