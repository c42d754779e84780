"""Bodies of HTTP requests and replies in the caller's memory, passed to and from the TLS layer without a copy."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import http.client
import io
import itertools
import socket
import ssl
import termios
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from bucketpoint.forks import process_lock
from bucketpoint.stores.base import Buffers
from bucketpoint.stores.cutoff import Throughput, pace_of

PIECE_BYTES = 256 * 1024
"""Bytes given to the connection in one call."""

SMALL_BYTES = 32 * 1024
"""Size below which neighbouring buffers are joined: a TLS record and a system call for each cost more than a copy."""

_READ_BYTES = 1 << 20
_WORTH_A_TURN = 64 << 10
"""A thread waits for a turn if at least this many bytes have arrived on its TLS connection."""

_turns = itertools.cycle([process_lock() for _ in range(3)])
"""A thread holds the next of these locks while bytes that have arrived are taken out of TLS. Each record of 16 KiB
needs the interpreter's lock: on 16 cores 24 threads received 1.3 GB/s with 1.75 CPU s a GB, and 3 threads 2.1 GB/s with
1.1 CPU s a GB. An interrupt can leave a semaphore's count too low, so these are locks."""


def _runs(buffers: Buffers) -> Iterator[list[memoryview]]:
    """Group the buffers: each large one alone, and small neighbours together, up to about `PIECE_BYTES`."""
    run: list[memoryview] = []
    size = 0
    for view in buffers:
        large = view.nbytes >= SMALL_BYTES
        if run and (large or size >= PIECE_BYTES):
            yield run
            run, size = [], 0
        if large:
            yield [view]
        elif view.nbytes:
            run.append(view)
            size += view.nbytes
    if run:
        yield run


def scatter(data: memoryview, buffers: Buffers) -> None:
    """Copy `data` into `buffers`, in order."""
    for view in buffers:
        if not data:
            break
        room = view[: len(data)]
        room[:] = data[: len(room)]
        data = data[len(room) :]


class Pieces:
    """A request body in the caller's memory. The HTTP library iterates over it once for each attempt.

    It has `seek`, because botocore rewinds a body before a retry; and no `read`, because urllib3 would then copy the
    body block by block.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._size = sum(view.nbytes for view in buffers)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[memoryview | bytes]:
        """Yield pieces of at most about `PIECE_BYTES`: large buffers sliced, runs of small ones joined."""
        for run in _runs(self._buffers):
            if len(run) > 1:
                yield b"".join(run)
                continue
            for start in range(0, run[0].nbytes, PIECE_BYTES):
                yield run[0][start : start + PIECE_BYTES]

    def seek(self, offset: int, whence: int = 0) -> int:
        return 0


class BrokenBody(OSError):
    """The body of a reply ended before its announced length."""


def _socket_of(body: Any, size: int) -> socket.socket | None:
    """Return the socket under a reply of `size` bytes; None if a layer above the socket has an unknown type."""
    raw = getattr(body, "_raw_stream", None)
    reply = getattr(raw, "_fp", None)
    if size == 0 or not hasattr(raw, "release_conn") or not isinstance(reply, http.client.HTTPResponse):
        return None
    if reply.chunked or reply.length != size or not isinstance(reply.fp, io.BufferedReader):
        return None
    if not hasattr(reply, "_close_conn"):
        return None
    sock = getattr(reply.fp.raw, "_sock", None)
    return sock if isinstance(sock, socket.socket) else None


class Receiver:
    """Reception of the `nbytes` bytes of a `StreamingBody`, in one call or in several: a `RangeReply`.

    Args:
        translated: calls a function, and translates the exceptions of the client library.
    """

    def __init__(self, body: Any, nbytes: int, translated: Callable[[Callable[[], None]], None]) -> None:
        self._body = body
        self._translated = translated
        self._left = nbytes
        self._wire: _Wire | None = None
        self._begun = False

    def receive(self, buffers: Buffers) -> None:
        self._translated(lambda: self._fill(buffers))

    def _fill(self, buffers: Buffers) -> None:
        """Fill `buffers` with the next bytes. After the last ones, return the connection to the pool.

        Raises:
            BrokenBody, OSError, ssl.SSLError, HTTPException, urllib3 and botocore errors: the body broke off. The
                connection is closed.
        """
        nbytes = sum(view.nbytes for view in buffers)
        if nbytes > self._left:
            # The connection is closed, or serves another request.
            raise BrokenBody("the body has ended, or was dropped")
        try:
            if not self._begun:
                self._begun, self._wire = True, _Wire.of(self._body, self._left)
            fill = self._wire.fill if self._wire else functools.partial(_fill_from, self._body.readinto)
            for run in _runs(buffers):
                target = run[0] if len(run) == 1 else memoryview(bytearray(sum(view.nbytes for view in run)))
                fill(target)
                if len(run) > 1:
                    scatter(target, run)
            self._left -= nbytes
            if self._left > 0:
                return
            if not self._wire and self._body.read():
                raise BrokenBody("the body is longer than was announced")
            if self._wire:
                self._wire.finish()
        except BaseException:
            self._left = 0
            discard(self._body)
            raise

    def drop(self) -> None:
        """Close the connection, unless the whole body has been received."""
        if self._left > 0:
            self._left = 0
            discard(self._body)


def discard(body: Any) -> None:
    """Drop a reply without reading its body, and close the connection, which still carries the rest of the body."""
    body.close()
    raw = getattr(body, "_raw_stream", None)
    release = getattr(raw, "release_conn", None)
    if release is not None:
        release()


def _fill_from(take: Callable[[memoryview], int], view: memoryview, pace: Throughput | None = None) -> None:
    done = 0
    size = view.nbytes
    while done < size:
        started = time.monotonic()
        count = take(view[done:])
        if not count:
            raise BrokenBody("the body ended before its announced length")
        done += count
        if pace is not None:
            pace.moved(count, time.monotonic() - started)


def _fill_in_turns(sock: socket.socket, take: Callable[[memoryview], int], view: memoryview, pace: Throughput) -> None:
    """Fill `view` from a TLS connection. A thread that has a turn never waits for the network."""
    count = array("i", [0])
    while view:
        fcntl.ioctl(sock, termios.FIONREAD, count)
        # At least this much content has arrived in whole records: small records add up to 3 % to their content.
        ready = count[0] - (count[0] >> 5) - (32 << 10)
        piece = view[: max(ready, _WORTH_A_TURN)]
        with next(_turns) if ready >= _WORTH_A_TURN else contextlib.nullcontext():
            _fill_from(take, piece, pace)
        view = view[len(piece) :]


class _Wire:
    """The socket under a reply, read directly, without the buffering of urllib3 and http.client.

    A TLS record is 16 KiB, so the read loop runs 60,000 times per gigabyte. Through `HTTPResponse.readinto`,
    `BufferedReader`, `SocketIO` and `SSLSocket.recv_into`, Python alone takes 0.1 s for that. Reading directly uses
    private attributes: if any of them differs from the known versions, `of` returns None, and `readinto` is used.
    """

    def __init__(
        self, raw: Any, reply: http.client.HTTPResponse, fill: Callable[[memoryview, Throughput], None]
    ) -> None:
        self._raw = raw
        self._reply = reply
        self._fill = fill
        self._pace = pace_of(reply)
        # The buffered reader holds bytes of the body that arrived in one read with the headers.
        self._buffered = len(reply.fp.peek(1))

    @classmethod
    def of(cls, body: Any, size: int) -> _Wire | None:
        sock = _socket_of(body, size)
        if sock is None:
            return None
        raw = body._raw_stream
        read = getattr(getattr(sock, "_sslobj", None), "read", None) if isinstance(sock, ssl.SSLSocket) else None
        if read is None:
            return cls(raw, raw._fp, functools.partial(_fill_from, sock.recv_into))
        return cls(raw, raw._fp, functools.partial(_fill_in_turns, sock, functools.partial(read, _READ_BYTES)))

    def fill(self, view: memoryview) -> None:
        count = min(self._buffered, view.nbytes)
        if count:
            self._reply.fp.readinto(view[:count])
            self._buffered -= count
        self._fill(view[count:], self._pace)

    def finish(self) -> None:
        """Mark the reply as read in http.client, and the connection as free in urllib3."""
        self._reply.length = 0
        self._reply._close_conn()  # type: ignore[attr-defined]
        self._raw.release_conn()
