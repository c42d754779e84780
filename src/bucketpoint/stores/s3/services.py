"""Differences between S3-compatible services, as a table with sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from bucketpoint.errors import BucketpointError


@dataclass(frozen=True)
class S3Service:
    """An S3-compatible service or server program.

    Attributes:
        header: beginning of the Server header in replies, in lower case; empty if it does not identify the service.
        hosts: suffixes of host names that only this service has.
        checksums: the service verifies the CRC32C sent with a body. If False, none is sent.
        addressing: `"path"` to put the bucket in the path; None for botocore's choice, which is the host for AWS and
            the path for every other endpoint.
        conditional_put: If-None-Match and If-Match of PutObject are honoured, atomically.
        conditional_delete: If-Match of DeleteObject is honoured, atomically.
        expiring_delete: a presigned DeleteObject is refused once it has expired.
        equal_parts: all parts of an upload except the last must have the same size. Uploads of bucketpoint always do.
        lists_uploads: uploads in progress are listed by any prefix of their keys, not only by the whole key.
        answers_early: the reply to a copy begins before the copy ends, so no read timeout interrupts the copy.
    """

    name: str
    header: str = ""
    hosts: tuple[str, ...] = ()
    checksums: bool = True
    addressing: str | None = "path"
    conditional_put: bool = True
    conditional_delete: bool = False
    expiring_delete: bool = False
    equal_parts: bool = False
    lists_uploads: bool = True
    answers_early: bool = False


SERVICES: Mapping[str, S3Service] = {
    service.name: service
    for service in (
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
        S3Service(
            "aws",
            header="amazons3",
            hosts=(".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu"),
            addressing=None,
            conditional_delete=True,  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-deletes.html
            expiring_delete=True,  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-presigned-url.html
            answers_early=True,  # https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
        ),
        # Source: tests against the server. Host addressing needs MINIO_DOMAIN, and a DNS name for every bucket. MinIO
        # ignores If-Match of deletions: https://github.com/minio/minio/issues/21677
        S3Service("minio", header="minio", expiring_delete=True, lists_uploads=False),
        # https://developers.cloudflare.com/r2/objects/multipart-objects/
        # https://developers.cloudflare.com/r2/api/s3/api/#checksum-types
        # https://developers.cloudflare.com/r2/api/s3/extensions/ for conditional puts;
        # https://developers.cloudflare.com/r2/api/s3/conditional-operations/ does not mention deletions.
        S3Service(
            "r2",
            header="cloudflare",
            hosts=(".r2.cloudflarestorage.com",),
            expiring_delete=True,  # https://developers.cloudflare.com/r2/api/s3/presigned-urls/
            equal_parts=True,
        ),
        # https://docs.ceph.com/en/latest/radosgw/s3/. Older releases do not support checksums, and overwrite an object
        # despite If-None-Match. Support for deletions is found by a trial: `bucketpoint.stores.proven_deletes`. Host
        # addressing needs rgw_dns_name, and a DNS name for every bucket.
        S3Service("ceph", header="ceph", checksums=False, conditional_put=False),
        # Source: tests against the server, over a POSIX filesystem. Host addressing needs --virtual-domain.
        S3Service("versitygw", header="versitygw", conditional_delete=True, expiring_delete=True),
        # https://cloud.google.com/storage/docs/request-preconditions: GCS honours ETags only in reads; writes take
        # x-goog-if-generation-match. GCS uses another header for checksums: x-goog-hash.
        S3Service(
            "gcs-xml",
            header="uploadserver",
            hosts=(".storage.googleapis.com",),
            checksums=False,
            conditional_put=False,
        ),
    )
}

UNKNOWN = S3Service("unknown", addressing=None, lists_uploads=False)
"""A service that neither the options nor the endpoint identify. It has the features of S3, except those that only a
trial can show, and `lists_uploads`: it may be MinIO, which lists uploads by their whole key only."""


def named(name: str) -> S3Service:
    """Return the service called `name`. Raises BucketpointError for an unknown name."""
    if name not in SERVICES:
        raise BucketpointError(
            f"service={name!r} is not known",
            remedy=f"Name one of {', '.join(SERVICES)}, or leave it out: then the endpoint decides",
        )
    return SERVICES[name]


def at_endpoint(endpoint_url: str) -> S3Service:
    """Return the service that the endpoint's host name identifies, or `UNKNOWN`."""
    host = f".{urlsplit(endpoint_url).hostname or ''}"
    return next((service for service in SERVICES.values() if host.endswith(service.hosts)), UNKNOWN)


def by_header(server: str) -> S3Service | None:
    """Return the service whose replies have this Server header, or None. A proxy may have replaced the header."""
    text = server.lower()
    return next((one for one in SERVICES.values() if one.header and text.startswith(one.header)), None)
