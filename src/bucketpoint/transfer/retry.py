"""Doing again what may work the second time, where the client library does not repeat it by itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from bucketpoint.errors import ThrottledError, TransientStoreError

T = TypeVar("T")
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0


def retry_transient(attempt: Callable[[], T], *, attempts: int) -> T:
    """Call `attempt` up to `attempts` times while it raises a transient error, with full jitter between.

    The last error is raised with the first as its cause, since the first is the one that tells what began it.
    """
    first: Exception | None = None
    for number in range(attempts):
        try:
            return attempt()
        except (TransientStoreError, ThrottledError) as error:
            if number + 1 == attempts:
                raise error from first
            first = first or error
            time.sleep(random.uniform(0, min(FIRST_DELAY_S * 2**number, LONGEST_DELAY_S)))
    raise AssertionError("attempts must be at least 1")
