"""`S3Options`, the settings of a bucket's connection and requests, and a table of S3-compatible services."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar
from urllib.parse import urlsplit

from bucketpoint.errors import BucketpointError
from bucketpoint.stores.http_store import StoreOptions, check_text

_MAPPINGS = ("client_kwargs", "config_kwargs", "request_kwargs")


@dataclass(frozen=True)
class S3Options(StoreOptions):
    """Settings of the connection to a bucket and of each request. Everything not set here is left to boto3.

    Attributes:
        region: the bucket's region. Default: AWS_REGION, then boto3's own sources, then us-east-1.
        endpoint_url: for stores other than AWS. Default: boto3's own sources (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL).
        profile: a profile of the AWS configuration files.
        service: the S3-compatible service: "aws", "minio", "r2", "ceph", "versitygw" or "gcs-xml"
            (`SERVICES`). It sets the defaults of some options below. Default: derived from the endpoint.
        anon: send unsigned requests, for public buckets.
        requester_pays: accept the charges of a requester-pays bucket.
        access_key, secret_key, session_token: explicit credentials. Default: every source that boto3 knows.
        insecure_tls: allow `client_kwargs={"verify": False}` to switch off the verification of certificates.
        use_ssl: False to use plain HTTP if there is no endpoint URL.
        checksums: send a CRC32C with every body, so that the store verifies it. Set to False for stores that refuse the
            header. Default: the service's.
        conditional_puts: the store honours If-None-Match and If-Match of PutObject. Set to False for stores that ignore
            or refuse them: a commit then reads the object before and after the write. Default: the service's.
        client_kwargs: as in s3fs: further arguments of `boto3.client`.
        config_kwargs: as in s3fs: arguments of `botocore.config.Config`, which override bucketpoint's defaults. The
            entry `retries` sets the number of attempts of a request. Default: AWS_MAX_ATTEMPTS or the profile's
            setting, then 6. A configured number also limits throttled attempts (503 SlowDown), which the default
            repeats until the deadline.
        request_kwargs: as s3fs's `s3_additional_kwargs`: parameters sent with every request that takes them, by boto3's
            names, such as `StorageClass`, `Tagging` and `ServerSideEncryption`. A 32-byte `SSECustomerKey` is sent with
            reads, writes and copies, and needs TLS.
    """

    service_name: ClassVar[str] = "S3"
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "key": "access_key",
            "username": "access_key",
            "secret": "secret_key",
            "password": "secret_key",
            "token": "session_token",
            "s3_additional_kwargs": "request_kwargs",
        }
    )
    tuning: ClassVar[str] = (
        "cache_regions default_block_size default_cache_type default_fill_cache dircache fixed_upload_size "
        "local_expiry_check max_concurrency"
    )
    replaced: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "addressing_style": 'config_kwargs={"s3": {"addressing_style": ...}}',
            "ca_bundle": 'client_kwargs={"verify": ...}, or AWS_CA_BUNDLE,',
            "max_attempts": 'config_kwargs={"retries": {"total_max_attempts": ...}}, or AWS_MAX_ATTEMPTS,',
            "sse": 'request_kwargs={"ServerSideEncryption": ...}',
            "sse_customer_key": 'request_kwargs={"SSECustomerKey": ...}',
            "sse_kms_key_id": 'request_kwargs={"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": ...}',
            "storage_class": 'request_kwargs={"StorageClass": ...}',
            "tags": 'request_kwargs={"Tagging": "NAME=VALUE&..."}',
            "user_agent": 'config_kwargs={"user_agent_extra": ...}',
        }
    )
    further: ClassVar[str] = "Pass other arguments of boto3 in client_kwargs, config_kwargs or s3_additional_kwargs"

    region: str | None = None
    profile: str | None = None
    service: str | None = None
    anon: bool = False
    requester_pays: bool = False
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    insecure_tls: bool = False
    use_ssl: bool = True
    checksums: bool | None = None
    conditional_puts: bool | None = None
    client_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    config_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    request_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _MAPPINGS:
            if not isinstance(getattr(self, name), Mapping):
                raise BucketpointError(f"the storage option {name} is not a mapping", remedy="Pass a dict")
        for name in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token"):
            check_text(f"client_kwargs[{name!r}]", self.client_kwargs.get(name))
        for name, value in self.request_kwargs.items():
            # boto3's error message would quote the value.
            if name.endswith("SSECustomerKey") and not isinstance(value, str | bytes):
                raise BucketpointError(f"request_kwargs: {name} is neither text nor bytes")
        if self.service is not None:
            named(self.service)

    def request_parameters(self) -> dict[str, Any]:
        """Return the parameters, by boto3's names, for every request whose operation takes them."""
        merged = {**({"RequestPayer": "requester"} if self.requester_pays else {}), **self.request_kwargs}
        if "SSECustomerKey" in merged:
            merged.setdefault("SSECustomerAlgorithm", "AES256")
            # A copy inside the store needs the key for reading, too.
            merged.setdefault("CopySourceSSECustomerKey", merged["SSECustomerKey"])
            merged.setdefault("CopySourceSSECustomerAlgorithm", merged["SSECustomerAlgorithm"])
        return merged


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
        equal_parts: all parts of an upload except the last must have the same size. In bucketpoint's uploads they have.
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
