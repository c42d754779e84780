"""Each fault of the kit does to a real store and a real client what it says, and is counted."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.errors import (
    BucketpointError,
    CorruptDataError,
    CredentialsError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from bucketpoint.stores import ObjectInfo
from bucketpoint.stores.s3 import S3Options, S3Store
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
    Rule,
    Script,
    SkewClock,
    Slow,
    Stale,
    Stall,
    Wire,
    always,
    mixed,
)
from kit.faults import Player
from kit.kinds import StoreRequest
from kit.plugin import MakeProxy
from kit.proxied_connection import Board
from kit.servers import S3Server

BODY = bytes(range(256)) * 4096


def store_at(server: S3Server, proxy: FaultProxy, **options: Any) -> S3Store:
    """One attempt for each request, so that what a fault does is seen and not survived."""
    options = {**server.at(proxy.url).options, **server.attempts(1), **options}
    return S3Store(server.make_bucket(), S3Options.from_storage_options(options))


def put(store: S3Store, key: str = "key", body: bytes = BODY) -> None:
    store.put(key, [memoryview(body)])


@pytest.mark.contract
def test_passes_whole_and_counts_what_meets_no_fault(s3: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(s3)
    store = store_at(s3, proxy)
    put(store)
    assert store.get("key")[0] == BODY
    assert [info.key for info in store.list("")] == ["key"]
    upload = store.create_multipart("large")
    part = store.put_part("large", upload, 1, [memoryview(BODY)])
    store.complete_multipart("large", upload, [part])
    store.abort_multipart("large", store.create_multipart("large"))
    store.copy(ObjectInfo("key", len(BODY)), "copied")
    assert store.delete(["key", "large", "copied"]) == []
    counts = proxy.counts
    assert counts.requests == Counter(
        {
            "PutObject": 1,
            "GetObject": 1,
            "ListObjects": 1,
            "CreateMultipartUpload": 2,
            "UploadPart": 1,
            "CompleteMultipartUpload": 1,
            "AbortMultipartUpload": 1,
            "CopyObject": 1,
            "DeleteObjects": 1,
        }
    )
    assert counts.sent["PutObject"] == counts.received["GetObject"] == counts.sent["UploadPart"] == len(BODY)
    assert not counts.faults
    assert {one.request.key for one in proxy.exchanges} == {"", "key", "large", "copied"}


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Refuse(503, "SlowDown"), ThrottledError),
        (Refuse(500, "InternalError"), TransientStoreError),
        (Refuse(502, "BadGateway"), TransientStoreError),
        (Refuse(429, "TooManyRequests"), ThrottledError),
        (Reset(), TransientStoreError),
        (Stall(0.1), TransientStoreError),
        (CutRequest(), TransientStoreError),
        (FlipRequest(), CorruptDataError),
        (SkewClock(3600), CredentialsError),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_fails_a_put_that_meets_a_fault_and_leaves_nothing(
    minio: S3Server, fault_proxy: MakeProxy, fault: Any, error: type[StoreError]
) -> None:
    proxy = fault_proxy(minio, always(fault, kinds=["PutObject"], times=1))
    store = store_at(minio, proxy)
    with pytest.raises(error):
        put(store)
    assert minio.keys(store.bucket) == []
    assert proxy.counts.faults == {fault.name: 1}
    put(store)
    assert store.get("key")[0] == BODY


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
    proxy = fault_proxy(minio, Script((Rule((Stale(),), kinds=("GetObject",), keys="key", skip=1, times=1),)))
    store = store_at(minio, proxy)
    put(store, body=b"old")
    assert store.get("key")[0] == b"old"
    put(store, body=b"new")
    assert store.get("key")[0] == b"old"
    assert store.get("key")[0] == b"new"


def test_shows_a_skewed_clock_in_the_date(minio: S3Server, fault_proxy: MakeProxy) -> None:
    from bucketpoint.stores.s3.inspect import clock

    proxy = fault_proxy(minio, always(SkewClock(600)))
    found = clock(store_at(minio, proxy))
    assert found is not None
    assert -700 < found.ahead < -500


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
    assert S3Store(store.bucket, S3Options.from_storage_options(renewed)).get("key")[0] == BODY


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


def test_survives_every_transient_fault_once_by_the_default_retries(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio, mixed(0.3, seed=5))
    store = store_at(minio, proxy, **minio.attempts(6))
    for number in range(30):
        put(store, f"{number}", BODY[:1000])
    proxy.play(Script())
    assert all(store.get(f"{number}")[0] == BODY[:1000] for number in range(30))
    assert len(proxy.counts.faults) >= 4


def test_reaches_a_store_by_its_own_name_through_a_forward_proxy(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio)
    options = {"key": minio.key, "secret": minio.secret, **proxy.options}
    store = S3Store(minio.make_bucket(), S3Options.from_storage_options(options))
    put(store)
    assert store.get("key")[0] == BODY
    assert store.identity == f"{minio.endpoint}/{store.bucket}"
    assert proxy.counts.requests == {"PutObject": 1, "GetObject": 1}


def test_serves_no_other_host_by_a_forward_proxy(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy("http://elsewhere.invalid", always(Delay(0)))
    options = {**minio.options, "config_kwargs": {"proxies": {"http": proxy.url}, **minio.attempts(1)["config_kwargs"]}}
    with pytest.raises(BucketpointError):
        put(S3Store("bucket", S3Options.from_storage_options(options)))


def test_reaches_a_store_under_tls_with_plain_http_to_the_proxy(s3_tls: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(s3_tls)
    plain = s3_tls.at(proxy.url).options
    del plain["client_kwargs"]["verify"]
    store = S3Store(s3_tls.make_bucket(), S3Options.from_storage_options(plain))
    put(store)
    assert store.get("key")[0] == BODY


def test_stores_a_flipped_bit_from_a_client_without_a_checksum(minio: S3Server, fault_proxy: MakeProxy) -> None:
    """What the fault does to those who do not look, so that it is known to do something."""
    proxy = fault_proxy(minio, always(FlipRequest(0.0), kinds=["PutObject"]))
    server = minio.at(proxy.url)
    bucket = server.make_bucket()
    config = Config(request_checksum_calculation="when_required", s3={"payload_signing_enabled": False})
    client = server.client()
    client.meta.config.request_checksum_calculation = config.request_checksum_calculation
    try:
        client.put_object(Bucket=bucket, Key="key", Body=b"body")
    except ClientError as refused:
        assert refused.response["Error"]["Code"] in ("XAmzContentSHA256Mismatch", "BadDigest")  # noqa: PT017
    else:
        assert minio.client().get_object(Bucket=bucket, Key="key")["Body"].read() == b"cody"


KINDS = ["PutObject", "GetObject", "UploadPart", "CompleteMultipartUpload", "ListObjects"]

requests = st.builds(
    lambda kind, key, nbytes: StoreRequest(kind, key, "PUT", f"/b/{key}", nbytes),
    st.sampled_from(KINDS),
    st.sampled_from(["a", "b/.metadata"]),
    st.integers(0, 10),
)


@given(st.lists(requests, max_size=40), st.floats(0, 1), st.integers(0, 5))
def test_plays_a_script_the_same_every_time(passing: list[StoreRequest], probability: float, seed: int) -> None:
    script = mixed(probability, seed=seed)
    first, second = Player(script), Player(script)
    chosen = [first.choose(request) for request in passing]
    assert chosen == [second.choose(request) for request in passing]
    assert all(fault is None or fault.fits(request) for fault, request in zip(chosen, passing, strict=True))
    if probability == 0:
        assert not any(chosen)
    if probability == 1:
        assert all(chosen)


@given(st.lists(requests, max_size=40), st.integers(0, 5), st.integers(0, 5))
def test_passes_over_and_strikes_as_many_as_a_rule_says(passing: list[StoreRequest], skip: int, times: int) -> None:
    player = Player(always(Reset(), kinds=["PutObject"], keys="*.metadata", skip=skip, times=times))
    struck = [player.choose(request) is not None for request in passing]
    fitting = [index for index, one in enumerate(passing) if one.kind == "PutObject" and one.key != "a"]
    assert [index for index, hit in enumerate(struck) if hit] == fitting[skip : skip + times]


def test_records_no_secret_anywhere(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio)
    put(store_at(minio, proxy))
    told = repr(proxy.exchanges)
    assert minio.secret not in told
    assert hashlib.sha256(minio.secret.encode()).hexdigest() not in told
    assert "Signature" not in told


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
