"""Options: s3fs's names mean what they mean there, and each one really shows in the requests that are sent."""

from __future__ import annotations

import base64
import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config

from bucketpoint.errors import AccessDeniedError, BucketpointError, CredentialsError, EndpointError, StoreError
from bucketpoint.stores import Store, open_store
from bucketpoint.stores.s3 import S3Options, S3Store
from bucketpoint.stores.s3 import client as s3_client
from kit.buffers import views
from kit.servers import S3Server, s3_attempts
from stores.engines import sent_by_each
from stores.scripted import Answer, Seen, scripted

CREATED = b"<?xml version='1.0'?><InitiateMultipartUploadResult><UploadId>up</UploadId></InitiateMultipartUploadResult>"
LISTED = b"<?xml version='1.0'?><ListBucketResult></ListBucketResult>"
COPIED = b"<?xml version='1.0'?><CopyObjectResult><ETag>e</ETag></CopyObjectResult>"


def answer(request: Seen, number: int) -> Answer:
    headers = {"ETag": '"e"', "Content-Type": "application/xml"}
    if request.method == "POST" and "uploads" in request.target:
        return Answer(200, headers, CREATED)
    if "x-amz-copy-source" in request.headers:
        return Answer(200, headers, COPIED)
    if request.method == "HEAD":
        return Answer(200, {**headers, "Content-Length": "5"})
    if request.method == "GET" and "range" in request.headers:
        return Answer(206, headers, b"12345")
    return Answer(200, headers, LISTED if request.method == "GET" else b"")


def sent_by_each_operation(**storage_options: Any) -> dict[str, Seen]:
    with scripted(answer) as server:
        options = {"endpoint_url": server.endpoint, "key": "a", "secret": "hush", **storage_options}
        return sent_by_each(S3Store("bucket", S3Options.from_storage_options(options)), server, EACH)


@pytest.fixture
def aws_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


def config_of(**options: Any) -> Any:
    return s3_client.build_client(S3Options.from_storage_options(options)).api.meta.config


def test_takes_the_names_of_s3fs_and_ignores_what_only_tunes_it() -> None:
    both = {"anon": True, "endpoint_url": "http://e", "profile": "p", "use_ssl": False, "requester_pays": True}
    both |= {"client_kwargs": {"region_name": "r"}, "config_kwargs": {"connect_timeout": 1}}
    acl = {"ACL": "private"}
    theirs = S3Options.from_storage_options(
        {**both, "key": "k", "secret": "s", "token": "t", "s3_additional_kwargs": acl}
    )
    assert theirs == S3Options(**both, access_key="k", secret_key="s", session_token="t", request_kwargs=acl)
    assert S3Options.from_storage_options({"username": "k", "password": "s"}).access_key == "k"
    assert S3Options.from_storage_options(None) == S3Options()
    tuning = (
        "default_block_size default_fill_cache default_cache_type version_aware cache_regions asynchronous loop "
        "max_concurrency fixed_upload_size skip_instance_cache use_listings_cache listings_expiry_time"
    )
    assert S3Options.from_storage_options(dict.fromkeys(tuning.split(), 1)) == S3Options()


def test_names_all_unknown_options() -> None:
    with pytest.raises(BucketpointError, match=r"acces_key, regoin\. Did you mean access_key, region\? Pass other"):
        S3Options.from_storage_options({"regoin": "x", "acces_key": "y"})
    with pytest.raises(BucketpointError, match="twice"):
        S3Options.from_storage_options({"key": "a", "username": "b"})
    with pytest.raises(BucketpointError, match="client_kwargs"):
        S3Options.from_storage_options({"client_kwargs": "region"})
    with pytest.raises(BucketpointError, match="ServerSideEncrypton"):
        s3_client.build_client(S3Options(request_kwargs={"ServerSideEncrypton": "AES256"}))
    with pytest.raises(BucketpointError, match="conect_timeout"):
        s3_client.build_client(S3Options(config_kwargs={"conect_timeout": 1}))


@pytest.mark.parametrize("name", S3Options.replaced)
def test_names_what_replaces_an_option_of_earlier_versions(name: str) -> None:
    with pytest.raises(BucketpointError) as caught:
        S3Options.from_storage_options({name: "hush", "region": "eu-west-1"})
    assert "hush" not in str(caught.value)
    _, given, end = (caught.value.remedy or "").partition(f"Pass {S3Options.replaced[name]}")
    assert given
    assert end == f" in place of {name}"
    option, value = S3Options.replaced[name].partition(", or")[0].split("=", 1)
    example = value.replace("&...", "").replace("...", '"2"' if name == "max_attempts" else '"path"')
    s3_client.build_client(S3Options.from_storage_options({option: eval(example)}))


def test_pickles_and_compares_options_and_hides_what_is_secret() -> None:
    secrets = {
        "key": "AKIAHUSH1",
        "secret": "hush2",
        "token": "hush3",
        "client_kwargs": {"aws_secret_access_key": "hush5"},
        "config_kwargs": {"proxies": {"https": "http://me:hush6@proxy"}},
        "s3_additional_kwargs": {"SSECustomerKey": "hush7"},
    }
    options = S3Options.from_storage_options({**secrets, "region": "eu-west-1"})
    again = pickle.loads(pickle.dumps(options))
    assert again == options
    assert again.cache_key() == options.cache_key()
    assert hash(options.cache_key()) != hash(options.replace(secret_key="other").cache_key())
    for text in (repr(options), str(options), repr(S3Store("bucket", options))):
        assert "hush" not in text.lower()
        assert "eu-west-1" in text
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.region = "x"  # type: ignore[misc]


def test_takes_the_region_from_the_first_source_that_has_one(monkeypatch: pytest.MonkeyPatch, aws_files: Path) -> None:
    def region(**options: Any) -> str:
        return s3_client.build_client(S3Options.from_storage_options(options)).region

    assert region() == "us-east-1"
    (aws_files / "config").write_text("[default]\nregion = sa-east-1\n[profile p]\nregion = ca-central-1\n")
    assert region() == "sa-east-1"
    assert region(profile="p") == "ca-central-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-2")
    assert region() == "eu-west-2"
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    assert region() == "eu-west-3"
    assert region(client_kwargs={"region_name": "us-west-2"}) == "us-west-2"
    assert region(region="us-west-1", client_kwargs={"region_name": "us-west-2"}) == "us-west-1"


def test_takes_the_endpoint_from_options_or_the_standard_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def endpoint(**options: Any) -> str:
        return str(s3_client.build_client(S3Options.from_storage_options(options)).api.meta.endpoint_url)

    assert endpoint().startswith("https://s3")
    assert endpoint(use_ssl=False).startswith("http://s3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert endpoint() == "http://127.0.0.1:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2")
    assert endpoint() == "http://127.0.0.1:2"
    assert endpoint(client_kwargs={"endpoint_url": "http://127.0.0.1:3"}) == "http://127.0.0.1:3"
    both = endpoint(endpoint_url="http://127.0.0.1:4", client_kwargs={"endpoint_url": "http://127.0.0.1:3"})
    assert both == "http://127.0.0.1:4"


def test_uses_another_endpoint_for_stores_that_are_made_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")

    def made() -> Store:
        return open_store("s3://bucket")[0]

    with scripted(answer) as before, scripted(answer) as after:
        monkeypatch.setenv("AWS_ENDPOINT_URL", before.endpoint)
        first, unused = made(), made()
        first.put("one", views(b"x"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", after.endpoint)
        made().put("two", views(b"x"))
        # A save under way ends where it began. What was not used yet, or crosses to another process, has no such place.
        first.put("three", views(b"x"))
        unused.put("four", views(b"x"))
        pickle.loads(pickle.dumps(first)).put("five", views(b"x"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", before.endpoint)
        made().put("six", views(b"x"))
    assert [request.path for request in before.seen] == ["/bucket/one", "/bucket/three", "/bucket/six"]
    assert [request.path for request in after.seen] == ["/bucket/two", "/bucket/four", "/bucket/five"]


def test_takes_credentials_from_a_profile_or_from_client_kwargs(minio: S3Server, aws_files: Path) -> None:
    (aws_files / "credentials").write_text(
        f"[trainer]\naws_access_key_id = {minio.key}\naws_secret_access_key = {minio.secret}\n"
    )
    bucket = minio.make_bucket()
    store = S3Store(bucket, S3Options(endpoint_url=minio.endpoint, profile="trainer"))
    store.put("k", views(b"x"))
    given = {"aws_access_key_id": minio.key, "aws_secret_access_key": minio.secret, "endpoint_url": minio.endpoint}
    assert S3Store(bucket, S3Options(client_kwargs=given)).get("k")[0] == b"x"
    with pytest.raises(CredentialsError):
        S3Store(bucket, S3Options(endpoint_url=minio.endpoint, access_key="only")).get("k")


@pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")
def test_takes_a_ca_bundle_as_an_option_or_all_from_the_environment(
    s3_tls: S3Server, bucket_tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = S3Options(endpoint_url=s3_tls.endpoint, access_key=s3_tls.key, secret_key=s3_tls.secret)
    S3Store(bucket_tls, options.replace(client_kwargs={"verify": str(s3_tls.ca)})).put("k", views(b"x"))
    insecure = options.replace(client_kwargs={"verify": False}, insecure_tls=True)
    assert S3Store(bucket_tls, insecure).get("k")[0] == b"x"
    with pytest.raises(EndpointError):
        S3Store(bucket_tls, options.replace(client_kwargs={"verify": "/no/such/bundle.pem"})).get("k")
    for name, value in s3_tls.env.items():
        monkeypatch.setenv(name, value)
    assert S3Store(bucket_tls, S3Options(connections=8)).get("k")[0] == b"x"


def test_keeps_our_defaults_in_the_client_unless_the_user_sets_others(
    monkeypatch: pytest.MonkeyPatch, aws_files: Path
) -> None:
    config = config_of()
    assert (config.connect_timeout, config.read_timeout, config.max_pool_connections) == (10, 60, 32)
    assert config.tcp_keepalive is True
    assert config.request_checksum_calculation == "when_required"
    assert config.s3["payload_signing_enabled"] is False

    chosen = config_of(
        connections=7,
        config_kwargs={"connect_timeout": 3, "s3": {"addressing_style": "path"}, "proxies": {"https": "http://p"}},
    )
    assert (chosen.connect_timeout, chosen.max_pool_connections) == (3, 7)
    assert chosen.s3 == {"addressing_style": "path", "payload_signing_enabled": False}
    assert chosen.proxies == {"https": "http://p"}
    given = config_of(client_kwargs={"config": Config(read_timeout=5, s3={"addressing_style": "path"})})
    assert (given.read_timeout, given.connect_timeout) == (5, 10)
    assert given.s3 == {"addressing_style": "path", "payload_signing_enabled": False}


def test_makes_attempts_in_one_place_however_their_number_is_given(
    monkeypatch: pytest.MonkeyPatch, aws_files: Path
) -> None:
    def policy(**options: Any) -> tuple[int, bool]:
        client = s3_client.build_client(S3Options(**options))
        assert client.api.meta.config.retries == {"mode": "standard", "total_max_attempts": 1}
        return client.policy.attempts, client.policy.counts_throttled

    assert policy() == (6, False)
    assert policy(config_kwargs={"retries": {"max_attempts": 3, "mode": "adaptive"}}) == (4, True)
    assert policy(config_kwargs={"retries": {"total_max_attempts": 3}}) == (3, True)
    assert policy(client_kwargs={"config": Config(retries={"total_max_attempts": 7})}) == (7, True)
    (aws_files / "config").write_text("[default]\nmax_attempts = 9\nretry_mode = adaptive\n")
    assert policy() == (9, True)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "4")
    assert policy() == (4, True)
    assert policy(**s3_attempts(2)) == (2, True)
    assert s3_client.build_client(S3Options(retry_deadline_s=7)).policy.deadline_s == 7
    with pytest.raises(BucketpointError, match="retry_deadline_s"):
        policy(retry_deadline_s=0)


def test_sends_requests_to_the_path_or_to_the_host_as_the_style_says() -> None:
    def url(style: str | None = None, **options: Any) -> str:
        chosen: dict[str, Any] = {} if style is None else {"config_kwargs": {"s3": {"addressing_style": style}}}
        made = S3Options(access_key="a", secret_key="b", region="eu-west-1", **chosen, **options)
        client, seen = s3_client.build_client(made), list[str]()

        def capture(request: Any, **_: Any) -> None:
            seen.append(request.url)
            raise InterruptedError

        client.api.meta.events.register_first("before-send.s3", capture)
        with pytest.raises(InterruptedError):
            client.call("GetObject", Bucket="bucket", Key="k")
        return seen[0]

    assert url() == "https://bucket.s3.eu-west-1.amazonaws.com/k"
    assert url("path") == "https://s3.eu-west-1.amazonaws.com/bucket/k"
    assert url(endpoint_url="http://127.0.0.1:9000") == "http://127.0.0.1:9000/bucket/k"
    assert url("virtual", endpoint_url="https://store.example") == "https://bucket.store.example/k"


KEY = b"0123456789abcdef0123456789abcdef"
SSE = "x-amz-server-side-encryption"
EACH = {"put", "create", "part", "read", "head", "copy", "list"}
WRITES = {"put", "create", "copy"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            {
                "authorization": (EACH, "AWS4-HMAC-SHA256 "),
                "user-agent": (EACH, "bucketpoint/"),
                "x-amz-checksum-crc32c": ({"put", "part"}, "qTxfkw=="),
                "x-amz-checksum-algorithm": ({"create"}, "CRC32C"),
                "x-amz-request-payer": (set(), ""),
            },
        ),
        (
            {"checksums": False},
            {"x-amz-checksum-crc32c": (set(), ""), "x-amz-checksum-algorithm": (set(), "")},
        ),
        ({"config_kwargs": {"user_agent_extra": "x/1"}}, {"user-agent": (EACH, "x/1")}),
        ({"requester_pays": True}, {"x-amz-request-payer": (EACH, "requester")}),
        ({"anon": True}, {"authorization": (set(), "")}),
        (
            {"request_kwargs": {"StorageClass": "STANDARD_IA", "Tagging": "team=a%26b&run=7+x", "ACL": "private"}},
            {
                "x-amz-storage-class": (WRITES, "STANDARD_IA"),
                # A copy brings its tags along; to send others needs a directive.
                "x-amz-tagging": ({"put", "create"}, "team=a%26b&run=7+x"),
                "x-amz-acl": (WRITES, "private"),
            },
        ),
        (
            {"request_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "the-key"}},
            {SSE: (WRITES, "aws:kms"), f"{SSE}-aws-kms-key-id": (WRITES, "the-key")},
        ),
        *(
            (
                {"s3_additional_kwargs": {"SSECustomerKey": key}},
                {
                    f"{SSE}-customer-key": (EACH - {"list"}, base64.b64encode(KEY).decode()),
                    f"{SSE}-customer-algorithm": (EACH - {"list"}, "AES256"),
                    f"x-amz-copy-source{SSE[5:]}-customer-key": ({"copy"}, base64.b64encode(KEY).decode()),
                },
            )
            for key in (KEY, KEY.decode())
        ),
        (
            {"s3_additional_kwargs": {"ExpectedBucketOwner": "123456789012"}},
            {"x-amz-expected-bucket-owner": (EACH, "123456789012")},
        ),
    ],
)
def test_sends_the_headers_of_an_option_with_the_requests_that_take_them(
    options: dict[str, Any], expected: dict[str, tuple[set[str], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server that looks at the headers has no TLS.
    monkeypatch.setattr(s3_client, "_refuse_key_in_clear", lambda *_: None)
    sent = sent_by_each_operation(**options)
    assert sent.keys() == EACH
    for header, (operations, value) in expected.items():
        found = {name: request.headers[header] for name, request in sent.items() if header in request.headers}
        assert found.keys() == operations, header
        assert all(value in text for text in found.values()), found


def test_sends_no_customer_key_in_clear_not_even_to_this_machine() -> None:
    keyed = {"SSECustomerKey": b"x" * 32}
    for host in ("10.0.0.1", "127.0.0.1:9", "localhost:9", "[::1]:9"):
        with pytest.raises(EndpointError, match="SSE-C"):
            S3Store("b", S3Options(endpoint_url=f"http://{host}", request_kwargs=keyed)).get("k")


def test_reads_and_copies_an_object_under_a_customer_key_with_it_and_no_other(
    s3_tls: S3Server, bucket_tls: str
) -> None:
    options = S3Options.from_storage_options(s3_tls.options)
    keyed = S3Store(bucket_tls, options.replace(request_kwargs={"SSECustomerKey": os.urandom(32)}))
    upload = keyed.create_multipart("k")
    part = keyed.put_part("k", upload, 1, views(b"content"))
    keyed.complete_multipart("k", upload, [part])
    keyed.copy(keyed.head("k"), "copy")
    data = bytearray(3)
    keyed.read_into("copy", 1, views(data))
    assert data == b"ont"
    for other in (options, options.replace(request_kwargs={"SSECustomerKey": os.urandom(32)})):
        with pytest.raises((StoreError, AccessDeniedError)):
            S3Store(bucket_tls, other).get("k")
