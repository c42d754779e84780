"""One way to reach S3 and GCS servers, for tests that are the same on both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bucketpoint import BucketReader, BucketWriter, S3Reader, S3Writer
from bucketpoint.dcp import GCSReader, GCSWriter
from gcs_server import GCSServer
from servers import S3Server


@dataclass(frozen=True)
class Service:
    """A server, the classes that it is reached with, and what tests do to it behind the back of the code under test."""

    server: S3Server | GCSServer

    @property
    def options(self) -> dict[str, Any]:
        return self.server.options

    @property
    def secret(self) -> str | None:
        return self.server.secret if isinstance(self.server, S3Server) else None

    def writer(self, path: str | None = None, **arguments: Any) -> BucketWriter:
        kind = S3Writer if isinstance(self.server, S3Server) else GCSWriter
        return kind(path, storage_options=self.options, **arguments)

    def reader(self, path: str | None = None, **arguments: Any) -> BucketReader:
        kind = S3Reader if isinstance(self.server, S3Server) else GCSReader
        return kind(path, storage_options=self.options, **arguments)

    def make_bucket(self) -> str:
        return self.server.make_bucket()

    def url(self, bucket: str, key: str) -> str:
        return self.server.url(bucket, key)

    def keys(self, bucket: str) -> list[str]:
        return self.server.keys(bucket)

    def read(self, bucket: str, key: str) -> bytes:
        if isinstance(self.server, GCSServer):
            return self.server.read(bucket, key)
        body: bytes = self.server.client().get_object(Bucket=bucket, Key=key)["Body"].read()
        return body

    def etag(self, bucket: str, key: str) -> str:
        """What the store says of an object as an ETag, without quotes."""
        if isinstance(self.server, GCSServer):
            return self.server.generation(bucket, key)
        found: str = self.server.client().head_object(Bucket=bucket, Key=key)["ETag"]
        return found.strip('"')

    def write(self, bucket: str, key: str, body: bytes) -> None:
        if isinstance(self.server, GCSServer):
            self.server.write(bucket, key, body)
        else:
            self.server.client().put_object(Bucket=bucket, Key=key, Body=body)
