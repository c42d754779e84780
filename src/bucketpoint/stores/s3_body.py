"""How bodies leave the caller's memory and arrive in it, with no copy on the way to the TLS layer. No requests."""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

from bucketpoint.errors import TransientStoreError
from bucketpoint.stores.base import Buffers

PIECE_BYTES = 256 * 1024
"""Bytes handed to the socket in one call. Python's deadline covers a whole `sendall`, however much it sends: with the
10 s connect timeout that holds for a new connection's first request, a connection that gets 26 KB/s still passes."""

SMALL_BYTES = 32 * 1024
"""Below this, neighbouring buffers are joined: a TLS record and a system call each would cost more than the copy."""

_READ_BYTES = 1 << 20


class OutgoingBody:
    """The file that botocore wants to see as a `Body`: it measures, rewinds and, where payloads are signed, reads it.

    What is sent is not read from here: see `send_from_memory`.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = [view for view in buffers if view.nbytes]
        self._size = sum(view.nbytes for view in self.buffers)
        self._position = 0

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = min(max(base + offset, 0), self._size)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = self._size - self._position
        wanted = left if size is None or size < 0 else min(size, left)
        taken: list[memoryview] = []
        start = 0
        need = wanted
        for view in self.buffers:
            if not need:
                break
            skip = max(self._position - start, 0)
            if skip < view.nbytes:
                piece = view[skip : skip + need]
                taken.append(piece)
                need -= piece.nbytes
                self._position += piece.nbytes
            start += view.nbytes
        return b"".join(taken)


class _Pieces:
    """What urllib3 iterates over and sends. It has `seek`, for botocore's rewind before a retry; with a `read`
    urllib3 would copy it block by block instead."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers

    def __iter__(self) -> Iterator[memoryview | bytes]:
        return pieces(self._buffers)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return 0


def pieces(buffers: Buffers) -> Iterator[memoryview | bytes]:
    """The buffers in pieces of at most about `PIECE_BYTES`: slices of large ones, runs of small ones joined."""
    small: list[memoryview] = []
    size = 0
    for view in buffers:
        if view.nbytes < SMALL_BYTES:
            small.append(view)
            size += view.nbytes
            if size >= PIECE_BYTES:
                yield b"".join(small)
                small, size = [], 0
            continue
        if size:
            yield b"".join(small)
            small, size = [], 0
        for start in range(0, view.nbytes, PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]
    if size:
        yield b"".join(small)


def send_from_memory(request: Any, **_: Any) -> None:
    """Handler of botocore's `before-send`: swap the signed request's body for the memory itself."""
    if isinstance(request.body, OutgoingBody):
        request.body = _Pieces(request.body.buffers)
    # Waiting for "100 Continue" costs a round trip for every part. The header is not signed.
    if "Expect" in request.headers:
        del request.headers["Expect"]


class Delivered:
    """The body of a reply that did not come through a socket of ours: `content`, or `received` bytes that are where
    they belong already."""

    def __init__(self, content: bytes = b"", received: int = 0) -> None:
        self.content = content
        self.received = received

    def stream(self, amount: int = 0) -> Iterator[bytes]:
        yield self.content

    def read(self, amount: int | None = None) -> bytes:
        content, self.content = self.content, b""
        return content

    def close(self) -> None:
        """Nothing is open."""


class BrokenBody(OSError):
    """The body of a reply ended before its announced length."""


class OpenReply:
    """The store's `RangeReply`: received by the thread that asked for it, dropped by any.

    Args:
        nbytes: of the body.
        fill: receives the body into buffers, and calls the function that it is given as soon as all of it is there,
            while the connection is still this reply's.
    """

    def __init__(self, body: Any, nbytes: int, fill: Callable[[Buffers, Callable[[], None]], None]) -> None:
        self._body = body
        self._fill = fill
        self._lock = threading.Lock()
        # None where urllib3 gives the connection back by itself, at a moment that nobody is told: then it is read out.
        self._socket = _socket_of(body, nbytes)
        self._receiving = self._ended = False

    def receive(self, buffers: Buffers) -> None:
        with self._lock:
            self._receiving = not self._ended
        if not self._receiving:
            raise TransientStoreError("the reply was dropped")
        try:
            self._fill(buffers, self._end)
        finally:
            self._end()

    def drop(self) -> None:
        with self._lock:
            if self._ended:
                return
            if not self._receiving:
                self._ended = True
                discard(self._body)
            elif self._socket is not None:
                # Wakes a thread that waits in `recv`, which closing would not. Not SSLSocket's own: that changes the
                # object under the other thread.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _end(self) -> None:
        # From here on the connection may serve another request, which must not be cut off.
        with self._lock:
            self._ended = True
            self._socket = None


def _socket_of(body: Any, size: int) -> socket.socket | None:
    """The socket under a reply of so many bytes, if all of its layers are what they are known to be."""
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


def _nothing() -> None:
    pass


def receive(body: Any, buffers: Buffers, filled: Callable[[], None] = _nothing) -> None:
    """Fill `buffers` from a reply's `StreamingBody`, whose length is theirs, and give its connection back to the pool.

    Args:
        filled: called before the connection is given back.

    Raises:
        BrokenBody, OSError, ssl.SSLError, HTTPException, urllib3 and botocore errors: the body broke off. Its
            connection is closed.
    """
    raw = getattr(body, "_raw_stream", None)
    if isinstance(raw, Delivered):
        if raw.received != sum(view.nbytes for view in buffers):
            raise BrokenBody("the body has another length than was announced")
        filled()
        return
    try:
        wire = _Wire.of(body, sum(view.nbytes for view in buffers))
        fill = wire.fill if wire else functools.partial(_fill_from, body.readinto)
        for target, scattered in _targets(buffers):
            fill(target)
            start = 0
            for view in scattered:
                view[:] = target[start : start + view.nbytes]
                start += view.nbytes
        if not wire and body.read():
            raise BrokenBody("the body is longer than was announced")
        filled()
        if wire:
            wire.finish()
    except BaseException:
        discard(body)
        raise


def discard(body: Any) -> None:
    """Drop a reply whose body will not be read, and close its connection, on which the rest is still to come."""
    body.close()
    raw = getattr(body, "_raw_stream", None)
    release = getattr(raw, "release_conn", None)
    if release is not None:
        release()


def _targets(buffers: Buffers) -> Iterator[tuple[memoryview, list[memoryview]]]:
    """Memory to receive into, and the small buffers to copy it to afterwards, if any."""
    small: list[memoryview] = []
    size = 0
    for view in buffers:
        if 0 < view.nbytes < SMALL_BYTES:
            small.append(view)
            size += view.nbytes
            if size >= PIECE_BYTES:
                yield memoryview(bytearray(size)), small
                small, size = [], 0
            continue
        if size:
            yield memoryview(bytearray(size)), small
            small, size = [], 0
        if view.nbytes:
            yield view, []
    if len(small) == 1:
        yield small[0], []
    elif size:
        yield memoryview(bytearray(size)), small


def _fill_from(take: Callable[[memoryview], int], view: memoryview) -> None:
    done = 0
    size = view.nbytes
    while done < size:
        count = take(view[done:])
        if not count:
            raise BrokenBody("the body ended before its announced length")
        done += count


class _Wire:
    """The socket under a reply, read past urllib3's and http.client's buffering.

    A TLS record is 16 KiB, so this loop runs 60,000 times a gigabyte: on the way through `HTTPResponse.readinto`,
    `BufferedReader`, `SocketIO` and `SSLSocket.recv_into` Python alone takes 0.1 s for it. Much of it is private:
    `of` answers None, and the public way is taken, as soon as anything looks different from what is known.
    """

    def __init__(self, raw: Any, reply: http.client.HTTPResponse, take: Callable[[memoryview], int]) -> None:
        self._raw = raw
        self._reply = reply
        self._take = take
        # What came in one read with the headers waits in the buffered reader.
        self._buffered = len(reply.fp.peek(1))

    @classmethod
    def of(cls, body: Any, size: int) -> _Wire | None:
        raw = body._raw_stream if _socket_of(body, size) is not None else None
        if raw is None:
            return None
        reply, sock = raw._fp, raw._fp.fp.raw._sock
        read = getattr(getattr(sock, "_sslobj", None), "read", None) if isinstance(sock, ssl.SSLSocket) else None
        return cls(raw, reply, functools.partial(read, _READ_BYTES) if read else sock.recv_into)

    def fill(self, view: memoryview) -> None:
        count = min(self._buffered, view.nbytes)
        if count:
            self._reply.fp.readinto(view[:count])
            self._buffered -= count
        _fill_from(self._take, view[count:])

    def finish(self) -> None:
        """Say to http.client that its reply has been read, and to urllib3 that the connection is free again."""
        self._reply.length = 0
        self._reply._close_conn()  # type: ignore[attr-defined]
        self._raw.release_conn()
