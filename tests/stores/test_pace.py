"""The floor of throughput: what drips is cut off and sent again, what is slow but moves is not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bucketpoint.errors import StoreError
from bucketpoint.stores import cutoff
from bucketpoint.stores.retry import retry_transient
from stores.engines import Make, gcs_at, s3_at


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutoff, "WINDOW_S", 0.3)
    monkeypatch.setattr(cutoff, "LATE_S", 0.15)


@contextmanager
def dripping(head: bytes, body: bytes, *, drips: int | None) -> Iterator[str]:
    """An endpoint whose first answers come byte by byte, `drips` of them; the others come at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    answered = []

    def serve(client: socket.socket) -> None:
        with client:
            got = b""
            while b"\r\n\r\n" not in got:
                piece = client.recv(1 << 20)
                if not piece:
                    return
                got += piece
            answered.append(1)
            slow = drips is None or len(answered) <= drips
            try:
                client.sendall(head)
                if not slow:
                    client.sendall(body)
                    return
                for byte in body:
                    client.sendall(bytes([byte]))
                    time.sleep(0.05)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


OBJECT = (
    b'HTTP/1.1 206 Partial\r\nETag: "e"\r\nx-goog-generation: 1\r\nContent-Range: bytes 0-499/500\r\n'
    b"Content-Length: 500\r\nConnection: close\r\n\r\n"
)
ERROR = b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: 500\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("make", [s3_at, gcs_at])
@pytest.mark.parametrize(
    ("head", "body"),
    [(OBJECT, b"x" * 500), (ERROR, b"<Error>".ljust(500)), (b"", OBJECT * 3)],
    ids=["object", "error", "head"],
)
def test_ends_an_answer_that_drips_at_the_deadline(make: Make, head: bytes, body: bytes) -> None:
    with dripping(head, body, drips=None) as endpoint, pytest.raises(StoreError, match="TooSlowError"):
        make(endpoint, max_attempts=None, retry_deadline_s=0.5).get("k", first=500)


@pytest.mark.parametrize("make", [s3_at, gcs_at])
def test_cuts_off_a_read_that_drips_and_sends_it_again(make: Make) -> None:
    with dripping(OBJECT, b"x" * 500, drips=2) as endpoint:
        data = bytearray(500)
        store = make(endpoint, max_attempts=None, retry_deadline_s=60)
        retry_transient(lambda: store.read_into("k", 0, [memoryview(data)]))
    assert data == b"x" * 500


def test_counts_only_the_time_of_waiting_and_lets_pass_what_computes() -> None:
    slow = cutoff.Throughput(cutoff.Limits(time.monotonic() + 60))
    for _ in range(100):
        slow.moved(int(cutoff.FLOOR_BYTES_PER_S * 0.2) + 1, 0.2)
    with pytest.raises(cutoff.TooSlowError):
        slow.moved(1, 0.4)
    cutoff.Throughput(cutoff.Limits(time.monotonic() - 60, computes=True)).moved(1, 100)


def test_cuts_off_an_upload_that_drips() -> None:
    """The server takes nothing more once the kernel's buffers are full."""
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
    body = memoryview(bytes(32 << 20))
    with listener, pytest.raises(StoreError, match="PutObject failed"):
        s3_at(endpoint, max_attempts=None, retry_deadline_s=0.5).put("k", [body])
