"""`doctor` tells which S3 service a bucket is on by what it does, and which options fit it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import bucketpoint.doctor.examine as examine_module
from bucketpoint.doctor.bucket import bucket_findings
from bucketpoint.doctor.examine import Diagnosis, examine
from bucketpoint.stores.gcs import GCSOptions, GCSStore
from bucketpoint.stores.s3 import S3Options, S3Store
from bucketpoint.stores.s3 import client as s3_client
from cli.test_doctor import finding_of
from kit.servers import S3Server
from stores.scripted import Answer, ScriptedServer, Seen, error, scripted


def store_of(server: S3Server, **changes: Any) -> S3Store:
    return S3Store(server.make_bucket(), S3Options.from_storage_options({**server.options, **changes}))


def examined(server: ScriptedServer, **more: Any) -> Diagnosis:
    options = {"endpoint_url": server.endpoint, "key": "k", "secret": "hush-hush", **more}
    return examine(S3Store("bucket", S3Options.from_storage_options(options)), "runs", probe_bytes=0)


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


LEAVE_OUT = 'Leave {"conditional_puts": false} out of storage_options'


@pytest.mark.parametrize(
    ("said", "status", "remedy"),
    [
        ({"service": "minio"}, "ok", None),
        ({"service": "ceph"}, "warn", 'Set {"service": "minio"} in storage_options'),
        ({"conditional_puts": False}, "warn", LEAVE_OUT),
        ({"conditional_puts": False, "service": "minio"}, "warn", LEAVE_OUT),
    ],
)
def test_compares_what_the_options_say_with_the_service_that_it_recognises(
    minio: S3Server, said: dict[str, Any], status: str, remedy: str | None
) -> None:
    found = examine(store_of(minio, **said), "runs", probe_bytes=0)
    service, create_only = finding_of(found, "service"), finding_of(found, "create-only put")
    assert service.message.startswith("minio by its Server header: conditional puts are honoured")
    assert (service.status, service.remedy) == (status, remedy)
    told = "conditional_puts=false in storage_options"
    assert create_only.message.startswith(told) == ("conditional_puts" in said)


@pytest.mark.contract
def test_passes_every_check_on_versitygw_as_what_it_is(versitygw: S3Server) -> None:
    store = store_of(versitygw, service="versitygw")
    found = examine(store, "runs", probe_bytes=0)
    assert found.ok
    service = finding_of(found, "service")
    assert service.status == "ok"
    assert service.message.startswith("versitygw by its Server header: conditional puts are honoured")
    assert versitygw.keys(store.bucket) == []
    assert versitygw.open_uploads(store.bucket) == []
    # The gateway answers 501 to requests about rules, and no right would change that.
    lifecycle = finding_of(found, "lifecycle")
    assert (lifecycle.status, lifecycle.remedy) == ("skip", None)
    assert lifecycle.message.startswith("the service does not support this request: ")
    assert "HTTP 501" in lifecycle.message


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_tells_a_store_that_ignores_conditions_from_what_it_calls_itself(
    minio: S3Server, ignoring: list[str], header: str
) -> None:
    ignoring.append(header)
    store = store_of(minio)
    found = examine(store, "runs", probe_bytes=0)
    service = finding_of(found, "service")
    refused = finding_of(found, "create-only put" if header == "If-None-Match" else "put if match")
    assert (service.status, refused.status) == ("warn", "fail")
    assert "conditional puts are ignored" in service.message
    assert service.remedy == 'Set {"conditional_puts": false} in storage_options'
    assert '{"conditional_puts": false}' in (refused.remedy or "")
    # With the remedy the place is fit, with a warning: a commit checks, writes and checks again.
    cured = examine(store_of(minio, conditional_puts=False), "runs", probe_bytes=0)
    assert cured.ok or header == "If-Match"
    create_only = finding_of(cured, "create-only put")
    assert (finding_of(cured, "service").status, create_only.status) == ("ok", "warn")
    assert "Give every job its own URL" in (create_only.remedy or "")


def test_recognises_the_service_without_the_right_to_list_uploads(minio: S3Server) -> None:
    everything = {"Effect": "Allow", "Action": "s3:*", "Resource": "arn:aws:s3:::*"}
    denied = {"Effect": "Deny", "Action": "s3:ListBucketMultipartUploads", "Resource": "arn:aws:s3:::*"}
    options = S3Options.from_storage_options(minio.limited_options(everything, denied))
    found = examine(S3Store(minio.make_bucket(), options), "runs", probe_bytes=0)
    service = finding_of(found, "service")
    assert service.status == "ok"
    assert service.message.startswith("minio by its Server header: conditional puts are honoured")
    assert "uploads" not in service.message
    assert finding_of(found, "multipart list").status == "warn"


ALLOWED = Answer(body=b"<DeleteResult/>")
"""The answer to the trial of the right to delete, which comes before any write."""


ENCRYPTED = {"request_kwargs": {"SSEKMSKeyId": "the-key"}}


@pytest.mark.parametrize(
    ("status", "code", "options", "said", "lacks_a_right"),
    [
        (501, "NotImplemented", ENCRYPTED, "by SSEKMSKeyId", False),
        (404, "kms:KeyNotFound", ENCRYPTED, "Check the encryption key", False),
        # Over plain HTTP.
        (403, "AccessDenied", {}, "try https://", True),
    ],
)
def test_names_a_remedy_for_a_write_that_is_refused_for_another_reason_than_a_right(
    status: int, code: str, options: dict[str, Any], said: str, lacks_a_right: bool
) -> None:
    with scripted(lambda request, number: error(status, code) if request.method == "PUT" else ALLOWED) as server:
        put = finding_of(examined(server, **options), "put")
    assert put.status == "fail"
    assert said in (put.remedy or "")
    assert ("s3:PutObject" in (put.remedy or "")) == lacks_a_right


def test_gives_up_in_time_on_a_server_that_dies_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead server answers 503 here, to which a client waits for five minutes."""
    monkeypatch.setattr(examine_module, "PATIENCE_S", 1.0)

    def answer(request: Seen, number: int) -> Answer:
        if number > 2:
            return error(503, "SlowDown")
        return Answer(headers={"ETag": '"e"', "x-amz-request-id": "1"}) if request.method == "PUT" else ALLOWED

    with scripted(answer) as server:
        started = time.monotonic()
        found = examined(server)
    assert not found.ok
    assert found.left
    assert time.monotonic() - started < 60


VERSIONED = {"versioning": {"enabled": True}}
RULE = {"action": {"type": "Delete"}, "condition": {"daysSinceNoncurrentTime": 7}}


@pytest.mark.parametrize(
    ("bucket", "soft", "versions"),
    [
        ({"softDeletePolicy": {"retentionDurationSeconds": "0"}}, "ok", "ok"),
        ({"softDeletePolicy": {"retentionDurationSeconds": "604800"}}, "warn", "ok"),
        (VERSIONED, "warn", "warn"),
        (VERSIONED | {"lifecycle": {"rule": [RULE]}}, "warn", "ok"),
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
