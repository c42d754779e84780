"""Each fault of the kit does to a real store and a real client what it says, is counted, and told once at the end."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.errors import CorruptDataError, CredentialsError, StoreError, ThrottledError, TransientStoreError
from bucketpoint.stores import ObjectInfo, open_store
from gcs_server import GCSServer
from kit import (
    CutReply,
    CutRequest,
    Delay,
    ErrorInBody,
    ExpireCredentials,
    FaultProxy,
    FlipReply,
    FlipRequest,
    Kill,
    Refuse,
    Reset,
    Script,
    Slow,
    Stale,
    Stall,
    Wire,
    always,
    mixed,
)
from kit.faults import Player
from kit.http import Head
from kit.kinds import Api, StoreRequest
from kit.plugin import MakeProxy
from kit.proxied_connection import Board, Counts
from kit.servers import S3Server
from kit.tally import Tally
from services import Server, proxy_before

BODY = bytes(range(256)) * 4096


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


def store_at(server: Server, proxy: FaultProxy) -> Any:
    """One attempt for each request, so that what a fault does is seen and not survived."""
    options = {**server.at(proxy.url).options, **server.attempts(1)}
    return open_store(server.url(server.make_bucket()), storage_options=options)[0]


def put(store: Any, key: str = "key", body: bytes = BODY) -> None:
    store.put(key, [memoryview(body)])


@pytest.mark.parametrize("server", ["minio", "gcs"], indirect=True)
def test_passes_whole_and_counts_what_meets_no_fault(server: Server, fault_proxy: MakeProxy) -> None:
    proxy = proxy_before(server, fault_proxy)
    store, keys, api = store_at(server, proxy), ["a/b"], Api.GCS_JSON
    put(store, "a/b")
    assert store.get("a/b")[0] == BODY
    assert store.head("a/b").size == len(BODY)
    assert [info.key for info in store.list("")] == keys
    expected = Counter(PutObject=1, GetObject=1, HeadObject=1, ListObjects=1, DeleteObjects=1)
    if isinstance(server, S3Server):
        upload = store.create_multipart("large")
        part = store.put_part("large", upload, 1, [memoryview(BODY)])
        store.complete_multipart("large", upload, [part])
        store.abort_multipart("large", store.create_multipart("large"))
        store.copy(ObjectInfo("a/b", len(BODY)), "copied")
        keys, api = ["a/b", "large", "copied"], Api.S3
        expected |= Counter(CreateMultipartUpload=2, UploadPart=1, CompleteMultipartUpload=1, CopyObject=1)
        expected |= Counter(AbortMultipartUpload=1)
        assert proxy.counts.sent["PutObject"] == proxy.counts.sent["UploadPart"] == len(BODY)
    assert store.delete(keys) == []
    assert proxy.counts.requests == expected
    assert proxy.counts.received["GetObject"] == len(BODY)
    assert not proxy.counts.faults
    assert {one.request.key for one in proxy.exchanges} == {"", *keys}
    assert {one.request.api for one in proxy.exchanges} == {api}


@pytest.mark.parametrize(
    ("server", "fault", "error"),
    [
        ("minio", Refuse(503, "SlowDown"), ThrottledError),
        ("minio", Refuse(500, "InternalError"), TransientStoreError),
        ("minio", Reset(), TransientStoreError),
        ("minio", Stall(0.1), TransientStoreError),
        ("minio", CutRequest(), TransientStoreError),
        ("minio", FlipRequest(), CorruptDataError),
        ("gcs", Refuse(503, "backendError"), ThrottledError),
        ("gcs", Refuse(403, "userRateLimitExceeded"), ThrottledError),
        ("gcs", CutRequest(), TransientStoreError),
    ],
    indirect=["server"],
    ids=lambda value: getattr(value, "name", ""),
)
def test_fails_a_put_that_meets_a_fault_and_leaves_nothing(
    server: Server, fault_proxy: MakeProxy, fault: Any, error: type[StoreError]
) -> None:
    proxy = proxy_before(server, fault_proxy)
    proxy.play(always(fault, kinds=["PutObject"], times=1))
    store = store_at(server, proxy)
    with pytest.raises(error):
        put(store)
    assert server.keys(store.bucket) == []
    assert proxy.counts.faults == {fault.name: 1}
    put(store)
    assert store.get("key")[0] == BODY


def test_flips_a_bit_of_a_body_which_gcs_gets_once_more(gcs: GCSServer, fault_proxy: MakeProxy) -> None:
    """GCS says "invalid" of it, as of much else."""
    proxy = proxy_before(gcs, fault_proxy)
    proxy.play(always(FlipRequest(), kinds=["PutObject"], times=1))
    store = store_at(gcs, proxy)
    put(store)
    assert proxy.counts.requests["PutObject"] == 2
    proxy.play(always(FlipRequest(), kinds=["PutObject"], keys="key"))
    with pytest.raises(StoreError):
        put(store)
    assert gcs.read(store.bucket, "key") == BODY


@pytest.mark.parametrize("fault", [Refuse(500, "InternalError", acted=True), Reset(acted=True), Stall(0.1, acted=True)])
def test_leaves_what_the_store_was_asked_for_after_a_lost_answer(
    minio: S3Server, fault_proxy: MakeProxy, fault: Any
) -> None:
    proxy = fault_proxy(minio, always(fault, kinds=["PutObject"]))
    store = store_at(minio, proxy)
    with pytest.raises(TransientStoreError):
        put(store)
    assert minio.keys(store.bucket) == ["key"]
    assert proxy.exchanges[-1].status == 200


def test_cuts_a_reply_short_or_flips_a_bit_in_it(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio)
    store = store_at(minio, proxy)
    put(store)
    proxy.play(always(CutReply()))
    with pytest.raises(TransientStoreError):
        store.get("key")
    proxy.play(always(FlipReply(0.25)))
    found = store.get("key")[0]
    different = [at for at in range(len(BODY)) if found[at] != BODY[at]]
    assert different == [len(BODY) // 4]
    assert found[different[0]] ^ BODY[different[0]] == 1


@pytest.mark.parametrize("acted", [False, True])
def test_answers_complete_with_200_and_an_error_in_its_body(
    minio: S3Server, fault_proxy: MakeProxy, acted: bool
) -> None:
    proxy = fault_proxy(minio, always(ErrorInBody(acted=acted)))
    store = store_at(minio, proxy)
    upload = store.create_multipart("key")
    part = store.put_part("key", upload, 1, [memoryview(BODY)])
    with pytest.raises(TransientStoreError):
        store.complete_multipart("key", upload, [part])
    assert minio.keys(store.bucket) == ["key"] * acted


def test_gives_as_a_stale_answer_the_first_that_was_given(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio, always(Stale(), kinds=["GetObject"], keys="key", skip=1, times=1))
    store = store_at(minio, proxy)
    put(store, body=b"old")
    assert store.get("key")[0] == b"old"
    put(store, body=b"new")
    assert store.get("key")[0] == b"old"
    assert store.get("key")[0] == b"new"


def test_keeps_expired_credentials_expired_and_no_others(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio, always(ExpireCredentials(), kinds=["PutObject"], skip=1, times=1))
    store = store_at(minio, proxy)
    put(store)
    for _ in range(2):
        with pytest.raises(CredentialsError):
            put(store)
    with pytest.raises(CredentialsError):
        store.get("key")
    bucket = f"arn:aws:s3:::{store.bucket}"
    renewed = minio.limited_options({"Effect": "Allow", "Action": ["s3:*"], "Resource": [bucket, f"{bucket}/*"]})
    renewed["client_kwargs"]["endpoint_url"] = proxy.url
    assert open_store(minio.url(store.bucket), storage_options=renewed)[0].get("key")[0] == BODY
    # What the proxy keeps of these requests holds no secret.
    told = repr(proxy.exchanges)
    assert minio.secret not in told
    assert hashlib.sha256(minio.secret.encode()).hexdigest() not in told
    assert "Signature" not in told


def test_takes_the_stated_time_for_delay_stall_and_slow_wire_and_changes_no_byte(
    minio: S3Server, fault_proxy: MakeProxy
) -> None:
    """What they take at least, by the proxy's own clock: no machine is so fast as to take less."""
    proxy = fault_proxy(minio, always(Delay(0.1)), wire=Wire(delay_s=0.01))
    store = store_at(minio, proxy)
    put(store)
    proxy.play(always(Slow(10e6)))
    assert store.get("key")[0] == BODY
    put(store)
    proxy.play(always(Stall(0.1)))
    with pytest.raises(TransientStoreError):
        store.get("key")
    taken = [one.end - one.start for one in proxy.exchanges]
    for at, least in enumerate((0.11, 0.09, 0.09, 0.1)):
        assert taken[at] >= least, f"request {at + 1}"
    assert proxy.counts.faults == {"delay": 1, "slow": 2, "stall": 1}


def test_keeps_the_wire_as_wide_for_all_connections_as_it_says(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio, wire=Wire(total_bytes_per_s=20e6))
    store = store_at(minio, proxy)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: put(store, f"{number}"), range(4)))
    passing = [one for one in proxy.exchanges if one.request.kind == "PutObject"]
    assert max(one.end for one in passing) - min(one.start for one in passing) >= 0.9 * 4 * len(BODY) / 20e6


def test_passes_nothing_after_a_kill_until_another_script_is_played(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio, always(Kill(())))
    store = store_at(minio, proxy)
    for key in ("first", "second"):
        with pytest.raises(TransientStoreError):
            put(store, key)
    assert minio.keys(store.bucket) == ["first"]
    assert proxy.counts.faults == {"kill": 1}
    proxy.play(Script())
    put(store, "third")
    assert minio.keys(store.bucket) == ["first", "third"]


KINDS = ["PutObject", "GetObject", "UploadPart", "CompleteMultipartUpload", "ListObjects"]

requests = st.builds(
    lambda kind, key, nbytes: StoreRequest(kind, key, "PUT", f"/b/{key}", nbytes),
    st.sampled_from(KINDS),
    st.sampled_from(["a", "b/.metadata"]),
    st.integers(0, 10),
)


@given(st.lists(requests, max_size=40), st.floats(0, 1), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_plays_a_script_the_same_every_time_and_strikes_as_often_as_a_rule_says(
    passing: list[StoreRequest], probability: float, seed: int, skip: int, times: int
) -> None:
    script = mixed(probability, seed=seed)
    first, second = Player(script), Player(script)
    chosen = [first.choose(request) for request in passing]
    assert chosen == [second.choose(request) for request in passing]
    assert all(fault is None or fault.fits(request) for fault, request in zip(chosen, passing, strict=True))
    if probability == 0:
        assert not any(chosen)
    if probability == 1:
        assert all(chosen)

    player = Player(always(Reset(), kinds=["PutObject"], keys="*.metadata", skip=skip, times=times))
    struck = [player.choose(request) is not None for request in passing]
    fitting = [index for index, one in enumerate(passing) if one.kind == "PutObject" and one.key != "a"]
    assert [index for index, hit in enumerate(struck) if hit] == fitting[skip : skip + times]


def test_counts_nothing_that_was_answered_before_a_clear_after_it() -> None:
    """A client has its answer a moment before the exchange has ended."""
    board = Board(Script())
    exchange, _ = board.begin("1", StoreRequest("GetObject", "k", "GET", "/b/k", 0, None))
    with ThreadPoolExecutor(1) as pool:
        cleared = pool.submit(board.clear)
        time.sleep(0.1)
        board.end(exchange)
        cleared.result()
    assert board.settled() == []


def test_recognises_requests_of_gcs_by_the_names_of_s3() -> None:
    def request(method: str, target: str, *headers: str) -> StoreRequest:
        lines = [f"{method} {target} HTTP/1.1", "Host: storage.googleapis.com", *headers, "", ""]
        return StoreRequest.of(Head.parse("\r\n".join(lines).encode()))

    for method, target, kind, key in (
        ("POST", "/upload/storage/v1/b/bucket/o?uploadType=media&name=a%2Fb", "PutObject", "a/b"),
        ("POST", "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=a", "CreateMultipartUpload", "a"),
        ("PUT", "/upload/storage/v1/b/bucket/o?upload_id=7&name=a", "UploadPart", "a"),
        ("GET", "/storage/v1/b/bucket/o/a%2Fb?alt=media", "GetObject", "a/b"),
        ("GET", "/storage/v1/b/bucket/o/a%2Fb", "HeadObject", "a/b"),
        ("GET", "/storage/v1/b/bucket/o?prefix=a", "ListObjects", ""),
        ("DELETE", "/storage/v1/b/bucket/o/a", "DeleteObject", "a"),
        ("POST", "/batch/storage/v1", "DeleteObjects", ""),
    ):
        found = request(method, target)
        assert (found.kind, found.key, found.api) == (kind, key, Api.GCS_JSON)
    # Only the XML API's Complete, which is S3's, may answer with an error under a status of success.
    multipart = request("POST", "/bucket/a?uploadId=7", "Authorization: Bearer planted-token")
    assert (multipart.kind, multipart.api) == ("CompleteMultipartUpload", Api.GCS_XML)
    assert ErrorInBody().fits(multipart)
    assert multipart.access_key
    assert "planted" not in repr(multipart)


def test_tells_nothing_of_a_run_without_faults() -> None:
    tally = Tally()
    tally.passed(Counts())
    assert tally.lines() == []
