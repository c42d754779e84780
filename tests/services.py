"""One way to reach S3 and GCS servers, for tests that are the same on both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from bucketpoint import BucketReader, BucketWriter, S3Reader, S3Writer
from bucketpoint.dcp.s3_and_gcs import GCSReader, GCSWriter
from gcs_server import GCSServer
from kit import FaultProxy
from kit.plugin import MakeProxy
from kit.servers import S3Server

Server = S3Server | GCSServer

S3_AND_GCS = [pytest.param("minio", id="s3"), "gcs"]
"""For contract tests that moto would not do for: `make test-matrix` leaves out what is named after MinIO."""

in_parts = pytest.mark.parametrize("service", ["minio", "gcs_xml"], indirect=True)
"""For tests of uploads in parts, which GCS's emulator does not have by itself."""


@dataclass(frozen=True)
class Service:
    """A bucket on a server, the classes that it is reached with, and what tests do to it behind their back."""

    server: Server
    bucket: str

    @classmethod
    def on(cls, server: Server) -> Service:
        """A new, empty bucket."""
        return cls(server, server.make_bucket())

    def at(self, endpoint: str) -> Service:
        """The same bucket, reached by another way, such as through a proxy."""
        return replace(self, server=self.server.at(endpoint))

    def requests_of_parts(self, number: int) -> dict[str, int]:
        """What an object of so many parts costs, by S3's names for requests; GCS's emulator takes it whole."""
        if isinstance(self.server, GCSServer):
            return {"PutObject": 1}
        return {"CreateMultipartUpload": 1, "UploadPart": number, "CompleteMultipartUpload": 1}

    def requests_of_a_miss(self) -> dict[str, int]:
        """What the first read of a process costs that finds nothing: GCS's 404 says not whether there is a bucket."""
        return {"GetObject": 1, "ListObjects": 1} if isinstance(self.server, GCSServer) else {"GetObject": 1}

    @property
    def keys_in_a_delete(self) -> int:
        """How many a request takes at most: GCS's are batches of calls."""
        return 100 if isinstance(self.server, GCSServer) else 1000

    @property
    def options(self) -> dict[str, Any]:
        return self.server.options

    @property
    def env(self) -> dict[str, str]:
        return self.server.env

    @property
    def secret(self) -> str | None:
        return self.server.secret if isinstance(self.server, S3Server) else None

    def url(self, key: str = "") -> str:
        return self.server.url(self.bucket, key)

    def writer(self, path: str | None = None, **arguments: Any) -> BucketWriter:
        kind = S3Writer if isinstance(self.server, S3Server) else GCSWriter
        return kind.of_run(path, arguments.pop("log", None), storage_options=self.options, **arguments)

    def reader(self, path: str | None = None, **arguments: Any) -> BucketReader:
        kind = S3Reader if isinstance(self.server, S3Server) else GCSReader
        return kind(path, storage_options=self.options, **arguments)

    def listed(self, prefix: str = "") -> list[str]:
        """Every key under the prefix, sorted."""
        return self.server.keys(self.bucket, prefix)

    def open_uploads(self, key: str) -> list[str]:
        """The keys of multipart uploads neither completed nor aborted. MinIO lists them for an exact key only."""
        return self.server.open_uploads(self.bucket, key)

    def read(self, key: str) -> bytes:
        if isinstance(self.server, GCSServer):
            return self.server.read(self.bucket, key)
        body: bytes = self.server.client().get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return body

    def etag(self, key: str) -> str:
        """What the store says of an object as an ETag, without quotes."""
        if isinstance(self.server, GCSServer):
            return self.server.generation(self.bucket, key)
        found: str = self.server.client().head_object(Bucket=self.bucket, Key=key)["ETag"]
        return found.strip('"')

    def write(self, key: str, body: bytes) -> None:
        if isinstance(self.server, GCSServer):
            self.server.write(self.bucket, key, body)
        else:
            self.server.client().put_object(Bucket=self.bucket, Key=key, Body=body)

    def delete(self, key: str) -> None:
        if isinstance(self.server, GCSServer):
            self.server.delete(self.bucket, key)
        else:
            self.server.client().delete_object(Bucket=self.bucket, Key=key)


def proxy_before(server: Server, fault_proxy: MakeProxy) -> FaultProxy:
    if isinstance(server, S3Server):
        return fault_proxy(server)
    # It tells its API by the host that is asked.
    return fault_proxy(server.endpoint, host_header=urlsplit(server.endpoint).netloc)
