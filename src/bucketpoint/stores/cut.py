"""Breaking off requests that are under way, whose answers nobody waits for any more. Makes no requests.

A store that has taken a connection and says nothing holds a thread in the kernel, where no flag reaches it. So what is
to be broken off is the connection.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_LEAST_S = 0.05

_current: ContextVar[Cut | None] = ContextVar("bucketpoint_cut", default=None)


class Cut:
    """What breaks off the requests of one piece of work, on whichever threads they are.

    Args:
        ends: no connection is waited for after this, by the monotonic clock.
    """

    def __init__(self, ends: float) -> None:
        self._ends = ends
        self._made = threading.Event()
        self._lock = threading.Lock()
        self._held: dict[int, Any] = {}

    @property
    def is_made(self) -> bool:
        return self._made.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep, or less if the cut is made meanwhile. Whether it is."""
        return self._made.wait(seconds)

    def make(self) -> None:
        """Break off what is under way. May be made again, for connections that were only being opened."""
        self._made.set()
        with self._lock:
            held = list(self._held.values())
        for connection in held:
            # One that this work is done with may be at another's service by now, whose request is then sent again.
            _shut_down(connection)

    @contextlib.contextmanager
    def over_here(self) -> Iterator[None]:
        """Requests of the block can be cut off, those on threads that it starts included."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def left_s(self) -> float:
        return max(self._ends - time.monotonic(), _LEAST_S)

    def hold(self, connection: Any) -> None:
        """The current thread's request goes over this connection now."""
        with self._lock:
            self._held[threading.get_ident()] = connection


def current_cut() -> Cut | None:
    """What may break off the requests of the current thread."""
    return _current.get()


def make_cuttable(manager: Any) -> None:
    """Requests through this urllib3 `PoolManager` can be cut off."""
    manager.pool_classes_by_scheme = {
        scheme: _cuttable(pool) for scheme, pool in manager.pool_classes_by_scheme.items()
    }


@functools.cache
def _cuttable(pool: type[Any]) -> type[Any]:
    class CuttablePool(pool):  # type: ignore[misc]
        def _make_request(self, conn: Any, *args: Any, **kwargs: Any) -> Any:
            cut = _current.get()
            if cut is not None:
                if cut.is_made:
                    raise TimeoutError("cut off before it was sent")
                cut.hold(conn)
                limits = kwargs.get("timeout")
                if hasattr(limits, "connect_timeout"):
                    kwargs["timeout"] = _shortened(limits, cut.left_s())
            return super()._make_request(conn, *args, **kwargs)

    return CuttablePool


def _shortened(limits: Any, left_s: float) -> Any:
    return type(limits)(connect=_least(limits.connect_timeout, left_s), read=_least(limits.read_timeout, left_s))


def _least(limit: Any, left_s: float) -> float:
    return min(limit, left_s) if isinstance(limit, int | float) else left_s


def _shut_down(connection: Any) -> None:
    sock = getattr(connection, "sock", None)
    if isinstance(sock, socket.socket):
        # Not by the TLS layer's own method, which takes from a thread that reads what it reads from.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
