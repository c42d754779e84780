"""Trying again: how often, how long, how many requests at once. What a failure calls for is said in
`s3_errors` and `gcs_errors`.

One loop for every request. Whoever calls another such loop from within shares its deadline, and an error that a loop
has given up on is fatal to those around it, so that attempts never multiply.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from bucketpoint.errors import Action, BucketpointError, StoreError, ThrottledError
from bucketpoint.stores.cut import current_cut
from bucketpoint.stores.outage import Outage, store_of

T = TypeVar("T")

DEADLINE_S = 300.0
"""All attempts of one request together. Half of the 10 minutes after which NCCL ends a job whose ranks wait."""

FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 10.0
FIRST_THROTTLED_DELAY_S, LONGEST_THROTTLED_DELAY_S = 0.2, 20.0

BUDGET_TOKENS = 500.0
REFUND = 0.5
"""What a success gives back of the one token that a repetition takes: a third of all requests may fail for ever."""

MOST_REFRESHES = 2

_GROWN_BACK = 2.0
_POLL_S = 0.2

_ends: ContextVar[float | None] = ContextVar("bucketpoint_retry_ends", default=None)
_stop: ContextVar[threading.Event | None] = ContextVar("bucketpoint_retry_stop", default=None)


@dataclass(frozen=True)
class RetryPolicy:
    """How long to insist.

    Attributes:
        attempts: of a request that fails, the first included.
        deadline_s: seconds for all attempts of one request. An attempt under way is not cut off.
        counts_throttled: whether an answer that asks for fewer requests is one of the attempts. Otherwise only the
            deadline ends the waiting: a store that throttles is well, and will take the request.
    """

    attempts: int = 6
    deadline_s: float = DEADLINE_S
    counts_throttled: bool = False

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise BucketpointError(f"attempts must be at least 1, not {self.attempts}")
        if not self.deadline_s > 0:
            raise BucketpointError(f"retry_deadline_s must be more than 0, not {self.deadline_s}")


@dataclass
class RetryCounts:
    """What the loops of this process have done: `requests` that ended well, and what it took."""

    requests: int = 0
    retried: int = 0
    throttled: int = 0
    refreshed: int = 0
    given_up: int = 0


class Gate:
    """How many requests may be under way at once towards one service: any number, until it throttles.

    Then as many as half of those that were under way, and one more after each round of successes. Answers to requests
    that were sent before the last halving say nothing new, and do not halve again.
    """

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._limit = math.inf
        self._peak = 0
        self._running = 0
        self._epoch = 0

    @property
    def limit(self) -> float:
        """Requests that may be under way; infinite where the store has not throttled, or has long ceased to."""
        return self._limit

    def enter(self, ends: float) -> int:
        """Wait for a place, and return what `leave` asks for. Raises ThrottledError at the deadline, or if stopped."""
        with self._state:
            while self._running >= self._limit:
                left = ends - time.monotonic()
                if left <= 0 or stopped():
                    raise ThrottledError("the store asks for fewer requests, and this one never got its turn")
                self._state.wait(min(left, _POLL_S))
            self._running += 1
            return self._epoch

    def leave(self, epoch: int, *, throttled: bool, succeeded: bool) -> None:
        """Give the place back, and say what came of the request."""
        with self._state:
            if throttled and epoch == self._epoch:
                self._peak = max(self._peak, self._running)
                self._limit = max(min(self._running, self._limit) // 2, 1)
                self._epoch += 1
            elif succeeded and self._limit < math.inf:
                self._limit += 1 / self._limit
                if self._limit >= _GROWN_BACK * self._peak:
                    self._limit, self._peak = math.inf, 0
            self._running -= 1
            self._state.notify_all()


@dataclass
class Budget:
    """Repetitions that a process may still make: where everything fails, it stops making everything worse.

    Attributes:
        outages: of the stores whose requests have failed, by what names the store.
    """

    tokens: float = BUDGET_TOKENS
    counts: RetryCounts = field(default_factory=RetryCounts)
    outages: dict[str, Outage] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def take(self) -> bool:
        with self._lock:
            if self.tokens < 1:
                return False
            self.tokens -= 1
            self.counts.retried += 1
            return True

    def succeeded(self) -> None:
        with self._lock:
            self.tokens = min(self.tokens + REFUND, BUDGET_TOKENS)
            self.counts.requests += 1

    def note(self, name: str) -> None:
        with self._lock:
            setattr(self.counts, name, getattr(self.counts, name) + 1)

    def outage_of(self, error: StoreError) -> Outage:
        store = store_of(error)
        return self.outages.setdefault(store, Outage(store))


# By process: after a fork the lock may be held by a thread that the child lacks.
_budgets: dict[int, Budget] = {}


def process_budget() -> Budget:
    """The budget that all requests of this process share, with the counts of what they took."""
    return _budgets.setdefault(os.getpid(), Budget())


@contextmanager
def deadline(seconds: float) -> Iterator[float]:
    """All requests that the block makes on this thread end by then. Yields the time, by the monotonic clock."""
    outer = _ends.get()
    ends = time.monotonic() + seconds
    token = _ends.set(ends if outer is None else min(ends, outer))
    try:
        yield _ends.get() or ends
    finally:
        _ends.reset(token)


def stop_waiting_on(event: threading.Event) -> None:
    """On this thread, from now on: whoever waits before another attempt gives up once the event is set."""
    _stop.set(event)


def run(
    attempt: Callable[[], T],
    policy: RetryPolicy,
    *,
    gate: Gate | None = None,
    refresh: Callable[[], bool] | None = None,
    once_more: tuple[type[StoreError], ...] = (),
) -> T:
    """Call `attempt` until it succeeds, as long as what it raises and the policy allow it, with full jitter between.

    Args:
        gate: of the service that is asked.
        refresh: gets other credentials; False if there are none to be had.
        once_more: fatal kinds that are given one more chance all the same.

    Raises:
        StoreError: the last one, whose cause is the first, since that is the one that tells what began it.
    """
    tries = _Tries(policy, process_budget(), refresh, once_more)
    try:
        with deadline(policy.deadline_s) as ends:
            while True:
                try:
                    value = attempt() if gate is None else _through(gate, attempt, ends)
                except StoreError as error:
                    if tries.is_final(error):
                        raise
                    # Without its traceback, whose frames hold the buffers of the request.
                    last = error.with_traceback(None)
                else:
                    tries.succeeded()
                    return value
                if not tries.again(last, ends):
                    break
    finally:
        tries.end()
    raise tries.given_up(last) from tries.cause(last)


class _Tries:
    """The attempts of one request so far."""

    def __init__(
        self,
        policy: RetryPolicy,
        budget: Budget,
        refresh: Callable[[], bool] | None,
        once_more: tuple[type[StoreError], ...],
    ) -> None:
        self.budget = budget
        self._policy = policy
        self._refresh = refresh
        self._once_more = once_more
        self._started = time.monotonic()
        self._first: StoreError | None = None
        self._outage: Outage | None = None
        self._since = 0.0
        self._well = False
        self._failed = self._throttled = self._refreshed = 0

    def is_final(self, error: StoreError) -> bool:
        """Whether there is nothing to add to the error, and nothing to try."""
        return error.action is Action.FATAL and self._first is None and not isinstance(error, self._once_more)

    def again(self, error: StoreError, ends: float) -> bool:
        """Wait before the next attempt; False if there is to be none."""
        action = error.action
        if action is Action.FATAL and self._first is None and isinstance(error, self._once_more):
            action = Action.RETRY
        self._note(error)
        if action is Action.THROTTLE:
            self._throttled += 1
            self.budget.note("throttled")
        else:
            self._failed += 1
        counted = self._failed + (self._throttled if self._policy.counts_throttled else 0)
        if action is Action.FATAL or counted >= self._policy.attempts or time.monotonic() >= ends or stopped():
            return False
        if action is Action.REFRESH:
            # Credentials that are refused as soon as they are made will not do the next time.
            if self._refreshed >= MOST_REFRESHES or self._refresh is None or not self._refresh():
                return False
            self._refreshed += 1
            self.budget.note("refreshed")
        # What is throttled is bounded by the gate and the deadline: it takes nothing of the budget.
        elif action is Action.RETRY and not self.budget.take():
            return False
        _wait(action, self._throttled if action is Action.THROTTLE else self._failed, error.wait_s, ends)
        return not stopped()

    def _note(self, error: StoreError) -> None:
        now = time.monotonic()
        if self._outage is None:
            self._first, self._since = error, now
            self._outage = self.budget.outage_of(error)
            self._outage.enter(now)
        else:
            self._outage.failed(error, self._since, now)

    def succeeded(self) -> None:
        """The request has ended well."""
        self._well = True
        self.budget.succeeded()

    def end(self) -> None:
        """The request is not tried any more."""
        if self._outage is not None:
            self._outage.leave(time.monotonic(), succeeded=self._well)

    def cause(self, last: StoreError) -> StoreError | None:
        return self._first if self._first is not last else None

    def given_up(self, last: StoreError) -> StoreError:
        """The last error, final, with the first one in its text: causes do not survive the way to another rank."""
        self.budget.note("given_up")
        message, tried = last.message, self._failed + self._throttled
        if tried > 1:
            message += f" (attempt {tried}, after {time.monotonic() - self._started:.1f} s"
            if self._first is not None and self._first.message != last.message:
                message += f"; the first failed with {type(self._first).__name__}: {self._first.message}"
            message += ")"
        final = type(last)(message, **last.fields())
        final.action = Action.FATAL
        return final


def _through(gate: Gate, attempt: Callable[[], T], ends: float) -> T:
    epoch = gate.enter(ends)
    throttled = succeeded = False
    try:
        value = attempt()
        succeeded = True
        return value
    except StoreError as error:
        throttled = error.action is Action.THROTTLE
        raise
    finally:
        gate.leave(epoch, throttled=throttled, succeeded=succeeded)


def _wait(action: Action, number: int, asked_s: float, ends: float) -> None:
    low, high = (
        (FIRST_THROTTLED_DELAY_S, LONGEST_THROTTLED_DELAY_S)
        if action is Action.THROTTLE
        else (FIRST_DELAY_S, LONGEST_DELAY_S)
    )
    # What a service asks for is waited at least, but not for ever: it would also ask for an hour.
    delay = min(asked_s, high) + random.uniform(0, min(low * 2.0 ** min(number - 1, 30), high))
    pause(max(min(delay, ends - time.monotonic()), 0))


def pause(seconds: float) -> None:
    """Sleep, or less if this thread's work is cancelled or cut off meanwhile."""
    stop, cut = _stop.get(), current_cut()
    if cut is None:
        (stop or threading.Event()).wait(seconds)
        return
    ends = time.monotonic() + seconds
    while not stopped() and (left := ends - time.monotonic()) > 0:
        cut.wait(min(left, _POLL_S))


def stopped() -> bool:
    """Whether what this thread works for has been given up, or cut off."""
    stop, cut = _stop.get(), current_cut()
    return (stop is not None and stop.is_set()) or (cut is not None and cut.is_made)
