"""What the services that speak S3's protocol do differently: facts with their sources, as data. No requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from bucketpoint.errors import BucketpointError


@dataclass(frozen=True)
class S3Service:
    """A service, or a program that serves.

    Attributes:
        checksums: the CRC32C that goes with a body is compared with it. Where not, none is sent.
        addressing: `"path"` where the bucket is to stand in the path; None for botocore's choice, which is the host for
            AWS and the path for every other endpoint.
        conditional_put: If-None-Match and If-Match of PutObject are honoured, atomically.
        conditional_delete: If-Match of DeleteObject is honoured, atomically.
        expiring_delete: a presigned DeleteObject is refused once it has expired.
        equal_parts: all parts of an upload but the last must have one size. Uploads here always do so.
        lists_uploads: uploads under way are listed by any prefix of their keys, and not by the whole key only.
        header: what its replies' Server header begins with, in small letters; empty where that tells nothing.
        source: where all this is written, or how it is known.
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
            addressing="path",  # The host needs MINIO_DOMAIN, and a name for every bucket.
            conditional_put=True,
            conditional_delete=False,  # It deletes whatever If-Match says: https://github.com/minio/minio/issues/21677
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
            # https://developers.cloudflare.com/r2/api/s3/conditional-operations/ names no deletions.
            conditional_delete=False,
            expiring_delete=True,  # https://developers.cloudflare.com/r2/api/s3/presigned-urls/
            equal_parts=True,
            lists_uploads=True,
            header="cloudflare",
            source="https://developers.cloudflare.com/r2/objects/multipart-objects/",
        ),
        S3Service(
            name="ceph",
            # Releases differ. Older ones know no checksums, and ignore If-None-Match: they overwrite.
            # For deletions `bucketpoint.stores.proven_deletes` finds it out.
            checksums=False,
            addressing="path",  # The host needs rgw_dns_name, and a name for every bucket.
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
            addressing="path",  # The host needs --virtual-domain.
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
            checksums=False,  # x-goog-hash, which is another header.
            addressing="path",
            conditional_put=False,  # ETags are only for requests that read; writes take x-goog-if-generation-match.
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
    # MinIO finds uploads by their whole key only, and nothing in its answers tells it from stores that do better.
    lists_uploads=False,
    header="",
    source="assumed until `bucketpoint doctor` is asked",
)
"""A store at an endpoint of its own, of which nothing was said: what S3 does, but for what MinIO does not."""

_HOSTS = {
    "aws": (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu"),
    "r2": (".r2.cloudflarestorage.com",),
    "gcs-xml": (".storage.googleapis.com",),
}


def named(name: str) -> S3Service:
    """The service of this name. Raises BucketpointError, which lists the names."""
    if name not in SERVICES:
        raise BucketpointError(
            f"service={name!r} is not known",
            remedy=f"It is one of {', '.join(SERVICES)}; without it the endpoint decides",
        )
    return SERVICES[name]


def at_endpoint(endpoint_url: str) -> S3Service:
    """The service whose endpoint this certainly is, or `UNKNOWN`."""
    host = f".{urlsplit(endpoint_url).hostname or ''}"
    return next((SERVICES[name] for name, ends in _HOSTS.items() if host.endswith(ends)), UNKNOWN)


def by_header(server: str) -> S3Service | None:
    """The service whose replies have this Server header. A proxy before it may have put its own there."""
    text = server.lower()
    return next((one for one in SERVICES.values() if one.header and text.startswith(one.header)), None)
