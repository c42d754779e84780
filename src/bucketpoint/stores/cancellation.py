"""Cancellation of requests in progress whose answers are no longer needed.

If a server accepts a connection and never answers, the thread that reads from it is blocked in the kernel, where it
cannot check a flag. So a request is cancelled by shutting down its connection. Calls that do not use bucketpoint's
connections, such as look-ups of credentials or host names, run on another thread, which a cancellation abandons.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from bucketpoint.errors import EndpointError
from bucketpoint.stores.pace import paced, pacing

T = TypeVar("T")

_LEAST_S = 0.05
_POLL_S = 0.1

_current: ContextVar[RequestCanceller | None] = ContextVar("bucketpoint_cut", default=None)

_caller: ContextVar[int | None] = ContextVar("bucketpoint_caller", default=None)
"""Identifier of the thread that waits for the current thread in `give_up_when_cut`."""


class RequestCanceller:
    """Cancels the requests of one piece of work, on all of the threads that make them.

    Args:
        ends: time on the monotonic clock after which no request waits for a connection or for bytes.
    """

    def __init__(self, ends: float) -> None:
        self._ends = ends
        self._made = threading.Event()
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
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

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
    return _current.get()


def give_up_when_cut(call: Callable[[], T], what: str) -> T:
    """Call a function that may block and cannot be interrupted, but stop waiting when the current work is cancelled.

    With a `RequestCanceller`, the function runs on another thread, which is abandoned after `make`: so the function
    must not write into the caller's memory.

    Args:
        what: name of the call, for the error.

    Raises:
        EndpointError: the work was cancelled before the call ended.
    """
    cut = _current.get()
    if cut is None or _caller.get() is not None:
        return call()
    outcome: list[tuple[T | None, BaseException | None]] = []
    done = threading.Event()

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
    """Make requests through this urllib3 `PoolManager` cancellable, and enforce the floor of `pace`."""
    manager.pool_classes_by_scheme = {
        scheme: _cuttable(pool) for scheme, pool in manager.pool_classes_by_scheme.items()
    }


@functools.cache
def _cuttable(pool: type[Any]) -> type[Any]:
    class CuttablePool(pool):  # type: ignore[misc]
        ConnectionCls = paced(pool.ConnectionCls)

        def _make_request(self, conn: Any, *args: Any, **kwargs: Any) -> Any:
            cut = _current.get()
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
