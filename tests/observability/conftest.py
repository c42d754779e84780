"""Programs of Debian's package `prometheus`; tests that need them are skipped where they are missing."""

from __future__ import annotations

import shutil

import pytest


def _found(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(
            f"there is no {name} here: `apt-get install prometheus`, or put a release of Prometheus on the PATH"
        )
    return path


@pytest.fixture(scope="session")
def promtool() -> str:
    """Path of promtool."""
    return _found("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    """Path of the server."""
    return _found("prometheus")
