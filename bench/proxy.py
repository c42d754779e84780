"""An HTTP proxy that ends TLS, counts requests and bytes, and emulates a wire. Knows HTTP, not S3's meaning.

It stands between a client and one plain-HTTP server. Every request's head is held back for a fixed delay, and each
connection moves bytes no faster than a cap, in either direction. Each request becomes one JSON line in a log. Clients
are served by plain threads in a few processes: at 16 KiB a TLS record an event loop in Python would be the bottleneck.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

CHUNK_BYTES = 256 << 10
MAX_HEAD_BYTES = 64 << 10
SMALLEST_SLEEP_S = 0.002
"""Shorter waits are carried over to the next chunk: the scheduler could not keep them."""

_numbers = itertools.count()

Socket = socket.socket | ssl.SSLSocket


@dataclass(frozen=True)
class Wire:
    """What the emulated wire does: seconds added to each request; bytes a second of each connection, and of all
    connections of one process together (0: no cap)."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    total_bytes_per_s: float = 0.0


@dataclass
class Pace:
    """The cap of one direction of a connection, or of all: a clock that may not fall behind the bytes sent."""

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
    """The other side went away."""


@dataclass
class Stream:
    """A socket with a little buffered input, so that heads can be parsed and bodies pumped."""

    sock: Socket
    buffered: bytearray = field(default_factory=bytearray)
    _chunk: memoryview = field(default_factory=lambda: memoryview(bytearray(CHUNK_BYTES)))

    def head(self) -> bytes:
        """Everything up to and including the empty line; empty if the connection ended between messages."""
        while (end := self.buffered.find(b"\r\n\r\n")) < 0:
            if len(self.buffered) > MAX_HEAD_BYTES:
                raise Closed("the head is too long")
            count = self._receive(CHUNK_BYTES)
            if not count:
                return b""
            self.buffered += self._chunk[:count]
        head = bytes(self.buffered[: end + 4])
        del self.buffered[: end + 4]
        return head

    def line(self) -> bytes:
        while (end := self.buffered.find(b"\r\n")) < 0:
            count = self._receive(CHUNK_BYTES)
            if not count:
                raise Closed("ended within a chunked body")
            self.buffered += self._chunk[:count]
        line = bytes(self.buffered[: end + 2])
        del self.buffered[: end + 2]
        return line

    def pump(self, target: Stream, nbytes: int, pace: Pace) -> None:
        """Move exactly `nbytes` to `target`."""
        if self.buffered and nbytes:
            first = bytes(self.buffered[:nbytes])
            del self.buffered[: len(first)]
            target.sock.sendall(first)
            pace.spend(len(first))
            nbytes -= len(first)
        while nbytes:
            count = self._receive(min(nbytes, CHUNK_BYTES))
            if not count:
                raise Closed("ended within a body")
            # One TLS read gives one record; what else has arrived already goes out in the same write.
            while count < min(nbytes, CHUNK_BYTES) and isinstance(self.sock, ssl.SSLSocket) and self.sock.pending():
                count += self.sock.recv_into(self._chunk[count : min(nbytes, CHUNK_BYTES)])
            target.sock.sendall(self._chunk[:count])
            pace.spend(count)
            nbytes -= count

    def _receive(self, limit: int) -> int:
        try:
            return self.sock.recv_into(self._chunk[:limit])
        except (ConnectionError, ssl.SSLError):
            return 0


@dataclass(frozen=True)
class Head:
    """A request's or response's first line and headers."""

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


def _body(head: Head, source: Stream, target: Stream, pace: Pace) -> int:
    """Move one message's body and return its size on the wire."""
    if not head.chunked:
        source.pump(target, head.length, pace)
        return head.length
    total = 0
    while True:
        line = source.line()
        target.sock.sendall(line)
        size = int(line.split(b";")[0], 16)
        if size:
            source.pump(target, size + 2, pace)
            total += size
            continue
        while True:
            trailer = source.line()
            target.sock.sendall(trailer)
            if trailer == b"\r\n":
                return total


class Connection:
    """One client connection and its twin to the server, served in turn: request, response, request, …"""

    def __init__(self, client: Stream, upstream: tuple[str, int], wire: Wire, total: Pace, log: Log) -> None:
        self._client = client
        self._wire = wire
        self._log = log
        self._name = f"{os.getpid()}-{next(_numbers)}"
        self._server = Stream(socket.create_connection(upstream))
        self._server.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._up = Pace(wire.bytes_per_s, total)
        self._down = Pace(wire.bytes_per_s, total)

    def serve(self) -> None:
        try:
            while raw := self._client.head():
                if not self._exchange(Head.parse(raw)):
                    break
        except (Closed, OSError):
            pass  # The client sees its connection end, as it would without a proxy.
        finally:
            self._server.sock.close()

    def _exchange(self, request: Head) -> bool:
        start = time.monotonic()
        if self._wire.delay_s:
            time.sleep(self._wire.delay_s)
        self._server.sock.sendall(request.raw)
        sent = 0
        response: Head | None = None
        if request.headers.get("expect", "").lower() == "100-continue":
            response = self._response()
            if response.first[1] == "100":
                response = None
        if response is None:
            with contextlib.suppress(ConnectionError):  # An early refusal closes the way up; its answer is still read.
                sent = _body(request, self._client, self._server, self._up)
            response = self._response()
            while response.first[1] == "100":
                response = self._response()
        bodiless = request.first[0] == "HEAD" or response.first[1] in ("204", "304")
        received = 0 if bodiless else _body(response, self._server, self._client, self._down)
        self._log.write(self._name, request, response, start, sent, received)
        return request.keeps_alive and response.keeps_alive

    def _response(self) -> Head:
        raw = self._server.head()
        if not raw:
            raise Closed("the server ended the connection")
        self._client.sock.sendall(raw)
        return Head.parse(raw)


class Log:
    """One JSON line for each request, with times on the machine's monotonic clock."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write(self, connection: str, request: Head, response: Head, start: float, sent: int, received: int) -> None:
        record = {
            "connection": connection,
            "start": start,
            "end": time.monotonic(),
            "method": request.first[0],
            "target": request.first[1],
            "copy": "x-amz-copy-source" in request.headers,
            "range": request.headers.get("range"),
            "status": int(response.first[1]),
            "sent": sent,
            "received": received,
            "head_sent": len(request.raw),
            "head_received": len(response.raw),
        }
        with self._lock:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


@dataclass(frozen=True)
class RunningProxy:
    """A proxy in processes of its own, and the log that it writes."""

    url: str
    log_dir: Path

    def requests(self, start: float, end: float) -> list[dict[str, Any]]:
        """The requests that began and ended within a window of the monotonic clock, by their beginning."""
        found = []
        for path in self.log_dir.glob("*.jsonl"):
            with path.open() as lines:
                found += [json.loads(line) for line in lines if line.endswith("\n")]
        inside = [record for record in found if record["start"] >= start and record["end"] <= end]
        return sorted(inside, key=lambda record: float(record["start"]))


@contextlib.contextmanager
def running_proxy(
    upstream: tuple[str, int], *, cert: Path, key: Path, port: int, log_dir: Path, wire: Wire, workers: int = 2
) -> Iterator[RunningProxy]:
    """Run a proxy until the block ends."""
    log_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--upstream", f"{upstream[0]}:{upstream[1]}"]
    command += ["--port", str(port), "--cert", str(cert), "--key", str(key), "--log-dir", str(log_dir)]
    command += ["--delay", str(wire.delay_s), "--rate", str(wire.bytes_per_s)]
    command += ["--total-rate", str(wire.total_bytes_per_s)]
    processes = [subprocess.Popen(command) for _ in range(workers)]
    try:
        _wait_for_port(port)
        yield RunningProxy(f"https://127.0.0.1:{port}", log_dir)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _wait_for_port(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on port {port}")


def _accept(options: argparse.Namespace) -> None:
    host, _, port = options.upstream.partition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.cert, options.key)
    wire = Wire(options.delay, options.rate)
    total = Pace(options.total_rate)
    listener = socket.socket()
    # Each worker has a listener of its own, and the kernel deals the connections out.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", options.port))
    listener.listen(512)
    log = Log((Path(options.log_dir) / f"{os.getpid()}.jsonl").open("w"))
    while True:
        accepted, _ = listener.accept()
        threading.Thread(
            target=_serve, args=(accepted, context, (host, int(port)), wire, total, log), daemon=True
        ).start()


def _serve(
    accepted: socket.socket, context: ssl.SSLContext, upstream: tuple[str, int], wire: Wire, total: Pace, log: Log
) -> None:
    with contextlib.suppress(OSError), accepted:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context.wrap_socket(accepted, server_side=True) as client:
            Connection(Stream(client), upstream, wire, total, log).serve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True, help="host:port of a plain-HTTP server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cert", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--log-dir", required=True)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds added to every request")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes a second of each connection, 0 for no cap")
    parser.add_argument("--total-rate", type=float, default=0.0, help="bytes a second of all of one process's")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    _accept(parser.parse_args())


if __name__ == "__main__":
    main()
