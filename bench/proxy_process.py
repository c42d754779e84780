"""The proxy in processes of its own, for measurements: TLS ends there, and each request becomes a JSON line in a log.

It uses plain threads in a few processes: at 16 KiB a TLS record an event loop in Python would be the bottleneck.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from kit.faults import Script
from kit.http import Pace, Upstream, Wire
from kit.proxied_connection import Board, RecordedRequest
from kit.proxy import accept, serve


@dataclass(frozen=True)
class RunningProxy:
    """A proxy in processes of its own, and the log that it writes."""

    url: str
    log_dir: Path

    def requests(self, start: float, end: float) -> list[dict[str, Any]]:
        """Return the requests that began and ended within a window of the monotonic clock, in the order of their start.

        Each has the fields of `RecordedRequest`, and next to them those of the `StoreRequest` in it.
        """
        found = []
        for path in self.log_dir.glob("*.jsonl"):
            with path.open() as lines:
                found += [json.loads(line) for line in lines if line.endswith("\n")]
        inside = [record for record in found if record["start"] >= start and record["end"] <= end]
        return sorted(inside, key=lambda record: float(record["start"]))


@contextlib.contextmanager
def running_proxy(
    upstream: tuple[str, int], *, cert: Path, key: Path, port: int, log_dir: Path, wire: Wire, workers: int = 2
) -> Iterator[RunningProxy]:
    """Run a proxy until the block ends."""
    log_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--upstream", f"http://{upstream[0]}:{upstream[1]}"]
    command += ["--port", str(port), "--cert", str(cert), "--key", str(key), "--log-dir", str(log_dir)]
    command += ["--delay", str(wire.delay_s), "--rate", str(wire.bytes_per_s)]
    command += ["--total-rate", str(wire.total_bytes_per_s)]
    # The kit lies beside the tests, which this process has on its path.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [subprocess.Popen(command, env=env) for _ in range(workers)]
    try:
        _wait_for_port(port)
        yield RunningProxy(f"https://127.0.0.1:{port}", log_dir)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _wait_for_port(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on port {port}")


class _Log(Board):
    """Board that writes each finished request to a file and keeps nothing."""

    def __init__(self, file: IO[str]) -> None:
        super().__init__(Script())
        self._file = file
        self._writing = threading.Lock()

    def end(self, exchange: RecordedRequest) -> None:
        exchange.end = time.monotonic()
        fields = asdict(exchange)
        request = fields.pop("request")
        # Not a secret, but it does not belong in a log either.
        request.pop("access_key")
        request["api"] = request["api"].value
        line = json.dumps({**request, **fields})
        with self._writing:
            self._file.write(line + "\n")
            self._file.flush()


def _run(options: argparse.Namespace) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.cert, options.key)
    wire = Wire(options.delay, options.rate)
    total = Pace(options.total_rate)
    upstream = Upstream.of(options.upstream)
    listener = socket.socket()
    # Each worker has a listener of its own, and the kernel distributes the connections.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", options.port))
    listener.listen(512)
    with (Path(options.log_dir) / f"{os.getpid()}.jsonl").open("w") as file:
        log = _Log(file)
        accept(listener, lambda accepted: serve(accepted, context, upstream, wire, total, log))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True, help="URL of a plain-HTTP server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cert", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--log-dir", required=True)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds added to every request")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes a second of each connection, 0 for no cap")
    parser.add_argument("--total-rate", type=float, default=0.0, help="bytes a second of all of one process's")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    _run(parser.parse_args())


if __name__ == "__main__":
    main()
