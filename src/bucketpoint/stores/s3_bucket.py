"""What a bucket is set to: versioning, locks, lifecycle rules; and the clock of its store. Changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import botocore.exceptions

from bucketpoint.stores.s3 import S3Store
from bucketpoint.stores.s3_client import client_for
from bucketpoint.stores.s3_errors import translate

_NO_RULES = frozenset({"NoSuchLifecycleConfiguration", "NoSuchLifecycle"})
_NO_LOCK = frozenset({"ObjectLockConfigurationNotFoundError", "ObjectLockConfigurationNotFound"})


@dataclass(frozen=True)
class LifecycleRule:
    """One enabled rule.

    Attributes:
        prefix: of the keys that it is for; empty for all.
        narrowed: it is only for objects with certain tags or sizes.
        expires: it deletes current objects.
        storage_classes: that it moves current objects to.
        noncurrent_days: after which it deletes versions that are no longer current; None where it does not.
        abort_days: after which it aborts incomplete multipart uploads; None where it does not.
    """

    name: str
    prefix: str
    narrowed: bool
    expires: bool
    storage_classes: tuple[str, ...]
    noncurrent_days: int | None
    abort_days: int | None

    def touches(self, prefix: str) -> bool:
        """Whether it is for some of the keys below `prefix`."""
        return prefix.startswith(self.prefix) or self.prefix.startswith(prefix)

    def covers(self, prefix: str) -> bool:
        """Whether it is for all of the keys below `prefix`."""
        return prefix.startswith(self.prefix) and not self.narrowed


@dataclass(frozen=True)
class Clock:
    """The store's clock against this machine's, in seconds: positive where this machine is ahead."""

    ahead: float
    uncertainty: float


def versioning(store: S3Store) -> str:
    """`"Enabled"`, `"Suspended"`, or `"Off"` for a bucket that never had it. Raises StoreError."""
    reply = _ask(store, "get_bucket_versioning")
    return str((reply or {}).get("Status") or "Off")


def default_retention(store: S3Store) -> str | None:
    """How long new objects are locked by default, in words; None where they are not. Raises StoreError."""
    reply = _ask(store, "get_object_lock_configuration", absent=_NO_LOCK) or {}
    rule = reply.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention")
    if not rule:
        return None
    period = f"{rule['Days']} days" if rule.get("Days") else f"{rule.get('Years')} years"
    return f"{rule.get('Mode')}, {period}"


def lifecycle(store: S3Store) -> list[LifecycleRule]:
    """The enabled rules of the bucket. Raises StoreError."""
    reply = _ask(store, "get_bucket_lifecycle_configuration", absent=_NO_RULES) or {}
    return [_rule(entry) for entry in reply.get("Rules", []) if entry.get("Status") == "Enabled"]


def clock(store: S3Store) -> Clock | None:
    """This machine's clock against the Date header of a reply; None where there is none. Raises StoreError."""
    before = time.time()
    date = _headers(store).get("date")
    after = time.time()
    if not date:
        return None
    # The header counts whole seconds, cut off: on average it is half of one behind.
    theirs = parsedate_to_datetime(date).timestamp() + 0.5
    return Clock((before + after) / 2 - theirs, (after - before) / 2 + 0.5)


def server_header(store: S3Store) -> str | None:
    """What the store calls itself in the Server header of a reply, if it does. Raises StoreError."""
    return _headers(store).get("server")


def _headers(store: S3Store) -> dict[str, str]:
    """Of a reply, by their names in small letters. A refusal has them like any other reply."""
    try:
        reply = client_for(store.options, store.pin).api.head_bucket(Bucket=store.bucket)
    except botocore.exceptions.ClientError as error:
        reply = error.response
    except botocore.exceptions.BotoCoreError as error:
        raise translate(error, "HeadBucket", store.url) from None
    headers: dict[str, str] = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return headers


def _ask(store: S3Store, method: str, *, absent: frozenset[str] = frozenset()) -> Any:
    call: Callable[..., Any] = getattr(client_for(store.options, store.pin).api, method)
    try:
        return call(Bucket=store.bucket)
    except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
        if isinstance(error, botocore.exceptions.ClientError) and error.response["Error"].get("Code") in absent:
            return None
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
