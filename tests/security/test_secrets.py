"""No secret is anywhere but where it was given, and none goes over a connection that nobody has verified."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.cli.app import run
from bucketpoint.errors import BucketpointError, EndpointError
from bucketpoint.location import Location
from bucketpoint.stores import open_store, retry
from bucketpoint.stores.s3 import S3Options, S3Store
from bucketpoint.stores.s3 import client as s3_client
from kit.failures import failure_of
from kit.servers import KMS_KEY, S3Server, free_port, s3_attempts
from security.planted import SECRETS, assert_clean, assert_failure_is_clean, clean_failures
from stores.scripted import Answer, error, scripted


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "pause", lambda seconds: None)


def planted(endpoint: str, **more: Any) -> dict[str, Any]:
    return {
        "key": SECRETS["access key"],
        "secret": SECRETS["secret key"],
        "token": SECRETS["session token"],
        "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
        **more,
    }


FAILURES = {
    "denied": error(403, "AccessDenied"),
    "signature": error(403, "SignatureDoesNotMatch", extra="<StringToSign>x</StringToSign>"),
    "expired": error(400, "ExpiredToken"),
    "unknown key": error(403, "InvalidAccessKeyId", extra=f"<AWSAccessKeyId>{SECRETS['access key']}</AWSAccessKeyId>"),
    "throttled": error(503, "SlowDown"),
    "failing": error(500, "InternalError"),
    "moved": error(301, "PermanentRedirect", extra="<Endpoint>elsewhere</Endpoint>"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_tells_no_secret_in_a_failure_of_a_store(failure: str, log: io.StringIO) -> None:
    """A store that redirects without saying where to is an error of ours as well, and not botocore's recursion."""
    with scripted(lambda request, number: FAILURES[failure]) as server:
        options = planted(server.endpoint, **s3_attempts(2))
        writer, reader = bp.S3Writer(storage_options=options), bp.S3Reader(storage_options=options)
        clean_failures("s3://bucket/run/step-1", options, writer, reader, S3Options.from_storage_options(options))
    assert_clean(log.getvalue(), "log")


def test_tells_no_secret_in_any_way_of_not_reaching_a_store(log: io.StringIO) -> None:
    proxies = {"https": f"http://user:{SECRETS['proxy password']}@127.0.0.1:{free_port()}"}
    dead, once = f"127.0.0.1:{free_port()}", s3_attempts(1)["config_kwargs"]
    for options in (
        planted(f"http://{dead}"),
        planted(f"http://user:{SECRETS['url password']}@{dead}"),
        planted(f"http://{dead}/?X-Amz-Signature={SECRETS['url signature']}"),
        planted("https://store.invalid", config_kwargs={**once, "proxies": proxies}),
        planted(f"http://{dead}", request_kwargs={"SSECustomerKey": SECRETS["customer key"]}),
        planted("http://10.0.0.1", request_kwargs={"SSECustomerKey": SECRETS["customer key"]}),
        planted(f"no-url:{SECRETS['url password']}@"),
    ):
        store, _ = open_store("s3://bucket/x", storage_options={**s3_attempts(1), **options})
        assert_clean(repr(store), "repr")
        with pytest.raises(BucketpointError) as caught:
            store.get("k")
        assert_failure_is_clean(caught.value, str(options["client_kwargs"]))
    assert_clean(log.getvalue(), "log")


def test_keeps_the_signature_of_a_deletion_out_of_urllib3s_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "urllib3")
    with scripted(lambda request, number: Answer(204, {"x-amz-request-id": "1"})) as server:
        store, _ = open_store("s3://bucket/x", storage_options=planted(server.endpoint, service="minio"))
        assert store.expiring_delete("k", 60)()  # type: ignore[attr-defined]
        assert "X-Amz-Security-Token=" in server.seen[-1].target
    assert "DELETE /bucket/k HTTP/1.1" in caplog.text
    assert "X-Amz" not in caplog.text
    assert_clean(caplog.text, "log")


def test_quotes_no_options_that_are_wrong() -> None:
    for wrong in (
        {"key": SECRETS["access key"], "access_key": SECRETS["secret key"]},
        {"secrets": SECRETS["secret key"]},
        {"client_kwargs": SECRETS["secret key"]},
        {"config_kwargs": {"signature": SECRETS["secret key"]}},
        {"request_kwargs": {"SSECustomerKey": {"key": SECRETS["customer key"]}}},
        {"request_kwargs": {"SSECustomer": SECRETS["customer key"]}},
        {"sse_customer_key": SECRETS["customer key"]},
    ):
        with pytest.raises(BucketpointError) as caught:
            open_store("s3://b/x", storage_options=wrong)[0].get("k")
        assert_failure_is_clean(caught.value, str(sorted(wrong)))


def test_tells_no_secret_in_the_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client.clients, "_clients", {})
    with scripted(lambda request, number: error(403, "SignatureDoesNotMatch")) as server:
        for command in ("show", "verify", "ls", "doctor"):
            for more in ([], ["--json"], ["--debug"]):
                options = ["--storage-option", f"secret={SECRETS['secret key']}"]
                options += ["--storage-option", f"key={SECRETS['access key']}", "--endpoint-url", server.endpoint]
                assert run([command, "s3://bucket/run", *options, *more]) != 0
                said = capsys.readouterr()
                assert_clean(said.out + said.err, f"{command} {more}")


def test_holds_no_secret_in_anything_that_a_save_writes(s3_tls: S3Server, bucket_tls: str, log: io.StringIO) -> None:
    """With an SSE-C key, which goes out with every request and comes back; the objects are read with it."""
    key = SECRETS["customer key"]
    options = {**s3_tls.options, "request_kwargs": {"SSECustomerKey": key}}
    url = f"s3://{bucket_tls}/run/step-1"
    state = {"w": torch.ones(3_000_000), "o": {"x": 1}}
    small = bp.TransferOptions(part_bytes=5 << 20, single_put_bytes=5 << 20)
    told: list[bp.Progress] = []
    for _ in range(2):
        writer = bp.S3Writer(storage_options=options, transfer=small, progress=told.append)
        dcp.save(state, checkpoint_id=url, storage_writer=writer, no_dist=True)
    target = {"w": torch.zeros(3_000_000), "o": {"x": 0}}
    dcp.load(target, checkpoint_id=url, storage_reader=bp.S3Reader(storage_options=options), no_dist=True)
    assert torch.equal(target["w"], state["w"])
    assert verify(open_checkpoint(Location.of(url, options))).ok
    client = s3_tls.client()
    customer = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}
    for name in s3_tls.keys(bucket_tls):
        found = client.get_object(Bucket=bucket_tls, Key=name, **customer)
        assert_clean(found["Body"].read(), name)
        assert s3_tls.secret.encode() not in client.get_object(Bucket=bucket_tls, Key=name, **customer)["Body"].read()
    assert_clean(log.getvalue(), "log")
    assert told
    assert_clean(told, "progress")
    keyless = bp.S3Reader(url, storage_options=s3_tls.options)
    failure_of(lambda: dcp.load(target, storage_reader=keyless, no_dist=True))


def test_loads_a_checkpoint_that_the_store_encrypted(minio: S3Server) -> None:
    bucket, sse = minio.make_bucket(), {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": KMS_KEY}
    options, url = {**minio.options, "request_kwargs": sse}, f"s3://{bucket}/run/step-1"
    dcp.save({"w": torch.ones(1000)}, storage_writer=bp.S3Writer(url, storage_options=options), no_dist=True)
    client = minio.client()
    for name in minio.keys(bucket):
        assert client.head_object(Bucket=bucket, Key=name)["ServerSideEncryption"] == "aws:kms", name
    target = {"w": torch.zeros(1000)}
    dcp.load(target, checkpoint_id=url, storage_reader=bp.S3Reader(storage_options=minio.options), no_dist=True)
    assert target["w"].sum() == 1000
    assert verify(open_checkpoint(Location.of(url, minio.options))).ok


# TLS


@pytest.mark.parametrize(
    ("options", "variable", "named"),
    [
        *(({"client_kwargs": {"verify": value}}, None, "insecure_tls") for value in (False, "", " ", 0)),
        *(({"connections": 9}, name, name) for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")),
        ({"insecure_tls": True, **s3_attempts(1)}, None, "certificate"),
    ],
    ids=repr,
)
def test_keeps_verification_on_despite_one_option_or_an_empty_variable(
    s3_tls: S3Server, options: dict[str, Any], variable: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, "")
    store = S3Store("bucket", S3Options(endpoint_url=s3_tls.endpoint, access_key="a", secret_key="b", **options))
    with pytest.raises(EndpointError, match=named):
        store.get("k")
