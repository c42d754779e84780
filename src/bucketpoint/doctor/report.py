"""Collection of the findings of one examination, and conversion of trial requests to findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bucketpoint.doctor.bucket import Finding
from bucketpoint.errors import BucketNotFoundError, CredentialsError, EndpointError, StoreError, WrongRegionError
from bucketpoint.stores import Store

T = TypeVar("T")

UNREACHABLE = (EndpointError, CredentialsError, BucketNotFoundError, WrongRegionError)


class Report:
    """The findings about one store. `told` is called with each finding as it is made."""

    def __init__(self, store: Store, told: Callable[[Finding], None]) -> None:
        self.store = store
        self.findings: list[Finding] = []
        self._told = told

    def attempt(
        self, check: str, action: Callable[[], T], said: str, *, remedy: str | None = None, warn: bool = False
    ) -> T | None:
        """Call `action` and record the outcome as a finding. Returns the result, or None if `action` failed.

        Args:
            said: message of the finding if `action` succeeds.
            warn: a failure is a warning.
        """
        try:
            result = action()
        except StoreError as error:
            self.failed(check, error, remedy, warn=warn)
            return None
        self.say(check, "ok", said)
        return result

    def quietly(self, action: Callable[[], T], check: str | None = None) -> T | None:
        """Call `action` and return the result, or None if it fails. A failure is a finding only if `check` is given."""
        try:
            return action()
        except StoreError as error:
            if check is not None:
                self.failed(check, error)
            return None

    def expect(self, true: bool, otherwise: str) -> None:
        if not true:
            raise StoreError(otherwise, url=self.store.url)

    def failed(self, check: str, error: StoreError, remedy: str | None = None, *, warn: bool = False) -> None:
        self.say(check, "warn" if warn else "fail", error.message, remedy or error.remedy)

    def say(self, check: str, status: str, message: str, remedy: str | None = None) -> None:
        self.add(Finding(check, status, message, remedy))

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._told(finding)
