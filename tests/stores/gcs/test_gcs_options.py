"""Options: gcsfs's names mean what they mean there, each shows in the requests that are sent, and no secret shows."""

from __future__ import annotations

import datetime
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

pytest.importorskip("google.cloud.storage")

from google.oauth2.credentials import Credentials

import bucketpoint
from bucketpoint.errors import AccessDeniedError, BucketpointError, CredentialsError, EndpointError
from bucketpoint.stores import retry
from bucketpoint.stores.gcs import GCSOptions, GCSStore
from bucketpoint.stores.gcs import client as gcs_client
from gcs_server import GCSServer
from kit.buffers import views
from kit.certificates import make_certificates
from kit.servers import free_port
from stores.engines import CALLS, OBJECT, gcs_at, sent_by_each
from stores.engines import gcs_reply as reply
from stores.scripted import Answer, ScriptedServer, Seen, scripted

pytestmark = pytest.mark.contract

CREATED = b"<InitiateMultipartUploadResult><UploadId>up</UploadId></InitiateMultipartUploadResult>"
COMPLETED = b"<CompleteMultipartUploadResult/>"
KMS_KEY = "projects/p/locations/eu/keyRings/r/cryptoKeys/k"
EACH = ("put", "create", "part", "complete", "abort", "read", "head", "copy", "list")


def answer(request: Seen, number: int) -> Answer:
    if request.path == "/token":
        return reply({"access_token": "ya29.hush", "expires_in": 3600, "token_type": "Bearer"})
    if "range" in request.headers:
        return Answer(206, {"Content-Range": "bytes 0-4/5", "x-goog-generation": "7"}, b"12345")
    if request.method == "GET" and request.path.endswith("/o"):
        return reply({"kind": "storage#objects"})
    if "uploads" in request.target and request.method == "POST" and request.path == "/bucket/k":
        return Answer(200, {}, CREATED)
    if "uploadId" in request.target:
        return Answer(200, {"ETag": '"e"'}, COMPLETED if request.method == "POST" else b"")
    if "rewriteTo" in request.path:
        return reply({"done": True, "resource": OBJECT})
    return reply(OBJECT)


def sent_by_each_operation(**options: Any) -> dict[str, Seen]:
    with scripted(answer) as server:
        return sent_by_each(gcs_at(server, max_attempts=1, **options), server, EACH)


def query(request: Seen) -> dict[str, list[str]]:
    return parse_qs(urlsplit(request.target).query)


def json_of(request: Seen) -> dict[str, Any]:
    """The JSON of a request, or of the first part of an upload."""
    body = request.body
    found: dict[str, Any] = json.loads(body.split(b"\r\n\r\n")[1].split(b"\r\n--")[0] if body[:2] == b"--" else body)
    return found


def test_takes_the_names_of_gcsfs_and_ignores_what_only_tunes_it() -> None:
    theirs = {"project": "p", "token": "anon", "requester_pays": True, "endpoint_url": "http://127.0.0.1:1"}
    tuning = (
        "access block_size consistency cache_timeout version_aware check_connection default_location asynchronous loop"
    )
    found = GCSOptions.from_storage_options({**theirs, **dict.fromkeys(tuning.split(), 1)})
    assert found == GCSOptions(project="p", token="anon", requester_pays=True, endpoint_url="http://127.0.0.1:1")
    assert GCSOptions.from_storage_options(None) == GCSOptions()


def test_names_unknown_options_and_values() -> None:
    with pytest.raises(BucketpointError, match=r"projct, tokn.*connections"):
        GCSOptions.from_storage_options({"tokn": "anon", "projct": "p"})
    with pytest.raises(BucketpointError, match="gcloud auth application-default login"):
        GCSOptions(token="browser")
    with pytest.raises(BucketpointError, match="requester_pays="):
        GCSOptions(requester_pays=True)
    with pytest.raises(BucketpointError, match="max_attempts must be at least 1"):
        GCSOptions(max_attempts=0)


def test_has_parts_and_buckets_of_one_name_at_google_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(**options: Any) -> bool:
        return GCSStore("b", GCSOptions(**options)).capabilities.multipart

    assert GCSStore("b").identity == "gs://b"
    assert GCSStore("b", GCSOptions(endpoint_url="http://me:hush@h:1/")).identity == "http://h:1/b"
    assert parts()
    assert parts(endpoint_url="https://storage.europe-west1.rep.googleapis.com")
    assert parts(endpoint_url="http://127.0.0.1:1", uploads="xml")
    assert not parts(endpoint_url="http://127.0.0.1:1")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:4443")
    assert not parts()
    assert GCSStore("b").identity == "http://127.0.0.1:4443/b"
    with pytest.raises(BucketpointError, match=r"uploads='compose'.*Leave it out"):
        parts(uploads="compose")


def test_says_with_every_request_who_pays() -> None:
    for options in ({"requester_pays": "payer"}, {"requester_pays": True, "project": "payer"}):
        for name, request in sent_by_each_operation(**options, uploads="xml").items():
            if request.path == "/bucket/k":
                assert request.headers["x-goog-user-project"] == "payer", name
            else:
                assert query(request)["userProject"] == ["payer"], name
    for request in sent_by_each_operation(project="payer", uploads="xml").values():
        assert "payer" not in request.target + str(request.headers)


def test_sends_key_and_class_of_what_makes_an_object_and_the_user_agent_with_all() -> None:
    options = {"kms_key_name": KMS_KEY, "storage_class": "NEARLINE", "user_agent": "my-job/1"}
    sent = sent_by_each_operation(**options, uploads="xml")
    assert query(sent["put"])["kmsKeyName"] == [KMS_KEY]
    assert query(sent["copy"])["destinationKmsKeyName"] == [KMS_KEY]
    assert sent["create"].headers["x-goog-encryption-kms-key-name"] == KMS_KEY
    for name in ("part", "complete", "abort", "read", "head", "list"):
        assert "kms" not in sent[name].target.lower() + str(sent[name].headers).lower()
    assert json_of(sent["put"])["storageClass"] == json_of(sent["copy"])["storageClass"] == "NEARLINE"
    assert sent["create"].headers["x-goog-storage-class"] == "NEARLINE"
    assert sent["part"].headers["x-goog-hash"] == f"crc32c={json_of(sent['put'])['crc32c']}"
    for request in sent.values():
        assert request.headers["user-agent"].startswith("bucketpoint/")
        assert " my-job/1 google-cloud-storage/" in request.headers["user-agent"]
        assert "authorization" not in request.headers


@pytest.fixture(scope="module")
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*form).decode()


def service_account(server: ScriptedServer, private_key: str) -> dict[str, str]:
    return {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "1",
        "private_key": private_key,
        "client_email": "trainer@p.iam.gserviceaccount.com",
        "token_uri": f"{server.endpoint}/token",
    }


@pytest.mark.parametrize("way", ["dict", "path", "environment"])
def test_signs_in_a_service_account_once_and_sends_its_token_with_every_request(
    way: str, private_key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted(answer) as server:
        account = service_account(server, private_key)
        path = tmp_path / "account.json"
        path.write_text(json.dumps(account))
        token: Any = {"dict": account, "path": str(path), "environment": None}[way]
        if way == "environment":
            monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        # Application default credentials are found for any token, so each of these is a client of its own.
        options = GCSOptions(token=token, endpoint_url=server.endpoint, user_agent=way)
        store = GCSStore("bucket", options)
        store.put("k", views(b"x"))
        store.head("k")
        store.delete([])
    assert [request.path == "/token" for request in server.seen] == [True, False, False]
    assert all(request.headers["authorization"] == "Bearer ya29.hush" for request in server.seen[1:])
    assert "hush" not in repr(store)
    assert "PRIVATE" not in repr(store)


def test_signs_in_a_workload_by_federation_and_the_programs_own_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None) + datetime.timedelta(hours=1)
    with scripted(answer) as server:
        own = Credentials("hush-own", expiry=soon)
        GCSStore("bucket", GCSOptions(token=own, endpoint_url=server.endpoint)).head("k")
    assert server.seen[0].headers["authorization"] == "Bearer hush-own"
    (tmp_path / "subject").write_text("from-the-cluster")
    with scripted(answer) as server:
        config = {
            "type": "external_account",
            "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/pool/providers/x",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": f"{server.endpoint}/token",
            "credential_source": {"file": str(tmp_path / "subject")},
        }
        path = tmp_path / "workload.json"
        path.write_text(json.dumps(config))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        GCSStore("bucket", GCSOptions(endpoint_url=server.endpoint)).head("k")
    assert b"from-the-cluster" in server.seen[0].body
    assert server.seen[1].headers["authorization"] == "Bearer ya29.hush"


def test_renews_a_token_that_is_refused_and_sends_the_whole_body_again(private_key: str) -> None:
    def script(request: Seen, number: int) -> Answer:
        return Answer(401, {}, b"{}") if number == 1 else answer(request, number)

    body = b"x" * 300_000
    with scripted(script) as server:
        account = service_account(server, private_key)
        GCSStore("bucket", GCSOptions(token=account, endpoint_url=server.endpoint)).put("k", views(body))
    assert [request.path == "/token" for request in server.seen] == [True, False, True, False]
    assert body in server.seen[1].body
    assert body in server.seen[3].body


def test_raises_credentials_errors_for_credentials_refused_or_not_there(
    private_key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Answer(400, {"Content-Type": "application/json"}, b'{"error": "invalid_grant"}')
    with scripted(lambda request, number: refused) as server:
        store = GCSStore("bucket", GCSOptions(token=service_account(server, private_key), endpoint_url=server.endpoint))
        with pytest.raises(CredentialsError, match="gcloud auth application-default login") as caught:
            store.put("k", views(b"x"))
    assert "PRIVATE" not in str(caught.value)
    assert caught.value.__context__ is None
    nowhere = {"endpoint_url": "http://127.0.0.1:9", "max_attempts": 1}
    broken = tmp_path / "broken.json"
    broken.write_text('{"type": "service_account", "private_key": "hush"}')
    for token in (None, str(tmp_path / "absent.json"), str(broken), {"type": "service_account"}):
        with pytest.raises(CredentialsError) as caught:
            GCSStore("bucket", GCSOptions(token=token, **nowhere)).get("k")
        assert "hush" not in str(caught.value)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    with pytest.raises(CredentialsError, match=r"absent\.json"):
        GCSStore("bucket", GCSOptions(**nowhere, user_agent="absent")).get("k")


def test_needs_nothing_but_the_environment(gcs: GCSServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = gcs.make_bucket()
    for host in (gcs.endpoint, gcs.endpoint.removeprefix("http://")):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        GCSStore(bucket).put("k", views(b"x"))
        assert gcs.read(bucket, "k") == b"x"


def test_names_an_emulator_that_is_not_there_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    monkeypatch.setattr(retry, "UNSEEN_S", 0.3)
    with pytest.raises(EndpointError) as caught:
        bucketpoint.load({"w": torch.zeros(1)}, "gs://bucket/run")
    for part in (f"{endpoint} cannot be reached", "refused", "STORAGE_EMULATOR_HOST", "gs://bucket/run/.metadata"):
        assert part in str(caught.value)
    # What bounds the time: the attempts of one request, and no other request.
    assert "after 0." in str(caught.value)
    for host in ("http://nowhere.invalid:4443", "localhost:no-port"):
        options = GCSOptions(token="anon", endpoint_url=f"http://{host.removeprefix('http://')}", max_attempts=1)
        with pytest.raises(EndpointError, match=f"{host.removeprefix('http://')} cannot be reached"):
            GCSStore("bucket", options).get("k")


WHO = "trainer@p.iam.gserviceaccount.com does not have {} access to the Google Cloud Storage object"


def refusal(permission: str, *, terse: bool) -> Callable[[Seen, int], Answer]:
    """Whatever is asked is refused, as the two APIs word it: naming the permission, and not.

    https://cloud.google.com/storage/docs/json_api/v1/status-codes#403-forbidden and
    https://cloud.google.com/storage/docs/xml-api/reference-status
    """
    message = "Forbidden" if terse else WHO.format(permission)
    details = "" if terse else f"<Details>{message}.</Details>"
    error = {"code": 403, "message": message, "errors": [{"domain": "global", "reason": "forbidden"}]}
    xml = f"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access denied.</Message>{details}</Error>"

    def script(request: Seen, number: int) -> Answer:
        if request.path.startswith("/bucket"):
            return Answer(403, {"Content-Type": "application/xml"}, xml.encode())
        return Answer(403, {"Content-Type": "application/json"}, json.dumps({"error": error}).encode())

    return script


@pytest.mark.parametrize("terse", [False, True], ids=["as IAM words it", "without a reason"])
@pytest.mark.parametrize(
    ("permission", "calls"),
    [
        ("storage.objects.create", ["put"]),
        ("storage.objects.get", ["get", "head"]),
        ("storage.objects.list", ["list"]),
        ("storage.multipartUploads.create", ["create", "part"]),
        ("storage.multipartUploads.abort", ["abort"]),
        ("storage.multipartUploads.list", ["uploads"]),
    ],
)
def test_names_a_permission_that_is_missing(permission: str, calls: list[str], terse: bool) -> None:
    for call in calls:
        with scripted(refusal(permission, terse=terse)) as server, pytest.raises(AccessDeniedError) as caught:
            CALLS[call](gcs_at(server, uploads="xml", max_attempts=1))
        assert caught.value.url in ("gs://bucket/k", "gs://bucket", "gs://bucket/run/")
        assert f"This request needs {permission}" in str(caught.value)
        assert (WHO.format(permission) in caught.value.message) != terse


def test_sends_no_credentials_in_clear_over_a_network() -> None:
    for endpoint in ("http://10.0.0.1:4443", "http://store.internal"):
        with pytest.raises(EndpointError, match="in clear"):
            gcs_client.build_client(GCSOptions(token={"type": "service_account"}, endpoint_url=endpoint))
        gcs_client.build_client(GCSOptions(token="anon", endpoint_url=endpoint))
    with pytest.raises(EndpointError, match="not a URL"):
        gcs_client.build_client(GCSOptions(token="anon", endpoint_url="localhost:4443"))
    with pytest.raises(EndpointError, match="CA bundle"):
        gcs_client.build_client(GCSOptions(token="anon", ca_bundle="/nowhere.pem"))


def test_pickles_options_as_names_and_places_and_never_with_what_is_secret(private_key: str) -> None:
    options = GCSOptions(token="/etc/account.json", project="p", kms_key_name=KMS_KEY)
    again = pickle.loads(pickle.dumps(options))
    assert again == options
    assert again.cache_key() == options.cache_key()
    held = GCSOptions(token={"private_key": private_key})
    assert "PRIVATE" not in repr(held)
    with pytest.raises(BucketpointError, match="path of a credentials file"):
        pickle.dumps(held)
    assert hash(held.cache_key()) != hash(GCSOptions(token={"private_key": "other"}).cache_key())


def test_trusts_the_certificates_of_an_option_and_no_others(tmp_path: Path) -> None:
    authority = make_certificates(tmp_path)
    with scripted(answer, tls=tmp_path) as server:
        base = {"token": "anon", "endpoint_url": server.endpoint, "max_attempts": 1}
        assert GCSStore("bucket", GCSOptions(**base, ca_bundle=str(authority))).head("k").etag == "7"
        with pytest.raises(EndpointError, match="SSL"):
            GCSStore("bucket", GCSOptions(**base)).head("k")
