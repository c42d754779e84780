"""How stores over HTTP move bodies and take failures, where it is the same of S3 and GCS: memory, retries, connections,
broken replies, processes. What only one of them does is in `test_s3_engine` and `test_gcs_engine`.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from awscrt import checksums

from bucketpoint.errors import StoreError, TransientStoreError
from bucketpoint.stores import Store, open_store, retry
from bucketpoint.stores.cutoff import Limits, Throughput
from bucketpoint.stores.http_body import _fill_in_turns
from kit.buffers import views
from services import Service
from stores.engines import ENGINES, GCS, S3, Engine
from stores.scripted import Answer, Seen, scripted

pytestmark = pytest.mark.contract

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(retry, "FIRST_THROTTLED_DELAY_S", 0.01)


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "gcs":
        pytest.importorskip("google.cloud.storage")
    return ENGINES[request.param]


def store_on(service: Service) -> Store:
    return open_store(service.url("x"), storage_options=service.options)[0]


@pytest.mark.parametrize("server", ["minio", "minio_tls", "gcs"])
def test_sends_and_receives_a_body_without_a_copy(server: str, request: pytest.FixtureRequest) -> None:
    store = store_on(Service.on(request.getfixturevalue(server)))
    content = bytearray(os.urandom(MIB)) * 24
    crc = checksums.crc32c(content)
    store.put("warm", views(content[:MIB]))
    store.read_into("warm", 0, views(bytearray(MIB)))
    received = bytearray(len(content))
    tracemalloc.start()
    try:
        if server == "gcs":  # the emulator has no parts
            store.put("big", views(content), crc32c=crc)
        else:
            upload = store.create_multipart("big")
            part = store.put_part("big", upload, 1, views(content), crc32c=crc)
            store.complete_multipart("big", upload, [part])
        sent_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        store.read_into("big", 0, views(received))
        received_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert received == content
    assert sent_peak < 4 * MIB
    assert received_peak < 4 * MIB


@pytest.mark.parametrize("failure", list(S3.failures))
def test_sends_the_whole_body_again_in_a_retry(engine: Engine, failure: str) -> None:
    content = os.urandom(700_000)
    small = [memoryview(content)[at : at + 10] for at in range(100_000, 100_100, 10)]
    with scripted(lambda request, number: engine.failures[failure] if number < 2 else engine.written) as server:
        engine.at(server).put("k", [*views(content[:1], content[1:100_000]), *small, memoryview(content)[100_100:]])
    assert [engine.sent(request.body) for request in server.seen] == [content] * 3


@pytest.mark.parametrize("chunked", [False, True], ids=["of a length", "by the public way"])
def test_uses_connections_again_after_each_body(engine: Engine, chunked: bool) -> None:
    content = os.urandom(500_000)
    with scripted(engine.serving(content, chunked=chunked)) as server:
        store = engine.at(server)
        for _ in range(20):
            data = bytearray(400_000)
            store.read_into("k", 50_000, views(data))
            assert data == content[50_000:450_000]
    assert (len(server.seen), server.connections) == (20, 1)


@pytest.mark.parametrize("cut", [0, 1, 100, 250_000, 499_999])
def test_treats_a_body_that_breaks_off_as_transient_and_drops_its_connection(engine: Engine, cut: int) -> None:
    content = os.urandom(500_000)
    whole = engine.serving(content)

    def script(request: Seen, number: int) -> Answer:
        answer = whole(request, number)
        answer.cut = cut if number < 2 else None
        return answer

    with scripted(script) as server:
        store = engine.at(server)
        data = bytearray(len(content))
        with pytest.raises(TransientStoreError, match=f"{engine.scheme}://bucket/k"):
            store.read_into("k", 0, views(data))
        reply = store.open_range("k", 0, len(content))
        with pytest.raises(TransientStoreError):
            for _ in range(5):
                reply.receive(views(bytearray(100_000)))
        store.read_into("k", 0, views(data))
        assert data == content
    assert server.connections == 3


def test_raises_a_transient_error_for_a_silent_server_after_the_read_timeout(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def silent(request: Seen, number: int) -> Answer:
        release.wait(20)
        return Answer(drop=True)

    monkeypatch.setattr(engine.clients, "READ_TIMEOUT_S", 0.2)
    if engine is GCS:
        monkeypatch.setitem(GCS.clients.GCSClient.request.__kwdefaults__, "timeout", 0.2)
    with scripted(silent) as server:
        with pytest.raises(TransientStoreError, match="ReadTimeout"):
            engine.at(server, max_attempts=1).get("k")
        release.set()


def test_detects_a_store_that_ignores_ranges(engine: Engine) -> None:
    with scripted(lambda request, number: Answer(200, dict([engine.identity]), b"x" * 100)) as server:
        store = engine.at(server)
        for offset, size in ((10, 20), (0, 20)):
            with pytest.raises(StoreError, match="ignored the range"):
                store.read_into("k", offset, views(bytearray(size)))
        data = bytearray(100)
        store.read_into("k", 0, views(data))
        assert data == b"x" * 100


def test_makes_one_client_for_threads_that_arrive_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    build = engine.clients.build_client

    def counting(options: Any) -> Any:
        made.append(options)
        return build(options)

    monkeypatch.setattr(engine.clients, "build_client", counting)
    with scripted(lambda request, number: engine.written) as server:
        deadline_s = random.uniform(100, 200)
        options, equal = (engine.at(server, retry_deadline_s=deadline_s).options for _ in range(2))
        start = threading.Barrier(6)

        def arrive(_: int) -> Any:
            start.wait()
            return engine.clients.clients.get(options)

        with ThreadPoolExecutor(6) as pool:
            clients = list(pool.map(arrive, range(6)))
        assert len(made) == 1
        assert len({id(client) for client in (*clients, engine.clients.clients.get(equal))}) == 1
        assert engine.clients.clients.get(options.replace(connections=7)) not in clients


@pytest.mark.parametrize("service", ["minio", "gcs"], indirect=True)
def test_makes_connections_of_its_own_in_a_forked_process(service: Service) -> None:
    store: Any = store_on(service)
    store.put("k", views(b"content"))
    client = store.clients.get(store.options)
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            assert store.get("k")[0] == b"content"
            assert store.clients.get(store.options) is not client
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("k")[0] == b"content"


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
