"""`BucketWriter` and `BucketReader` for the URLs of one kind of store."""

from __future__ import annotations

from bucketpoint.dcp.reader import BucketReader
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.stores.registry import GCS_SCHEMES, S3_SCHEMES


class S3Writer(BucketWriter):
    """`BucketWriter` for `s3://` URLs: Amazon S3, MinIO and other stores with the S3 protocol."""

    schemes = S3_SCHEMES


class S3Reader(BucketReader):
    """`BucketReader` for `s3://` URLs: Amazon S3, MinIO and other stores with the S3 protocol."""

    schemes = S3_SCHEMES


class GCSWriter(BucketWriter):
    """`BucketWriter` for `gs://` URLs: Google Cloud Storage."""

    schemes = GCS_SCHEMES


class GCSReader(BucketReader):
    """`BucketReader` for `gs://` URLs: Google Cloud Storage."""

    schemes = GCS_SCHEMES
