"""The part for stores: bucketpoint and others over the same library, to the same server. Orchestration only.

What is compared is in `MATCHES`, a row each; who saves and loads how is in `stores_worker.py`. Contenders of a match
take turns, one run each a round; then each operation runs once through a proxy that writes its requests down.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import environments
from bench.endpoints import client_env, proxied
from bench.requests_seen import summary
from bench.stores_report import print_measurement
from bucketpoint.testing.http import Wire
from bucketpoint.testing.servers import S3Server, minio

ROOT = Path(__file__).resolve().parent.parent
BUCKET = "bench-stores"
OPS = ("save", "load", "quarter0")


@dataclass(frozen=True)
class Match:
    """Contenders over one library. The server is MinIO: a match on another one brings its own context manager.

    Attributes:
        env: the environment whose interpreter runs them.
    """

    contenders: Sequence[str]
    env: str = "s3fs"


MATCHES = {"s3fs": Match(("bucketpoint + s3fs", "torch + s3fs"))}


@dataclass
class Worker:
    """The measuring process of one environment."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, env: str) -> Worker:
        process = subprocess.Popen(
            [environments.python_of(env), "-m", "bench.stores_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))},
            cwd=ROOT,
        )
        return cls(process)

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer: dict[str, Any] = (
            json.loads(line) if line else {"error": f"the process ended with status {self.process.wait()}"}
        )
        return answer

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@dataclass
class Stores:
    """One run of the part."""

    scratch: Path
    fast: Path
    binary: Path
    rounds: int
    measurements: list[dict[str, Any]] = field(default_factory=list)

    def run(self, match: Match) -> None:
        worker = Worker.start(match.env)
        try:
            with minio(self.binary, tls=True, data=self.fast / "stores") as server:
                server.client().create_bucket(Bucket=BUCKET)
                for round_ in range(self.rounds):
                    shift = round_ % len(match.contenders)
                    order = [*match.contenders[shift:], *match.contenders[:shift]]
                    for op in OPS[:2]:
                        for name in order:
                            found = worker.ask(_command(name, op, round_, client_env(server), warm=True))
                            self.note(name, op, "loopback", round_, found)
                    self.forget(server)
            with minio(self.binary, data=self.fast / "counted") as plain:
                plain.client().create_bucket(Bucket=BUCKET)
                with proxied(self.scratch, plain, Wire()) as (server, proxy):
                    for name in match.contenders:
                        for op in OPS:
                            found = worker.ask(_command(name, op, 0, client_env(server), warm=False))
                            if "error" not in found:
                                found["requests"] = summary(proxy.requests(found["start"], found["end"]))
                            self.note(name, op, "count", 0, found)
        finally:
            worker.stop()

    def forget(self, server: S3Server) -> None:
        """Free the memory that a round's checkpoints take up in the server."""
        for key in server.keys(BUCKET):
            server.client().delete_object(Bucket=BUCKET, Key=key)
        # MinIO only moves what is deleted, and frees it minutes later: too late for a folder in memory.
        for trash in self.fast.glob("*/.minio.sys/tmp/.trash/*"):
            shutil.rmtree(trash, ignore_errors=True)

    def note(self, name: str, op: str, where: str, round_: int, found: dict[str, Any]) -> None:
        measurement = {"contender": name, "op": op, "where": where, "round": round_, **found}
        self.measurements.append(measurement)
        print_measurement(measurement)


def _command(name: str, op: str, round_: int, env: dict[str, str], *, warm: bool) -> dict[str, Any]:
    folder = f"s3://{BUCKET}/{name.replace(' + ', '-')}"
    return {
        "contender": name,
        "op": op,
        "env": env,
        "url": f"{folder}/round-{round_}",
        # Unmeasured requests would only be in the way of the count.
        "warm_url": f"{folder}/warm" if warm else None,
    }


def measure(scratch: Path, fast: Path, binary: Path, *, quick: bool) -> dict[str, Any]:
    """The `stores` part of the result."""
    began = time.monotonic()
    part = Stores(scratch, fast, binary, rounds=2 if quick else 5)
    for match in MATCHES.values():
        part.run(match)
    return {
        "machine": environments.describe(binary, None),
        "quick": quick,
        "seconds": round(time.monotonic() - began),
        "measurements": part.measurements,
    }
