"""Ranges that are late, asked for a second time: when, how often, and which of two replies counts. Knows no extents.

Two replies never write into the same memory. A reply gets memory only once its head is there: the first one the
caller's, the second one a buffer of its own out of the budget. If the second is whole first, the first one's connection
is shut, its thread is waited for, and then the bytes are copied. So requests that have not been answered, which is most
of what is late, cost no memory and no copy, and a request that is given up needs nobody who waits for it: its thread
finds nothing to write to, whenever the answer comes.
"""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from bucketpoint.errors import StoreError
from bucketpoint.stores import OpensRanges, RangeReply, Store, retry
from bucketpoint.stores.base import Buffers
from bucketpoint.transfer.budget import BufferPool
from bucketpoint.transfer.options import Hedge, TransferOptions
from bucketpoint.transfer.progress import Meter

RECENT = 128
ENOUGH = 10
"""So many times of one size are remembered, and so many are needed before any of them counts as late."""

LATE = 2.0
"""Times the median that a range must take to be late: a second request takes about one median, and would not be there
before the first one otherwise."""

FIRST, SECOND = "bucketpoint-range", "bucketpoint-range-again"
"""Names of the threads."""

_POLL_S = 0.1


class Reads(Protocol):
    """What a load needs of a store."""

    @property
    def url(self) -> str: ...

    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None: ...


def hedged(store: Store, options: TransferOptions, pool: BufferPool, meter: Meter) -> Reads:
    """The store as loads read it: late ranges are asked for twice, if the options say so and the store lets replies
    be given up."""
    if options.hedge is None or not isinstance(store, OpensRanges):
        return store
    return HedgedReads(store, store.url, options.hedge, pool, meter)


class HedgedReads:
    """Reads ranges as a store's `read_into` does, and asks for those that are late once more.

    Args:
        pool: where the memory for second replies comes from. They do without where it has none left.
        meter: counts the second requests.

    Attributes:
        asked, extra: requests for ranges, and the second ones beside them.
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
        self._meter.add(0)
        return True


class RecentTimes:
    """How long ranges took, by their size: within one class, no range is more than four times as large as another."""

    def __init__(self, hedge: Hedge) -> None:
        self._hedge = hedge
        self._lock = threading.Lock()
        self._by_class: dict[int, deque[float]] = {}

    def add(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._by_class.setdefault(_class_of(nbytes), deque(maxlen=RECENT)).append(seconds)

    def late_after(self, nbytes: int) -> float | None:
        """Seconds; None as long as too little is known. What is late among larger ranges is late for this one too."""
        if self._hedge.after_s is not None:
            return self._hedge.after_s
        with self._lock:
            known = [each for each in sorted(self._by_class) if len(self._by_class[each]) >= ENOUGH]
            found = next((each for each in known if each >= _class_of(nbytes)), None)
            times = sorted(self._by_class[found]) if found is not None else []
        if not times:
            return None
        return max(times[math.ceil(self._hedge.quantile * len(times)) - 1], LATE * times[(len(times) - 1) // 2])


def _class_of(nbytes: int) -> int:
    return nbytes.bit_length() // 2


class _Race:
    """One range, asked for once or twice, each time on a thread of its own.

    `_in_place` is the reply that writes into the caller's memory: one at a time, and none once `run` has returned.
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
        """Fill the target. Raises what the first request raised, if the second has not been whole either."""
        began, asked_again = time.monotonic(), False
        try:
            with self._state:
                self._start(self._first, FIRST)
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
                            self._start(self._second, SECOND)
                        wait_s = max(left, 0.0) or _POLL_S
                    self._state.wait(wait_s)
        finally:
            self._end()

    def _end(self) -> None:
        """Whatever happened: nobody writes into the target any more, or begins to, and nobody else holds on to it."""
        with self._state:
            self._decided = True
            self._given_up.set()
            self._drop_all()
            self._state.wait_for(lambda: self._in_place is None)
            self._target = self._first_error = None

    # -- on the threads of the two requests ---------------------------------------------------------------------------

    def _start(self, request: Callable[[], None], name: str) -> None:
        # A daemon: of a request that is given up nobody needs an answer, and least of all a process that ends.
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(request,), name=name, daemon=True)
        thread.start()
        self._running += 1

    def _first(self) -> None:
        retry.stop_waiting_on(self._given_up)
        with self._ended():
            try:
                self._receive(self._ask())
            except BaseException as error:  # noqa: BLE001 (raised by `run`)
                # Without its traceback, whose frames hold the target.
                self._first_error = error.with_traceback(None) if isinstance(error, StoreError) else error

    def _second(self) -> None:
        # One attempt that waits for nothing: of a store that throttles or fails, no more than it was asked anyway.
        never = threading.Event()
        never.set()
        retry.stop_waiting_on(never)
        with self._ended():
            try:
                self._receive(self._ask())
            except StoreError:
                # The first request goes on, and says what is wrong if it fails too.
                return

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
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
        """Into memory of its own. False if there is none left."""
        with self._pool.lease_now(self._nbytes) as view:
            if view is None:
                return False
            reply.receive([view])
            self._take_over(view)
            return True

    def _receive_in_place(self, reply: RangeReply) -> None:
        """Into the caller's memory, once nobody else writes there."""
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
        """What was received beside is whole, and counts unless what is in place already does."""
        with self._state:
            if self._decided:
                return
            self._decided = True
            self._drop_all()
            self._state.wait_for(lambda: self._in_place is None)
            if self._target is None:
                # Whoever wanted it has left meanwhile.
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
