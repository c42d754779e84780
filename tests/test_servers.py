"""The fixtures themselves: the servers store, refuse conditions, speak TLS, and end with their session."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, SSLError

from kit.servers import KMS_KEY, SUPERVISE, S3Server

pytestmark = pytest.mark.contract


def put(server: S3Server, bucket: str, body: bytes, **conditions: Any) -> str:
    etag: str = server.client().put_object(Bucket=bucket, Key="key", Body=body, **conditions)["ETag"]
    return etag


def get(server: S3Server, bucket: str) -> bytes:
    body: bytes = server.client().get_object(Bucket=bucket, Key="key")["Body"].read()
    return body


def status(error: pytest.ExceptionInfo[ClientError]) -> int:
    code: int = error.value.response["ResponseMetadata"]["HTTPStatusCode"]
    return code


def test_reads_what_is_put(s3: S3Server, bucket: str) -> None:
    put(s3, bucket, b"first")
    assert get(s3, bucket) == b"first"
    assert s3.keys(bucket) == ["key"]


def test_gives_every_test_an_empty_bucket_of_its_own(s3: S3Server, bucket: str) -> None:
    assert s3.keys(bucket) == []
    assert s3.make_bucket() != bucket


def test_refuses_a_put_that_demands_absence_when_the_key_exists(s3: S3Server, bucket: str) -> None:
    put(s3, bucket, b"first", IfNoneMatch="*")
    with pytest.raises(ClientError) as error:
        put(s3, bucket, b"second", IfNoneMatch="*")
    assert status(error) == 412
    assert get(s3, bucket) == b"first"


def test_refuses_a_put_that_demands_an_etag_when_the_object_changed(s3: S3Server, bucket: str) -> None:
    first = put(s3, bucket, b"first")
    put(s3, bucket, b"second", IfMatch=first)
    with pytest.raises(ClientError) as error:
        put(s3, bucket, b"third", IfMatch=first)
    assert status(error) == 412
    assert get(s3, bucket) == b"second"


def test_carries_what_a_client_needs_in_options(s3: S3Server, bucket: str) -> None:
    options = s3.options
    client = boto3.client(
        "s3", aws_access_key_id=options["key"], aws_secret_access_key=options["secret"], **options["client_kwargs"]
    )
    client.put_object(Bucket=bucket, Key="key", Body=b"body")
    assert get(s3, bucket) == b"body"


def test_carries_what_a_client_needs_in_the_environment(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    boto3.session.Session().client("s3").put_object(Bucket=bucket, Key="key", Body=b"body")
    assert get(s3, bucket) == b"body"


def test_accepts_tls_with_the_authority_and_refuses_it_without(s3_tls: S3Server, bucket_tls: str) -> None:
    put(s3_tls, bucket_tls, b"body")
    assert get(s3_tls, bucket_tls) == b"body"
    options = s3_tls.options
    del options["client_kwargs"]["verify"]
    stranger = boto3.client(
        "s3", aws_access_key_id=options["key"], aws_secret_access_key=options["secret"], **options["client_kwargs"]
    )
    with pytest.raises(SSLError):
        stranger.get_object(Bucket=bucket_tls, Key="key")


@pytest.mark.parametrize(
    "encryption",
    [
        {"ServerSideEncryption": "AES256"},
        {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": KMS_KEY},
        {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "k" * 32},
    ],
    ids=["sse-s3", "sse-kms", "sse-c"],
)
def test_serves_every_kind_of_encryption_by_minio_over_tls(
    s3_tls: S3Server, bucket_tls: str, encryption: dict[str, str]
) -> None:
    put(s3_tls, bucket_tls, b"body", **encryption)
    customer = {name: value for name, value in encryption.items() if name.startswith("SSECustomer")}
    assert s3_tls.client().get_object(Bucket=bucket_tls, Key="key", **customer)["Body"].read() == b"body"


def test_lets_limited_credentials_do_only_what_they_are_granted(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    put(minio, bucket, b"body")
    options = minio.limited_options(
        {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": [f"arn:aws:s3:::{bucket}/*"]}
    )
    reader = boto3.client(
        "s3",
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        aws_session_token=options["token"],
        **options["client_kwargs"],
    )
    assert reader.get_object(Bucket=bucket, Key="key")["Body"].read() == b"body"
    with pytest.raises(ClientError) as error:
        reader.put_object(Bucket=bucket, Key="key", Body=b"other")
    assert status(error) == 403


def test_keeps_settings_of_the_host_from_every_test() -> None:
    allowed = {"AWS_EC2_METADATA_DISABLED", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"}
    assert {name for name in os.environ if name.startswith("AWS_")} <= allowed


def test_keeps_a_secret_out_of_the_repr(s3: S3Server) -> None:
    assert s3.secret not in repr(s3)


def test_ends_a_server_with_its_process_even_when_that_is_killed(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    killed = textwrap.dedent(
        """
        import os, signal, subprocess, sys
        child = [sys.executable, sys.argv[1], sys.argv[2], sys.executable, "-c", "import time; time.sleep(600)"]
        process = subprocess.Popen(child, stdin=subprocess.PIPE)
        print(process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    # The pipe of standard output stays open in the server, so reading it to its end waits for the server's.
    subprocess.run(
        [sys.executable, "-c", killed, str(SUPERVISE), str(scratch)], stdout=subprocess.PIPE, timeout=30, check=False
    )
    assert not scratch.exists()
