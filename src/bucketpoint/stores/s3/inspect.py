"""Read-only inspection of a bucket: versioning, locks, lifecycle rules, and the store's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import botocore.exceptions

from bucketpoint.stores.http_store import http_seconds
from bucketpoint.stores.s3.errors import translate
from bucketpoint.stores.s3.store import S3Store

_NO_RULES = frozenset({"NoSuchLifecycleConfiguration", "NoSuchLifecycle"})
_NO_LOCK = frozenset({"ObjectLockConfigurationNotFoundError", "ObjectLockConfigurationNotFound"})


@dataclass(frozen=True)
class LifecycleRule:
    """One enabled lifecycle rule.

    Attributes:
        prefix: prefix of the keys that the rule applies to; empty for all keys.
        narrowed: the rule applies only to objects with certain tags or sizes.
        expires: the rule deletes current objects.
        storage_classes: storage classes that the rule moves current objects to.
        noncurrent_days: days after which the rule deletes noncurrent versions; None if it deletes none.
        abort_days: days after which the rule aborts incomplete multipart uploads; None if it aborts none.
    """

    name: str
    prefix: str
    narrowed: bool
    expires: bool
    storage_classes: tuple[str, ...]
    noncurrent_days: int | None
    abort_days: int | None

    def touches(self, prefix: str) -> bool:
        """Return True if the rule may apply to keys below `prefix`."""
        return prefix.startswith(self.prefix) or self.prefix.startswith(prefix)

    def covers(self, prefix: str) -> bool:
        """Return True if the rule applies to all of the keys below `prefix`."""
        return prefix.startswith(self.prefix) and not self.narrowed


@dataclass(frozen=True)
class Clock:
    """Difference between this machine's clock and the store's, in seconds: positive if this machine is ahead."""

    ahead: float
    uncertainty: float


def versioning(store: S3Store) -> str:
    """Return `"Enabled"`, `"Suspended"`, or `"Off"` if the bucket never had versioning. Raises StoreError."""
    return str(_ask(store, "get_bucket_versioning").get("Status") or "Off")


def default_retention(store: S3Store) -> str | None:
    """Describe the lock that new objects get by default (mode and period); None if they get none. Raises StoreError."""
    reply = _ask(store, "get_object_lock_configuration", accepted=_NO_LOCK.__contains__)
    rule = reply.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention")
    if not rule:
        return None
    count, unit = (rule["Days"], "day") if rule.get("Days") else (rule.get("Years"), "year")
    return f"{rule.get('Mode')}, {count} {unit}{'' if count == 1 else 's'}"


def lifecycle(store: S3Store) -> list[LifecycleRule]:
    """Return the enabled lifecycle rules of the bucket. Raises StoreError."""
    reply = _ask(store, "get_bucket_lifecycle_configuration", accepted=_NO_RULES.__contains__)
    return [_rule(entry) for entry in reply.get("Rules", []) if entry.get("Status") == "Enabled"]


def clock(store: S3Store) -> Clock | None:
    """Compare this machine's clock with the Date header of a reply; None if there is no header. Raises StoreError."""
    before = time.time()
    theirs = http_seconds(_headers(store).get("date"))
    after = time.time()
    # The header is truncated to whole seconds: on average it is half a second behind.
    return None if theirs is None else Clock((before + after) / 2 - theirs - 0.5, (after - before) / 2 + 0.5)


def partition(store: S3Store) -> str:
    """Return the partition of the region in use, such as `aws` or `aws-cn`."""
    return str(store.client.api.meta.partition)


def server_header(store: S3Store) -> str | None:
    """Return the Server header of a reply, or None. Raises StoreError."""
    return _headers(store).get("server")


def _headers(store: S3Store) -> dict[str, str]:
    """Return the headers of a reply to HeadBucket, by lower-case name, also of a refusal."""
    reply = _ask(store, "head_bucket", accepted=lambda refusal: True)
    headers: dict[str, str] = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return headers


def _ask(store: S3Store, method: str, *, accepted: Callable[[str], bool] = lambda code: False) -> dict[str, Any]:
    """Send a request about the bucket and return the reply, which may be a refusal with an `accepted` error code."""
    call: Callable[..., dict[str, Any]] = getattr(store.client.api, method)
    try:
        return call(Bucket=store.bucket)
    except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
        if isinstance(error, botocore.exceptions.ClientError) and accepted(str(error.response["Error"].get("Code"))):
            return dict(error.response)
        failure = translate(error, method, store.url)
    raise failure


def _rule(entry: dict[str, Any]) -> LifecycleRule:
    # https://docs.aws.amazon.com/AmazonS3/latest/API/API_LifecycleRule.html
    filters = entry.get("Filter") or {}
    several = filters.get("And") or {}
    expiration = entry.get("Expiration") or {}
    return LifecycleRule(
        name=str(entry.get("ID", "without a name")),
        prefix=str(several.get("Prefix") or filters.get("Prefix") or entry.get("Prefix") or ""),
        narrowed=bool(set(filters) - {"Prefix", "And"} or set(several) - {"Prefix"}),
        expires="Days" in expiration or "Date" in expiration,
        storage_classes=tuple(str(move.get("StorageClass")) for move in entry.get("Transitions", [])),
        noncurrent_days=(entry.get("NoncurrentVersionExpiration") or {}).get("NoncurrentDays"),
        abort_days=(entry.get("AbortIncompleteMultipartUpload") or {}).get("DaysAfterInitiation"),
    )
