"""Real S3 servers on 127.0.0.1 for tests, benchmarks and demos: moto and MinIO, plain and TLS."""

from __future__ import annotations

import base64
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3
import botocore.loaders
import botocore.session
from botocore.config import Config

from kit.supervise import supervised

REGION = "us-east-1"
START_TIMEOUT_S = 60
START_ATTEMPTS = 3
SUPERVISE = Path(__file__).with_name("supervise.py")

# Name of the key that the MinIO servers here know for SSE-KMS.
KMS_KEY = "bucketpoint-test"

_HOST_SETTINGS = ("AWS_", "MINIO_", "MOTO_")


Command = Callable[[Path, int], list[str]]
"""Builds a server's command line from its directory and its port."""


def s3_attempts(number: int) -> dict[str, Any]:
    """Return the storage options of S3 for so many attempts of each request."""
    return {"config_kwargs": {"retries": {"total_max_attempts": number}}}


@dataclass(frozen=True)
class S3Server:
    """A running server: settings to reach it, and direct access for tests, past the code under test."""

    kind: str
    endpoint: str
    key: str
    secret: str = field(repr=False)
    ca: Path | None = None
    region: str = REGION
    pid: int = 0

    def attempts(self, number: int) -> dict[str, Any]:
        """Return the storage options for so many attempts of each request."""
        return s3_attempts(number)

    @property
    def options(self) -> dict[str, Any]:
        """`storage_options` in the style of s3fs. A new dict each time: callers may change it."""
        client = {"endpoint_url": self.endpoint, "region_name": self.region}
        if self.ca is not None:
            client["verify"] = str(self.ca)
        return {"key": self.key, "secret": self.secret, "client_kwargs": client}

    @property
    def env(self) -> dict[str, str]:
        """The same settings as environment variables, for subprocesses and for tests of the environment."""
        env = {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return env if self.ca is None else {**env, "AWS_CA_BUNDLE": str(self.ca)}

    def at(self, endpoint: str) -> S3Server:
        """Return the same server under another endpoint, such as a proxy's."""
        return replace(self, endpoint=endpoint)

    def client(self, service: str = "s3", **settings: Any) -> Any:
        """Make a raw boto3 client that shares no connection and no setting with the code under test."""
        core = botocore.session.Session()
        core.register_component("data_loader", _loader())
        return boto3.session.Session(botocore_session=core).client(
            service,
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            verify=None if self.ca is None else str(self.ca),
            config=Config(s3={"addressing_style": "path"}, retries={"mode": "standard", "max_attempts": 2}),
            **settings,
        )

    def make_bucket(self, stem: str = "bucketpoint") -> str:
        """Make an empty bucket with a new, unique name, and return the name."""
        name = f"{stem}-{os.urandom(6).hex()}"
        _client_of(self).create_bucket(Bucket=name)
        return name

    def url(self, bucket: str, key: str = "") -> str:
        return f"s3://{bucket}/{key}" if key else f"s3://{bucket}"

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Return every key under the prefix, sorted."""
        pages = _client_of(self).get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", []))

    def open_uploads(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the keys of unfinished multipart uploads. MinIO lists them for an exact key only."""
        answer = _client_of(self).list_multipart_uploads(Bucket=bucket, Prefix=prefix)
        return sorted(upload["Key"] for upload in answer.get("Uploads", []))

    def limited_options(self, *statements: dict[str, Any], lifetime_s: int = 900) -> dict[str, Any]:
        """Return `storage_options` with session credentials limited to what the statements allow (MinIO only)."""
        policy = json.dumps({"Version": "2012-10-17", "Statement": list(statements)})
        granted = self.client("sts").assume_role(
            RoleArn="arn:aws:iam::000000000000:role/limited",
            RoleSessionName="limited",
            Policy=policy,
            DurationSeconds=lifetime_s,
        )["Credentials"]
        return {
            **self.options,
            "key": granted["AccessKeyId"],
            "secret": granted["SecretAccessKey"],
            "token": granted["SessionToken"],
        }


@functools.lru_cache(maxsize=16)
def _client_of(server: S3Server) -> Any:
    """Return the client of a server for buckets and listings. Each new client costs 10 ms or more."""
    return server.client()


@functools.cache
def _loader() -> botocore.loaders.Loader:
    """Return the loader of botocore's descriptions of services. A client with a loader of its own takes 12 MB."""
    return botocore.loaders.create_loader()


@contextmanager
def moto() -> Iterator[S3Server]:
    """Run moto's server in a process of its own, so that its CPU time is not the test's. It keeps data in memory."""

    def command(scratch: Path, port: int) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

    with _running(command, {}) as (_, port, pid):
        yield S3Server("moto", f"http://127.0.0.1:{port}", "testing", "testing-secret", pid=pid)


@contextmanager
def minio(binary: Path, *, tls: bool = False, data: Path | None = None) -> Iterator[S3Server]:
    """Run a MinIO server on a temporary directory, or on `data`; with `tls`, under a newly made authority."""
    key, secret = "bucketpoint", os.urandom(16).hex()
    if tls:
        from kit import certificates as authority

    def command(scratch: Path, port: int) -> list[str]:
        certificates = scratch / "certificates"
        certificates.mkdir()
        if tls:
            authority.make_certificates(certificates)
        return [
            *(str(binary), "server", "--quiet", "--address", f"127.0.0.1:{port}"),
            # Given without TLS too: the default is a folder in the user's home.
            *("--certs-dir", str(certificates)),
            str(data or scratch / "data"),
        ]

    env = {
        "MINIO_ROOT_USER": key,
        "MINIO_ROOT_PASSWORD": secret,
        "MINIO_BROWSER": "off",
        "MINIO_UPDATE": "off",
        # Lets MinIO use a directory of the root disk, which suffices for a test; it otherwise requires a mount of
        # its own.
        "MINIO_CI_CD": "1",
        # With this key MinIO supports SSE-S3 and SSE-KMS; SSE-C needs TLS as well.
        "MINIO_KMS_SECRET_KEY": f"{KMS_KEY}:{base64.b64encode(os.urandom(32)).decode()}",
    }
    with _running(command, env) as (scratch, port, pid):
        ca = scratch / "certificates" / authority.CA_FILE if tls else None
        scheme = "https" if tls else "http"
        server = S3Server("minio", f"{scheme}://127.0.0.1:{port}", key, secret, ca=ca, pid=pid)
        _wait_until_served(server)
        yield server


@contextmanager
def _running(command: Command, env: dict[str, str]) -> Iterator[tuple[Path, int, int]]:
    """Run the server and yield (its directory, its port, the supervisor's pid) once the port answers."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_HOST_SETTINGS)}
    for attempt in range(START_ATTEMPTS):
        # The supervisor deletes the directory as well, in case this process is killed.
        scratch = Path(tempfile.mkdtemp(prefix="bucketpoint-server-"))
        port = free_port()
        settings = {**inherited, "HOME": str(scratch), **env}
        with (
            tempfile.TemporaryFile() as log,
            supervised(scratch, command(scratch, port), settings, log) as process,
        ):
            if _wait_until_listening(process, port):
                yield scratch, port, process.pid
                return
            if attempt == START_ATTEMPTS - 1:
                log.seek(0)
                raise RuntimeError(f"the server did not start: {log.read()[-2000:].decode(errors='replace')}")


def free_port() -> int:
    """Return a port that is free now. Another process may take it first, so callers retry the start of a server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_listening(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
        except OSError:
            time.sleep(0.05)
    return False


def _wait_until_served(server: S3Server) -> None:
    """Wait until the server answers requests: MinIO listens before its disks are ready, and answers 503 until then."""
    deadline = time.monotonic() + START_TIMEOUT_S
    client = server.client()
    while True:
        try:
            client.list_buckets()
            return
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
