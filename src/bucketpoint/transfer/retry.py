"""Doing again what a store does not repeat by itself: a body that broke off, a range whose checksum differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bucketpoint.errors import CorruptDataError
from bucketpoint.stores import retry

T = TypeVar("T")


def retry_transient(attempt: Callable[[], T], *, attempts: int, deadline_s: float = retry.DEADLINE_S) -> T:
    """Call `attempt` up to `attempts` times while it fails for a reason that may pass, with full jitter between.

    What is throttled is not counted, and waits until the deadline. Bytes that are not what was written are read once
    more before that is an error: it tells a bit that flipped on the way from one that flipped where it lies.

    Raises:
        StoreError: the last one, with the first as its cause, since the first is the one that tells what began it.
    """
    policy = retry.RetryPolicy(attempts=attempts, deadline_s=deadline_s)
    return retry.run(attempt, policy, once_more=(CorruptDataError,))
