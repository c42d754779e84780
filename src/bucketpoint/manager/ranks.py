"""The ranks that use one manager together: a gloo group of its own, and what is agreed through it. No I/O on stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bucketpoint.dcp import process_groups
from bucketpoint.errors import BucketpointError

T = TypeVar("T")


class Ranks:
    """All ranks of a group, or this process alone where torch.distributed is not initialised.

    The group is a new one on gloo, so that no collective of training can meet the manager's. Saves beside training run
    on another one, the one that `async_save` keeps beside this: the manager asks other ranks while a save is under way.
    Making them is a collective call.

    Args:
        members: torch's group of the ranks; None for all of the job.
        timeout: how long a rank waits for another, in any one collective.

    Raises:
        BucketpointError: there are several ranks and no process group.
    """

    def __init__(self, members: Any = None, *, timeout: timedelta) -> None:
        self.group: Any = None
        self.rank, self.world = 0, 1
        process_groups.refuse_a_rank_alone("A checkpoint manager")
        if process_groups.is_initialized():
            self.group = process_groups.new_group(members, timeout)
            # Now, while all ranks are here, and not at the first save.
            process_groups.group_beside(self.group)
            self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def told(self, find: Callable[[], T]) -> T:
        """What the coordinator finds, on every rank; or the error that it raised there. `find` runs on it alone."""
        said: list[Any] = [None, None]
        if self.is_coordinator:
            try:
                said[0] = find()
            except Exception as error:
                if self.world == 1:
                    raise
                # Whatever it is, no other rank may go on without it, and foreign ones may not unpickle there.
                ours = isinstance(error, BucketpointError)
                said[1] = error if ours else BucketpointError(f"{type(error).__name__}: {error}")
        if self.world > 1:
            dist.broadcast_object_list(said, group_src=0, group=self.group)
        if said[1] is not None:
            raise said[1]
        found: T = said[0]
        return found

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The largest that any rank has of each number."""
        if self.world == 1:
            return list(numbers)
        agreed = torch.tensor(list(numbers), dtype=torch.int64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in agreed.tolist()]

    def close(self) -> None:
        """Leave the group. Not a collective call."""
        if self.group is not None:
            process_groups.leave(self.group)
        self.group = None
        self.world = 1
