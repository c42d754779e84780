"""Hosts that stay up for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from xla.hosts import Host


def _host(devices: int) -> Any:
    @pytest.fixture(scope="session")
    def host() -> Iterator[Host]:
        running = Host(devices)
        yield running
        running.close()

    return host


# Of the others the first four know nothing.
four, other_four, sixteen = _host(4), _host(4), _host(16)
