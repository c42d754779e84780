"""Bodies that many threads take out of TLS at a time."""

from __future__ import annotations

import socket
import threading
import time

from bucketpoint.stores.cutoff import Limits, Throughput
from bucketpoint.stores.http_body import _fill_in_turns


def test_takes_bytes_that_have_arrived_out_of_tls_on_three_threads_at_a_time() -> None:
    body, lock, reading, most = bytes(range(256)) * 512, threading.Lock(), 0, 0
    filled: list[bytes] = []

    def fill(here: socket.socket) -> None:
        def take(view: memoryview) -> int:
            nonlocal reading, most
            with lock:
                reading += 1
                most = max(most, reading)
            time.sleep(0.001)
            with lock:
                reading -= 1
            return here.recv_into(view[: 16 << 10])

        target = bytearray(80 << 10)
        _fill_in_turns(here, take, memoryview(target), Throughput(Limits()))
        filled.append(bytes(target))

    pairs = [socket.socketpair() for _ in range(8)]
    for _, there in pairs:
        there.sendall(body)
    receivers = [threading.Thread(target=fill, args=(here,), daemon=True) for here, _ in pairs]
    for thread in receivers:
        thread.start()
    for thread in receivers:
        thread.join(60)
    assert filled == [body[: 80 << 10]] * 8
    assert most == 3
    # What arrives only later is received without a turn.
    filled.clear()
    (here, there), *_ = pairs
    threading.Timer(0.1, there.sendall, (body[: 32 << 10],)).start()
    fill(here)
    assert filled == [body[80 << 10 :] + body[: 32 << 10]]
