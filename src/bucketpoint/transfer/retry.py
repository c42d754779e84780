"""Retries of failures that a store does not retry by itself: a body that broke off, a range with a wrong checksum."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bucketpoint.errors import CorruptDataError
from bucketpoint.stores import retry

T = TypeVar("T")


def retry_transient(attempt: Callable[[], T], *, attempts: int, deadline_s: float = retry.DEADLINE_S) -> T:
    """Call `attempt` up to `attempts` times while it fails with a transient error, with full jitter between attempts.

    Throttled attempts are not counted, and are retried until the deadline. After a `CorruptDataError` the attempt is
    made once more before the error is raised: this tells a bit that flipped on the way from one that flipped in the
    store.

    Raises:
        StoreError: the last error. Its cause is the first error, which tells how the failure began.
    """
    policy = retry.RetryPolicy(attempts=attempts, deadline_s=deadline_s)
    return retry.run(attempt, policy, once_more=(CorruptDataError,))
