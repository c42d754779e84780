"""The throttle of a pruner beside training: the pruner rests after every request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from bucketpoint.stores import DeleteFailure, ExpiringDeletes, Store

RESTS = 19
"""Length of a rest, as a multiple of the time that the pruner worked: one part in twenty is work.

Wall time, not CPU time: where training keeps the interpreter's lock or the cores busy, a request takes longer, and so
does the rest after it.
"""

LONGEST_REST_S = 1.0
"""Longest rest in seconds. Nothing tells this thread that the program ends, so a longer rest would hold up the exit."""

REST_AT_MOST_S = 300.0
"""Most seconds of rest in one round: a third of the time of the pruner's lock, so that a round ends within the lock."""

PAGE = 1000
"""Keys that one request lists or deletes."""


class Throttle:
    """Rests of one thread. Before `begin`, and after `hurry`, there are none.

    Args:
        clock: returns seconds, as `time.monotonic`.
        wait: rests for the given seconds; by default it also ends at `hurry`.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, wait: Callable[[float], object] | None = None
    ) -> None:
        self._hurried = threading.Event()
        self._clock = clock
        self._wait = wait or self._hurried.wait
        self._left = 0.0
        self._since = clock()

    def begin(self) -> None:
        """Note that a round of work begins."""
        self._left, self._since = REST_AT_MOST_S, self._clock()

    def hurry(self) -> None:
        """Stop resting until `calm`, because somebody waits. A rest under way ends. Callable from any thread."""
        self._hurried.set()

    def calm(self) -> None:
        """Allow rests again: nobody waits any more."""
        self._hurried.clear()

    def rest(self) -> None:
        """Rest for the work done since the last rest."""
        # No rest once the main thread has ended: the program then waits for this thread.
        if not self._hurried.is_set() and threading.main_thread().is_alive():
            rest = min(RESTS * (self._clock() - self._since), LONGEST_REST_S, self._left)
            if rest > 0:
                self._left -= rest
                self._wait(rest)
        self._since = self._clock()


def delete_in_pages(store: Store, keys: Sequence[str], after: Callable[[int], object]) -> list[DeleteFailure]:
    """Delete keys, `PAGE` of them in each request.

    Args:
        after: called after each request with the number of keys that it deleted.
    """
    failures: list[DeleteFailure] = []
    for start in range(0, len(keys), PAGE):
        page = keys[start : start + PAGE]
        refused = store.delete(page)
        failures += refused
        after(len(page) - len(refused))
    return failures


def paced(store: Store, pace: Throttle) -> Store:
    """Wrap a store so that it rests after each request."""
    return cast("Store", _PacedStore(store, pace))


class _PacedStore:
    def __init__(self, store: Store, pace: Throttle) -> None:
        self._store = store
        self._pace = pace

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        if not callable(attribute):
            return attribute

        def call(*given: Any, **named: Any) -> Any:
            answer = attribute(*given, **named)
            if isinstance(answer, Iterator):
                return self._page_by_page(answer)
            self._pace.rest()
            return answer

        return call

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        return delete_in_pages(self._store, keys, lambda _: self._pace.rest())

    def expiring_delete(self, key: str, seconds: int) -> Callable[[], bool]:
        send = cast("ExpiringDeletes", self._store).expiring_delete(key, seconds)

        def paced_send() -> bool:
            gone = send()
            self._pace.rest()
            return gone

        # No rest before the signed request is sent: it expires.
        return paced_send

    def _page_by_page(self, found: Iterator[Any]) -> Iterator[Any]:
        for number, one in enumerate(found, 1):
            yield one
            if number % PAGE == 0:
                self._pace.rest()
        self._pace.rest()
