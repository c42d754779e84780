"""Findings about a bucket's configuration (versioning, locks, lifecycle rules), with their remedies."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

from bucketpoint.doctor.report import Finding, counted
from bucketpoint.errors import AccessDeniedError, StoreError, UnsupportedRequestError
from bucketpoint.stores import Store
from bucketpoint.stores.gcs import GCSStore
from bucketpoint.stores.gcs.inspect import bucket_configuration
from bucketpoint.stores.s3 import S3Store
from bucketpoint.stores.s3.inspect import LifecycleRule, clock, default_retention, lifecycle, server_header, versioning
from bucketpoint.stores.s3.services import by_header

# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html: RequestTimeTooSkewed.
LARGEST_SKEW_S = 15 * 60
NOTABLE_SKEW_S = 30

_ABORT_DAYS = 7

_GOOGLE = (
    "not checked: by default Google Cloud Storage keeps deleted objects for 7 days, and bills them",
    "Look with `gcloud storage buckets describe`; switch it off with `--clear-soft-delete`",
)
_AZURE = (
    "not checked: Azure keeps deleted blobs, and bills them, where soft delete is on",
    "Look with `az storage account blob-service-properties show`",
)
_SOFT_DELETE = {"gs": _GOOGLE, "gcs": _GOOGLE, **dict.fromkeys(("az", "abfs", "abfss", "adl"), _AZURE)}
"""Message and remedy for clouds that keep deleted objects, by URL scheme."""

_OBJECTS_MAY_GO = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""Storage classes whose objects must be restored, which takes hours, before they can be read."""


def clock_finding(store: S3Store) -> Finding:
    """Compare this machine's clock with the store's."""
    try:
        clocks = clock(store)
    except StoreError as error:
        return Finding("clock", "warn", f"the store's clock cannot be read: {error.message}")
    if clocks is None:
        return Finding("clock", "warn", "the store does not date its replies")
    skew = abs(clocks.ahead)
    message = f"this machine is {skew:.1f} s {'ahead of' if clocks.ahead > 0 else 'behind'} the store"
    if skew <= clocks.uncertainty + NOTABLE_SKEW_S:
        return Finding("clock", "ok", f"{message} (+/- {clocks.uncertainty:.1f} s)")
    status = "fail" if skew > LARGEST_SKEW_S else "warn"
    return Finding("clock", status, message, "Set the clock by NTP: S3 refuses requests that are 15 minutes off")


def bucket_findings(store: Store, prefix: str, *, spared: str | None = None) -> Iterator[Finding]:
    """Check versioning, soft delete, object locks and lifecycle rules.

    `spared` is the message of a skipped check, in place of a warning, if the role neither has nor needs the permission.
    """
    if isinstance(store, GCSStore):
        yield from _of_google(store, spared)
        return
    if not isinstance(store, S3Store):
        yield Finding("versioning", "skip", "not checked: only buckets of S3 and GCS have this check")
        keeps = _SOFT_DELETE.get(urlsplit(store.url).scheme)
        if keeps is not None:
            yield Finding("soft delete", "warn", *keeps)
        return
    below = f"{prefix}/" if prefix else ""
    rules: list[LifecycleRule] | None = None
    try:
        rules = [rule for rule in lifecycle(store) if rule.touches(below)]
    except StoreError as error:
        yield _unread("lifecycle", "s3:GetLifecycleConfiguration", error, spared)
    days = [rule.noncurrent_days for rule in rules or () if rule.noncurrent_days is not None]
    remedy = "Add a lifecycle rule with NoncurrentVersionExpiration"
    version_status = "s3:GetBucketVersioning"
    yield _cautious("versioning", version_status, spared, lambda: _versioning(versioning(store), days, remedy))
    if urlsplit(store.identity).hostname == "storage.googleapis.com":
        yield Finding("soft delete", "warn", *_GOOGLE)
    else:
        yield Finding("soft delete", "ok", "S3 has none besides versioning")
    locked = "s3:GetBucketObjectLockConfiguration"
    yield _cautious("object lock", locked, spared, lambda: _lock(default_retention(store)))
    if rules is not None:
        yield from _lifecycle(rules)
        yield _incomplete_uploads(rules, below, store)


def _of_google(store: GCSStore, spared: str | None) -> Iterator[Finding]:
    try:
        configuration = bucket_configuration(store)
    except StoreError as error:
        yield _unread("versioning", "storage.buckets.get", error, spared)
        yield Finding("soft delete", "warn" if spared is None else "skip", *_GOOGLE)
        return
    remedy = "Add a lifecycle rule that deletes old versions (daysSinceNoncurrentTime)"
    yield _versioning("Enabled" if configuration.versioning else "Off", configuration.noncurrent_days, remedy)
    seconds = configuration.soft_delete_s
    if seconds is None:
        yield Finding("soft delete", "warn", *_GOOGLE)
    elif seconds:
        message = f"on: deleted objects stay for {counted(seconds / 86400, 'day')}, and are billed"
        yield Finding("soft delete", "warn", message, _GOOGLE[1])
    else:
        yield Finding("soft delete", "ok", "off")


def _cautious(check: str, right: str, spared: str | None, ask: Callable[[], Finding]) -> Finding:
    try:
        return ask()
    except StoreError as error:
        return _unread(check, right, error, spared)


def _unread(check: str, right: str, error: StoreError, spared: str | None) -> Finding:
    if isinstance(error, UnsupportedRequestError):
        return Finding(check, "skip", f"the service does not support this request: {error.message}")
    if spared is not None and isinstance(error, AccessDeniedError):
        return Finding(check, "skip", spared)
    remedy = f"Grant {right}, or ask an administrator of the bucket"
    return Finding(check, "warn", f"it cannot be read: {error.message}", remedy)


def _versioning(status: str, days: Sequence[int], remedy: str) -> Finding:
    """Return a finding about versioning. `days`: the days after which lifecycle rules delete old versions."""
    if status not in ("Enabled", "Suspended"):
        return Finding("versioning", "ok", "off: what is deleted is gone, and is no longer billed")
    enabled = status == "Enabled"
    if days:
        state = "on" if enabled else "suspended"
        message = f"{state}, and a lifecycle rule deletes old versions after {counted(min(days), 'day')}"
        return Finding("versioning", "ok", message)
    message = "on: a deleted checkpoint stays as an old version, and is billed forever"
    if not enabled:
        message = "suspended: earlier versions stay, and are billed forever"
    return Finding("versioning", "warn", message, remedy)


def _lock(retention: str | None) -> Finding:
    if retention is None:
        return Finding("object lock", "ok", "new objects are not locked")
    message = f"new objects are locked by default ({retention}): pruned ones are hidden, and billed until the lock ends"
    return Finding("object lock", "warn", message, "Use a bucket without default retention to free bytes at once")


def _lifecycle(rules: list[LifecycleRule]) -> Iterator[Finding]:
    check, harmless = "lifecycle expiry", True
    for rule in rules:
        narrowed = " for some objects" if rule.narrowed else ""
        where = f"rule {rule.name!r}{narrowed} {f'below {rule.prefix!r}' if rule.prefix else 'of the whole bucket'}"
        if rule.expires:
            harmless = False
            status = "warn" if rule.narrowed else "fail"
            remedy = "Let the retention policy decide: exclude this prefix from the rule"
            yield Finding(check, status, f"{where} deletes checkpoints, or parts of them, by age", remedy)
        if classes := _OBJECTS_MAY_GO.intersection(rule.storage_classes):
            harmless = False
            remedy = "Exclude this prefix: archived objects can be loaded only after a restore, which takes hours"
            yield Finding(check, "warn", f"{where} moves checkpoints to {', '.join(sorted(classes))}", remedy)
    if harmless:
        yield Finding(check, "ok", "no rule deletes or archives checkpoints")


def _incomplete_uploads(rules: list[LifecycleRule], below: str, store: S3Store) -> Finding:
    check = "lifecycle multipart"
    days = [rule.abort_days for rule in rules if rule.abort_days is not None and rule.covers(below)]
    if days:
        return Finding(check, "ok", f"incomplete multipart uploads are aborted after {counted(min(days), 'day')}")
    service = None
    with contextlib.suppress(StoreError):
        service = by_header(server_header(store) or "")
    if service is not None and service.name == "minio":
        # MinIO refuses a lifecycle rule that aborts uploads: https://github.com/minio/minio/issues/16120
        message = "MinIO has no rule for it: it aborts uploads after a day (MINIO_API_STALE_UPLOADS_EXPIRY)"
        return Finding(check, "ok", message)
    wanted = {
        "ID": "abort-incomplete-uploads",
        "Status": "Enabled",
        "Filter": {"Prefix": below},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": _ABORT_DAYS},
    }
    return Finding(
        check,
        "warn",
        "no rule aborts incomplete multipart uploads: those of killed saves are billed, and listings do not show them",
        f"Add this lifecycle rule: {json.dumps(wanted)}",
    )
