"""The retry loop of every request: attempts, waiting times, deadlines, and a limit on concurrent requests.

The `errors` module of each service's folder decides the reaction (`Action`) to a failure.

Retry loops may be nested: an inner loop keeps the deadline of the outer loop, and an error that an inner loop has given
up on is fatal to the outer loops, so that attempts never multiply.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from bucketpoint.errors import Action, BucketpointError, CorruptDataError, StoreError, ThrottledError
from bucketpoint.forks import Monitor, process_lock, renew_in_child
from bucketpoint.stores.cutoff import current_cut, current_end, limited
from bucketpoint.stores.outage import Outage, store_of

T = TypeVar("T")

DEADLINE_S = 300.0
"""Seconds for all attempts of one request: half of the 10 minutes after which NCCL ends a job whose ranks wait."""

FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 10.0
FIRST_THROTTLED_DELAY_S, LONGEST_THROTTLED_DELAY_S = 0.2, 20.0
LONGEST_OUTAGE_DELAY_S = 5.0
"""Less than after other failures: refused connections put no load on a store that is down."""

BUDGET_TOKENS = 500.0
REFUND = 0.5
"""Tokens that a success adds. A retry takes one token, so the budget lasts even if a third of all attempts fail."""

MOST_REFRESHES = 2

UNSEEN_S = 25.0
"""Deadline, in seconds, for a store that has never answered this process: its name is probably wrong. With the last
attempt (`cutoff.LATE_S`), a request takes 30 s at most."""

READ_ATTEMPTS = 5
"""Attempts to read a range or a small object whose body breaks off, including the first."""

GROWN_BACK = 2.0
"""The limit on concurrent requests is lifted at this multiple of those in progress when the service throttled."""

KINDS = (
    "put",
    "get",
    "head",
    "list",
    "delete",
    "copy",
    "create_multipart",
    "put_part",
    "complete_multipart",
    "abort_multipart",
    "list_multipart",
)
"""Kinds of requests, named after the methods of `Store`. A ranged read is a `"get"`."""

COMPUTED = frozenset({"copy", "complete_multipart"})
"""Kinds of requests for which a service may compute for minutes: see `cutoff.Limits`."""

_POLL_S = 0.2

_stop: ContextVar[threading.Event | None] = ContextVar("bucketpoint_retry_stop", default=None)
_counts: ContextVar[Counter[str] | None] = ContextVar("bucketpoint_retry_counts", default=None)


@dataclass(frozen=True)
class RetryPolicy:
    """Limits on the attempts of one request.

    Attributes:
        attempts: limit on the attempts of a request, including the first.
        deadline_s: seconds for all attempts of one request. After them, an attempt in progress is interrupted only if
            it is slow: see `cutoff`.
        counts_throttled: count throttled and unanswered attempts, too. Otherwise these are limited only by the
            deadline, because a store that throttles or does not answer will probably accept the request later.
    """

    attempts: int = 6
    deadline_s: float = DEADLINE_S
    counts_throttled: bool = False

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise BucketpointError(f"attempts must be at least 1, not {self.attempts}")
        if not self.deadline_s > 0:
            raise BucketpointError(f"retry_deadline_s must be more than 0, not {self.deadline_s}")


class ConcurrencyLimiter:
    """Limit on concurrent requests to one service. There is no limit until the service throttles.

    When the service throttles, the limit becomes half of the requests in progress, and then grows by one after each
    round of successes. A throttled request that was sent before the last halving does not halve the limit again.

    Attributes:
        answered: True once the service has answered a request of this process.
        limit: limit on concurrent requests; infinite unless the store has throttled recently.
    """

    def __init__(self) -> None:
        self.answered = False
        self.limit = math.inf
        self._state = Monitor()
        self._peak = 0
        self._running = 0
        self._epoch = 0

    def enter(self, ends: float) -> int:
        """Wait until another request may be sent, and return the epoch to pass to `leave`.

        Raises:
            ThrottledError: the deadline passed, or this thread's work was given up.
        """
        with self._state:
            while self._running >= self.limit:
                left = ends - time.monotonic()
                if left <= 0 or stopped():
                    raise ThrottledError(
                        "the store asked for fewer requests, and the request was not sent before its deadline"
                    )
                self._state.wait(min(left, _POLL_S))
            self._running += 1
            return self._epoch

    def leave(self, epoch: int, *, answered: bool, throttled: bool, succeeded: bool) -> None:
        """Record the end of a request, and adjust the limit by its outcome."""
        with self._state:
            self.answered = self.answered or answered
            if throttled and epoch == self._epoch:
                self._peak = max(self._peak, self._running)
                self.limit = max(min(self._running, self.limit) // 2, 1)
                self._epoch += 1
            elif succeeded and self.limit < math.inf:
                self.limit += 1 / self.limit
                if self.limit >= GROWN_BACK * self._peak:
                    self.limit, self._peak = math.inf, 0
            self._running -= 1
            self._state.notify_all()


@dataclass
class Budget:
    """Limit on the retries of a process, so that retries do not add load when everything fails.

    Attributes:
        counts: requests sent, by kind (`KINDS`), and their outcomes: `succeeded`; `retried`, sent again after a
            failure that may pass; `throttled`, refused by a store that asks for fewer requests; `refreshed`, sent again
            with new credentials; `given_up` after an attempt that could be retried.
        outages: outages of stores with failed requests, by the store's name (see `store_of`).
    """

    tokens: float = BUDGET_TOKENS
    counts: Counter[str] = field(default_factory=Counter)
    outages: dict[str, Outage] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=process_lock, repr=False)

    def take(self) -> bool:
        with self._lock:
            if self.tokens < 1:
                return False
            self.tokens -= 1
        self.add({"retried": 1})
        return True

    def succeeded(self) -> None:
        with self._lock:
            self.tokens = min(self.tokens + REFUND, BUDGET_TOKENS)
        self.add({"succeeded": 1})

    def add(self, counts: Mapping[str, int]) -> None:
        """Add `counts`, such as those of another process, to these counts and to the counter of `count_into`."""
        own = _counts.get()
        with self._lock:
            self.counts.update(counts)
            if own is not None:
                own.update(counts)


_budgets: dict[str, Budget] = {}


def process_budget() -> Budget:
    """Return the budget of this process, with the counts of all its requests."""
    budget = _budgets.get("process")
    if budget is None:
        budget = _budgets.setdefault("process", Budget())
        renew_in_child(budget, lambda _: _budgets.clear())
    return budget


def ongoing_outage() -> tuple[str, str | None]:
    """Return for the error of a wait that took too long what fails in this process, and the remedy; "" if nothing."""
    outages = [each.ongoing(time.monotonic()) for each in list(process_budget().outages.values())]
    return next((each for each in outages if each is not None), ("", None))


@contextmanager
def deadline(seconds: float) -> Iterator[float]:
    """Limit the retries of the block's requests, on this thread, to `seconds` from now.

    Yields the time on the monotonic clock at which retries end. An outer deadline that is earlier is kept.
    """
    ends = min(time.monotonic() + seconds, current_end())
    with limited(ends=ends, computes=False):
        yield ends


def count_into(counts: Counter[str] | None) -> Counter[str] | None:
    """Count requests of this thread and its task groups in `counts`, too; None ends this. Return the former counter."""
    former = _counts.get()
    _counts.set(counts)
    return former


def stop_waiting_on(event: threading.Event) -> None:
    """Make retry loops on this thread give up, instead of waiting for another attempt, once the event is set."""
    _stop.set(event)


def run(
    attempt: Callable[[], T],
    policy: RetryPolicy,
    *,
    gate: ConcurrencyLimiter | None = None,
    refresh: Callable[[], bool] | None = None,
    kind: str | None = None,
    once_more: tuple[type[StoreError], ...] = (),
) -> T:
    """Call `attempt` until it succeeds, as long as the error and the policy allow another attempt.

    Waits between attempts with exponential backoff and full jitter.

    Args:
        gate: limit on concurrent requests to the service.
        refresh: function that gets new credentials; returns False if there are none.
        kind: kind of the request, one of `KINDS`; None for a loop around requests that are counted themselves.
        once_more: classes of fatal errors after which one more attempt is made.

    Raises:
        StoreError: the last error. Its cause is the first error, which shows how the failure began.
    """
    budget, started = process_budget(), time.monotonic()
    first: StoreError | None = None
    outage: Outage | None = None
    failed = waited = refreshed = 0
    since, well = started, False
    try:
        with deadline(policy.deadline_s) as latest:
            while True:
                ends = latest if gate is None or gate.answered else min(latest, started + UNSEEN_S)
                if kind is not None:
                    budget.add({kind: 1})
                try:
                    with limited(ends=ends, computes=kind in COMPUTED):
                        value = attempt() if gate is None else _through(gate, attempt, ends)
                except StoreError as error:
                    action = error.action
                    if action is Action.FATAL and first is None:
                        if not isinstance(error, once_more):
                            raise
                        action = Action.RETRY
                    # Drop the traceback: its frames would keep the buffers of the request alive.
                    last = error.with_traceback(None)
                else:
                    well = True
                    budget.succeeded()
                    return value
                now = time.monotonic()
                if outage is None:
                    first, since, outage = last, now, budget.outages.setdefault(store_of(last), Outage(store_of(last)))
                    outage.enter(last, now)
                elif action is not Action.FATAL:
                    outage.failed(last, since, now)
                waits = action in (Action.THROTTLE, Action.OUTAGE)
                if waits:
                    waited += 1
                    budget.add({"throttled" if action is Action.THROTTLE else "retried": 1})
                else:
                    failed += 1
                counted = failed + (waited if policy.counts_throttled else 0)
                latest = min(latest, started + last.limit_s)
                ends = latest if gate is None or gate.answered else min(latest, started + UNSEEN_S)
                # Any answer of the store ends an outage, even an error.
                well = action is Action.FATAL and kind is not None
                if action is Action.FATAL or counted >= policy.attempts or now >= ends or stopped():
                    break
                if action is Action.REFRESH:
                    # Bounded, because a service that refuses new credentials would refuse the next ones, too.
                    if refreshed >= MOST_REFRESHES or refresh is None or not refresh():
                        break
                    refreshed += 1
                    budget.add({"refreshed": 1})
                # Waiting for the store takes no token from the budget: the deadline and the gate limit such attempts.
                elif action is Action.RETRY and not budget.take():
                    break
                _wait(action, waited if waits else failed, last.wait_s, ends)
                if stopped():
                    break
    finally:
        if outage is not None:
            outage.leave(time.monotonic(), succeeded=well)
    budget.add({"given_up": 1})
    message, tried = last.message, failed + waited
    if tried > 1:
        message += f" (attempt {tried}, after {time.monotonic() - started:.1f} s"
        # The message names the first error, too, because `__cause__` is not pickled, and does not reach other ranks.
        if first is not None and first.message != last.message:
            message += f"; the first failed with {type(first).__name__}: {first.message}"
        message += ")"
    final = type(last)(message, **last.fields())
    final.action = Action.FATAL
    try:
        raise final from (first if first is not last else None)
    finally:
        # Break the cycle of this frame, the error and its traceback, which would keep the buffers of the request alive.
        del final


def retry_transient(attempt: Callable[[], T], *, attempts: int = READ_ATTEMPTS) -> T:
    """Repeat `attempt` after failures that a store does not retry, such as a body that broke off.

    Throttled attempts are not counted. After a `CorruptDataError` one more attempt is made, which distinguishes a bit
    that flipped in transit from one that flipped in the store.

    Raises:
        StoreError: as `run`.
    """
    return run(attempt, RetryPolicy(attempts), once_more=(CorruptDataError,))


def _through(gate: ConcurrencyLimiter, attempt: Callable[[], T], ends: float) -> T:
    epoch = gate.enter(ends)
    answered = throttled = succeeded = False
    try:
        value = attempt()
        answered = succeeded = True
        return value
    except StoreError as error:
        answered, throttled = error.action is not Action.OUTAGE, error.action is Action.THROTTLE
        raise
    finally:
        gate.leave(epoch, answered=answered, throttled=throttled, succeeded=succeeded)


def _wait(action: Action, number: int, asked_s: float, ends: float) -> None:
    low, high = {
        Action.THROTTLE: (FIRST_THROTTLED_DELAY_S, LONGEST_THROTTLED_DELAY_S),
        Action.OUTAGE: (FIRST_DELAY_S, LONGEST_OUTAGE_DELAY_S),
    }.get(action, (FIRST_DELAY_S, LONGEST_DELAY_S))
    # Wait at least as long as the service asks for, up to `high`: a service may ask for an hour.
    delay = min(asked_s, high) + random.uniform(0, min(low * 2.0 ** min(number - 1, 30), high))
    pause(max(min(delay, ends - time.monotonic()), 0))


def pause(seconds: float) -> None:
    """Sleep for `seconds`, or less if this thread's work is given up or cut off meanwhile."""
    stop, cut = _stop.get(), current_cut()
    if cut is None:
        (stop or threading.Event()).wait(seconds)
        return
    ends = time.monotonic() + seconds
    while not stopped() and (left := ends - time.monotonic()) > 0:
        cut.wait(min(left, _POLL_S))


def stopped() -> bool:
    """Return True if this thread's work has been given up or cut off."""
    stop, cut = _stop.get(), current_cut()
    return (stop is not None and stop.is_set()) or (cut is not None and cut.is_made)
