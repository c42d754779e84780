"""Findings of one examination as they are made, and how a trial of a request becomes a finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bucketpoint.errors import BucketNotFoundError, CredentialsError, EndpointError, StoreError, WrongRegionError
from bucketpoint.stores import Store
from bucketpoint.transfer.doctor_bucket import Finding

T = TypeVar("T")

UNREACHABLE = (EndpointError, CredentialsError, BucketNotFoundError, WrongRegionError)


class Report:
    """Findings about one store. `told` is called with each finding as it is made."""

    def __init__(self, store: Store, told: Callable[[Finding], None]) -> None:
        self.store = store
        self.findings: list[Finding] = []
        self._told = told

    def attempt(
        self, check: str, action: Callable[[], T], said: str, *, remedy: str | None = None, warn: bool = False
    ) -> T | None:
        """Make a finding of what `action` comes to. None where it failed."""
        try:
            result = action()
        except StoreError as error:
            self.failed(check, error, remedy, warn=warn)
            return None
        self.say(check, "ok", said)
        return result

    def quietly(self, action: Callable[[], T], check: str | None = None) -> T | None:
        """The result of `action`, or None where it failed, which is a finding only of a `check`."""
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
