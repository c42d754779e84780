"""`S3Options`: the settings of the connection to a bucket and of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from bucketpoint.errors import BucketpointError
from bucketpoint.stores.http_store import StoreOptions
from bucketpoint.stores.s3 import services as s3_services

_MAPPINGS = ("client_kwargs", "config_kwargs", "request_kwargs")


@dataclass(frozen=True)
class S3Options(StoreOptions):
    """Settings of the connection to a bucket and of each request. Everything not set here is left to boto3.

    Attributes:
        region: the bucket's region. Default: AWS_REGION, then boto3's own sources, then us-east-1.
        endpoint_url: for stores other than AWS. Default: boto3's own sources (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL).
        profile: a profile of the AWS configuration files.
        service: the S3-compatible service: "aws", "minio", "r2", "ceph", "versitygw" or "gcs-xml"
            (`s3.services.SERVICES`). It sets the defaults of some options below. Default: derived from the endpoint.
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
            setting, then 6. Only with the default of 6, throttled attempts (503 SlowDown) are not counted: a throttled
            request is retried until the deadline.
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
        for name, value in self.request_kwargs.items():
            # boto3's error message would quote the value.
            if name.endswith("SSECustomerKey") and not isinstance(value, str | bytes):
                raise BucketpointError(f"request_kwargs: {name} is neither text nor bytes")
        if self.service is not None:
            s3_services.named(self.service)

    def request_parameters(self) -> dict[str, Any]:
        """Return the parameters, by boto3's names, for every request whose operation takes them."""
        merged = {**({"RequestPayer": "requester"} if self.requester_pays else {}), **self.request_kwargs}
        if "SSECustomerKey" in merged:
            merged.setdefault("SSECustomerAlgorithm", "AES256")
            # A copy inside the store needs the key for reading, too.
            merged.setdefault("CopySourceSSECustomerKey", merged["SSECustomerKey"])
            merged.setdefault("CopySourceSSECustomerAlgorithm", merged["SSECustomerAlgorithm"])
        return merged
