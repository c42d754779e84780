"""The CRT engine: what goes through it, that it changes nothing else, and that failures end as they do without it."""

from __future__ import annotations

import base64
import multiprocessing
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from awscrt import checksums

from bucketpoint.errors import BucketpointError, CorruptDataError, EndpointError, StoreError, TransientStoreError
from bucketpoint.stores import S3Options, S3Store
from bucketpoint.stores.s3 import crt as s3_crt
from bucketpoint.testing.servers import S3Server, free_port
from stores.scripted import Answer, ScriptedServer, Seen, error, scripted

MIB = 1 << 20
SIGN = "CRTS3NativeClient"
"""What awscrt adds to the user agent."""


def views(*chunks: bytes | bytearray) -> list[memoryview]:
    return [memoryview(chunk) for chunk in chunks]


def store_at(server: ScriptedServer, **options: Any) -> S3Store:
    chosen = {"max_attempts": 3, **options}
    keys = {"access_key": "a", "secret_key": "hush"}
    return S3Store("bucket", S3Options(endpoint_url=server.endpoint, engine="crt", **keys, **chosen))


def store_of(server: S3Server, **changes: Any) -> S3Store:
    options = {**server.options, "engine": "crt", **changes}
    return S3Store(server.make_bucket(), S3Options.from_storage_options(options))


def answer(content: bytes) -> Any:
    def script(request: Seen, number: int) -> Answer:
        if request.method != "GET":
            return Answer(headers={"ETag": '"etag"'})
        start, _, end = request.headers["range"].removeprefix("bytes=").partition("-")
        body = content[int(start) : int(end) + 1]
        return Answer(206, {"Content-Range": f"bytes {start}-{end}/{len(content)}", "ETag": '"e"'}, body)

    return script


def test_large_bodies_go_through_it_and_small_ones_do_not() -> None:
    content = os.urandom(3 * MIB)
    with scripted(answer(content)) as server:
        store = store_at(server)
        store.put_part("k", "up", 1, views(content[:5], content[5:]))
        store.put_part("k", "up", 2, views(content[:1000]))
        store.put("k", views(content))
        received = bytearray(3 * MIB - 9)
        store.read_into("k", 7, views(received))
        store.read_into("k", 7, views(bytearray(1000)))
    assert received == content[7 : 3 * MIB - 2]
    assert [SIGN in seen.headers["user-agent"] for seen in server.seen] == [True, False, True, True, False]
    assert all("bucketpoint/" in seen.headers["user-agent"] for seen in server.seen)
    assert server.seen[0].body == server.seen[2].body == content
    crc = checksums.crc32c(content).to_bytes(4, "big")
    assert base64.b64decode(server.seen[0].headers["x-amz-checksum-crc32c"]) == crc
    assert server.seen[0].headers["authorization"].startswith("AWS4-HMAC-SHA256")


@pytest.mark.parametrize("engine", ["boto3", "auto"])
def test_nothing_goes_through_it_that_was_not_told_to(engine: str) -> None:
    with scripted(answer(b"")) as server:
        S3Store("bucket", store_at(server).options.replace(engine=engine)).put("k", views(bytes(2 * MIB)))
    assert SIGN not in server.seen[0].headers["user-agent"]


@pytest.mark.parametrize("failure", [error(500, "InternalError"), error(503, "SlowDown"), Answer(drop=True)])
def test_a_retry_sends_the_whole_body_again_and_each_attempt_is_one_request(failure: Answer) -> None:
    content = os.urandom(2 * MIB)
    with scripted(lambda request, number: failure if number < 2 else answer(content)(request, number)) as server:
        part = store_at(server).put_part("k", "up", 1, views(content[:1], content[1:]))
    assert part.etag == "etag"
    assert len(server.seen) == 3
    assert all(seen.body == content for seen in server.seen)


def test_a_failure_that_lasts_is_the_error_that_boto3_makes_of_it() -> None:
    with scripted(lambda request, number: error(403, "AccessDenied")) as server:
        errors = []
        for engine in ("crt", "boto3"):
            store = S3Store("bucket", store_at(server).options.replace(engine=engine))
            with pytest.raises(StoreError) as caught:
                store.put_part("k", "up", 1, views(bytes(2 * MIB)))
            errors.append((type(caught.value), caught.value.message, caught.value.url))
            assert caught.value.__context__ is None
    assert errors[0] == errors[1]


@pytest.mark.parametrize("cut", [0, 1000, MIB])
def test_a_body_that_breaks_off_is_transient(cut: int) -> None:
    content = os.urandom(2 * MIB)

    def script(request: Seen, number: int) -> Answer:
        whole = answer(content)(request, number)
        return Answer(whole.status, whole.headers, whole.body, cut=cut)

    with scripted(script) as server, pytest.raises(TransientStoreError):
        store_at(server, max_attempts=1).read_into("k", 0, views(bytearray(len(content))))


def test_a_store_that_ignores_ranges_is_found_out_and_nothing_is_written_beyond_the_buffers() -> None:
    content = os.urandom(4 * MIB)
    memory = bytearray(b"\xaa" * (3 * MIB))
    with (
        scripted(lambda request, number: Answer(200, {"ETag": '"e"'}, content)) as server,
        pytest.raises(StoreError, match="ignored the range"),
    ):
        store_at(server).read_into("k", 0, [memoryview(memory)[: 2 * MIB]])
    assert memory[2 * MIB :] == b"\xaa" * MIB


def test_a_range_beyond_the_end_is_corrupt(minio: S3Server) -> None:
    store = store_of(minio)
    store.put("k", views(bytes(2 * MIB)))
    with pytest.raises(CorruptDataError):
        store.read_into("k", MIB, views(bytearray(2 * MIB)))


def test_tls_is_verified_with_the_bundle_that_the_options_name(minio_tls: S3Server) -> None:
    store = store_of(minio_tls)
    content = os.urandom(2 * MIB)
    store.put("k", views(content))
    received = bytearray(len(content))
    store.read_into("k", 0, views(received))
    assert received == content


@pytest.mark.slow  # The CRT tries for some 15 s to get through.
def test_an_untrusted_certificate_is_an_endpoint_error(minio_tls: S3Server) -> None:
    options = minio_tls.options
    del options["client_kwargs"]["verify"]
    untrusting = S3Options.from_storage_options({**options, "engine": "crt", "max_attempts": 1})
    with pytest.raises(EndpointError):
        S3Store(minio_tls.make_bucket(), untrusting).put("k", views(bytes(2 * MIB)))


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:{port}", "http://no-such-host.invalid"])
def test_an_endpoint_that_is_not_there_is_an_endpoint_error(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    url = endpoint.format(port=free_port())
    options = S3Options(endpoint_url=url, access_key="a", secret_key="b", engine="crt", max_attempts=1)
    options = options.replace(config_kwargs={"s3": {"payload_signing_enabled": False}})
    with pytest.raises(EndpointError, match="s3://bucket/k"):
        S3Store("bucket", options).put("k", views(bytes(2 * MIB)))


def test_a_proxy_and_an_engine_that_nobody_knows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"access_key": "a", "secret_key": "b"}
    with pytest.raises(BucketpointError, match="crt"):
        S3Options(engine="rust")
    proxied = S3Options(engine="crt", config_kwargs={"proxies": {"https": "http://proxy.example:3128"}}, **keys)
    with pytest.raises(EndpointError, match="proxy"):
        S3Store("bucket", proxied).put("k", views(b"x"))
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    with pytest.raises(EndpointError, match="proxy"):
        S3Store("bucket", S3Options(engine="crt", **keys)).put("k", views(b"x"))


def test_many_threads_share_it(minio: S3Server) -> None:
    store = store_of(minio, connections=4)
    content = os.urandom(2 * MIB)

    def move(number: int) -> bytes:
        key = f"k{number}"
        store.put(key, views(content))
        received = bytearray(MIB)
        store.read_into(key, number, views(received))
        return bytes(received)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(move, range(24)))
    assert found == [content[number : number + MIB] for number in range(24)]
    store.close()
    assert move(0) == content[:MIB]


def test_a_body_is_copied_when_a_core_has_room_for_it_and_reads_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_crt, "bodies_at_once", lambda: 2)
    content = bytes(MIB)
    lock, inside, most = threading.Lock(), Counter[str](), Counter[str]()
    # As many have to be there at once as are let through, and one more has time to come.
    together = {"PUT": threading.Barrier(2), "GET": threading.Barrier(4)}
    too_many = threading.Event()

    def script(request: Seen, number: int) -> Answer:
        with lock:
            inside[request.method] += 1
            most[request.method] = max(most[request.method], inside[request.method])
            if inside["PUT"] > 2:
                too_many.set()
        together[request.method].wait(240)
        too_many.wait(0.3)
        with lock:
            inside[request.method] -= 1
        return answer(content)(request, number)

    with scripted(script) as server, ThreadPoolExecutor(8) as pool:
        store = store_at(server, connections=4)
        list(pool.map(lambda number: store.put(f"k{number}", views(content)), range(8)))
        list(pool.map(lambda number: store.read_into("k", 0, views(bytearray(MIB))), range(8)))
    assert (most["PUT"], most["GET"]) == (2, 4)


def test_a_body_that_failed_leaves_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_crt, "bodies_at_once", lambda: 1)
    with scripted(lambda request, number: Answer(drop=True) if number == 0 else answer(b"")(request, number)) as server:
        store = store_at(server, max_attempts=1)
        with pytest.raises(TransientStoreError):
            store.put("k", views(bytes(MIB)))
        store.put("k", views(bytes(MIB)))
    assert len(server.seen) == 2


def test_there_is_room_for_one_body_a_core_and_for_two_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = {}
    for cores in (1, 2, 96):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        rooms[cores] = s3_crt.bodies_at_once()
    assert rooms == {1: 2, 2: 2, 96: 96}


def _read_in_child(store: S3Store, results: Any) -> None:
    received = bytearray(2 * MIB)
    store.read_into("k", 0, views(received))
    results.put(bytes(received))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_has_one_of_its_own(minio: S3Server, method: Any) -> None:
    store = store_of(minio)
    content = os.urandom(2 * MIB)
    store.put("k", views(content))
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=_read_in_child, args=(store, results))
    child.start()
    try:
        assert results.get(timeout=240) == content
    finally:
        child.join(60)
    assert child.exitcode == 0
    received = bytearray(len(content))
    store.read_into("k", 0, views(received))
    assert received == content


@pytest.mark.contract
def test_a_checkpoint_is_saved_and_loaded_and_a_save_that_fails_leaves_nothing(
    minio: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from bucketpoint import S3Reader, S3Writer

    bucket = minio.make_bucket()
    options = minio.options
    state = {"w": torch.rand(6 << 20), "b": torch.rand(10)}
    writer = S3Writer(f"s3://{bucket}/good", storage_options=options, engine="crt")
    dcp.save(state, storage_writer=writer, no_dist=True)
    loaded = {"w": torch.zeros(6 << 20), "b": torch.zeros(10)}
    reader = S3Reader(f"s3://{bucket}/good", storage_options=options, engine="crt")
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert "engine" not in options

    kept = minio.keys(bucket)
    refused = S3Store.put_part

    def failing(self: S3Store, key: str, upload_id: str, number: int, body: Any, **how: Any) -> Any:
        # The wrong checksum: the store refuses what came through the engine.
        return refused(self, key, upload_id, number, body, crc32c=1)

    monkeypatch.setattr(S3Store, "put_part", failing)
    options["max_attempts"] = 1
    writer = S3Writer(f"s3://{bucket}/bad", storage_options=options, engine="crt")
    with pytest.raises(CheckpointException):
        dcp.save(state, storage_writer=writer, no_dist=True)
    assert minio.keys(bucket) == kept
