"""Differences between the services that speak S3's protocol, as a table of facts with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from bucketpoint.errors import BucketpointError


@dataclass(frozen=True)
class S3Service:
    """A service, or a server program, that speaks S3's protocol.

    Attributes:
        checksums: the service compares the CRC32C that is sent with a body. If False, none is sent.
        addressing: `"path"` to put the bucket in the path; None for botocore's choice, which is the host for AWS and
            the path for every other endpoint.
        conditional_put: If-None-Match and If-Match of PutObject are honoured, atomically.
        conditional_delete: If-Match of DeleteObject is honoured, atomically.
        expiring_delete: a presigned DeleteObject is refused once it has expired.
        equal_parts: all parts of an upload except the last must have the same size. Uploads of bucketpoint always do.
        lists_uploads: uploads under way are listed by any prefix of their keys, not only by the whole key.
        header: beginning of the Server header in replies, in lower case; empty if the header does not tell the service.
        source: documentation of these facts, or the way in which they were found.
    """

    name: str
    checksums: bool
    addressing: str | None
    conditional_put: bool
    conditional_delete: bool
    expiring_delete: bool
    equal_parts: bool
    lists_uploads: bool
    header: str
    source: str


SERVICES: Mapping[str, S3Service] = {
    service.name: service
    for service in (
        S3Service(
            name="aws",
            checksums=True,
            addressing=None,
            conditional_put=True,
            conditional_delete=True,  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-deletes.html
            expiring_delete=True,  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-presigned-url.html
            equal_parts=False,
            lists_uploads=True,
            header="amazons3",
            source="https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html",
        ),
        S3Service(
            name="minio",
            checksums=True,
            addressing="path",  # Host addressing needs MINIO_DOMAIN, and a DNS name for every bucket.
            conditional_put=True,
            conditional_delete=False,  # MinIO ignores If-Match of deletions: https://github.com/minio/minio/issues/21677
            expiring_delete=True,
            equal_parts=False,
            lists_uploads=False,
            header="minio",
            source="tested on the server itself",
        ),
        S3Service(
            name="r2",
            checksums=True,  # https://developers.cloudflare.com/r2/api/s3/api/#checksum-types
            addressing="path",
            conditional_put=True,  # https://developers.cloudflare.com/r2/api/s3/extensions/
            # https://developers.cloudflare.com/r2/api/s3/conditional-operations/ does not mention deletions.
            conditional_delete=False,
            expiring_delete=True,  # https://developers.cloudflare.com/r2/api/s3/presigned-urls/
            equal_parts=True,
            lists_uploads=True,
            header="cloudflare",
            source="https://developers.cloudflare.com/r2/objects/multipart-objects/",
        ),
        S3Service(
            name="ceph",
            # Releases differ. Older ones do not know checksums, and ignore If-None-Match: they overwrite the object.
            # For deletions `bucketpoint.stores.proven_deletes` makes a trial.
            checksums=False,
            addressing="path",  # Host addressing needs rgw_dns_name, and a DNS name for every bucket.
            conditional_put=False,
            conditional_delete=False,
            expiring_delete=False,
            equal_parts=False,
            lists_uploads=True,
            header="ceph",
            source="https://docs.ceph.com/en/latest/radosgw/s3/",
        ),
        S3Service(
            name="versitygw",
            checksums=True,
            addressing="path",  # Host addressing needs --virtual-domain.
            conditional_put=True,
            conditional_delete=True,
            expiring_delete=True,
            equal_parts=False,
            lists_uploads=True,
            header="versitygw",
            source="tested on the server itself, over a POSIX filesystem",
        ),
        S3Service(
            name="gcs-xml",
            checksums=False,  # GCS uses another header: x-goog-hash.
            addressing="path",
            conditional_put=False,  # GCS honours ETags only in reads; writes take x-goog-if-generation-match.
            conditional_delete=False,
            expiring_delete=False,
            equal_parts=False,
            lists_uploads=True,
            header="uploadserver",
            source="https://cloud.google.com/storage/docs/request-preconditions",
        ),
    )
}

UNKNOWN = S3Service(
    name="unknown",
    checksums=True,
    addressing=None,
    conditional_put=True,
    conditional_delete=False,
    expiring_delete=False,
    equal_parts=False,
    # MinIO lists uploads by their whole key only, and nothing in its replies tells it from stores without that limit.
    lists_uploads=False,
    header="",
    source="assumed until `bucketpoint doctor` is asked",
)
"""A service that neither the options nor the endpoint identify: features of S3, except those that MinIO lacks and those
that only a trial can show."""

_HOSTS = {
    "aws": (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu"),
    "r2": (".r2.cloudflarestorage.com",),
    "gcs-xml": (".storage.googleapis.com",),
}


def named(name: str) -> S3Service:
    """Return the service of this name. Raises BucketpointError, which lists the known names."""
    if name not in SERVICES:
        raise BucketpointError(
            f"service={name!r} is not known",
            remedy=f"It is one of {', '.join(SERVICES)}; without it the endpoint decides",
        )
    return SERVICES[name]


def at_endpoint(endpoint_url: str) -> S3Service:
    """Return the service to which this endpoint certainly belongs, or `UNKNOWN`."""
    host = f".{urlsplit(endpoint_url).hostname or ''}"
    return next((SERVICES[name] for name, ends in _HOSTS.items() if host.endswith(ends)), UNKNOWN)


def by_header(server: str) -> S3Service | None:
    """Return the service whose replies have this Server header, or None. A proxy may have replaced the header."""
    text = server.lower()
    return next((one for one in SERVICES.values() if one.header and text.startswith(one.header)), None)
