"""Services that speak S3's protocol: who is one, what is sent to it, and what stands in for what it does not do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError

from bucketpoint.cli.commands.doctor import role_policies
from bucketpoint.errors import AccessDeniedError, BucketpointError
from bucketpoint.stores.s3 import S3Options, S3Store
from bucketpoint.stores.s3 import client as s3_client
from bucketpoint.stores.s3 import options as s3_services
from bucketpoint.stores.s3.errors import translate
from kit.buffers import views
from kit.servers import S3Server
from stores.engines import CALLS
from stores.scripted import Answer, Seen, scripted


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
def test_decides_by_the_endpoint_where_it_is_certain(endpoint: str | None, service: str) -> None:
    client = s3_client.build_client(S3Options(endpoint_url=endpoint, access_key="a", secret_key="b"))
    assert client.service.name == service


def test_prefers_what_is_said_to_the_endpoint_and_to_the_service() -> None:
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
    with pytest.raises(BucketpointError, match="gcs-xml") as caught:
        service(service="azure")
    assert "azure" in caught.value.message


@pytest.mark.parametrize("name", s3_services.SERVICES)
def test_addresses_each_service_as_it_wants_to_be_and_sends_what_it_is_able_to(name: str) -> None:
    facts = s3_services.SERVICES[name]
    amazon = S3Options(endpoint_url="https://s3.us-east-1.amazonaws.com", access_key="a", secret_key="b", service=name)
    chosen = amazon.replace(config_kwargs={"s3": {"addressing_style": "virtual"}})
    for options, style in ((amazon, facts.addressing), (chosen, "virtual")):
        assert s3_client.build_client(options).api.meta.config.s3.get("addressing_style") == style

    def answer(request: Seen, number: int) -> Answer:
        crc = request.headers.get("x-amz-checksum-crc32c")
        headers = {"ETag": '"e"', "Content-Type": "application/xml", "x-amz-request-id": "1"}
        headers |= {"x-amz-checksum-crc32c": crc} if crc else {}
        if "uploads" in request.target:
            body = b"<InitiateMultipartUploadResult><UploadId>up</UploadId></InitiateMultipartUploadResult>"
            return Answer(200, headers, body)
        return Answer(404 if request.method == "HEAD" else 200, headers)

    with scripted(answer) as server:
        options = S3Options(endpoint_url=server.endpoint, access_key="a", secret_key="b", service=name)
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


@pytest.mark.parametrize(
    ("denied", "calls"),
    [
        ("s3:PutObject", ["put", "create"]),
        ("s3:GetObject", ["get", "head"]),
        ("s3:ListBucket", ["list"]),
        ("s3:AbortMultipartUpload", ["abort"]),
        ("s3:ListBucketMultipartUploads", ["uploads"]),
    ],
)
def test_names_a_permission_that_is_missing(minio: S3Server, denied: str, calls: list[str]) -> None:
    bucket = minio.make_bucket()
    minio.client().put_object(Bucket=bucket, Key="k", Body=b"x")
    everything = {"Effect": "Allow", "Action": "s3:*", "Resource": "arn:aws:s3:::*"}
    limited = minio.limited_options(everything, {**everything, "Effect": "Deny", "Action": denied})
    store = S3Store(bucket, S3Options.from_storage_options(limited))
    for call in calls:
        with pytest.raises(AccessDeniedError, match=f"needs the permission {denied}") as caught:
            CALLS[call](store)
        assert caught.value.url in (f"s3://{bucket}/k", f"s3://{bucket}/run/")
        if denied != "s3:GetObject":
            # One role that has the permission, and no list of all others.
            (role,) = {role for role in ("trainer", "reader", "pruner") if f"--role {role} --iam" in str(caught.value)}
            assert f'"{denied}"' in json.dumps(role_policies()[role])


def test_names_the_permission_for_a_session_of_a_directory_bucket() -> None:
    refusal = ClientError(
        {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}, "CreateSession"
    )
    failure = translate(refusal, "PutObject", "s3://b--usw2-az1--x-s3/run/k")
    assert isinstance(failure, AccessDeniedError)
    assert "s3express:CreateSession" in str(failure.remedy)
