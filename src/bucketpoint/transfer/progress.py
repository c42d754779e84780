"""Counters of transferred bytes and requests, for callbacks, the log line and the tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Progress of one save or load of this rank, in bytes of data objects. The commit is not counted.

    Attributes:
        phase: `"save"` or `"load"`; for a command `"convert"`, `"cp"` or `"verify"`.
        url: URL of the checkpoint.
        done_bytes: bytes transferred so far.
        total_bytes: bytes to transfer in all; 0 while not known.
        finished: True in the last event.
    """

    phase: str
    url: str
    done_bytes: int
    total_bytes: int
    finished: bool = False


ProgressCallback = Callable[[Progress], None]


class Meter:
    """Thread-safe counters of one save or load, reported to a callback as they grow."""

    def __init__(self, phase: str, url: str, total_bytes: int, callback: ProgressCallback | None) -> None:
        self._phase = phase
        self._url = url
        self._callback = callback
        self._lock = threading.Lock()
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.requests = 0
        self.node_bytes = 0
        self._repeated = 0

    def expect(self, nbytes: int) -> None:
        """Set the total to the bytes already done plus `nbytes`."""
        self.total_bytes = self.done_bytes + nbytes

    def begin_again(self) -> None:
        """Ignore the next `done_bytes` bytes that `add` is called for: they are transferred a second time."""
        with self._lock:
            self._repeated = self.done_bytes

    def add(self, nbytes: int, *, requests: int = 1, from_node: int = 0) -> None:
        """Count transferred bytes and requests. `from_node`: how many of the bytes were read from the node's copy."""
        with self._lock:
            self.node_bytes += from_node
            again = min(nbytes, self._repeated)
            self._repeated -= again
            self.done_bytes += nbytes - again
            self.requests += requests
            # Called with the lock held, so that a callback never receives a smaller count than before.
            self._report(finished=False)

    def finish(self) -> None:
        with self._lock:
            self._report(finished=True)

    def _report(self, *, finished: bool) -> None:
        if self._callback is not None:
            self._callback(Progress(self._phase, self._url, self.done_bytes, self.total_bytes, finished))
