"""`FaultProxy`: an HTTP proxy on this machine, in threads of this process, between a client and a store.

The script may be changed at any time, and requests are counted.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import threading
from types import TracebackType
from typing import Any

from kit.faults import Script
from kit.http import Pace, Stream, Upstream, Wire
from kit.proxied_connection import Board, Connection, Counts, RecordedRequest


class FaultProxy:
    """HTTP proxy in front of one store, on a port of this machine's loopback. Use it as a context manager.

    A client takes `url` for its endpoint. The Host header passes as the client signed it, which MinIO, moto and other
    stores that do not check it accept.

    Args:
        upstream: URL of the store, such as `http://127.0.0.1:9000`.
        script: the faults, and the requests that meet them.
        wire: delays and caps that all requests share.
        host_header: see `Upstream`.
    """

    def __init__(
        self,
        upstream: str,
        script: Script | None = None,
        *,
        wire: Wire | None = None,
        host_header: str | None = None,
    ) -> None:
        self.upstream = Upstream.of(upstream, host_header=host_header)
        self.board = Board(script or Script())
        self._wire = wire or Wire()
        self._total = Pace(self._wire.total_bytes_per_s)
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.port = 0

    # -- what a test does with it -------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """URL of the proxy itself, to be used as an `endpoint_url`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def exchanges(self) -> list[RecordedRequest]:
        """Exchanges since the last `clear`, in the order in which they ended."""
        return self.board.settled()

    @property
    def counts(self) -> Counts:
        """Counts of the exchanges since the last `clear`."""
        counts = Counts()
        for exchange in self.exchanges:
            counts.add(exchange)
        return counts

    def play(self, script: Script) -> None:
        """Begin another script, and let requests pass again after a `Kill`."""
        self.board.play(script)

    def clear(self) -> None:
        """Forget the finished exchanges and their counts."""
        self.board.clear()

    def cut(self) -> None:
        """Drop every connection, as the death of the machine at the other end would."""
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    # -- running ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> FaultProxy:  # noqa: PYI034 (Self needs Python 3.11)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=accept, args=(self._listener, self._serve), name="fault-proxy", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            # Closing alone does not wake a thread that waits in accept.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _serve(self, accepted: socket.socket) -> None:
        with self._lock:
            self._open.add(accepted)
        try:
            serve(accepted, None, self.upstream, self._wire, self._total, self.board)
        finally:
            with self._lock:
                self._open.discard(accepted)


_numbers = itertools.count()


def accept(listener: socket.socket, serve_one: Any) -> None:
    """Start a thread for every connection, until the listener is closed."""
    while True:
        try:
            accepted, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=serve_one, args=(accepted,), name="fault-proxy-connection", daemon=True).start()


def serve(
    accepted: socket.socket,
    context: ssl.SSLContext | None,
    upstream: Upstream,
    wire: Wire,
    total: Pace,
    board: Board,
) -> None:
    """Serve one connection until it ends."""
    name = f"{os.getpid()}-{next(_numbers)}"
    with contextlib.suppress(OSError), accepted:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = context.wrap_socket(accepted, server_side=True) if context is not None else accepted
        with client:
            Connection(Stream(client), upstream, wire, total, board, name).serve()
