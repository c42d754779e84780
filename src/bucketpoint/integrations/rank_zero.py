"""Questions to a store that rank 0 asks, and whose answers all ranks have to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from bucketpoint.errors import BucketpointError

T = TypeVar("T")


def on_rank_zero(ask: Callable[[], T], rank: int, broadcast: Callable[[Any], Any]) -> T:
    """Call a function on rank 0, and return its answer on all ranks. All ranks.

    Args:
        rank: number of this rank.
        broadcast: the framework's own: it returns on each rank the value that rank 0 gave.

    Raises:
        BucketpointError: what the function raised, on each rank.
    """
    answer: T | None = None
    failure: BucketpointError | None = None
    if rank == 0:
        try:
            answer = ask()
        except BucketpointError as error:
            # The other ranks wait for an answer.
            failure = error
    answer, failure = broadcast((answer, failure))
    if failure is not None:
        raise failure
    return answer
