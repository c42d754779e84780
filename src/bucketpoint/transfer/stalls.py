"""The limit on a store's silence during a load: a read without a byte for this time is cut off, and sent again.

A request that a store, or something before it, has lost would otherwise hold up the whole load until the client's
timeout of a minute.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator

from bucketpoint.stores.pace import silent_for

LEAST_S = 5.0
"""Shortest limit, in seconds. A store under load may take seconds for its first byte."""

MEDIANS = 4.0
"""The limit in medians of the recent waits, so that reads of a slow store are not cut off."""

_RECENT = 128


class StallLimits:
    """The limits of one load, by the waits for its recent replies."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_RECENT)

    def add(self, seconds: float) -> None:
        """Add the time from a request to its reply."""
        self._waits.append(seconds)

    def limit_s(self) -> float:
        """Return the limit for the first attempt of a read, in seconds."""
        waits = list(self._waits)
        return max(LEAST_S, MEDIANS * statistics.median(waits)) if waits else LEAST_S


class StallLimit:
    """The limit of one read. It doubles with each attempt, so that a sudden slowdown of the store fails no load."""

    def __init__(self, limits: StallLimits) -> None:
        self._limits = limits
        self._factor = 1.0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Apply the limit to the requests of the block, and add the time that the block takes."""
        started = time.monotonic()
        with silent_for(self._next):
            yield
        self._limits.add(time.monotonic() - started)

    def _next(self) -> float:
        factor, self._factor = self._factor, 2 * self._factor
        return factor * self._limits.limit_s()
