"""HTTP messages on sockets: parsing of heads, and pumping of bodies at a set pace."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

CHUNK_BYTES = 256 << 10
MAX_HEAD_BYTES = 64 << 10
SMALLEST_SLEEP_S = 0.002
"""Shorter waits are carried over to the next chunk, because the scheduler is not that precise."""

Socket = socket.socket | ssl.SSLSocket

Write = Callable[[memoryview], None]
"""Callback for the next bytes of a message."""


@dataclass(frozen=True)
class Wire:
    """Settings of the emulated network.

    Attributes:
        delay_s: seconds added to each request.
        bytes_per_s: bytes a second of each connection; 0 for no cap.
        total_bytes_per_s: bytes a second of all connections of one process together; 0 for no cap.
    """

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    total_bytes_per_s: float = 0.0


@dataclass
class Pace:
    """Cap on one direction of a connection, or on all: a clock that runs ahead with the bytes sent."""

    bytes_per_s: float
    shared: Pace | None = None
    _free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def spend(self, nbytes: int) -> None:
        if self.shared is not None:
            self.shared.spend(nbytes)
        if not self.bytes_per_s:
            return
        now = time.monotonic()
        with self._lock:
            self._free_at = max(self._free_at, now) + nbytes / self.bytes_per_s
            wait = self._free_at - now
        if wait > SMALLEST_SLEEP_S:
            time.sleep(wait)


class Closed(Exception):
    """Raised if the peer has closed the connection."""


@dataclass
class Stream:
    """A socket with a small input buffer, so that heads can be parsed and bodies pumped."""

    sock: Socket
    buffered: bytearray = field(default_factory=bytearray)
    _chunk: memoryview = field(default_factory=lambda: memoryview(bytearray(CHUNK_BYTES)))

    def head(self) -> bytes:
        """Read up to and including the empty line. Empty if the connection ended between messages."""
        end = self._find(b"\r\n\r\n", MAX_HEAD_BYTES)
        if end < 0 and len(self.buffered) >= MAX_HEAD_BYTES:
            raise Closed("the head is too long")
        return b"" if end < 0 else self._take(end + 4)

    def line(self) -> bytes:
        end = self._find(b"\r\n", MAX_HEAD_BYTES)
        if end < 0:
            raise Closed("ended within a chunked body")
        return self._take(end + 2)

    def peek(self, mark: bytes, limit: int) -> bytes:
        """Return the next bytes, up to a mark or about `limit` bytes, and leave them to be read."""
        self._find(mark, limit)
        return bytes(self.buffered[:limit])

    def write(self, data: memoryview | bytes) -> None:
        self.sock.sendall(data)

    def pump(self, write: Write, nbytes: int, pace: Pace) -> None:
        """Pass exactly `nbytes` on."""
        if self.buffered and nbytes:
            first = self._take(nbytes)
            write(memoryview(first))
            pace.spend(len(first))
            nbytes -= len(first)
        while nbytes:
            count = self._receive(min(nbytes, CHUNK_BYTES))
            if not count:
                raise Closed("ended within a body")
            # One TLS read gives one record. Records that have arrived already go out in the same write.
            while count < min(nbytes, CHUNK_BYTES) and isinstance(self.sock, ssl.SSLSocket) and self.sock.pending():
                count += self.sock.recv_into(self._chunk[count : min(nbytes, CHUNK_BYTES)])
            write(self._chunk[:count])
            pace.spend(count)
            nbytes -= count

    def ended(self) -> bool:
        """Return True if the peer has closed the connection, or has sent something between two messages."""
        if self.buffered:
            return True
        before = self.sock.gettimeout()
        try:
            self.sock.settimeout(0)
            self.sock.recv(1)
            return True
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        finally:
            self.sock.settimeout(before)

    def abort(self) -> None:
        """Close with a reset instead of an orderly end, like a machine that disappears."""
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.sock.close()
        except OSError:
            return

    def _find(self, mark: bytes, limit: int) -> int:
        """Receive up to a mark, and return its position; -1 if the peer or `limit` bytes came first."""
        while (position := self.buffered.find(mark)) < 0 and len(self.buffered) < limit:
            count = self._receive(CHUNK_BYTES)
            if not count:
                break
            self.buffered += self._chunk[:count]
        return position

    def _take(self, nbytes: int) -> bytes:
        taken = bytes(self.buffered[:nbytes])
        del self.buffered[:nbytes]
        return taken

    def _receive(self, limit: int) -> int:
        try:
            return self.sock.recv_into(self._chunk[:limit])
        except (ConnectionError, ssl.SSLError):
            return 0


@dataclass(frozen=True)
class Upstream:
    """The store behind the proxy, over plain HTTP.

    Attributes:
        host_header: replaces the Host header that the client sent. S3 signs that header, so this is only for stores
            whose requests carry a token, as those of GCS do.
    """

    host: str
    port: int
    host_header: str | None = None

    @classmethod
    def of(cls, url: str, *, host_header: str | None = None) -> Upstream:
        parts = urlsplit(url)
        return cls(parts.hostname or "", parts.port or 80, host_header)

    def connect(self) -> Stream:
        sock = socket.create_connection((self.host, self.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Stream(sock)


@dataclass(frozen=True)
class Head:
    """First line and headers of a request or response."""

    raw: bytes
    first: list[str]
    headers: dict[str, str]

    @classmethod
    def parse(cls, raw: bytes) -> Head:
        lines = raw.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if line)
        return cls(raw, lines[0].split(" ", 2), {name.strip().lower(): value.strip() for name, _, value in pairs})

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def length(self) -> int:
        return int(self.headers.get("content-length", "0"))

    @property
    def keeps_alive(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"

    @property
    def expects_continue(self) -> bool:
        return self.headers.get("expect", "").lower() == "100-continue"

    def with_header(self, name: str, value: str) -> Head:
        """Return the same head with one header replaced or added."""
        lines = self.raw.decode("latin-1").split("\r\n")[:-2]
        kept = [line for line in lines[1:] if line.partition(":")[0].strip().lower() != name.lower()]
        return Head.parse("\r\n".join([lines[0], *kept, f"{name}: {value}", "", ""]).encode("latin-1"))


def move_body(head: Head, source: Stream, write: Write, pace: Pace) -> int:
    """Move one message's body, with its framing, and return its size on the wire."""
    if not head.chunked:
        source.pump(write, head.length, pace)
        return head.length
    total = 0
    while True:
        line = source.line()
        write(memoryview(line))
        size = int(line.split(b";")[0], 16)
        if size:
            source.pump(write, size + 2, pace)
            total += size
            continue
        while True:
            trailer = source.line()
            write(memoryview(trailer))
            if trailer == b"\r\n":
                return total


def nowhere(data: memoryview) -> None:
    """Drop the data: a `Write` for bodies that nobody needs."""
