"""Each test begins as a thread that has staged nothing: what a failed one left staged must not hold up the next."""

from __future__ import annotations

import pytest

from bucketpoint.staging import lease


@pytest.fixture(autouse=True)
def nothing_staged_before() -> None:
    lease._here.__dict__.clear()
