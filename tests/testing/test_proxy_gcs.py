"""The kit before a GCS endpoint: the same kinds, the same faults, and answers in GCS's own words."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.errors import CredentialsError, StoreError, ThrottledError, TransientStoreError
from bucketpoint.location import Location
from bucketpoint.stores.gcs import GCSOptions, GCSStore
from gcs_server import GCSServer
from kit import (
    CutReply,
    CutRequest,
    ErrorInBody,
    ExpireCredentials,
    FaultProxy,
    FlipReply,
    FlipRequest,
    Refuse,
    Reset,
    Script,
    Stall,
    always,
    mixed,
)
from kit.kinds import Api, StoreRequest
from kit.plugin import MakeProxy

pytestmark = pytest.mark.contract

BODY = bytes(range(256)) * 1024


def before(gcs: GCSServer, fault_proxy: MakeProxy, script: Script | None = None) -> FaultProxy:
    # The server is known to itself by its own address, as Google's is by its name.
    return fault_proxy(gcs.endpoint, script, host_header=gcs.endpoint.removeprefix("http://"))


def store_at(gcs: GCSServer, proxy: FaultProxy, **options: Any) -> GCSStore:
    """One attempt for each request, so that what a fault does is seen and not survived."""
    given = {**gcs.options, "endpoint_url": proxy.url, "max_attempts": 1, **options}
    return GCSStore(gcs.make_bucket(), GCSOptions.from_storage_options(given))


def put(store: GCSStore, key: str = "key") -> None:
    store.put(key, [memoryview(BODY)])


def test_passes_requests_whole_and_counts_them_by_the_names_of_s3(gcs: GCSServer, fault_proxy: MakeProxy) -> None:
    proxy = before(gcs, fault_proxy)
    store = store_at(gcs, proxy)
    put(store, "a/b")
    assert store.get("a/b")[0] == BODY
    assert store.head("a/b").size == len(BODY)
    assert [info.key for info in store.list("")] == ["a/b"]
    assert store.delete(["a/b"]) == []
    assert proxy.counts.requests == Counter(PutObject=1, GetObject=1, HeadObject=1, ListObjects=1, DeleteObjects=1)
    assert proxy.counts.received["GetObject"] == len(BODY)
    assert {one.request.api for one in proxy.exchanges} == {Api.GCS_JSON}
    assert proxy.exchanges[0].request.key == "a/b"
    assert not proxy.counts.faults


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Refuse(503, "backendError"), ThrottledError),
        (Refuse(429, "rateLimitExceeded"), ThrottledError),
        (Refuse(403, "userRateLimitExceeded"), ThrottledError),
        (Refuse(500, "backendError"), TransientStoreError),
        (Refuse(502, "badGateway"), TransientStoreError),
        (Reset(), TransientStoreError),
        (Stall(0.1), TransientStoreError),
        (CutRequest(), TransientStoreError),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_fails_a_put_that_meets_a_fault_and_leaves_nothing(
    gcs: GCSServer, fault_proxy: MakeProxy, fault: Any, error: type[StoreError]
) -> None:
    proxy = before(gcs, fault_proxy, always(fault, kinds=["PutObject"], times=1))
    store = store_at(gcs, proxy)
    with pytest.raises(error):
        put(store)
    assert gcs.keys(store.bucket) == []
    assert proxy.counts.faults == {fault.name: 1}
    put(store)
    assert store.get("key")[0] == BODY


def test_leaves_what_the_store_was_asked_for_after_a_lost_answer(gcs: GCSServer, fault_proxy: MakeProxy) -> None:
    proxy = before(gcs, fault_proxy, always(Reset(acted=True), kinds=["PutObject"]))
    store = store_at(gcs, proxy)
    with pytest.raises(TransientStoreError):
        put(store)
    assert gcs.keys(store.bucket) == ["key"]


def test_cuts_bodies_and_flips_bits_both_ways(gcs: GCSServer, fault_proxy: MakeProxy) -> None:
    """Of a bit that flips on the way up the service says "invalid", as of much else: the body is sent once more."""
    proxy = before(gcs, fault_proxy, always(FlipRequest(), kinds=["PutObject"], times=1))
    store = store_at(gcs, proxy)
    put(store)
    assert proxy.counts.requests["PutObject"] == 2
    assert gcs.read(store.bucket, "key") == BODY
    proxy.play(always(FlipRequest(), kinds=["PutObject"], keys="key"))
    with pytest.raises(StoreError):
        put(store)
    assert gcs.read(store.bucket, "key") == BODY
    proxy.play(always(CutReply()))
    with pytest.raises(TransientStoreError):
        store.get("key")
    proxy.play(always(FlipReply(0.25)))
    found = store.get("key")[0]
    assert [at for at in range(len(BODY)) if found[at] != BODY[at]] == [len(BODY) // 4]


def test_expires_a_token_and_lets_another_one_serve(gcs: GCSServer, fault_proxy: MakeProxy) -> None:
    from google.auth.credentials import Credentials

    class Renewed(Credentials):  # type: ignore[misc]
        """A token that changes with each renewal, as those of service accounts do."""

        renewals = 0

        def refresh(self, request: Any) -> None:
            self.renewals += 1
            self.token = f"planted-token-{self.renewals}"

    credentials = Renewed()
    proxy = before(gcs, fault_proxy, always(ExpireCredentials(), kinds=["PutObject"], skip=1, times=1))
    store = store_at(gcs, proxy, token=credentials)
    put(store, "first")
    put(store, "second")
    assert credentials.renewals == 2
    assert gcs.keys(store.bucket) == ["first", "second"]
    assert proxy.counts.faults == {"credentials expired": 1}
    assert "planted" not in repr(proxy.exchanges)


def test_refuses_an_expired_token_where_there_is_no_other(gcs: GCSServer, fault_proxy: MakeProxy) -> None:
    proxy = before(gcs, fault_proxy, always(ExpireCredentials(), times=1))
    store = store_at(gcs, proxy)
    for _ in range(2):
        with pytest.raises(CredentialsError):
            put(store)


def test_saves_and_loads_a_checkpoint_through_all_transient_faults(gcs: GCSServer, fault_proxy: MakeProxy) -> None:
    proxy = before(gcs, fault_proxy, mixed(0.25, seed=4))
    url = f"gs://{gcs.make_bucket()}/run/step-1"
    options = {**gcs.options, "endpoint_url": proxy.url, "max_attempts": None}
    small = bp.TransferOptions(part_bytes=1 << 20, single_put_bytes=1 << 20)
    state = {"w": torch.arange(1_000_000.0), "o": {"m": torch.ones(10)}, "step": 7}
    for _ in range(3):
        dcp.save(state, checkpoint_id=url, storage_writer=bp.GCSWriter(storage_options=options, transfer=small))
        target = {"w": torch.zeros(1_000_000), "o": {"m": torch.zeros(10)}, "step": 0}
        dcp.load(target, checkpoint_id=url, storage_reader=bp.GCSReader(storage_options=options))
        assert torch.equal(target["w"], state["w"])
        assert target["step"] == 7
    assert verify(open_checkpoint(Location.of(url, gcs.options))).ok
    assert len(proxy.counts.faults) >= 4


def test_recognises_requests_by_the_names_of_s3() -> None:
    from kit.http import Head

    def request(method: str, target: str, *headers: str) -> StoreRequest:
        lines = [f"{method} {target} HTTP/1.1", "Host: storage.googleapis.com", *headers, "", ""]
        return StoreRequest.of(Head.parse("\r\n".join(lines).encode()))

    def kind(method: str, target: str) -> tuple[str, str]:
        found = request(method, target)
        assert found.api is Api.GCS_JSON
        return found.kind, found.key

    assert kind("POST", "/upload/storage/v1/b/bucket/o?uploadType=media&name=a%2Fb") == ("PutObject", "a/b")
    assert kind("POST", "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=a") == ("CreateMultipartUpload", "a")
    assert kind("PUT", "/upload/storage/v1/b/bucket/o?upload_id=7&name=a") == ("UploadPart", "a")
    assert kind("GET", "/storage/v1/b/bucket/o/a%2Fb?alt=media") == ("GetObject", "a/b")
    assert kind("GET", "/storage/v1/b/bucket/o/a%2Fb") == ("HeadObject", "a/b")
    assert kind("GET", "/storage/v1/b/bucket/o?prefix=a") == ("ListObjects", "")
    assert kind("DELETE", "/storage/v1/b/bucket/o/a") == ("DeleteObject", "a")
    assert kind("POST", "/batch/storage/v1") == ("DeleteObjects", "")
    # Only the XML API's Complete, which is S3's, may answer with an error under a status of success.
    multipart = request("POST", "/bucket/a?uploadId=7", "Authorization: Bearer planted-token")
    assert (multipart.kind, multipart.api) == ("CompleteMultipartUpload", Api.GCS_XML)
    assert ErrorInBody().fits(multipart)
    assert multipart.access_key
    assert "planted" not in repr(multipart)
