"""Minimum throughput (the floor): an attempt of a request that moves too few bytes is cut off, and `retry` repeats it.

Only the time in which a thread waits for the network counts, not the time in which a service computes its answer or the
caller works between two reads.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import math
import socket
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

FLOOR_BYTES_PER_S = 1000
WINDOW_S = 60.0
"""Seconds of waiting after which an attempt below the floor is cut off."""

LATE_S = 5.0
"""Seconds that replace `WINDOW_S` after the request's deadline, because no attempt follows. They then also limit the
time without a byte."""


class TooSlowError(OSError):
    """An attempt of a request was cut off, because it moved fewer bytes than the floor."""


@dataclass(frozen=True)
class Limits:
    """Limits on an attempt.

    Attributes:
        ends: time on the monotonic clock at which the retries of the request end.
        computes: the service may compute for minutes before and during its answer. S3 then sends occasional blanks:
            https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html
        silence_s: returns the limit on seconds without a byte; called for each attempt.
    """

    ends: float = math.inf
    computes: bool = False
    silence_s: Callable[[], float] = lambda: math.inf


_NONE = Limits()

_limits: ContextVar[Limits] = ContextVar("bucketpoint_limits", default=_NONE)
_current: ContextVar[Throughput | None] = ContextVar("bucketpoint_pace", default=None)


def current_end() -> float:
    """Return the time on the monotonic clock at which retries on this thread end."""
    return _limits.get().ends


@contextlib.contextmanager
def until(ends: float, *, computes: bool = False) -> Iterator[None]:
    """Limit the requests of the block, on this thread: see `Limits`."""
    token = _limits.set(replace(_limits.get(), ends=ends, computes=computes))
    try:
        yield
    finally:
        _limits.reset(token)


@contextlib.contextmanager
def silent_for(seconds: Callable[[], float]) -> Iterator[None]:
    """Cut off each attempt of the block, on this thread, in which the store is silent for longer than `seconds()`."""
    token = _limits.set(replace(_limits.get(), silence_s=seconds))
    try:
        yield
    finally:
        _limits.reset(token)


class Throughput:
    """Throughput of one attempt of a request, and of the body of its reply."""

    __slots__ = ("_bytes", "_limits", "_seconds", "_silence_s")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._silence_s = limits.silence_s()
        self._bytes = 0
        self._seconds = 0.0

    def longest_wait_s(self) -> float:
        """Return the longest time for which the attempt may wait for a connection, or for a byte."""
        if self._limits.computes:
            return math.inf
        return min(self._silence_s, max(self._limits.ends - time.monotonic(), LATE_S))

    def moved(self, nbytes: int, seconds: float) -> None:
        """Add bytes that moved, and the seconds that the thread waited for them.

        Raises:
            TooSlowError: the attempt is below the floor.
        """
        self._bytes += nbytes
        self._seconds += seconds
        if self._seconds < LATE_S:
            return
        if self._bytes >= FLOOR_BYTES_PER_S * self._seconds:
            self._bytes, self._seconds = 0, 0.0
        elif not self._limits.computes and (self._seconds >= WINDOW_S or time.monotonic() >= self._limits.ends):
            raise TooSlowError(
                f"only {self._bytes} bytes moved in {self._seconds:.0f} s, fewer than {FLOOR_BYTES_PER_S} a second"
            )


@contextlib.contextmanager
def pacing() -> Iterator[Throughput]:
    """Measure the request that the block sends through a `paced` connection, and apply the limits of `until`."""
    pace = Throughput(_limits.get())
    token = _current.set(pace)
    try:
        yield pace
    finally:
        _current.reset(token)


class _PacedReader(socket.SocketIO):
    """Reader of a reply's head, and of a body that http.client receives."""

    pace: Throughput | None = None
    _begun = False

    def readinto(self, buffer: Any) -> int | None:
        started = time.monotonic()
        count = super().readinto(buffer)
        if self.pace is not None:
            # The first read waits for the service to compute its answer.
            self.pace.moved(count or 0, time.monotonic() - started if self._begun else 0.0)
        self._begun = True
        return count


class _PacedResponse(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        reader = getattr(self.fp, "raw", None)
        if type(reader) is socket.SocketIO:
            reader.__class__ = _PacedReader
            cast("_PacedReader", reader).pace = _current.get()


def pace_of(reply: http.client.HTTPResponse) -> Throughput:
    """Return the pace of the attempt that `reply` answers, for a reader that bypasses http.client."""
    return getattr(getattr(reply.fp, "raw", None), "pace", None) or Throughput(_NONE)


@functools.cache
def paced(connection: type[Any]) -> type[Any]:
    """Return a subclass of a urllib3 connection whose requests are measured: see `pacing`."""

    class PacedConnection(connection):  # type: ignore[misc]
        response_class = _PacedResponse

        def send(self, data: Any) -> None:
            pace = _current.get()
            if pace is None or self.sock is None or not isinstance(data, bytes | memoryview):
                super().send(data)
                return
            # Not `sendall`: its timeout covers all bytes of a call, so it would cut off a slow but moving transfer.
            left = memoryview(data)
            while left.nbytes:
                started = time.monotonic()
                count = self.sock.send(left)
                pace.moved(count, time.monotonic() - started)
                left = left[count:]

    return PacedConnection
