"""`bucketpoint.stores.retry` for all ranks at once: the limit on requests under way, and the waits after 503."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bucketpoint.stores import retry

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Limiters:
    """One `ConcurrencyLimiter` for each rank. A slot is one connection of one rank.

    The outcomes of one step take effect together, where the real limiter takes them one by one.

    Attributes:
        waiting: slots whose request waits until its rank may send it, first come first.
        gave_up: a request was not accepted within `retry.DEADLINE_S`, which fails the save or load.
    """

    def __init__(self, ranks: int, connections: int) -> None:
        self.waiting = np.zeros(0, np.int64)
        self.gave_up = False
        self._connections = connections
        self._limit = np.full(ranks, np.inf)
        self._peak = np.zeros(ranks, np.int64)
        self._running = np.zeros(ranks, np.int64)
        self._epoch = np.zeros(ranks, np.int64)
        self._sent_in = np.zeros(ranks * connections, np.int64)
        self._since = np.full(ranks * connections, np.nan)
        self._refusals = np.zeros(ranks * connections, np.int64)

    def enter(self, slots: Ints, times: Floats, now: float) -> tuple[Ints, Floats]:
        """Return the slots whose request may be sent now, and when each of them is sent. The others wait."""
        first = np.isnan(self._since[slots])
        self._since[slots[first]] = times[first]
        room = np.ceil(self._limit - self._running)
        if not self.waiting.size and bool((np.bincount(self._rank(slots), minlength=room.size) <= room).all()):
            entering, others = slots, slots[:0]
        else:
            order = np.argsort(times, kind="stable")
            queue = np.concatenate([self.waiting, slots[order]])
            times = np.concatenate([np.full(self.waiting.size, now), times[order]])
            rank = self._rank(queue)
            by_rank = np.argsort(rank, kind="stable")
            _, starts, counts = np.unique(rank[by_rank], return_index=True, return_counts=True)
            place = np.empty(queue.size, np.int64)
            place[by_rank] = np.arange(queue.size) - np.repeat(starts, counts)
            enters = place < room[rank]
            entering, others, times = queue[enters], queue[~enters], times[enters]
        self.waiting = others
        self.gave_up |= bool(others.size and now - self._since[others].min() >= retry.DEADLINE_S)
        self._running += np.bincount(self._rank(entering), minlength=room.size)
        self._sent_in[entering] = self._epoch[self._rank(entering)]
        return entering, times

    def succeeded(self, slots: Ints) -> None:
        """Take note of requests that were answered."""
        self._since[slots] = np.nan
        self._refusals[slots] = 0
        counts = np.bincount(self._rank(slots), minlength=self._limit.size)
        self._running -= counts
        limited = np.flatnonzero((counts > 0) & np.isfinite(self._limit))
        self._limit[limited] += counts[limited] / self._limit[limited]
        grown = limited[self._limit[limited] >= retry.GROWN_BACK * self._peak[limited]]
        self._limit[grown], self._peak[grown] = np.inf, 0

    def refused(self, slots: Ints, times: Floats, random: np.random.Generator) -> Floats:
        """Take note of requests that were answered 503. Returns when each is tried again."""
        rank = self._rank(slots)
        halved = np.unique(rank[self._sent_in[slots] == self._epoch[rank]])
        self._peak[halved] = np.maximum(self._peak[halved], self._running[halved])
        self._limit[halved] = np.maximum(np.minimum(self._running[halved], self._limit[halved]) // 2, 1)
        self._epoch[halved] += 1
        self._running -= np.bincount(rank, minlength=self._limit.size)
        self._refusals[slots] += 1
        longest = np.minimum(
            retry.FIRST_THROTTLED_DELAY_S * 2.0 ** np.minimum(self._refusals[slots] - 1, 30),
            retry.LONGEST_THROTTLED_DELAY_S,
        )
        left = self._since[slots] + retry.DEADLINE_S - times
        self.gave_up |= bool((left <= 0).any())
        return times + np.minimum(random.uniform(0, 1, slots.size) * longest, np.maximum(left, 0))

    def limit(self, rank: int) -> float:
        """Most requests of the rank that may be under way; infinite if there is no limit."""
        return float(self._limit[rank])

    def _rank(self, slots: Ints) -> Ints:
        return slots // self._connections
