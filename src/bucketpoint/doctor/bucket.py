"""Findings about a bucket's configuration (versioning, locks, lifecycle rules), with their remedies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from bucketpoint.errors import StoreError
from bucketpoint.stores import S3Store, Store
from bucketpoint.stores.s3.inspect import (
    LifecycleRule,
    clock,
    default_retention,
    lifecycle,
    server_header,
    versioning,
)
from bucketpoint.stores.s3.services import by_header

# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html: RequestTimeTooSkewed.
LARGEST_SKEW_S = 15 * 60
NOTABLE_SKEW_S = 30

_ABORT_DAYS = 7

_SOFT_DELETE = {
    "gs": "Google Cloud Storage keeps deleted objects for 7 days and bills them, unless the bucket's policy says "
    "otherwise",
    "az": "Azure may keep deleted blobs, and bills them, where soft delete is on",
}
_SOFT_DELETE_REMEDY = {
    "gs": "Look with `gcloud storage buckets describe`; switch it off with `--clear-soft-delete`",
    "az": "Look with `az storage account blob-service-properties show`",
}
_CLOUDS = {"gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az", "adl": "az"}

_OBJECTS_MAY_GO = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""Storage classes whose objects must be restored, which takes hours, before they can be read."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: `"ok"`, `"warn"`, `"fail"`, or `"skip"` if the check does not apply to this store.
    """

    check: str
    status: str
    message: str
    remedy: str | None = None


def clock_finding(store: S3Store) -> Finding:
    """Compare this machine's clock with the store's."""
    try:
        found = clock(store)
    except StoreError as error:
        return Finding("clock", "warn", f"the store's clock cannot be read: {error.message}")
    if found is None:
        return Finding("clock", "warn", "the store does not date its replies")
    skew = abs(found.ahead)
    said = f"this machine is {skew:.1f} s {'ahead of' if found.ahead > 0 else 'behind'} the store"
    if skew <= found.uncertainty + NOTABLE_SKEW_S:
        return Finding("clock", "ok", f"{said}, give or take {found.uncertainty:.1f} s")
    status = "fail" if skew > LARGEST_SKEW_S else "warn"
    return Finding("clock", status, said, "Set the clock by NTP: S3 refuses requests that are 15 minutes off")


def bucket_findings(store: Store, prefix: str) -> Iterator[Finding]:
    """Check versioning, soft delete, object locks and lifecycle rules."""
    if not isinstance(store, S3Store):
        yield Finding("versioning", "skip", "only S3 buckets are asked about versioning and lifecycle rules")
        cloud = _CLOUDS.get(urlsplit(store.url).scheme)
        if cloud is not None:
            yield Finding("soft delete", "warn", _SOFT_DELETE[cloud], _SOFT_DELETE_REMEDY[cloud])
        return
    below = f"{prefix}/" if prefix else ""
    rules: list[LifecycleRule] = []
    known = True
    try:
        rules = [rule for rule in lifecycle(store) if rule.touches(below)]
    except StoreError as error:
        known = False
        remedy = "Grant s3:GetLifecycleConfiguration, or ask an administrator of the bucket"
        yield Finding("lifecycle", "warn", f"the lifecycle rules cannot be read: {error.message}", remedy)
    yield _cautious("versioning", "s3:GetBucketVersioning", lambda: _versioning(versioning(store), rules))
    yield _soft_delete(store)
    yield _cautious("object lock", "s3:GetBucketObjectLockConfiguration", lambda: _lock(default_retention(store)))
    if known:
        yield from _lifecycle(rules, below)
        yield _incomplete_uploads(rules, below, store)


def _cautious(check: str, right: str, ask: Callable[[], Finding]) -> Finding:
    try:
        return ask()
    except StoreError as error:
        return Finding(
            check,
            "warn",
            f"it cannot be read: {error.message}",
            f"Grant {right}, or ask an administrator of the bucket",
        )


def _versioning(status: str, rules: list[LifecycleRule]) -> Finding:
    if status != "Enabled":
        return Finding("versioning", "ok", "off: what is deleted is gone, and is no longer billed")
    days = [rule.noncurrent_days for rule in rules if rule.noncurrent_days is not None]
    if days:
        return Finding("versioning", "ok", f"on, and a lifecycle rule deletes old versions after {min(days)} days")
    return Finding(
        "versioning",
        "warn",
        "on: a deleted checkpoint stays as an old version, and is billed forever",
        "Add a lifecycle rule with NoncurrentVersionExpiration, or suspend versioning",
    )


def _soft_delete(store: S3Store) -> Finding:
    if urlsplit(store.identity).hostname == "storage.googleapis.com":
        return Finding("soft delete", "warn", _SOFT_DELETE["gs"], _SOFT_DELETE_REMEDY["gs"])
    return Finding("soft delete", "ok", "S3 has none besides versioning")


def _lock(retention: str | None) -> Finding:
    if retention is None:
        return Finding("object lock", "ok", "new objects are not locked")
    remedy = "Use a bucket without default retention: checkpoints in this one cannot be pruned before it ends"
    return Finding("object lock", "warn", f"new objects are locked by default: {retention}", remedy)


def _lifecycle(rules: list[LifecycleRule], below: str) -> Iterator[Finding]:
    harmless = True
    for rule in rules:
        where = (
            f"rule {rule.name!r}{' for some objects' if rule.narrowed else ''} below {rule.prefix or 'the bucket'!r}"
        )
        if rule.expires:
            harmless = False
            status = "warn" if rule.narrowed else "fail"
            remedy = "Let the retention policy decide: exclude this prefix from the rule"
            yield Finding("lifecycle expiry", status, f"{where} deletes checkpoints, or parts of them, by age", remedy)
        if moves := _OBJECTS_MAY_GO.intersection(rule.storage_classes):
            harmless = False
            remedy = "Exclude this prefix: archived objects can be loaded only after a restore, which takes hours"
            yield Finding(
                "lifecycle expiry", "warn", f"{where} moves checkpoints to {', '.join(sorted(moves))}", remedy
            )
    if harmless:
        yield Finding("lifecycle expiry", "ok", "no rule deletes or archives checkpoints")


def _incomplete_uploads(rules: list[LifecycleRule], below: str, store: S3Store) -> Finding:
    check = "lifecycle multipart"
    days = [rule.abort_days for rule in rules if rule.abort_days is not None and rule.covers(below)]
    if days:
        return Finding(check, "ok", f"incomplete multipart uploads are aborted after {min(days)} days")
    try:
        told = by_header(server_header(store) or "")
    except StoreError:
        told = None
    if told is not None and told.name == "minio":
        # MinIO refuses a lifecycle rule that aborts uploads: https://github.com/minio/minio/issues/16120
        said = "MinIO takes no rule for it, and aborts uploads by itself after a day (MINIO_API_STALE_UPLOADS_EXPIRY)"
        return Finding(check, "ok", said)
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
