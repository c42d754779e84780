"""The stores that faults and kills are tried on, and the proxy before each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp.ranks import Ranks
from kit import FaultProxy
from kit.plugin import MakeProxy
from services import S3_AND_GCS, Server, proxy_before


@pytest.fixture(scope="module", params=S3_AND_GCS)
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def proxy(server: Server, fault_proxy: MakeProxy) -> FaultProxy:
    return proxy_before(server, fault_proxy)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """For saves in which no rank dies."""
    with Ranks(4) as ranks:
        yield ranks
