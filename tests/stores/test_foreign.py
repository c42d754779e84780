"""Answers of a login page, a proxy or another server: none of them counts as a success, or as a missing object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from bucketpoint.errors import EndpointError, StoreError
from bucketpoint.stores import retry
from bucketpoint.stores.foreign import ERROR_BYTES
from bucketpoint.stores.http_store import HttpStore
from kit.buffers import views
from stores.engines import CALLS, gcs_at, s3_at
from stores.engines import gcs_reply as _json
from stores.scripted import Answer, scripted

PAGE = Answer(200, {"Content-Type": "text/html", "Server": "portal"}, b"<html>Please log in</html>")
XHTML = Answer(200, {"Content-Type": "text/html", "ETag": '"e"'}, b"<?xml version='1.0'?><!DOCTYPE html><html/>")
EMPTY = Answer(200)
JSON = Answer(200, {"Content-Type": "application/json"}, b'{"login": "https://portal"}')
MISSING = Answer(404, {"Content-Type": "text/html"}, b"<h1>Not Found</h1>")
MOVED = Answer(302, {"Location": "https://user:hush@portal.example/login?next=hush"})
CACHED = Answer(304, {"ETag": '"e"', "Server": "squid"})
DENIED = Answer(403, {"Content-Type": "text/html"}, b"<h1>Forbidden</h1>")


s3: Callable[[str], HttpStore] = functools.partial(s3_at, max_attempts=None)
gcs: Callable[[str], HttpStore] = functools.partial(gcs_at, max_attempts=None, uploads="xml")


@pytest.mark.parametrize("call", sorted(CALLS.keys() - {"abort", "uploads"}))
@pytest.mark.parametrize("make", [s3, gcs])
def test_refuses_every_answer_that_is_not_the_stores(make: Callable[[str], HttpStore], call: str) -> None:
    answers = [PAGE, XHTML, EMPTY, JSON, MISSING, MOVED, CACHED, DENIED]
    for answer in answers:
        # The answer to HEAD has no body that could tell.
        if call == "head" and make is s3 and answer in (MISSING, DENIED):
            continue
        with scripted(lambda request, number, answer=answer: answer) as server:
            with pytest.raises(EndpointError, match="the answer is not the store's") as caught:
                CALLS[call](make(server.endpoint))
            assert len(server.seen) == 1, "it is not sent again"
        assert "hush" not in str(caught.value)
        assert answer is not MOVED or "https://portal.example/login" in str(caught.value)


def test_distrusts_a_write_without_the_checksum_of_the_writes_before() -> None:
    def script(request: Any, number: int) -> Answer:
        crc = {"x-amz-checksum-crc32c": request.headers["x-amz-checksum-crc32c"]} if number < 1 else {}
        return Answer(200, {"ETag": '"e"', **crc})

    with scripted(script) as server:
        store = s3(server.endpoint)
        store.put("k", views(b"x"))
        with pytest.raises(EndpointError, match="does not repeat the checksum"):
            store.put("k", views(b"y"))
    with scripted(lambda request, number: Answer(200, {"ETag": '"e"'})) as server:
        # A store that never repeats it.
        for _ in range(2):
            s3(server.endpoint).put("k", views(b"x"))


@pytest.mark.parametrize("make", [s3, gcs])
def test_reads_an_error_up_to_a_bound_and_shows_the_beginning_without_long_words(
    make: Callable[[str], HttpStore],
) -> None:
    endless = Answer(400, {"Content-Type": "application/xml"}, b"<Error>" + b" " * (2 * ERROR_BYTES))
    with scripted(lambda request, number: endless) as server, pytest.raises(EndpointError, match="longer than 1 MiB"):
        make(server.endpoint).get("k")
    token = b"Zm9vYmFyYmF6cXV4" * 3
    page = Answer(200, {"Content-Type": "text/html"}, b"<html>\x1b[31m you sent " + token + b" " + b"x " * 500)
    with scripted(lambda request, number: page) as server, pytest.raises(EndpointError) as caught:
        make(server.endpoint).put("k", views(b"x"))
    assert "you sent ***" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        (Answer(413, {"Content-Type": "text/html"}, b"<h1>Request Entity Too Large</h1>"), "part_bytes"),
        (Answer(407, {"Content-Type": "text/html"}, b"<h1>Proxy</h1>"), "HTTPS_PROXY"),
        (Answer(200, {"Server": "MinIO Console", "Content-Type": "text/html"}, b"<html>"), "port of MinIO's console"),
    ],
)
def test_names_the_remedy_of_what_answered(answer: Answer, remedy: str) -> None:
    with scripted(lambda request, number: answer) as server, pytest.raises(EndpointError, match=remedy):
        s3(server.endpoint).put("k", views(b"x"))


def test_treats_a_proxy_that_does_not_reach_the_store_as_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "pause", lambda seconds: None)
    away = Answer(502, {"Content-Type": "text/html"}, b"<h1>Bad Gateway</h1>")
    for make, there in (
        (s3, Answer(200, {"ETag": '"e"'})),
        (gcs, Answer(200, {}, b'{"generation": "1", "size": "1"}')),
    ):
        with scripted(lambda request, number, there=there: away if number < 20 else there) as server:
            make(server.endpoint).put("k", views(b"x"))


def _xml(content: str) -> Answer:
    return Answer(200, {"Content-Type": "application/xml"}, content.encode())


_OBJECT = {"kind": "storage#object", "name": "k", "generation": "7"}
_MORE = "<IsTruncated>true</IsTruncated>"
_PAGE = "<ListBucketResult><Contents>{}</Contents></ListBucketResult>"


@pytest.mark.parametrize(
    ("make", "call", "answer"),
    [
        (s3, "list", _xml(_PAGE.format("<Size>1</Size>"))),
        (s3, "list", _xml(_PAGE.format("<Key>k</Key>"))),
        (s3, "list", _xml(_PAGE.format("<Key>k</Key><Size>many</Size>"))),
        (s3, "list", _xml(_PAGE.format("<Key>k</Key><Size>1</Size><LastModified>late</LastModified>"))),
        (s3, "head", Answer(200, {"ETag": '"e"', "Last-Modified": "late"})),
        (s3, "head", Answer(200, {"ETag": '"e"'}, chunked=True)),
        (s3, "create", _xml("<InitiateMultipartUploadResult/>")),
        (gcs, "head", _json({**_OBJECT, "size": "many"})),
        (gcs, "head", _json({**_OBJECT, "timeCreated": 7})),
        (gcs, "list", _json({"kind": "storage#objects", "items": [7]})),
        (gcs, "list", Answer(200, {}, b'{"kind":' + b"[" * 100_000)),
        (gcs, "head", Answer(403, {}, b"[" * 100_000)),
        (gcs, "copy", _json({"done": False})),
    ],
)
def test_names_a_malformed_answer(
    make: Callable[[str], HttpStore], call: str, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "pause", lambda seconds: None)
    with scripted(lambda request, number: answer) as server, pytest.raises(StoreError) as caught:
        CALLS[call](make(server.endpoint))
    assert caught.value.url is not None


@pytest.mark.parametrize(
    ("make", "act", "answers"),
    [
        (gcs, "list", [_json({"kind": "storage#objects", "nextPageToken": token}) for token in "AB"]),
        (s3, "list", [_xml(f"<ListBucketResult>{_MORE}</ListBucketResult>")]),
        (gcs, "copy", [_json({"done": False, "rewriteToken": "A", "totalBytesRewritten": "5"})]),
        (
            s3,
            "list",
            [
                _xml(
                    f"<ListBucketResult>{_MORE}<NextContinuationToken>{token}</NextContinuationToken></ListBucketResult>"
                )
                for token in "AB"
            ],
        ),
        (
            gcs,
            "uploads",
            [_xml(f"<ListMultipartUploadsResult>{_MORE}<NextKeyMarker>k</NextKeyMarker></ListMultipartUploadsResult>")],
        ),
    ],
)
def test_ends_requests_that_lead_in_a_circle(make: Callable[[str], HttpStore], act: str, answers: list[Answer]) -> None:
    def script(request: Any, number: int) -> Answer:
        assert number < 10
        return answers[number % len(answers)]

    with scripted(script) as server, pytest.raises(StoreError, match="does not name the next page"):
        CALLS[act](make(server.endpoint))


@pytest.mark.parametrize(("make", "headers"), [(s3, {"ETag": '"e"'}), (gcs, {"x-goog-generation": "7"})])
def test_asks_again_for_a_mixed_up_range_and_reads_no_more_than_was_asked_for(
    make: Callable[[str], HttpStore], headers: dict[str, str]
) -> None:
    def script(request: Any, number: int) -> Answer:
        start = int(request.headers["range"].partition("=")[2].partition("-")[0]) + (0 if number else 3)
        return Answer(
            206, {**headers, "Content-Range": f"bytes {start}-{start + 2}/9"}, b"abcdefghi"[start : start + 3]
        )

    target = bytearray(3)
    with scripted(script) as server:
        store = make(server.endpoint)
        retry.retry_transient(lambda: store.read_into("k", 3, [memoryview(target)]))
        assert len(server.seen) == 2
    assert target == b"def"
    with scripted(lambda request, number: Answer(200, headers, b"x" * 100_000)) as server:
        data, info = make(server.endpoint).get("k", first=10)
    assert (data, info.size) == (b"x" * 10, 100_000)
