"""The stores that faults and kills are tried on, and the proxy before each."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from bucketpoint.testing import FaultProxy
from bucketpoint.testing.plugin import MakeProxy
from bucketpoint.testing.servers import S3Server
from dcp.ranks import Ranks
from faults.saves import Server
from gcs_server import GCSServer


@pytest.fixture(params=["minio", "gcs"])
def server(request: pytest.FixtureRequest) -> Server:
    found: S3Server | GCSServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def proxy(server: Server, fault_proxy: MakeProxy) -> FaultProxy:
    if isinstance(server, S3Server):
        return fault_proxy(server)
    # It tells its API by the host that is asked.
    return fault_proxy(server.endpoint, host_header=urlsplit(server.endpoint).netloc)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """For saves in which no rank dies."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()
