"""Checks for a role that only reads. They write nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from bucketpoint.doctor.remedies import needed
from bucketpoint.doctor.report import UNREACHABLE, Report, expect, refused
from bucketpoint.errors import AccessDeniedError, ObjectNotFoundError, PreconditionFailedError, StoreError
from bucketpoint.stores import ObjectInfo

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
