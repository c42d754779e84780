"""Hosts that stay up for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from xla.hosts import Host


@pytest.fixture(scope="session")
def four() -> Iterator[Host]:
    """Four devices."""
    yield from _host(4)


@pytest.fixture(scope="session")
def other_four() -> Iterator[Host]:
    """Four more, of which the first four know nothing."""
    yield from _host(4)


@pytest.fixture(scope="session")
def sixteen() -> Iterator[Host]:
    """Sixteen devices."""
    yield from _host(16)


def _host(devices: int) -> Iterator[Host]:
    host = Host(devices)
    yield host
    host.close()
