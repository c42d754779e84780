"""The example's demo in a process of its own, and a store that fails some of its requests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kit import FaultProxy, Refuse, Rule, Script
from kit.servers import S3Server, free_port

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "observability"

_THROTTLED, _BROKEN, _DENIED = Refuse(503, "SlowDown"), Refuse(500, "InternalError"), Refuse(403, "AccessDenied")

FAILURES = Script(
    (
        Rule((_THROTTLED,), ("PutObject",), "*/step-2/*", times=1),
        Rule((_BROKEN,), ("PutObject",), "*/step-2/*", times=1),
        Rule((_DENIED,), ("PutObject",), "*/step-4/*"),
        Rule((_DENIED,), ("PutObject",), "*/pruner.json", times=1),
    )
)
"""Two requests that are sent again, a save that fails, and a round of pruning that fails."""


@dataclass(frozen=True)
class Demo:
    """A running demo."""

    process: subprocess.Popen[str]
    run: str
    port: int

    def scrape(self) -> str:
        """Return what the demo exposes, in Prometheus's text format."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as reply:
            text: str = reply.read().decode()
        return text

    def lines(self) -> Iterator[str]:
        """Yield what the demo prints: a line for each step, and one when it has pruned for the last time."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield line
            if line.startswith("The metrics can be read until"):
                return


@contextlib.contextmanager
def running(server: S3Server, log: Path, *, saves: int, pause_s: float) -> Iterator[Demo]:
    """Run the demo on a bucket of its own, behind a proxy that plays `FAILURES`."""
    port = free_port()
    with FaultProxy(server.endpoint, FAILURES) as proxy, log.open("w+", encoding="utf-8") as errors:
        run = server.url(server.make_bucket(), "run")
        settings = {"--port": port, "--saves": saves, "--pause": pause_s}
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLE / "demo.py"), run, *(str(each) for pair in settings.items() for each in pair)],
            env=os.environ | server.at(proxy.url).env | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield Demo(process, run, port)
        finally:
            process.kill()
            process.communicate()
