"""Hedged reads: a late range is requested a second time, and the reply that is complete first is used.

Two replies never write into the same memory. A reply gets memory only once its headers have arrived: the first reply
the caller's memory, the second reply a buffer of its own from the budget. If the second reply is complete first, the
connection of the first reply is shut down, its thread is waited for, and then the bytes are copied. So requests without
an answer, which most late requests are, cost no memory and no copy. And nobody needs to wait for a request that was
given up: whenever its answer arrives, its thread finds no memory to write to.
"""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from bucketpoint.errors import StoreError
from bucketpoint.stores import OpensRanges, RangeReply, retry
from bucketpoint.stores.base import Buffers
from bucketpoint.transfer.budget import BufferPool
from bucketpoint.transfer.options import Hedge
from bucketpoint.transfer.progress import Meter

RECENT = 128
ENOUGH = 10
"""`RECENT` durations are kept for each class of sizes; `ENOUGH` of them are needed before a range can count as late."""

LATE = 2.0
"""A range must take at least this many times the median to be late. A second request takes about one median, so it
would not be complete before the first one otherwise."""

FIRST, SECOND = "bucketpoint-range", "bucketpoint-range-again"
"""Names of the threads of the first and the second request."""

_POLL_S = 0.1


class Reads(Protocol):
    """The part of `Store` that a load needs."""

    @property
    def url(self) -> str: ...

    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None: ...


class HedgedReads:
    """Reader of ranges like a store's `read_into`, which requests late ranges a second time.

    Args:
        pool: memory for second replies. If there is none left, a second reply waits for the caller's memory.
        meter: counts the second requests.

    Attributes:
        asked: number of ranges requested.
        extra: number of second requests.
    """

    def __init__(self, store: OpensRanges, url: str, hedge: Hedge, pool: BufferPool, meter: Meter) -> None:
        self.url = url
        self._store = store
        self._hedge = hedge
        self._pool = pool
        self._meter = meter
        self._times = RecentTimes(hedge)
        self._lock = threading.Lock()
        self.asked = self.extra = 0

    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None:
        nbytes = sum(view.nbytes for view in buffers)
        if not nbytes:
            return
        with self._lock:
            self.asked += 1
        race = _Race(
            lambda: self._store.open_range(key, offset, nbytes, if_match=if_match), buffers, nbytes, self._pool
        )
        began = time.monotonic()
        race.run(lambda: self._times.late_after(nbytes), self._may_ask_again)
        self._times.add(nbytes, time.monotonic() - began)

    def _may_ask_again(self) -> bool:
        with self._lock:
            if self.extra >= math.ceil(self._hedge.most_extra * self.asked):
                return False
            self.extra += 1
            self._meter.hedged += 1
        self._meter.add(0)
        return True


class RecentTimes:
    """Recent durations of reads by class of size: the sizes of a class differ by less than a factor of four."""

    def __init__(self, hedge: Hedge) -> None:
        self._hedge = hedge
        self._lock = threading.Lock()
        self._by_class: dict[int, deque[float]] = {}

    def add(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._by_class.setdefault(_class_of(nbytes), deque(maxlen=RECENT)).append(seconds)

    def late_after(self, nbytes: int) -> float | None:
        """Return the seconds after which a range of this size is late, or None as long as too few durations are known.

        If this class has too few durations, those of a class of larger ranges are used: a duration that is late for a
        larger range is late for this one, too.
        """
        if self._hedge.after_s is not None:
            return self._hedge.after_s
        with self._lock:
            classes = [self._by_class[size] for size in sorted(self._by_class) if size >= _class_of(nbytes)]
            times = next((sorted(known) for known in classes if len(known) >= ENOUGH), None)
        if times is None:
            return None
        return max(times[math.ceil(self._hedge.quantile * len(times)) - 1], LATE * times[(len(times) - 1) // 2])


def _class_of(nbytes: int) -> int:
    return nbytes.bit_length() // 2


class _Race:
    """One range that is requested once or twice, each time on a thread of its own.

    `_in_place` is the reply that writes into the caller's memory: at most one at a time, and none after `run` returns.
    """

    def __init__(self, ask: Callable[[], RangeReply], target: Buffers, nbytes: int, pool: BufferPool) -> None:
        self._ask = ask
        self._target: Buffers | None = target
        self._nbytes = nbytes
        self._pool = pool
        self._state = threading.Condition()
        self._given_up = threading.Event()
        self._open: list[RangeReply] = []
        self._in_place: RangeReply | None = None
        self._decided = self._done = False
        self._running = 0
        self._first_error: BaseException | None = None

    def run(self, late_after: Callable[[], float | None], may_ask_again: Callable[[], bool]) -> None:
        """Fill the target. Raises the error of the first request if the second request did not succeed either."""
        began, asked_again = time.monotonic(), False
        try:
            with self._state:
                self._start(FIRST, self._given_up)
                while not self._done:
                    if not self._running:
                        assert self._first_error is not None
                        raise self._first_error
                    if retry.stopped():
                        self._given_up.set()
                    wait_s = _POLL_S
                    late = None if asked_again else late_after()
                    if late is not None and (left := began + late - time.monotonic()) < wait_s:
                        if left <= 0 and self._first_error is None and may_ask_again():
                            asked_again = True
                            # A set event means one attempt without retries: a store that throttles or fails gets no
                            # additional load.
                            stop = threading.Event()
                            stop.set()
                            self._start(SECOND, stop)
                        wait_s = max(left, 0.0) or _POLL_S
                    self._state.wait(wait_s)
        finally:
            self._end()

    def _end(self) -> None:
        """Make sure, after success or failure, that no thread writes into the target or keeps a reference to it."""
        with self._state:
            self._decided = True
            self._given_up.set()
            self._drop_all()
            self._state.wait_for(lambda: self._in_place is None)
            self._target = self._first_error = None

    # -- on the threads of the two requests ---------------------------------------------------------------------------

    def _start(self, name: str, stop: threading.Event) -> None:
        # A daemon thread, so that a request that was given up does not keep the process from ending.
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._request, name, stop), name=name, daemon=True)
        thread.start()
        self._running += 1

    def _request(self, name: str, stop: threading.Event) -> None:
        retry.stop_waiting_on(stop)
        try:
            self._receive(self._ask())
        except BaseException as error:
            if name == FIRST:
                # Raised by `run`. Without the traceback, whose frames would keep the target alive.
                self._first_error = error.with_traceback(None) if isinstance(error, StoreError) else error
            elif not isinstance(error, StoreError):
                raise
            # If the second request fails, the first one goes on; if that fails, too, its error is raised.
        finally:
            with self._state:
                self._running -= 1
                self._state.notify_all()

    def _receive(self, reply: RangeReply) -> None:
        with self._state:
            if self._decided:
                reply.drop()
                return
            self._open.append(reply)
            beside = self._in_place is not None
        try:
            if not beside or not self._receive_beside(reply):
                self._receive_in_place(reply)
        finally:
            reply.drop()

    def _receive_beside(self, reply: RangeReply) -> bool:
        """Receive a reply into a buffer of its own. Returns False if the budget has no memory left."""
        with self._pool.lease_now(self._nbytes) as view:
            if view is None:
                return False
            reply.receive([view])
            self._take_over(view)
            return True

    def _receive_in_place(self, reply: RangeReply) -> None:
        """Receive a reply into the caller's memory, once no other reply writes there."""
        with self._state:
            self._state.wait_for(lambda: self._decided or self._in_place is None)
            if self._decided or self._target is None:
                return
            self._in_place, target = reply, self._target
        whole = False
        try:
            reply.receive(target)
            whole = True
        finally:
            with self._state:
                self._in_place = None
                if whole and not self._decided:
                    self._decided = self._done = True
                self._state.notify_all()

    def _take_over(self, view: memoryview) -> None:
        """Copy the complete second reply to the caller's memory, unless the other reply was complete before."""
        with self._state:
            if self._decided:
                return
            self._decided = True
            self._drop_all()
            self._state.wait_for(lambda: self._in_place is None)
            if self._target is None:
                # `run` has ended meanwhile.
                return
            start = 0
            for part in self._target:
                part[:] = view[start : start + part.nbytes]
                start += part.nbytes
            self._done = True
            self._state.notify_all()

    def _drop_all(self) -> None:
        for reply in self._open:
            reply.drop()
        self._state.notify_all()
