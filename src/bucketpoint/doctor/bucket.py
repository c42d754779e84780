"""Findings about a bucket's configuration, the service behind an S3 bucket, and guarantees of folders and fsspec.

Trial requests write only to the caller's keys.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from bucketpoint.doctor.report import Finding, counted, refused
from bucketpoint.errors import (
    AccessDeniedError,
    CorruptDataError,
    PreconditionFailedError,
    StoreError,
    UnsupportedRequestError,
)
from bucketpoint.stores import LocalStore, Store, proven
from bucketpoint.stores.fsspec import FsspecStore
from bucketpoint.stores.gcs import GCSStore
from bucketpoint.stores.s3 import S3Store
from bucketpoint.stores.s3.inspect import LifecycleRule, clock, default_retention, lifecycle, server_header, versioning
from bucketpoint.stores.s3.options import SERVICES, S3Service, by_header
from bucketpoint.transfer.checksum import crc32c

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
        settings = store.settings("versioning,softDeletePolicy,lifecycle")
    except StoreError as error:
        yield _unread("versioning", "storage.buckets.get", error, spared)
        yield Finding("soft delete", "warn" if spared is None else "skip", *_GOOGLE)
        return
    remedy = "Add a lifecycle rule that deletes old versions (daysSinceNoncurrentTime)"
    rules = settings.get("lifecycle", {}).get("rule", [])
    deletions = [rule.get("condition", {}) for rule in rules if rule.get("action", {}).get("type") == "Delete"]
    days = [condition.get("daysSinceNoncurrentTime") for condition in deletions]
    status = "Enabled" if settings.get("versioning", {}).get("enabled") else "Off"
    yield _versioning(status, [int(number) for number in days if number is not None], remedy)
    seconds = settings.get("softDeletePolicy", {}).get("retentionDurationSeconds")
    if seconds is None:
        yield Finding("soft delete", "warn", *_GOOGLE)
    elif int(seconds):
        message = f"on: deleted objects stay for {counted(int(seconds) / 86400, 'day')}, and are billed"
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


_LOCKED = (
    "a checkpoint is replaced and deleted under the lock of its file: safe on one machine, and between machines unless "
    "one of them pauses for minutes"
)
_CHECKS = "a save checks the URL, writes its commit, and checks again"


def folder_finding(store: LocalStore, key: str) -> Finding:
    """Return a finding about the guarantees of a folder, after a trial beside `key`."""
    try:
        linked = store.has_hard_links(key)
    except StoreError as error:
        return Finding("conditional commit", "fail", f"it could not be tried: {error.message}", error.remedy)
    if linked:
        return Finding("conditional commit", "ok", f"a hard link creates a checkpoint, on any machine; {_LOCKED}")
    message = f"the filesystem has no hard links: {_LOCKED.replace('is replaced', 'is created, replaced')}"
    return Finding("conditional commit", "warn", message, "Give every job its own URL")


def fsspec_findings(store: FsspecStore, prefix: str) -> Iterator[Finding]:
    """Yield one finding per guarantee, after a trial below `prefix` unless this process has made it already."""
    kind = type(store.fs)
    name = kind.__module__.partition(".")[0]
    version = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = f" {importlib.metadata.version(name)}"
    yield Finding("filesystem", "ok", f"{kind.__name__} of {name}{version}")
    try:
        able = proven(store, prefix)
    except StoreError as error:
        yield Finding("conditional commit", "fail", f"it could not be tried: {error.message}", error.remedy)
        return
    if able.conditional_put:
        reason = "no other process has this filesystem" if store.driver.private else "a second one is refused"
        yield Finding("conditional commit", "ok", f"a new checkpoint is created exclusively: {reason}")
        if able.conditional_replace:
            yield Finding("conditional replace", "ok", "a checkpoint is replaced only if it is still the one expected")
        else:
            message = f"replacing a checkpoint is not atomic: {_CHECKS}. Two jobs that overwrite one URL may collide"
            yield Finding("conditional replace", "warn", message, "Give every save its own URL")
    else:
        message = f"{_CHECKS}: safe against crashes, but not against two jobs that save to one URL at the same time"
        yield Finding("conditional commit", "warn", message, "Give every job its own URL")
    if able.checksums:
        message = "the CRC32C that the service computed is compared with ours"
        yield Finding("upload checksum", "ok", message)
    else:
        message = "the service returns no checksum of its objects. A load compares what it reads with what was saved"
        yield Finding("upload checksum", "skip", message)
    if able.multipart:
        least = f", from {able.min_part_bytes} bytes on" if able.min_part_bytes > 1 else ""
        yield Finding("parallel parts", "ok", f"parts of one object are uploaded in any order and in parallel{least}")
    else:
        yield Finding("parallel parts", "skip", "objects are uploaded whole, several at a time")


_SERVICE = "service"
_OPTIONS = {"conditional_put": "conditional_puts", "checksums": "checksums"}
"""Options by probed feature."""

# Features whose difference from the options needs no remedy, by whether the store has them. Options that do not rely on
# `lists_uploads` cost one more request; a checksum that the store ignores costs none.
_HARMLESS = {True: ("lists_uploads",), False: ("checksums",)}

_SAID = {
    "conditional_put": ("conditional puts are honoured", "conditional puts are ignored or refused"),
    "checksums": ("bodies are compared with their CRC32C", "bodies are not compared with their CRC32C"),
    "lists_uploads": ("uploads are listed by prefix", "uploads are listed by their whole key only"),
}


def service_finding(store: S3Store, new_key: Callable[[str], str], begin: Callable[[str], str]) -> Finding:
    """Probe the features of the store, identify the service, and compare both with the options in use.

    Args:
        new_key: returns an unused key, and makes sure that its object is deleted later.
        begin: begins a multipart upload, and makes sure that the upload is aborted later.
    """
    try:
        named = by_header(server_header(store) or "")
        features = _probe(store, new_key, begin)
    except StoreError as error:
        return Finding(_SERVICE, "warn", f"the properties of the store cannot be read: {error.message}")
    used = store.service
    differ = [name for name, does in features.items() if getattr(used, name) != does and name not in _HARMLESS[does]]
    does = "; ".join(_SAID[name][not has] for name, has in features.items())
    source = "its Server header" if named else "the endpoint or the options"
    message = f"{(named or used).name} by {source}: {does}"
    if (named or used).equal_parts:
        message += "; all parts of an upload but the last must have one size, as those of bucketpoint have"
    if not differ:
        return Finding(_SERVICE, "ok", message)
    remedy = _needless_options(store, features, differ) or _remedy(named, features, differ)
    return Finding(_SERVICE, "warn", message, remedy)


def _probe(store: S3Store, new_key: Callable[[str], str], begin: Callable[[str], str]) -> dict[str, bool]:
    # All features are switched on for the probe, so that the store decides and not the options.
    sure = store
    if not (store.service.conditional_put and store.service.checksums):
        sure = S3Store(store.bucket, store.options.replace(conditional_puts=True, checksums=True))
    body, key = memoryview(b"checksum"), new_key("service-condition")
    sure.put(key, [body])
    conditional_put = _all_refused(
        PreconditionFailedError,
        lambda: sure.put(key, [body], if_none_match=True),
        lambda: sure.put(key, [body], if_match="0" * 32),
    )
    summed = new_key("service-checksum")
    checksums = _all_refused(CorruptDataError, lambda: sure.put(summed, [body], crc32c=crc32c(body) ^ 1))
    features = {"conditional_put": conditional_put, "checksums": checksums}
    key = new_key("service-upload")
    upload = begin(key)
    # Without the permission to list uploads, which a trainer does not need, this feature is unknown.
    with contextlib.suppress(AccessDeniedError):
        features["lists_uploads"] = any(found.upload_id == upload for found in store.list_multipart(key[:-1]))
    return features


def _all_refused(kind: type[StoreError], *requests: Callable[[], object]) -> bool:
    try:
        return all(refused(kind, request) for request in requests)
    except StoreError:
        return False


def _needless_options(store: S3Store, features: Mapping[str, bool], differ: list[str]) -> str | None:
    """Return the remedy if the service that is recognised without the given options has the features; else None."""
    given = [_OPTIONS[name] for name in differ if getattr(store.options, _OPTIONS.get(name, ""), None) is not None]
    if not given:
        return None
    bare = S3Store(store.bucket, store.options.replace(**dict.fromkeys(given))).service
    if any(getattr(bare, name) != features[name] for name in differ):
        return None
    values = ", ".join(f'"{name}": {str(getattr(store.options, name)).lower()}' for name in given)
    return f"Leave {{{values}}} out of storage_options"


def _remedy(named: S3Service | None, features: Mapping[str, bool], differ: list[str]) -> str:
    fitting = [
        service.name
        for service in SERVICES.values()
        if all(getattr(service, name) == does for name, does in features.items())
    ]
    if named is not None and named.name in fitting:
        return f'Set {{"service": "{named.name}"}} in storage_options'
    options = [f'"{_OPTIONS[name]}": {str(features[name]).lower()}' for name in differ if name in _OPTIONS]
    if options:
        return f"Set {{{', '.join(options)}}} in storage_options"
    if fitting:
        return f'Set {{"service": "{fitting[0]}"}} in storage_options: {fitting[0]} behaves the same'
    return "Uploads that cannot be listed by prefix cannot be swept: use a lifecycle rule"
