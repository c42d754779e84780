"""`S3Options`: the settings of the connection to a bucket and of its requests."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlencode

from bucketpoint.errors import BucketpointError
from bucketpoint.stores.client_cache import frozen
from bucketpoint.stores.retry import DEADLINE_S
from bucketpoint.stores.s3 import services as s3_services

DEFAULT_CONNECTIONS = 32
"""Connections kept open: some more than a 10 Gbit/s link needs at the 50 MB/s that one connection to S3 carries."""

DEFAULT_MAX_ATTEMPTS = 6
"""Attempts of one request. botocore's default of 3 is used up within seconds, too soon for a store that restarts."""

_S3FS_ALIASES = {
    "key": "access_key",
    "username": "access_key",
    "secret": "secret_key",
    "password": "secret_key",
    "token": "session_token",
    "s3_additional_kwargs": "request_kwargs",
}

# Options of s3fs that are ignored: they have no meaning for a client without listing caches and an event loop.
_S3FS_MEANINGLESS = frozenset(
    {
        "asynchronous",
        "batch_size",
        "cache_regions",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "dircache",
        "fixed_upload_size",
        "listings_expiry_time",
        "local_expiry_check",
        "loop",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
        "version_aware",
    }
)

_MAPPINGS = ("tags", "client_kwargs", "config_kwargs", "request_kwargs")


@dataclass(frozen=True)
class S3Options:
    """Settings of the connection to a bucket and of each request. Everything not set here is left to boto3.

    Attributes:
        region: the bucket's region. Default: AWS_REGION, then boto3's own sources, then us-east-1.
        endpoint_url: for stores other than AWS. Default: boto3's own sources (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL).
        profile: a profile of the AWS configuration files.
        service: the service that speaks S3's protocol: "aws", "minio", "r2", "ceph", "versitygw" or "gcs-xml"
            (`s3.services.SERVICES`). It sets the defaults of some options below. Default: derived from the endpoint.
        addressing_style: "auto" (boto3's default), "path" or "virtual". Default: the service's.
        anon: send unsigned requests, for public buckets.
        requester_pays: accept the charges of a requester-pays bucket.
        access_key, secret_key, session_token: explicit credentials. Default: every source that boto3 knows.
        sse: "AES256", "aws:kms" or "aws:kms:dsse".
        sse_kms_key_id: the KMS key; implies `sse="aws:kms"`.
        sse_customer_key: a 32-byte key for SSE-C, sent with every read and write. Needs TLS.
        storage_class: the storage class of every object written.
        tags: tags of every object written.
        user_agent: added to the user agent, after bucketpoint's own name.
        connections: connections kept open in the pool.
        max_attempts: attempts of one request, the first included. Default: AWS_MAX_ATTEMPTS or the profile's setting,
            then 6. With the default of 6, throttled attempts (503 SlowDown) are not counted: a throttled request is
            retried until the deadline.
        retry_deadline_s: seconds for all attempts of one request together.
        ca_bundle: a file of certificates to trust. Default: AWS_CA_BUNDLE, then boto3's own.
        insecure_tls: allow `client_kwargs={"verify": False}` to switch off the verification of certificates.
        use_ssl: if False, and there is no endpoint URL, requests go over plain HTTP.
        checksums: send a CRC32C with every body, so that the store verifies it. Set to False for stores that refuse the
            header. Default: the service's.
        conditional_puts: the store honours If-None-Match and If-Match of PutObject. Set to False for stores that ignore
            or refuse them: a commit then reads the object before and after the write. Default: the service's.
        client_kwargs: as in s3fs: further arguments of `boto3.client`.
        config_kwargs: as in s3fs: arguments of `botocore.config.Config`; they override bucketpoint's defaults.
        request_kwargs: as s3fs's `s3_additional_kwargs`: parameters sent with every request that takes them.
    """

    region: str | None = None
    endpoint_url: str | None = field(default=None, repr=False)
    profile: str | None = None
    service: str | None = None
    addressing_style: str | None = None
    anon: bool = False
    requester_pays: bool = False
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    sse: str | None = None
    sse_kms_key_id: str | None = field(default=None, repr=False)
    sse_customer_key: bytes | str | None = field(default=None, repr=False)
    storage_class: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    user_agent: str | None = None
    connections: int = DEFAULT_CONNECTIONS
    max_attempts: int | None = None
    retry_deadline_s: float = DEADLINE_S
    ca_bundle: str | None = None
    insecure_tls: bool = False
    use_ssl: bool = True
    checksums: bool | None = None
    conditional_puts: bool | None = None
    client_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    config_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    request_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in _MAPPINGS:
            if not isinstance(getattr(self, name), Mapping):
                raise BucketpointError(f"the storage option {name} is not a mapping", remedy="Pass a dict")
        if self.service is not None:
            s3_services.named(self.service)

    @classmethod
    def from_storage_options(cls, storage_options: Mapping[str, Any] | None = None) -> S3Options:
        """Make options from a dict with the option names of s3fs, of this class, or both.

        Raises:
            BucketpointError: an option is not known, or the same option is given under two names.
        """
        known = {option.name for option in fields(cls)}
        values: dict[str, Any] = {}
        unknown: list[str] = []
        for name, value in (storage_options or {}).items():
            target = _S3FS_ALIASES.get(name, name)
            if name in _S3FS_MEANINGLESS:
                continue
            if target not in known:
                unknown.append(name)
            elif value is None:
                continue
            elif target in values:
                raise BucketpointError(f"the storage option {name} is given twice, under two names")
            else:
                values[target] = value
        if unknown:
            names = sorted({*known, *_S3FS_ALIASES})
            near = [match for name in sorted(unknown) for match in difflib.get_close_matches(name, names, n=1)]
            meant = f"Did you mean {', '.join(near)}? " if near else ""
            raise BucketpointError(
                f"unknown storage options for S3: {', '.join(sorted(unknown))}",
                remedy=f"{meant}Pass other arguments of boto3 in client_kwargs, config_kwargs or s3_additional_kwargs",
            )
        return cls(**values)

    def replace(self, **changes: Any) -> S3Options:
        return replace(self, **changes)

    def request_parameters(self) -> dict[str, Any]:
        """Return the parameters, by boto3's names, for every request whose operation takes them."""
        named: dict[str, Any] = {
            "ServerSideEncryption": self.sse or ("aws:kms" if self.sse_kms_key_id else None),
            "SSEKMSKeyId": self.sse_kms_key_id,
            "SSECustomerKey": self.sse_customer_key,
            "SSECustomerAlgorithm": "AES256" if self.sse_customer_key else None,
            "StorageClass": self.storage_class,
            "Tagging": urlencode(dict(self.tags)) if self.tags else None,
            "RequestPayer": "requester" if self.requester_pays else None,
        }
        merged = {**{name: value for name, value in named.items() if value is not None}, **self.request_kwargs}
        if "SSECustomerKey" in merged:
            merged.setdefault("SSECustomerAlgorithm", "AES256")
            # A copy inside the store needs the key for reading, too.
            merged.setdefault("CopySourceSSECustomerKey", merged["SSECustomerKey"])
            merged.setdefault("CopySourceSSECustomerAlgorithm", merged["SSECustomerAlgorithm"])
        return merged

    def cache_key(self) -> tuple[Any, ...]:
        """Return a hashable value that is equal exactly if the options are equal."""
        return tuple(frozen(getattr(self, option.name)) for option in fields(self))
