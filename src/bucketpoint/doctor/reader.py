"""Checks for a role that only reads. They write nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from bucketpoint.doctor.remedies import needed
from bucketpoint.doctor.report import UNREACHABLE, Report
from bucketpoint.errors import AccessDeniedError, ObjectNotFoundError, PreconditionFailedError, StoreError
from bucketpoint.stores import ObjectInfo

_LOOKED_AT = 1000
"""Number of listed objects among which a non-empty one is looked for: one page of a listing."""


def examine_reader(report: Report, prefix: str) -> None:
    """Check listing, reading an existing object, and reading it with a condition.

    Raises:
        EndpointError, CredentialsError, BucketNotFoundError, WrongRegionError: the store cannot be reached.
    """
    store, above = report.store, f"{prefix}/" if prefix else ""
    found: list[ObjectInfo] = []
    listed = True
    try:
        found = list(itertools.islice(store.list(above), _LOOKED_AT))
    except UNREACHABLE:
        raise
    except StoreError as error:
        listed = False
        report.failed("list", error, needed(store, "list"), warn=True)
    else:
        report.say("list", "ok", "objects can be listed")
    # Without the permission to list, the metadata of a checkpoint at this URL can still be read by its key.
    key = next((info.key for info in found if info.size), f"{above}.metadata")
    try:
        _, info = store.get(key, first=1)
    except ObjectNotFoundError:
        report.say("get", "ok", "a request to read is not refused, but there is no object to read")
    except AccessDeniedError as error:
        if found:
            report.failed("get", error, needed(store, "get"))
            return
        # Some services answer "access denied" for a missing object.
        remedy = "Pass the URL of a checkpoint, or of a run that has one"
        there = "there are no objects below the URL" if listed else "no checkpoint was found below the URL"
        report.say("get", "warn", f"the right to read could not be checked: {there}", remedy)
    except UNREACHABLE:
        raise
    except StoreError as error:
        report.failed("get", error)
    else:
        report.say("get", "ok", "objects can be read")
        if info.size:
            examine_pinned_read(report, lambda: info)


def examine_pinned_read(report: Report, make: Callable[[], ObjectInfo]) -> None:
    """Check conditional reads: read a byte with the object's ETag, then with a wrong ETag, which must be refused.

    Args:
        make: returns the object to read.
    """
    check, store = "pinned read", report.store
    if not store.capabilities.pinned_reads:
        report.say(check, "skip", "this store has no conditional reads: checksums alone protect a load")
        return

    def trial() -> None:
        info, view = make(), memoryview(bytearray(1))
        store.read_into(info.key, 0, [view], if_match=info.etag)
        try:
            store.read_into(info.key, 0, [view], if_match="0" * 32)
        except PreconditionFailedError:
            return
        raise StoreError("the store ignores If-Match on reads")

    remedy = "A replaced object is then noticed only by its checksum"
    report.attempt(check, trial, "a replaced object is refused", remedy=remedy, warn=True)
