"""An S3 endpoint on loopback that behaves as the model's store does: latency, request rate, connection rate, ceiling.

Plain HTTP, in a process of its own, and no more of S3 than a save and a load need. What is uploaded is kept in memory.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from sim.services import Service

CHUNK_BYTES = 64 << 10
XML = '<?xml version="1.0" encoding="UTF-8"?>'
_SLOW_DOWN_BODY = f"{XML}<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
SLOW_DOWN = f"HTTP/1.1 503 Slow Down\r\nContent-Length: {len(_SLOW_DOWN_BODY)}\r\n\r\n{_SLOW_DOWN_BODY}".encode()
SOCKET_BUFFER_BYTES = 128 << 10
"""Small, so that the kernel does not take what the rates hold back."""


@dataclass
class Line:
    """What goes at a rate, one after the other: `cost` seconds each."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _free_at: float = 0.0

    def until(self, cost: float) -> float:
        """When the next one is through."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + cost
            return self._free_at


@dataclass
class Door:
    """Requests that are accepted at once, at `rate` a second and `burst` at the same moment."""

    rate: float
    burst: float
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _tokens: float = 0.0
    _at: float = field(default_factory=time.monotonic)

    def accepts(self) -> bool:
        with self._lock:
            now = time.monotonic()
            self._tokens = min(self._tokens + (now - self._at) * self.rate, max(self.burst, 1.0))
            self._at = now
            accepted = self._tokens >= 1
            self._tokens -= accepted
            return accepted


@dataclass
class Endpoint:
    """The state that all connections share.

    Attributes:
        door: answers 503 above its rate; None: requests above the service's rate wait in `requests`.
    """

    service: Service
    door: Door | None
    requests: Line = field(default_factory=Line)
    bandwidth: Line = field(default_factory=Line)
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))

    def serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = connection.makefile("rb")
            while line := stream.readline():
                method, target, _ = line.decode("latin-1").split(" ", 2)
                headers = {}
                while (line := stream.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode("latin-1").partition(":")
                    headers[name.strip().lower()] = value.strip()
                rate = self.service.reads_per_s if method in ("GET", "HEAD") else self.service.writes_per_s
                body = bytearray(int(headers.get("content-length", "0")))
                if self.door is None:
                    _sleep_until(self.requests.until(1 / rate) + self.service.latency_s)
                else:
                    accepted = self.door.accepts()
                    time.sleep(self.service.latency_s)
                    if not accepted:
                        stream.readinto(body)
                        connection.sendall(SLOW_DOWN)
                        continue
                for view in self._paced(memoryview(body)):
                    done = 0
                    while done < len(view):
                        count = stream.readinto(view[done:])
                        if not count:
                            return
                        done += count
                status, extra, answer = self._answer(method, target, headers, bytes(body))
                head = f"HTTP/1.1 {status}\r\n{extra}Content-Length: {len(answer)}\r\n\r\n"
                connection.sendall(head.encode())
                if method != "HEAD":
                    for view in self._paced(memoryview(answer)):
                        connection.sendall(view)

    def _paced(self, whole: memoryview) -> Iterator[memoryview]:
        """Pieces of a body, each when the connection and the ceiling allow it."""
        mine = Line()
        for start in range(0, len(whole), CHUNK_BYTES):
            piece = whole[start : start + CHUNK_BYTES]
            yield piece
            own = mine.until(len(piece) / self.service.connection_bytes_per_s)
            _sleep_until(max(own, self.bandwidth.until(len(piece) / self.service.ceiling_bytes_per_s)))

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[str, str, bytes]:
        path, _, query = target.partition("?")
        asked = parse_qs(query, keep_blank_values=True)
        etag = 'ETag: "stub"\r\n'
        if method == "POST" and "uploads" in asked:
            answer = "<InitiateMultipartUploadResult><UploadId>stub</UploadId></InitiateMultipartUploadResult>"
            return "200 OK", "", f"{XML}{answer}".encode()
        if method == "POST" and "uploadId" in asked:
            parts = self.parts.pop(path)
            self.objects[path] = b"".join(parts[number] for number in sorted(parts))
            answer = '<CompleteMultipartUploadResult><Key>k</Key><ETag>"stub"</ETag></CompleteMultipartUploadResult>'
            return "200 OK", "", f"{XML}{answer}".encode()
        if method == "PUT" and "partNumber" in asked:
            self.parts[path][int(asked["partNumber"][0])] = body
            return "200 OK", etag, b""
        if method == "PUT":
            self.objects[path] = body
            return "200 OK", etag, b""
        found = self.objects.get(path)
        if method not in ("GET", "HEAD") or found is None:
            return "404 Not Found", "", f"{XML}<Error><Code>NoSuchKey</Code><Message>no</Message></Error>".encode()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
        if wanted is None:
            return "200 OK", etag, found
        first, last = int(wanted[1]), min(int(wanted[2]), len(found) - 1)
        where = f"Content-Range: bytes {first}-{last}/{len(found)}\r\n"
        return "206 Partial Content", etag + where, found[first : last + 1]


@contextlib.contextmanager
def running_stub(service: Service, *, refuse: bool = False) -> Iterator[str]:
    """Run the endpoint until the block ends; yields its URL. `refuse`: answer 503 above the rate of writes."""
    listener = socket.socket()
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        listener.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(listener, service, refuse), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        process.kill()
        process.join()
        listener.close()


def _serve(listener: socket.socket, service: Service, refuse: bool) -> None:
    parent = os.getppid()
    door = Door(service.writes_per_s, service.writes_per_s * service.burst_s) if refuse else None
    endpoint = Endpoint(service, door)
    listener.settimeout(1.0)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(None)
        threading.Thread(target=endpoint.serve, args=(connection,), daemon=True).start()


def _sleep_until(moment: float) -> None:
    wait = moment - time.monotonic()
    # The scheduler does not keep shorter ones; they add up in the lines until it does.
    if wait > 0.001:
        time.sleep(wait)
