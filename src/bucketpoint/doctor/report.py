"""Findings of one examination, and conversion of the results of trial requests to findings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bucketpoint.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    EndpointError,
    StoreError,
    WrongRegionError,
)
from bucketpoint.stores import Store

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
