"""`doctor` tells which S3 service a bucket is on by what it does, and which options fit it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import bucketpoint.doctor.examine as examine_module
from bucketpoint.doctor.bucket import bucket_findings
from bucketpoint.doctor.examine import Diagnosis, examine
from bucketpoint.doctor.report import Finding
from bucketpoint.stores.gcs import GCSOptions, GCSStore
from bucketpoint.stores.s3 import S3Options, S3Store
from bucketpoint.stores.s3 import client as s3_client
from kit.servers import S3Server
from stores.scripted import Answer, Seen, error, scripted


def store_of(server: S3Server, **changes: Any) -> S3Store:
    return S3Store(server.make_bucket(), S3Options.from_storage_options({**server.options, **changes}))


def service(found: Diagnosis) -> Finding:
    return next(one for one in found.findings if one.check == "service")


@pytest.fixture
def ignoring(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Headers in this list never reach a server, by whatever client."""
    headers: list[str] = []
    build = s3_client.build_client

    def without(request: Any, **_: Any) -> None:
        for name in headers:
            del request.headers[name]

    def build_without(options: S3Options) -> s3_client.S3Client:
        client = build(options)
        client.api.meta.events.register("before-sign.s3", without)
        return client

    monkeypatch.setattr(s3_client.clients, "_clients", {})
    monkeypatch.setattr(s3_client, "build_client", build_without)
    return headers


@pytest.mark.parametrize("said", [{}, {"service": "minio"}], ids=["nothing said", "named"])
def test_recognises_and_passes_minio(minio: S3Server, said: dict[str, Any]) -> None:
    store = store_of(minio, **said)
    finding = service(examine(store, "runs", probe_bytes=0))
    assert finding.status == "ok"
    assert finding.message.startswith("minio by its Server header: conditional puts are honoured")
    assert "by their whole key only" in finding.message
    assert minio.keys(store.bucket) == []
    assert minio.open_uploads(store.bucket) == []


@pytest.mark.contract
def test_passes_every_check_on_versitygw_as_what_it_is(versitygw: S3Server) -> None:
    store = store_of(versitygw, service="versitygw")
    found = examine(store, "runs", probe_bytes=0)
    assert found.ok
    assert service(found).status == "ok"
    assert service(found).message.startswith("versitygw by its Server header: conditional puts are honoured")
    assert versitygw.keys(store.bucket) == []
    assert versitygw.open_uploads(store.bucket) == []
    # The gateway answers 501 to requests about rules, and no right would change that.
    lifecycle = next(one for one in found.findings if one.check == "lifecycle")
    assert (lifecycle.status, lifecycle.remedy) == ("skip", None)
    assert lifecycle.message.startswith("the service does not support this request: ")
    assert "HTTP 501" in lifecycle.message


def test_names_the_service_where_options_name_one_that_does_less(minio: S3Server) -> None:
    finding = service(examine(store_of(minio, service="ceph"), "runs", probe_bytes=0))
    assert finding.status == "warn"
    assert finding.remedy == 'Set {"service": "minio"} in storage_options'


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_tells_a_store_that_ignores_conditions_from_what_it_calls_itself(
    minio: S3Server, ignoring: list[str], header: str
) -> None:
    ignoring.append(header)
    store = store_of(minio)
    found = examine(store, "runs", probe_bytes=0)
    assert not found.ok
    assert service(found).status == "warn"
    assert "conditional puts are ignored" in service(found).message
    assert service(found).remedy == 'Set {"conditional_puts": false} in storage_options'
    # With the remedy the place is fit, with a warning: a commit checks, writes and checks again.
    cured = examine(store_of(minio, conditional_puts=False), "runs", probe_bytes=0)
    assert cured.ok or header == "If-Match"
    assert service(cured).status == "ok"
    assert next(one for one in cured.findings if one.check == "create-only put").status == "warn"


@pytest.mark.parametrize("said", [{}, {"service": "minio"}], ids=["alone", "beside the service"])
def test_advises_to_leave_out_an_option_that_denies_what_the_store_does(minio: S3Server, said: dict[str, Any]) -> None:
    found = examine(store_of(minio, conditional_puts=False, **said), "runs", probe_bytes=0)
    assert service(found).status == "warn"
    assert service(found).remedy == 'Leave {"conditional_puts": false} out of storage_options'
    create_only = next(one for one in found.findings if one.check == "create-only put")
    assert create_only.message.startswith("conditional_puts=false in storage_options")


def test_recognises_the_service_without_the_right_to_list_uploads(minio: S3Server) -> None:
    everything = {"Effect": "Allow", "Action": "s3:*", "Resource": "arn:aws:s3:::*"}
    denied = {"Effect": "Deny", "Action": "s3:ListBucketMultipartUploads", "Resource": "arn:aws:s3:::*"}
    options = S3Options.from_storage_options(minio.limited_options(everything, denied))
    found = examine(S3Store(minio.make_bucket(), options), "runs", probe_bytes=0)
    assert service(found).status == "ok"
    assert service(found).message.startswith("minio by its Server header: conditional puts are honoured")
    assert "uploads" not in service(found).message
    assert next(one for one in found.findings if one.check == "multipart list").status == "warn"


ALLOWED = Answer(body=b"<DeleteResult/>")
"""The answer to the trial of the right to delete, which comes before any write."""


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [(501, "NotImplemented", "by SSEKMSKeyId"), (404, "kms:KeyNotFound", "Check the encryption key")],
)
def test_names_a_remedy_of_its_own_for_a_write_that_no_right_would_allow(status: int, code: str, said: str) -> None:
    def answer(request: Seen, number: int) -> Answer:
        return error(status, code) if request.method == "PUT" else ALLOWED

    with scripted(answer) as server:
        options = {"endpoint_url": server.endpoint, "key": "k", "secret": "hush-hush"}
        options |= {"request_kwargs": {"SSEKMSKeyId": "the-key"}}
        found = examine(S3Store("bucket", S3Options.from_storage_options(options)), "runs", probe_bytes=0)
    put = next(one for one in found.findings if one.check == "put")
    assert put.status == "fail"
    assert said in (put.remedy or "")
    assert "s3:PutObject" not in (put.remedy or "")


def test_advises_tls_for_a_write_that_is_refused_over_plain_http() -> None:
    with scripted(lambda request, number: error(403, "AccessDenied") if request.method == "PUT" else ALLOWED) as server:
        options = {"endpoint_url": server.endpoint, "key": "k", "secret": "hush-hush"}
        found = examine(S3Store("bucket", S3Options.from_storage_options(options)), "runs", probe_bytes=0)
    put = next(one for one in found.findings if one.check == "put")
    assert "s3:PutObject" in (put.remedy or "")
    assert "try https://" in (put.remedy or "")


def test_gives_up_in_time_on_a_server_that_dies_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead server answers 503 here, to which a client waits for five minutes."""
    monkeypatch.setattr(examine_module, "PATIENCE_S", 1.0)

    def answer(request: Seen, number: int) -> Answer:
        if number > 2:
            return error(503, "SlowDown")
        return Answer(headers={"ETag": '"e"', "x-amz-request-id": "1"}) if request.method == "PUT" else ALLOWED

    with scripted(answer) as server:
        options = {"endpoint_url": server.endpoint, "key": "k", "secret": "hush-hush"}
        started = time.monotonic()
        found = examine(S3Store("bucket", S3Options.from_storage_options(options)), "runs", probe_bytes=0)
    assert not found.ok
    assert found.left
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("bucket", "soft", "versions"),
    [
        ({"softDeletePolicy": {"retentionDurationSeconds": "0"}}, "ok", "ok"),
        ({"softDeletePolicy": {"retentionDurationSeconds": "604800"}}, "warn", "ok"),
        ({"versioning": {"enabled": True}}, "warn", "warn"),
        (
            {
                "versioning": {"enabled": True},
                "lifecycle": {
                    "rule": [{"action": {"type": "Delete"}, "condition": {"daysSinceNoncurrentTime": 7}}],
                },
            },
            "warn",
            "ok",
        ),
        (None, "warn", "warn"),
    ],
    ids=["neither", "soft delete", "versioning", "versioning with a rule", "refused"],
)
def test_reads_soft_delete_and_versioning_of_a_gcs_bucket(
    bucket: dict[str, Any] | None, soft: str, versions: str
) -> None:
    def answer(request: Seen, number: int) -> Answer:
        assert request.path == "/storage/v1/b/bucket"
        return Answer(403) if bucket is None else Answer(200, body=json.dumps(bucket).encode())

    with scripted(answer) as server:
        store = GCSStore("bucket", GCSOptions(endpoint_url=server.endpoint, token="anon"))
        found = {one.check: one for one in bucket_findings(store, "runs")}
        spared = {one.check: one.status for one in bucket_findings(store, "runs", spared="no matter")}
    assert (found["soft delete"].status, found["versioning"].status) == (soft, versions)
    if bucket is None:
        assert "storage.buckets.get" in (found["versioning"].remedy or "")
        assert found["soft delete"].message.startswith("not checked")
        assert spared == {"soft delete": "skip", "versioning": "skip"}
    elif soft == "warn" and "softDeletePolicy" in bucket:
        assert "for 7 days" in found["soft delete"].message
