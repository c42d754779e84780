"""Log messages about outages: times during which requests to one store fail and are retried."""

from __future__ import annotations

import logging
import threading
import time
from urllib.parse import urlsplit

from bucketpoint.errors import StoreError

logger = logging.getLogger(__name__)

SILENT_S = 5.0
"""Seconds for which a request is retried before anything is logged: most failures pass sooner."""

REPEAT_S = 60.0
"""Seconds between the warnings of one outage."""


class Outage:
    """One store's outage: the requests, from all threads, that have failed and are being retried.

    An outage begins with the first request that fails, and ends when the last failing request succeeds or is given up.
    It is logged for all threads together.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._failing = 0
        self._since = 0.0
        self._told: float | None = None
        self._error: StoreError | None = None

    def enter(self, error: StoreError, now: float) -> None:
        """Record that a request has failed for the first time."""
        with self._lock:
            self._error = error
            if not self._failing:
                self._since, self._told = now, None
            self._failing += 1

    def failed(self, error: StoreError, since: float, now: float) -> None:
        """Record that a request that first failed at `since` has failed again. Logs a warning if one is due."""
        with self._lock:
            self._error = error
            if now - since < SILENT_S or (self._told is not None and now - self._told < REPEAT_S):
                return
            self._told = now
            seconds = now - self._since
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() - seconds))
        logger.warning(
            "requests to %s have failed for %.0f s, since %s, and are retried: %s: %s [url=%s]",
            self._store,
            seconds,
            began,
            type(error).__name__,
            error.message,
            error.url,
        )

    def ongoing(self, now: float) -> tuple[str, str | None] | None:
        """Return what fails and the remedy, if the outage has lasted for `SILENT_S`."""
        with self._lock:
            error, seconds = self._error, now - self._since
            if error is None or not self._failing or seconds < SILENT_S:
                return None
        # Cut, because each rank sends it to the others.
        text = f"{type(error).__name__}: {error.message}"[:250]
        return f"requests to {self._store} have failed for {seconds:.0f} s: {text}", error.remedy

    def leave(self, now: float, *, succeeded: bool) -> None:
        """Record that a request that had failed has succeeded, or was given up."""
        with self._lock:
            self._failing -= 1
            over = succeeded and not self._failing and self._told is not None
            seconds = now - self._since
        if over:
            logger.info("requests to %s succeed again, after %.0f s", self._store, seconds)


def store_of(error: StoreError) -> str:
    """Return the name of the store that an error concerns: scheme and bucket of the error's URL."""
    if error.url is None:
        return "the store"
    parts = urlsplit(error.url)
    return f"{parts.scheme or 'file'}://{parts.netloc}"
