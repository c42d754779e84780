"""How `GCSStore` takes failures, batches, uploads in parts and copies. What is the same of S3 is in `test_engines`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("google.cloud.storage")

import gcs_xml as xml_api
from bucketpoint.errors import (
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from bucketpoint.stores import ObjectInfo, Part, retry
from bucketpoint.stores.gcs import GCSOptions, GCSStore
from gcs_server import GCSServer
from kit.buffers import views
from stores.engines import OBJECT
from stores.engines import gcs_at as store_at
from stores.engines import gcs_error as error
from stores.engines import gcs_reply as reply
from stores.scripted import Answer, Seen, scripted

pytestmark = pytest.mark.contract

MIB = 1 << 20


def store_on(server: GCSServer, **options: Any) -> GCSStore:
    return GCSStore(server.make_bucket(), GCSOptions.from_storage_options({**server.options, **options}))


def test_waits_until_a_service_says_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(retry, "pause", waits.append)
    asked = ["3", "7200", "Wed, 21 Oct 2026 07:28:00 GMT"]

    def script(request: Seen, number: int) -> Answer:
        if number < len(asked):
            return error(503, "backendError", **{"Retry-After": asked[number]})
        return reply(OBJECT)

    with scripted(script) as server:
        store_at(server, max_attempts=None).put("k", views(b"x"))
    assert 3 <= waits[0] < 4
    assert retry.LONGEST_THROTTLED_DELAY_S <= waits[1] < retry.LONGEST_THROTTLED_DELAY_S + 1
    assert waits[2] < 1


@pytest.mark.parametrize(
    ("listed", "asked"),
    [(reply({"kind": "storage#objects"}), [False, True, False, False]), (error(403, "forbidden"), [False, True] * 3)],
    ids=["once", "of who may not list"],
)
def test_asks_if_the_bucket_is_there_when_an_object_is_missing(listed: Answer, asked: list[bool]) -> None:
    with scripted(lambda request, number: listed if request.path.endswith("/o") else error(404, "notFound")) as server:
        for _ in range(3):
            with pytest.raises(ObjectNotFoundError):
                store_at(server).get("k")
    assert [request.path.endswith("/o") for request in server.seen] == asked


def test_says_that_an_object_is_gone_in_a_pinned_read(gcs: GCSServer) -> None:
    store = store_on(gcs)
    written = store.put("k", views(b"12345"))
    store.delete(["k"])
    with pytest.raises(ObjectNotFoundError):
        store.read_into("k", 0, views(bytearray(5)), if_match=written.etag)


def test_matches_no_object_by_an_etag_of_another_store(gcs: GCSServer) -> None:
    store = store_on(gcs)
    store.put("k", views(b"12345"))
    for etag in ("0", "0" * 32, "d41d8cd98f00b204e9800998ecf8427e", "9" * 19, "-1", "²"):
        with pytest.raises(PreconditionFailedError):
            store.read_into("k", 0, views(bytearray(5)), if_match=etag)
        with pytest.raises(PreconditionFailedError):
            store.put("k", views(b"other"), if_match=etag)
    assert store.get("k")[0] == b"12345"


def batch(request: Seen, answers: dict[str, tuple[int, str]]) -> Answer:
    """A reply to a batch: for the last part of each path, a status and a reason."""
    parts = []
    for number, path in re.findall(rb"Content-ID: <call\+(\d+)>\r\n\r\nDELETE (\S+) HTTP/1.1", request.body):
        status, reason = answers[path.decode().partition("?")[0].rpartition("/")[2]]
        content = error(status, reason).body.decode() if status >= 400 else ""
        parts.append(
            f"--b_oundary\r\nContent-Type: application/http\r\nContent-ID: <response-call+{number.decode()}>\r\n\r\n"
            f"HTTP/1.1 {status} Said\r\nContent-Length: {len(content)}\r\n\r\n{content}\r\n"
        )
    body = "".join(reversed(parts)) + "--b_oundary--\r\n"
    return Answer(200, {"Content-Type": 'multipart/mixed; boundary="b_oundary"'}, body.encode())


def test_reports_each_key_that_stays_in_a_batched_delete_and_retries_what_may_pass() -> None:
    answers = {"a": (204, ""), "b": (403, "forbidden"), "c": (404, "notFound"), "d": (503, "backendError")}

    def script(request: Seen, number: int) -> Answer:
        if number == 2:
            answers["d"] = (204, "")
        return reply({}) if request.path.endswith("/o") else batch(request, answers)

    with scripted(script) as server:
        failures = store_at(server, requester_pays="payer").delete(["a", "b", "c", "d"])
    assert [(failure.key, failure.code) for failure in failures] == [("b", "forbidden")]
    sent = [re.findall(rb"DELETE \S+/(\w)\?userProject=payer ", request.body) for request in server.seen]
    assert sent == [[b"a", b"b", b"c", b"d"], [b"d"], [b"d"]]


def test_sends_calls_of_a_batch_again_that_get_no_answer() -> None:
    def script(request: Seen, number: int) -> Answer:
        answered = batch(request, {"a": (204, ""), "b": (204, "")})
        return answered if number else replace(answered, body=b"--b_oundary--\r\n")

    with scripted(script) as server:
        assert store_at(server).delete(["a", "b"]) == []
    assert len(server.seen) == 2


def test_lists_uploads_under_way_page_by_page(gcs_xml: GCSServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xml_api, "MAX_LISTED", 2)
    store = store_on(gcs_xml)
    begun = [(key, store.create_multipart(key)) for key in ("a/1", "a/1", "a/2", "a/3", "a/4", "b")]
    assert [(one.key, one.upload_id) for one in store.list_multipart("a/")] == begun[:-1]
    assert [one.started for one in store.list_multipart("b")] == [pytest.approx(1767323045.678)]


def test_completes_an_upload_and_deletes_what_is_not_the_sum_of_its_parts() -> None:
    completed = b"<CompleteMultipartUploadResult/>"

    def script(request: Seen, number: int) -> Answer:
        if "batch" in request.path:
            return batch(request, {"k": (204, "")})
        return Answer(200, {}, completed) if request.method == "POST" else reply({**OBJECT, "crc32c": "AAAAAQ=="})

    with scripted(script) as server, pytest.raises(CorruptDataError):
        store_at(server, uploads="xml").complete_multipart("k", "upload", [Part(1, 5, "e", 2)])
    assert b"/o/k?generation=7 HTTP" in server.seen[-1].body
    # Who may only write gets no generation.
    made = Answer(200, {}, completed)
    with scripted(lambda request, number: made if request.method == "POST" else error(403, "forbidden")) as server:
        info = store_at(server, uploads="xml").complete_multipart("k", "upload", [Part(1, 5, "e", 2)])
    assert (info.size, info.etag) == (5, None)


def test_continues_a_copy_of_several_requests_by_its_token_from_one_generation() -> None:
    def script(request: Seen, number: int) -> Answer:
        if request.method == "GET":
            return reply({**OBJECT, "size": "11"})
        if "rewriteToken=next" in request.target:
            return reply({"done": True, "resource": {**OBJECT, "name": "t", "generation": "8", "size": "11"}})
        return reply({"done": False, "rewriteToken": "next"})

    with scripted(script) as server:
        info = store_at(server, kms_key_name="key").copy(ObjectInfo("k", 11, "7"), "t")
    assert (info.key, info.size, info.etag) == ("t", 11, "8")
    sent = [request.target for request in server.seen]
    assert len(sent) == 2
    assert all("ifSourceGenerationMatch=7" in target and "destinationKmsKeyName=key" in target for target in sent)


@pytest.mark.parametrize(("status", "kind"), [(412, PreconditionFailedError), (404, ObjectNotFoundError)])
def test_refuses_a_copy_of_another_generation_or_of_none(status: int, kind: type[StoreError]) -> None:
    def script(request: Seen, number: int) -> Answer:
        code = "conditionNotMet" if status == 412 else "notFound"
        return error(status, code) if request.method == "POST" else reply({"items": []})

    with scripted(script) as server:
        store = store_at(server)
        with pytest.raises(kind, match="bucket/k"):
            store.copy(ObjectInfo("k", 11, "7"), "t")
        assert "ifSourceGenerationMatch=7" in server.seen[0].target
        sent = len(server.seen)
        # The ETag of another store.
        with pytest.raises(PreconditionFailedError):
            store.copy(ObjectInfo("k", 11, "an-etag"), "t")
        assert len(server.seen) == sent


def test_copies_between_two_buckets_of_one_service(gcs: GCSServer) -> None:
    source, target = store_on(gcs), store_on(gcs)
    source.put("k", views(b"content"))
    assert target.can_copy_from(source)
    assert not target.can_copy_from(GCSStore(source.bucket))
    target.copy_from(source, source.head("k"), "copied/k")
    assert target.get("copied/k")[0] == b"content"
