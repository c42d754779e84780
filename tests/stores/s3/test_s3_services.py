"""Services that speak S3's protocol: who is one, what is sent to it, and what stands in for what it does not do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest

from bucketpoint.errors import (
    AccessDeniedError,
    BucketpointError,
    CredentialsError,
    EndpointError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    UnsupportedRequestError,
    WrongRegionError,
)
from bucketpoint.stores import S3Options, S3Store
from bucketpoint.stores.s3 import client as s3_client
from bucketpoint.stores.s3 import services as s3_services
from bucketpoint.stores.s3.errors import translate
from kit.servers import KMS_KEY, S3Server
from stores.scripted import Answer, Seen, error, scripted


def views(*chunks: bytes) -> list[memoryview]:
    return [memoryview(chunk) for chunk in chunks]


def store_of(server: S3Server, **changes: Any) -> S3Store:
    return S3Store(server.make_bucket(), S3Options.from_storage_options({**server.options, **changes}))


@pytest.mark.parametrize(
    ("endpoint", "service"),
    [
        (None, "aws"),
        ("https://s3.eu-west-1.amazonaws.com", "aws"),
        ("https://bucket.vpce-1a2b.s3.us-east-1.vpce.amazonaws.com", "aws"),
        ("https://0123456789abcdef.r2.cloudflarestorage.com", "r2"),
        ("https://0123456789abcdef.eu.r2.cloudflarestorage.com", "r2"),
        ("https://storage.googleapis.com", "gcs-xml"),
        ("https://storage.me-central2.rep.googleapis.com", "unknown"),
        ("https://amazonaws.com.example", "unknown"),
        ("https://minio.example:9000", "unknown"),
        ("http://127.0.0.1:9000", "unknown"),
    ],
)
def test_the_endpoint_decides_where_it_is_certain(endpoint: str | None, service: str) -> None:
    client = s3_client.build_client(S3Options(endpoint_url=endpoint, access_key="a", secret_key="b"))
    assert client.service.name == service


def test_what_is_said_wins_over_the_endpoint_and_over_the_service() -> None:
    def service(**options: Any) -> s3_services.S3Service:
        endpoint = {"endpoint_url": "https://storage.googleapis.com", "key": "a", "secret": "b"}
        return s3_client.build_client(S3Options.from_storage_options({**endpoint, **options})).service

    assert not service().conditional_put
    assert service(service="minio").conditional_put
    assert service(service="minio").name == "minio"
    assert not service(service="minio", conditional_puts=False).conditional_put
    assert service(conditional_puts=True).conditional_put
    assert not service().checksums
    assert service(checksums=True).checksums
    assert not service(service="aws", checksums=False).checksums


def test_a_service_that_nobody_knows_is_refused_with_the_names_of_those_that_are() -> None:
    with pytest.raises(BucketpointError, match="gcs-xml") as caught:
        S3Options.from_storage_options({"service": "azure"})
    assert "azure" in caught.value.message


@pytest.mark.parametrize("name", s3_services.SERVICES)
def test_each_service_is_addressed_as_it_wants_to_be(name: str) -> None:
    options = S3Options(endpoint_url="https://s3.us-east-1.amazonaws.com", access_key="a", secret_key="b", service=name)
    style = s3_client.build_client(options).api.meta.config.s3.get("addressing_style")
    assert style == s3_services.SERVICES[name].addressing
    chosen = s3_client.build_client(options.replace(config_kwargs={"s3": {"addressing_style": "virtual"}}))
    assert chosen.api.meta.config.s3["addressing_style"] == "virtual"


@pytest.mark.parametrize("service", s3_services.SERVICES)
def test_capabilities_are_those_of_the_service_and_nothing_else_is_sent(service: str) -> None:
    facts = s3_services.SERVICES[service]

    def answer(request: Seen, number: int) -> Answer:
        crc = request.headers.get("x-amz-checksum-crc32c")
        headers = {"ETag": '"e"', "Content-Type": "application/xml", "x-amz-request-id": "1"}
        headers |= {"x-amz-checksum-crc32c": crc} if crc else {}
        if "uploads" in request.target:
            body = b"<InitiateMultipartUploadResult><UploadId>up</UploadId></InitiateMultipartUploadResult>"
            return Answer(200, headers, body)
        return Answer(404 if request.method == "HEAD" else 200, headers)

    with scripted(answer) as server:
        options = S3Options(endpoint_url=server.endpoint, access_key="a", secret_key="b", service=service)
        store = S3Store("bucket", options)
        store.put("k", views(b"x"), if_none_match=True)
        store.create_multipart("k")
        store.put_part("k", "up", 1, views(b"x"))
    assert store.capabilities.conditional_put == facts.conditional_put
    assert store.capabilities.checksums == facts.checksums
    assert store.capabilities.lists_uploads == facts.lists_uploads
    put = next(seen for seen in server.seen if seen.method == "PUT")
    assert ("if-none-match" in put.headers) == facts.conditional_put
    sent = [name for seen in server.seen for name in seen.headers if "checksum" in name]
    assert bool(sent) == facts.checksums


class TestWithoutConditions:
    """Where the store does not look before it writes, this side does."""

    @pytest.fixture
    def store(self, minio: S3Server) -> S3Store:
        return store_of(minio, service="ceph")

    def test_a_create_only_put_does_not_replace(self, store: S3Store) -> None:
        first = store.put("k", views(b"first"), if_none_match=True)
        with pytest.raises(PreconditionFailedError):
            store.put("k", views(b"second"), if_none_match=True)
        assert store.get("k")[0] == b"first"
        assert store.put("k", views(b"third"), if_match=first.etag).etag != first.etag
        assert store.get("k")[0] == b"third"

    def test_an_if_match_put_replaces_only_what_it_names(self, store: S3Store) -> None:
        first = store.put("k", views(b"first"))
        store.put("k", views(b"second"))
        with pytest.raises(PreconditionFailedError):
            store.put("k", views(b"third"), if_match=first.etag)
        with pytest.raises(PreconditionFailedError):
            store.put("gone", views(b"x"), if_match=first.etag)
        assert store.get("k")[0] == b"second"
        with pytest.raises(ObjectNotFoundError):
            store.head("gone")

    def test_reads_are_pinned_all_the_same(self, store: S3Store) -> None:
        first = store.put("k", views(b"first"))
        store.put("k", views(b"other"))
        with pytest.raises(PreconditionFailedError):
            store.read_into("k", 0, views(bytearray(5)), if_match=first.etag)

    @pytest.mark.contract
    def test_a_commit_does_not_replace_unless_it_may(self, minio: S3Server) -> None:
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        from bucketpoint import S3Reader, S3Writer

        options = {**minio.options, "service": "ceph"}
        url = f"s3://{minio.make_bucket()}/run"

        def save(value: float, **how: Any) -> None:
            writer = S3Writer(url, storage_options=options, **how)
            dcp.save({"w": torch.full((1000,), value)}, storage_writer=writer, no_dist=True)

        save(1.0)
        with pytest.raises(CheckpointException, match="Checkpoint already exists"):
            save(2.0, overwrite=False)
        save(3.0)
        state = {"w": torch.zeros(1000)}
        dcp.load(state, storage_reader=S3Reader(url, storage_options=options), no_dist=True)
        assert state["w"].tolist() == [3.0] * 1000


# What a user is told


@pytest.mark.parametrize(
    ("reply", "remedy"),
    [
        (error(400, "AuthorizationHeaderMalformed", extra="<Region>eu-north-1</Region>"), "AWS_REGION=eu-north-1"),
        (error(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-north-1"}), "AWS_REGION=eu-north-1"),
        (error(400, "IllegalLocationConstraintException"), "Set AWS_REGION"),
        (error(301, "PermanentRedirect"), "Set AWS_REGION"),
    ],
    ids=["signed for another", "redirected", "refused", "redirected nowhere"],
)
def test_a_bucket_in_another_region_is_told_by_every_way_to_it(
    reply: Answer, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    import bucketpoint
    from bucketpoint.cli.app import run

    state, url = {"w": torch.zeros(1)}, "s3://bucket/run/step-1"
    with scripted(lambda request, number: reply) as server:
        options = {"endpoint_url": server.endpoint, "region": "us-east-1", "key": "k", "secret": "hush-hush"}
        ways: list[Callable[[], object]] = [
            lambda: bucketpoint.save(state, url, storage_options=options),
            lambda: bucketpoint.load(state, url, storage_options=options),
            lambda: bucketpoint.latest_checkpoint("s3://bucket/run", storage_options=options),
        ]
        for way in ways:
            with pytest.raises(WrongRegionError) as caught:
                way()
            assert remedy in str(caught.value)
            assert "s3://bucket/run" in str(caught.value)
        pairs = [part for name, value in options.items() for part in ("--storage-option", f"{name}={value}")]
        assert run(["doctor", url, "--size", "0", *pairs]) == 1
    said = capsys.readouterr().out
    assert "fail connect" in said
    assert remedy in said


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        # As versitygw calls a key that it does not know.
        (404, "XAdminUserNotFound", "of this endpoint's store"),
        (403, "SignatureDoesNotMatch", "The secret key is not that of the access key ID"),
    ],
)
def test_wrong_keys_are_told_as_what_they_are(status: int, code: str, remedy: str) -> None:
    with scripted(lambda request, number: error(status, code)) as server:
        options = {"endpoint_url": server.endpoint, "key": "k", "secret": "hush-hush"}
        with pytest.raises(CredentialsError, match=remedy):
            list(S3Store("bucket", S3Options.from_storage_options(options)).list("run/"))


def test_missing_credentials_are_to_be_set() -> None:
    failure = translate(botocore.exceptions.NoCredentialsError(), "PutObject", "s3://bucket/run")
    assert isinstance(failure, CredentialsError)
    assert "Set credentials" in str(failure)


@pytest.mark.parametrize(
    ("denied", "call"),
    [
        ("s3:PutObject", lambda store: store.put("run/k", views(b"x"))),
        ("s3:PutObject", lambda store: store.create_multipart("run/k")),
        ("s3:GetObject", lambda store: store.get("run/there")),
        ("s3:GetObject", lambda store: store.head("run/there")),
        ("s3:ListBucket", lambda store: list(store.list("run/"))),
        ("s3:AbortMultipartUpload", lambda store: store.abort_multipart("run/k", "upload")),
        ("s3:ListBucketMultipartUploads", lambda store: list(store.list_multipart("run/"))),
    ],
    ids=["put", "create", "get", "head", "list", "abort", "uploads"],
)
def test_a_permission_that_is_missing_is_named(minio: S3Server, denied: str, call: Callable[[S3Store], Any]) -> None:
    bucket = minio.make_bucket()
    minio.client().put_object(Bucket=bucket, Key="run/there", Body=b"x")
    store = S3Store(bucket, S3Options.from_storage_options(without(minio, denied)))
    with pytest.raises(AccessDeniedError, match=f"needs the permission {denied}") as caught:
        call(store)
    assert caught.value.url is not None
    assert caught.value.url.startswith(f"s3://{bucket}/run/")
    if denied != "s3:GetObject":
        # One role that has the permission, and no list of all others.
        (role,) = {role for role in ("trainer", "reader", "pruner") if f"policies/aws/{role}.json" in str(caught.value)}
        granted = (Path(__file__).parents[3] / "policies" / "aws" / f"{role}.json").read_text()
        assert f'"{denied}"' in granted


def test_objects_that_may_not_be_deleted_are_told_with_the_permission(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    minio.client().put_object(Bucket=bucket, Key="run/there", Body=b"x")
    store = S3Store(bucket, S3Options.from_storage_options(without(minio, "s3:DeleteObject")))
    (failure,) = store.delete(["run/there"])
    assert (failure.key, failure.code) == ("run/there", "AccessDenied")
    assert "s3:DeleteObject" in failure.message


def without(server: S3Server, denied: str) -> dict[str, Any]:
    """All rights but one."""
    everything = {"Effect": "Allow", "Action": "s3:*", "Resource": "arn:aws:s3:::*"}
    return server.limited_options(everything, {"Effect": "Deny", "Action": denied, "Resource": "arn:aws:s3:::*"})


def test_a_store_that_refuses_conditions_is_told_with_the_option_that_does_without() -> None:
    """As one that knows no conditions and says so. Without them the same save succeeds there."""
    import torch

    import bucketpoint

    objects: dict[str, bytes] = {}

    def answer(request: Seen, number: int) -> Answer:
        headers = {"ETag": '"e"', "Content-Type": "application/xml"}
        if request.method != "PUT":
            there = objects.get(request.path)
            return error(404, "NoSuchKey") if there is None else Answer(200, headers, there)
        if {"if-none-match", "if-match"} & set(request.headers):
            return error(501, "NotImplemented")
        objects[request.path] = request.body
        return Answer(200, headers)

    state, url = {"w": torch.zeros(1)}, "s3://bucket/run/step-1"
    with scripted(answer) as server:
        options = {"endpoint_url": server.endpoint, "key": "k", "secret": "hush-hush"}
        with pytest.raises(StoreError, match=r'bucketpoint doctor.*\{"conditional_puts": false\}') as caught:
            bucketpoint.save(state, url, storage_options=options)
        assert caught.value.url == f"{url}/.metadata"
        # Told once: it would be refused again.
        refused = [seen.path for seen in server.seen if "if-none-match" in seen.headers]
        assert refused == ["/bucket/run/step-1/.metadata"]
        bucketpoint.save(state, url, storage_options={**options, "conditional_puts": False})
    assert "/bucket/run/step-1/.metadata" in objects


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ServerSideEncryption": "AES256", "SSEKMSKeyId": "the-key"}, "by SSEKMSKeyId in request_kwargs"),
        ({"ServerSideEncryption": "aws:kms"}, "by ServerSideEncryption in request_kwargs"),
    ],
)
def test_a_service_without_encryption_is_told_with_the_parameter_that_asks_for_it(
    options: dict[str, Any], named: str
) -> None:
    with scripted(lambda request, number: error(501, "NotImplemented")) as server:
        where = {"endpoint_url": server.endpoint, "key": "k", "secret": "hush-hush"}
        store = S3Store("bucket", S3Options.from_storage_options({**where, "s3_additional_kwargs": options}))
        for write in (lambda: store.put("k", views(b"x")), lambda: store.create_multipart("k")):
            with pytest.raises(UnsupportedRequestError) as caught:
                write()
            assert named in str(caught.value)
            assert "conditional_puts" not in str(caught.value)
        # The service stored data with this encryption before it refuses a condition, and a read asks for none.
        for request in (lambda: store.put("k", views(b"x"), if_none_match=True), lambda: store.get("k")):
            with pytest.raises(UnsupportedRequestError, match="conditional_puts") as caught:
                request()
            assert named not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "KMS.NotFoundException"),
        (400, "KMS.DisabledException"),
        (400, "KMS.InvalidKeyUsageException"),
        (400, "KMS.KMSInvalidStateException"),
        (404, "kms:KeyNotFound"),
        (403, "kms:NotAuthorized"),
    ],
)
def test_a_fault_of_the_key_is_no_missing_checkpoint(status: int, code: str) -> None:
    import torch

    import bucketpoint

    with scripted(lambda request, number: error(status, code)) as server:
        options = {"endpoint_url": server.endpoint, "key": "k", "secret": "hush-hush"}
        for load in (
            lambda: bucketpoint.load({"w": torch.zeros(1)}, "s3://bucket/run/step-1", storage_options=options),
            lambda: bucketpoint.latest_checkpoint("s3://bucket/run", storage_options=options),
        ):
            with pytest.raises(StoreError, match="SSEKMSKeyId in request_kwargs") as caught:
                load()
            assert type(caught.value) is StoreError
            assert code in str(caught.value)
        # Nor is it another job that committed first.
        with pytest.raises(StoreError) as caught:
            S3Store("bucket", S3Options.from_storage_options(options)).put("k", views(b"x"), if_match="e")
        assert type(caught.value) is StoreError


def test_a_key_that_the_service_does_not_know_is_named_by_its_parameter(minio: S3Server) -> None:
    store = store_of(minio, request_kwargs={"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": f"{KMS_KEY}-not"})
    with pytest.raises(StoreError, match="SSEKMSKeyId in request_kwargs") as caught:
        store.put("k", views(b"x"))
    assert type(caught.value) is StoreError


def test_an_unknown_code_with_status_404_is_no_missing_object() -> None:
    unknown, bare = error(404, "SomethingNew"), Answer(404)
    for answer, kind in (
        (unknown, StoreError),
        # A proxy's, for all that it says.
        (bare, EndpointError),
        (error(404, "NoSuchKey"), ObjectNotFoundError),
    ):
        with scripted(lambda request, number, answer=answer: answer) as server:
            store = S3Store("bucket", S3Options(endpoint_url=server.endpoint, access_key="k", secret_key="s"))
            with pytest.raises(StoreError) as caught:
                store.get("k")
            assert type(caught.value) is kind
            # The reply to HEAD has no code.
            with pytest.raises(ObjectNotFoundError):
                store.head("k")


@pytest.mark.contract
def test_versitygw_lists_uploads_by_prefix_and_lets_one_of_many_writers_win(versitygw: S3Server) -> None:
    store = store_of(versitygw, service="versitygw")
    upload = store.create_multipart("runs/step-1/data")
    assert [one.upload_id for one in store.list_multipart("runs/")] == [upload]
    store.abort_multipart("runs/step-1/data", upload)
    start = threading.Barrier(8)

    def attempt(number: int) -> bool:
        start.wait()
        try:
            store.put("commit", views(b"%d" % number), if_none_match=True)
        except PreconditionFailedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 1
