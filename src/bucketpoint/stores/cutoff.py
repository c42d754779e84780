"""Requests that are cut off: those that move too few bytes, and those whose answers are no longer needed.

An attempt of a request below the minimum throughput (the floor) is cut off, and `retry` repeats it. Only the time in
which a thread waits for the network counts, not the time in which a service computes its answer or the caller works
between two reads.

If a server accepts a connection and never answers, the thread that reads from it is blocked in the kernel, where it
cannot check a flag. So a request is cancelled by shutting down its connection. Calls that do not use bucketpoint's
connections, such as look-ups of credentials or host names, run on another thread, which a cancellation abandons.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import http.client
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from bucketpoint.errors import EndpointError
from bucketpoint.forks import Event

T = TypeVar("T")

# -- minimum throughput ------------------------------------------------------------------------------------------------

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
_current_pace: ContextVar[Throughput | None] = ContextVar("bucketpoint_pace", default=None)


def current_end() -> float:
    """Return the time on the monotonic clock at which retries on this thread end."""
    return _limits.get().ends


@contextlib.contextmanager
def limited(**changes: Any) -> Iterator[None]:
    """Change the `Limits` on the requests of the block, on this thread."""
    token = _limits.set(replace(_limits.get(), **changes))
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
    """Measure the request that the block sends through a pool of `make_cuttable`, and apply the limits of `limited`."""
    pace = Throughput(_limits.get())
    token = _current_pace.set(pace)
    try:
        yield pace
    finally:
        _current_pace.reset(token)


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
            cast("_PacedReader", reader).pace = _current_pace.get()


def pace_of(reply: http.client.HTTPResponse) -> Throughput:
    """Return the pace of the attempt that `reply` answers, for a reader that bypasses http.client."""
    return getattr(getattr(reply.fp, "raw", None), "pace", None) or Throughput(_NONE)


# -- cancellation ------------------------------------------------------------------------------------------------------

_LEAST_S = 0.05
_POLL_S = 0.1

_current_cut: ContextVar[RequestCanceller | None] = ContextVar("bucketpoint_cut", default=None)

_caller: ContextVar[int | None] = ContextVar("bucketpoint_caller", default=None)
"""Identifier of the thread that waits for the current thread in `give_up_when_cut`."""


class RequestCanceller:
    """Cancels the requests of one piece of work, on all of the threads that make them.

    Args:
        ends: time on the monotonic clock after which no request waits for a connection or for bytes.
    """

    def __init__(self, ends: float) -> None:
        self._ends = ends
        self._made = Event()
        self._lock = threading.Lock()
        self._held: dict[int, Any] = {}
        self._called: dict[int, str] = {}

    @property
    def is_made(self) -> bool:
        return self._made.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep for `seconds`, or less if `make` is called meanwhile. Returns True if `make` was called."""
        return self._made.wait(seconds)

    def make(self) -> None:
        """Cancel the requests in progress. May be called again, for connections that were still being opened."""
        self._made.set()
        with self._lock:
            held = list(self._held.values())
        for connection in held:
            # A pooled connection may by now carry a request of other work: that request fails and is sent again.
            sock = getattr(connection, "sock", None)
            if isinstance(sock, socket.socket):
                # `SSLSocket.shutdown` would clear the TLS object that another thread is still reading from.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

    @contextlib.contextmanager
    def over_here(self) -> Iterator[None]:
        """Make the requests of the block cancellable, including those on threads that inherit its context."""
        token = _current_cut.set(self)
        try:
            yield
        finally:
            _current_cut.reset(token)

    @property
    def called(self) -> str | None:
        """Name of the call of `give_up_when_cut` that has run longest, or None."""
        return next(iter(dict(self._called).values()), None)

    def left_s(self) -> float:
        return max(self._ends - time.monotonic(), _LEAST_S)

    def hold(self, connection: Any) -> None:
        """Record `connection` as the one that carries the current thread's request."""
        with self._lock:
            self._held[_caller.get() or threading.get_ident()] = connection


def current_cut() -> RequestCanceller | None:
    """Return the `RequestCanceller` of the current thread's requests, or None."""
    return _current_cut.get()


def give_up_when_cut(call: Callable[[], T], what: str) -> T:
    """Call a function that may block and cannot be interrupted, but stop waiting when the current work is cancelled.

    With a `RequestCanceller`, the function runs on another thread, which is abandoned after `make`: so the function
    must not write into the caller's memory.

    Args:
        what: name of the call, for the error.

    Raises:
        EndpointError: the work was cancelled before the call ended.
    """
    cut = _current_cut.get()
    if cut is None or _caller.get() is not None:
        return call()
    outcome: list[tuple[T | None, BaseException | None]] = []
    done = Event()

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # noqa: BLE001 (raised by the caller)
            outcome.append((None, error))
        finally:
            done.set()

    here, context = threading.get_ident(), contextvars.copy_context()
    context.run(_caller.set, here)
    threading.Thread(target=context.run, args=(run,), name="bucketpoint-request", daemon=True).start()
    cut._called[here] = what
    try:
        while not done.wait(_POLL_S):
            if cut.is_made:
                raise EndpointError(
                    f"{what} was still running when the work was cancelled",
                    remedy="Check the network, its names (DNS) and the source of credentials, or allow more time",
                )
    finally:
        del cut._called[here]
    value, error = outcome.pop()
    try:
        if error is not None:
            raise error
        return value  # type: ignore[return-value]
    finally:
        # Otherwise the error and this frame, which its traceback holds, keep each other alive.
        del error


def make_cuttable(manager: Any) -> None:
    """Make requests through this urllib3 `PoolManager` cancellable, and enforce the floor of throughput."""
    manager.pool_classes_by_scheme = {
        scheme: _cuttable(pool) for scheme, pool in manager.pool_classes_by_scheme.items()
    }


@functools.cache
def _cuttable(pool: type[Any]) -> type[Any]:
    class PacedConnection(pool.ConnectionCls):  # type: ignore[misc, name-defined]
        response_class = _PacedResponse

        def send(self, data: Any) -> None:
            pace = _current_pace.get()
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

    class CuttablePool(pool):  # type: ignore[misc]
        ConnectionCls = PacedConnection

        def _make_request(self, conn: Any, *args: Any, **kwargs: Any) -> Any:
            cut = _current_cut.get()
            if cut is not None:
                if cut.is_made:
                    raise TimeoutError("the request was cancelled before it was sent")
                cut.hold(conn)
            with pacing() as pace:
                limits: Any = kwargs.get("timeout")
                left = min(pace.longest_wait_s(), math.inf if cut is None else cut.left_s())
                if left < math.inf and hasattr(limits, "connect_timeout"):
                    both = (limits.connect_timeout, limits.read_timeout)
                    connect, read = (min(one, left) if isinstance(one, int | float) else left for one in both)
                    kwargs["timeout"] = type(limits)(connect=connect, read=read)
                return super()._make_request(conn, *args, **kwargs)

    return CuttablePool
