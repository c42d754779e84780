"""The ranks that use one manager together: a gloo group of its own, and what is agreed through it. No I/O on stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bucketpoint.errors import BucketpointError

T = TypeVar("T")


class Ranks:
    """All ranks of a group, or this process alone where torch.distributed is not initialised.

    The group is a new one, so that no collective of the training can meet the manager's, and on gloo, as saves beside
    training need one. Making it is a collective call.

    Args:
        members: torch's group of the ranks; None for all of the job.
        timeout: how long a rank waits for another, in any one collective.
    """

    def __init__(self, members: Any = None, *, timeout: timedelta) -> None:
        self.group: Any = None
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            listed = None if members is None else dist.get_process_group_ranks(members)
            self.group = dist.new_group(listed, timeout=timeout, backend="gloo", use_local_synchronization=bool(listed))
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
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None
        self.world = 1
