"""Stores that take bytes and throw them away: one within the process, and an S3 endpoint in a process of its own.

The endpoint ends TLS and knows no more of S3 than an upload needs. All its connections together read no faster than a
cap; SIGUSR1 lifts the cap, SIGUSR2 sets it again. Its buffers are small, so that the kernel does not take what the cap
holds back.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RECEIVE_BUFFER_BYTES = 256 << 10
CHUNK_BYTES = 64 << 10
BURST_BYTES = 512 << 10
"""A connection reads this much at once and then waits for its share: every wait costs the machine two switches."""

XML = '<?xml version="1.0" encoding="UTF-8"?>'


def sink_writer(**settings: Any) -> Any:
    """A `BucketWriter` whose uploads end nowhere: everything is planned, checksummed and handed over, nothing kept."""
    from bucketpoint.dcp.writer import BucketWriter

    class SinkWriter(BucketWriter):
        """Every URL is the sink."""

        def _open(self, url: str | None) -> tuple[Any, str]:
            return _sink_store(), "checkpoint"

    return SinkWriter("sink", progress=False, **settings)


def _sink_store() -> Any:
    from bucketpoint.errors import ObjectNotFoundError
    from bucketpoint.stores.base import Capabilities, ObjectInfo, Part

    class SinkStore:
        """The `Store` methods that an upload and its commit call."""

        url = identity = "sink://"
        capabilities = Capabilities(conditional_put=True, checksums=True, multipart=True, pinned_reads=True)

        def put(self, key: str, body: Sequence[memoryview], **conditions: Any) -> ObjectInfo:
            return ObjectInfo(key, sum(view.nbytes for view in body), "sink")

        def get(self, key: str, **limits: Any) -> Any:
            raise ObjectNotFoundError("the sink keeps nothing", url=key)

        read_into = head = get

        def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
            return ObjectInfo(target, source.size, "sink")

        def create_multipart(self, key: str) -> str:
            return "sink"

        def put_part(
            self, key: str, upload_id: str, number: int, body: Sequence[memoryview], *, crc32c: int | None = None
        ) -> Part:
            return Part(number, sum(view.nbytes for view in body), "sink", crc32c)

        def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
            return ObjectInfo(key, sum(part.size for part in parts), "sink")

        def abort_multipart(self, key: str, upload_id: str) -> None:
            return None

        def delete(self, keys: Sequence[str]) -> list[Any]:
            # What the save of an intent left at a URL before the next one to the same.
            return []

        def delete_if(self, key: str, etag: str) -> None:
            pass

    return SinkStore()


class Cap:
    """Bytes a second over all connections, while it is on."""

    def __init__(self, bytes_per_s: float) -> None:
        self.on = bytes_per_s > 0
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def spend(self, nbytes: int) -> None:
        if not self.on:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
            wait = self._free_at - now
        while self.on and wait > 0:
            # In small steps, so that lifting the cap lets everybody go.
            time.sleep(min(wait, 0.1))
            wait = self._free_at - time.monotonic() if wait > 0.1 else 0


def _serve(accepted: socket.socket, context: ssl.SSLContext, cap: Cap) -> None:
    numbers = itertools.count(1)
    with contextlib.suppress(OSError, EOFError), accepted:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context.wrap_socket(accepted, server_side=True) as client:
            chunk = memoryview(bytearray(CHUNK_BYTES))
            buffered = b""
            while True:
                while b"\r\n\r\n" not in buffered:
                    count = client.recv_into(chunk)
                    if not count:
                        return
                    buffered += chunk[:count]
                head, _, buffered = buffered.partition(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                headers = {
                    name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
                }
                if headers.get("expect", "").lower() == "100-continue":
                    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                left = int(headers.get("content-length", "0")) - len(buffered)
                unpaid, buffered = len(buffered), b""
                while left > 0:
                    count = client.recv_into(chunk, min(left, CHUNK_BYTES))
                    if not count:
                        return
                    left -= count
                    unpaid += count
                    if unpaid >= BURST_BYTES or not left:
                        cap.spend(unpaid)
                        unpaid = 0
                method, target, _ = lines[0].split(" ", 2)
                client.sendall(_answer(method, target, next(numbers)))


def _answer(method: str, target: str, number: int) -> bytes:
    path, _, query = target.partition("?")
    status, body = "200 OK", ""
    if method == "POST" and "uploads" in query.split("&")[0]:
        body = f"{XML}<InitiateMultipartUploadResult><UploadId>sink</UploadId></InitiateMultipartUploadResult>"
    elif method == "POST":
        key = path.split("/", 2)[-1]
        body = (
            f'{XML}<CompleteMultipartUploadResult><Key>{key}</Key><ETag>"sink"</ETag></CompleteMultipartUploadResult>'
        )
    elif method in ("GET", "HEAD"):
        status = "404 Not Found"
        body = f"{XML}<Error><Code>NoSuchKey</Code><Message>the sink keeps nothing</Message></Error>"
    elif method == "DELETE":
        status = "204 No Content"
    sent = "" if method == "HEAD" else body
    return f'HTTP/1.1 {status}\r\nETag: "{number:032x}"\r\nContent-Length: {len(body)}\r\n\r\n{sent}'.encode()


@contextlib.contextmanager
def running_sink(*, cert: Path, key: Path, port: int, bytes_per_s: float) -> Iterator[int]:
    """Run the endpoint until the block ends; yields its process id."""
    command = [sys.executable, str(Path(__file__).resolve()), "--port", str(port), "--rate", str(bytes_per_s)]
    process = subprocess.Popen([*command, "--cert", str(cert), "--key", str(key)])
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cert", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--rate", type=float, default=0.0, help="bytes a second of all connections, 0 for no cap")
    options = parser.parse_args()
    cap = Cap(options.rate)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGUSR1, lambda *_: setattr(cap, "on", False))
    signal.signal(signal.SIGUSR2, lambda *_: setattr(cap, "on", True))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.cert, options.key)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Before listen(): accepted sockets inherit it, and the client's window follows from it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    listener.bind(("127.0.0.1", options.port))
    listener.listen(512)
    while True:
        accepted, _ = listener.accept()
        threading.Thread(target=_serve, args=(accepted, context, cap), daemon=True).start()


if __name__ == "__main__":
    main()
