"""Findings of one examination, from trial requests, with their remedies; checks for a role that only reads."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bucketpoint.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    EndpointError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    WrongRegionError,
)
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.stores.gcs import GCSStore
from bucketpoint.stores.s3 import S3Store

UNREACHABLE = (EndpointError, CredentialsError, BucketNotFoundError, WrongRegionError)


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


class Report:
    """Findings about one store. `told` is called with each finding immediately."""

    def __init__(self, store: Store, told: Callable[[Finding], None]) -> None:
        self.store = store
        self.findings: list[Finding] = []
        self._told = told

    @property
    def passed(self) -> bool:
        """True if the last finding is `"ok"`."""
        return self.findings[-1].status == "ok"

    @contextlib.contextmanager
    def trial(
        self,
        check: str,
        success: str,
        *,
        right: str | None = None,
        remedy: str | None = None,
        warn: bool = False,
        spared: str | None = None,
    ) -> Iterator[None]:
        """Record the outcome of the block as a finding. A `StoreError` ends the block, and is not raised.

        Args:
            success: message of the finding if the block succeeds.
            right: remedy for a lack of permission: see `failed`.
            warn: record a failure as a warning.
            spared: message of a skipped check, recorded if access is denied to a request that the role does not need.
        """
        try:
            yield
        except StoreError as error:
            if spared is not None and isinstance(error, AccessDeniedError):
                self.say(check, "skip", spared)
            else:
                self.failed(check, error, remedy, right=right, warn=warn)
        else:
            self.say(check, "ok", success)

    def failed(
        self,
        check: str,
        error: StoreError,
        remedy: str | None = None,
        *,
        right: str | None = None,
        warn: bool = False,
    ) -> None:
        """Record a failure. `right` is the remedy for denied access, and for an error without a remedy."""
        if isinstance(error, AccessDeniedError) or error.remedy is None:
            remedy = remedy or right
        self.say(check, "warn" if warn else "fail", error.message, remedy or error.remedy)

    def say(self, check: str, status: str, message: str, remedy: str | None = None) -> None:
        self.add(Finding(check, status, message, remedy))

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            self.findings.append(finding)
            self._told(finding)


def counted(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def expect(true: bool, otherwise: str) -> None:
    """Raise a `StoreError` with this message unless `true`."""
    if not true:
        raise StoreError(otherwise)


def refused(kind: type[StoreError], request: Callable[[], object]) -> bool:
    """Return True if a request is refused with this error, False if it succeeds. Raises any other error."""
    try:
        request()
    except kind:
        return True
    return False


_NEEDED = {
    "put": "Saves need the right to write below this URL",
    "put data": "Saves need the right to write below this URL",
    "get": "Loads, and overwriting saves, need the right to read",
    "list": "Saves and loads do not need it; finding the latest and pruning need the right to list",
    "delete": "Saves and loads do not need it; pruning needs the right to delete",
    "delete notes": "Saves and loads do not need it; `bucketpoint gc` removes the remains. Jobs with a retention "
    "policy need the right to delete below _bucketpoint/",
    "put notes": "Pruning needs the right to write below _bucketpoint/",
    "put .metadata": "Pruning does not need it; thinning needs the right to write .metadata",
}
_RIGHTS: dict[type, dict[str, str]] = {
    S3Store: {"put": "s3:PutObject", "get": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"},
    GCSStore: {
        "put": "storage.objects.create",
        "get": "storage.objects.get",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
}
_WITHOUT_CONDITIONS = (
    "a save checks the URL, writes its commit, and checks again: safe against crashes, but not against two jobs that "
    "save to one URL at the same time. Give every job its own URL"
)


def needed(store: Store, check: str) -> str:
    """Return the text that explains the permission behind a check, with this store's name for the permission."""
    right = _RIGHTS.get(type(store), {}).get(check.partition(" ")[0])
    text = f"{_NEEDED[check]} ({right})" if right else _NEEDED[check]
    if isinstance(store, S3Store) and store.client.api.meta.endpoint_url.startswith("http:"):
        text += ". The endpoint is plain HTTP, and a bucket policy may require TLS: try https://"
    return text


def lack_of_conditions(store: Store) -> str:
    """Return the message for a store that is used without conditional writes."""
    if isinstance(store, S3Store) and store.options.conditional_puts is False:
        return "conditional_puts=false in storage_options: saves use no conditional writes"
    return "this store has no conditional writes"


def without_conditions(store: Store) -> str:
    """Return the text about saves without conditional writes, with the option to set if saves rely on them."""
    if isinstance(store, S3Store) and store.capabilities.conditional_put:
        return f'Set {{"conditional_puts": false}} in storage_options: then {_WITHOUT_CONDITIONS}'
    return _WITHOUT_CONDITIONS[0].upper() + _WITHOUT_CONDITIONS[1:]


_LOOKED_AT = 1000
"""Limit on the objects listed to find one that is not empty: one page of a listing."""


def examine_reader(report: Report, prefix: str) -> None:
    """Check listing, reading an existing object, and reading it with a condition.

    Raises an error of `UNREACHABLE` if the store cannot be reached.
    """
    store, above = report.store, f"{prefix}/" if prefix else ""
    listed: list[ObjectInfo] = []
    try:
        listed = list(itertools.islice(store.list(above), _LOOKED_AT))
        report.say("list", "ok", "objects can be listed")
    except UNREACHABLE:
        raise
    except StoreError as error:
        report.failed("list", error, right=needed(store, "list"), warn=True)
    there = "there are no objects below the URL" if report.passed else "no checkpoint was found below the URL"
    # Without the permission to list, the metadata of a checkpoint at this URL can still be read by its key.
    key = next((info.key for info in listed if info.size), f"{above}.metadata")
    try:
        _, info = store.get(key, first=1)
    except ObjectNotFoundError:
        report.say("get", "ok", "a request to read is not refused, but there is no object to read")
    except UNREACHABLE:
        raise
    except StoreError as error:
        if isinstance(error, AccessDeniedError) and not listed:
            # Some services answer "access denied" for a missing object.
            remedy = "Pass the URL of a checkpoint, or of a run that has one"
            report.say("get", "warn", f"the right to read could not be checked: {there}", remedy)
        else:
            report.failed("get", error, right=needed(store, "get") if isinstance(error, AccessDeniedError) else None)
    else:
        report.say("get", "ok", "objects can be read")
        if info.size:
            examine_pinned_read(report, lambda: info)


def examine_pinned_read(report: Report, make: Callable[[], ObjectInfo]) -> None:
    """Check conditional reads of the object from `make`: its ETag must be accepted, a wrong ETag refused."""
    check, store, view = "pinned read", report.store, memoryview(bytearray(1))
    if not store.capabilities.pinned_reads:
        report.say(check, "skip", "this store has no conditional reads: checksums alone protect a load")
        return
    remedy = "A replaced object is then detected only by its checksum"
    with report.trial(check, "a replaced object is refused", remedy=remedy, warn=True):
        info = make()
        store.read_into(info.key, 0, [view], if_match=info.etag)
        wrong = refused(PreconditionFailedError, lambda: store.read_into(info.key, 0, [view], if_match="0" * 32))
        expect(wrong, "the store ignores If-Match on reads")
