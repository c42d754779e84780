"""The pytest plugin: servers and the fault proxy as fixtures, and a summary of the survived faults at the end.

Load it with `-p kit.plugin`. The module imports nothing large before a fixture is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from kit import FaultProxy, Script
    from kit.servers import S3Server
    from kit.tally import Tally

_WORKER_OUTPUT = "bucketpoint_tally"

_tally = pytest.StashKey["Tally"]()


class MakeProxy(Protocol):
    """Starts a proxy in front of a server, or of the store at a URL. The proxy ends with the test."""

    def __call__(self, upstream: S3Server | str, script: Script | None = None, **options: Any) -> FaultProxy: ...


def pytest_configure(config: pytest.Config) -> None:
    from kit.tally import Tally

    config.stash[_tally] = Tally()


@pytest.fixture(scope="session")
def bucketpoint_tally(pytestconfig: pytest.Config) -> Tally:
    """Counts of this run, for the summary at the end."""
    return pytestconfig.stash[_tally]


@pytest.fixture(scope="session")
def bucketpoint_moto() -> Iterator[S3Server]:
    """moto's S3 server, for the session."""
    from kit import servers

    with servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def bucketpoint_minio(bucketpoint_minio_binary: Path) -> Iterator[S3Server]:
    """A MinIO server, for the session; `bucketpoint_minio_binary` is the path of its program."""
    from kit import servers

    with servers.minio(bucketpoint_minio_binary) as server:
        yield server


@pytest.fixture
def fault_proxy(bucketpoint_tally: Tally) -> Iterator[MakeProxy]:
    """Factory `fault_proxy(server, script)` of running `FaultProxy`s.

    `server.at(proxy.url)` is the server behind one.
    """
    from kit import FaultProxy

    with contextlib.ExitStack() as stack:

        def make(upstream: S3Server | str, script: Script | None = None, **options: Any) -> FaultProxy:
            url = upstream if isinstance(upstream, str) else upstream.endpoint
            proxy = stack.enter_context(FaultProxy(url, script, **options))
            stack.callback(lambda: bucketpoint_tally.passed(proxy.board.total))
            return proxy

        yield make


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Under xdist each worker has a tally of its own, and the main process only sees the workers' output.
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_WORKER_OUTPUT] = session.config.stash[_tally].as_dict()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    tally = getattr(node, "workeroutput", {}).get(_WORKER_OUTPUT)
    if tally is not None:
        node.config.stash[_tally].add(tally)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash[_tally].lines()
    if lines:
        terminalreporter.section("bucketpoint: faults, kills and inputs")
        for line in lines:
            terminalreporter.line(line)
