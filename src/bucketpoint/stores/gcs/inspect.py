"""Read-only inspection of a bucket of GCS: versioning and soft delete."""

from __future__ import annotations

from dataclasses import dataclass

from bucketpoint.stores.gcs.store import GCSStore


@dataclass(frozen=True)
class BucketConfiguration:
    """Settings that decide how long a bucket keeps deleted objects.

    Attributes:
        versioning: True if replaced and deleted objects become noncurrent versions.
        soft_delete_s: seconds for which deleted objects are kept; 0 if soft delete is off, None if unknown.
        noncurrent_days: days after which lifecycle rules delete noncurrent versions.
    """

    versioning: bool
    soft_delete_s: int | None
    noncurrent_days: tuple[int, ...]


def bucket_configuration(store: GCSStore) -> BucketConfiguration:
    """Read the settings. Raises StoreError."""
    # https://cloud.google.com/storage/docs/json_api/v1/buckets#resource
    path, fields = store._path().removesuffix("/o"), "versioning,softDeletePolicy,lifecycle"
    found = store._call("buckets.get", None, "GET", path, {"fields": fields}).json()
    rules = found.get("lifecycle", {}).get("rule", [])
    days = [
        rule.get("condition", {}).get("daysSinceNoncurrentTime")
        for rule in rules
        if rule.get("action", {}).get("type") == "Delete"
    ]
    seconds = found.get("softDeletePolicy", {}).get("retentionDurationSeconds")
    return BucketConfiguration(
        versioning=bool(found.get("versioning", {}).get("enabled")),
        soft_delete_s=None if seconds is None else int(seconds),
        noncurrent_days=tuple(int(number) for number in days if number is not None),
    )
