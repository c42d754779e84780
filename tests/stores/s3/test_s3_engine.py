"""How `S3Store` moves bodies and takes failures, where S3 is a case of its own. The rest is in `test_engines`."""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint import errors
from bucketpoint.errors import (
    EndpointError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    TransientStoreError,
)
from bucketpoint.stores import ObjectInfo, http_body
from bucketpoint.stores.s3 import S3Options, S3Store
from bucketpoint.stores.s3 import client as s3_client
from bucketpoint.stores.s3 import exchange as s3_exchange
from bucketpoint.stores.s3 import inspect as s3_inspect
from bucketpoint.stores.s3 import store as s3_store
from kit.buffers import views
from kit.servers import S3Server
from stores.engines import s3_at as store_at
from stores.scripted import Answer, Seen, scripted

MIB = 1 << 20


def etag(request: Seen, number: int) -> Answer:
    return Answer(headers={"ETag": '"etag"'})


@given(st.lists(st.integers(0, 400_000).map(lambda size: os.urandom(1) * size), max_size=12), st.data())
def test_reads_seeks_and_tells_an_outgoing_body_like_a_file(chunks: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(chunks)
    body = s3_exchange.OutgoingBody(views(*chunks))
    assert len(body) == len(whole)
    assert b"".join(http_body.Pieces(views(*chunks))) == whole
    at = data.draw(st.integers(0, len(whole)))
    size = data.draw(st.integers(0, len(whole)))
    assert body.seek(at) == body.tell() == at
    assert body.read(size) == whole[at : at + size]
    assert body.read() == whole[at + size :]
    assert body.read() == b""
    body.seek(0)
    assert body.read(-1) == whole
    assert body.seek(-size, os.SEEK_END) == len(whole) - size


def test_sends_ten_thousand_small_buffers_in_few_pieces_and_copies_no_large_ones() -> None:
    small = [memoryview(b"x" * 100)] * 10_000
    assert len(list(http_body.Pieces(small))) == 4
    large = bytearray(MIB)
    for piece in http_body.Pieces(views(large)):
        assert isinstance(piece, memoryview)
        assert piece.obj is large
        assert piece.nbytes <= http_body.PIECE_BYTES


def test_waits_in_no_request_for_a_100_continue() -> None:
    with scripted(etag) as server:
        store_at(server).put("k", views(b"x" * (2 * MIB)))
    assert "expect" not in server.seen[0].headers


def test_signs_payloads_on_an_open_network_but_not_on_the_loopback_or_over_tls() -> None:
    content = os.urandom(300_000)

    def sent_with(options: S3Options) -> tuple[str, bytes]:
        client = s3_client.build_client(options)
        seen: list[Any] = []

        def capture(request: Any, **_: Any) -> Any:
            s3_exchange.send_from_memory(request)
            seen.append((request.headers["X-Amz-Content-SHA256"], b"".join(request.body)))
            raise InterruptedError

        client.api.meta.events.register_first("before-send.s3", capture)
        with pytest.raises(InterruptedError):
            client.call("PutObject", Bucket="b", Key="k", Body=s3_exchange.OutgoingBody(views(content)))
        digest, body = seen[0]
        return digest.decode() if isinstance(digest, bytes) else digest, body

    keys: dict[str, Any] = {"access_key": "a", "secret_key": "b"}
    signed = hashlib.sha256(content).hexdigest()
    assert sent_with(S3Options(endpoint_url="http://10.0.0.1:9000", **keys)) == (signed, content)
    assert sent_with(S3Options(endpoint_url="http://store.internal", **keys)) == (signed, content)
    assert sent_with(S3Options(endpoint_url="http://127.0.0.1:1", **keys)) == ("UNSIGNED-PAYLOAD", content)
    assert sent_with(S3Options(**keys)) == ("UNSIGNED-PAYLOAD", content)
    forced = S3Options(config_kwargs={"s3": {"payload_signing_enabled": True}}, **keys)
    assert sent_with(forced) == (signed, content)


def test_signs_payloads_that_a_real_server_accepts(minio: S3Server) -> None:
    options = S3Options.from_storage_options(minio.options)
    forced = options.replace(config_kwargs={"s3": {"payload_signing_enabled": True}})
    store, content = S3Store(minio.make_bucket(), forced), os.urandom(100_000)
    store.put("k", views(content[:70_000], content[70_000:]))
    assert store.get("k")[0] == content


@pytest.mark.parametrize("private", [True, False])
def test_receives_a_reply_piece_by_piece_over_one_connection(
    monkeypatch: pytest.MonkeyPatch, minio_tls: S3Server, private: bool
) -> None:
    if not private:
        monkeypatch.setattr(http_body._Wire, "of", classmethod(lambda cls, body, size: None))
    store = S3Store(minio_tls.make_bucket(), S3Options.from_storage_options(minio_tls.options))
    assert store.capabilities.streams_ranges
    content = os.urandom(500_000)
    store.put("k", views(content))
    manager = s3_client.clients.get(store.options).api._endpoint.http_session._manager

    def connections() -> int:
        return sum(manager.pools.get(key).num_connections for key in manager.pools.keys())  # noqa: SIM118

    before = connections()
    for _ in range(3):
        reply, received = store.open_range("k", 11, 400_000), bytearray()
        for size in (1, 99_999, 40_000, 260_000):
            piece = bytearray(size)
            reply.receive(views(piece[:0], piece))
            received += piece
        assert received == content[11:400_011]
        reply.drop()
        with pytest.raises(TransientStoreError):
            reply.receive(views(bytearray(1)))
    assert connections() == before

    reply = store.open_range("k", 0, 400_000)
    reply.receive(views(bytearray(1000)))
    reply.drop()
    with pytest.raises(TransientStoreError):
        reply.receive(views(bytearray(399_000)))
    whole = bytearray(len(content))
    store.read_into("k", 0, views(whole))
    assert whole == content


def test_fails_a_complete_that_answers_200_with_an_error_in_its_body() -> None:
    broken = b"<?xml version='1.0'?>\n<Error><Code>InternalError</Code><Message>scripted</Message></Error>"
    with scripted(lambda request, number: Answer(200, {"Content-Type": "application/xml"}, broken)) as server:
        store = store_at(server, max_attempts=2)
        with pytest.raises(TransientStoreError, match="InternalError"):
            store.complete_multipart("k", "upload", [])
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InternalError", TransientStoreError),
        ("PreconditionFailed", PreconditionFailedError),
        ("NoSuchKey", ObjectNotFoundError),
    ],
)
@pytest.mark.parametrize("size", [5, s3_store.SILENT_COPY_BYTES + 1])
def test_fails_a_copy_that_answers_200_with_an_error_in_its_body(code: str, kind: type[StoreError], size: int) -> None:
    """Amazon sends the status of a copy before it has made the copy."""
    created = b"<InitiateMultipartUploadResult><UploadId>up</UploadId></InitiateMultipartUploadResult>"
    broken = f"<?xml version='1.0'?>\n   <Error><Code>{code}</Code><Message>scripted</Message></Error>".encode()

    def script(request: Seen, number: int) -> Answer:
        if request.method == "DELETE":
            return Answer(204)
        return Answer(200, {}, broken if "x-amz-copy-source" in request.headers else created)

    with scripted(script) as server:
        with pytest.raises(kind, match=code):
            store_at(server, max_attempts=1).copy(ObjectInfo("k", size, "e"), "copied")
        copies = [one.headers for one in server.seen if "x-amz-copy-source" in one.headers]
        assert [one["x-amz-copy-source-if-match"] for one in copies] == ['"e"']
        assert "HEAD" not in [one.method for one in server.seen]
        assert size == 5 or server.seen[-1].method == "DELETE"


def test_reports_the_keys_that_failed_in_a_delete_that_answers_200() -> None:
    body = (
        b"<?xml version='1.0'?><DeleteResult><Error><Key>a</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
        b"<Error><Key>b</Key><Code>NoSuchKey</Code><Message>gone</Message></Error></DeleteResult>"
    )
    with scripted(lambda request, number: Answer(200, {"Content-Type": "application/xml"}, body)) as server:
        failures = store_at(server).delete(["a", "b", "c"])
    said = "no. It needs the permission s3:DeleteObject"
    assert [(failure.key, failure.code, failure.message) for failure in failures] == [("a", "AccessDenied", said)]


def test_raises_an_endpoint_error_for_an_endpoint_that_is_no_url() -> None:
    with pytest.raises(EndpointError, match="Write endpoint_url, or AWS_ENDPOINT_URL, with its scheme"):
        S3Store("bucket", S3Options(endpoint_url="localhost:9000", access_key="a", secret_key="b")).get("k")


def test_pickles_every_kind_of_store_error_with_its_fields() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StoreError)]
    for kind in kinds:
        found = kind("m", url="u", key="k", rank=3)
        again = pickle.loads(pickle.dumps(found))
        assert (type(again), again.fields(), str(again)) == (kind, found.fields(), str(found))


def test_reads_a_bundle_of_certificates_once_for_all_connections(
    minio_tls: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ssl

    loads: list[Any] = []
    plain = ssl.SSLContext.load_verify_locations

    def counting(self: ssl.SSLContext, *arguments: Any, **named: Any) -> None:
        loads.append(arguments)
        plain(self, *arguments, **named)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", counting)
    store = S3Store(
        minio_tls.make_bucket(),
        S3Options.from_storage_options(
            {**minio_tls.options, "config_kwargs": {"user_agent_extra": os.urandom(4).hex()}}
        ),
    )
    loads.clear()
    store.put("k", views(b"x"))
    for _ in range(3):
        s3_client.clients.get(store.options).api.close()
        assert store.get("k")[0] == b"x"
    assert len(loads) == 1


@pytest.mark.parametrize("ahead", [600, -600])
def test_says_how_far_this_machines_clock_is_ahead_of_the_stores(
    minio: S3Server, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr(s3_inspect, "time", SimpleNamespace(time=lambda: time.time() + ahead))
    found = s3_inspect.clock(S3Store(minio.make_bucket(), S3Options.from_storage_options(minio.options)))
    assert found is not None
    assert abs(found.ahead - ahead) < 100
