"""The part of the benchmark on unchanged bytes: `unchanged="copy"` beside `"send"`, and the requests of copies.

Orchestration only. What is measured is in `unchanged/worker.py`, a process for each contender. They take turns, and
which of them comes first changes each round.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import environments
from bench.endpoints import client_env, empty, proxied
from bench.lines import Worker
from bench.proxy_process import RunningProxy
from bench.requests_seen import kind_of, summary
from bench.unchanged.report import COPY_KINDS, print_measurement
from kit.http import Wire
from kit.servers import S3Server, minio

BUCKET = "bench-unchanged"
CONTENDERS = ("copy", "send")
ROUNDS = {"lora": 7, "dense": 20}
QUICK_ROUNDS = {"lora": 2, "dense": 3}
COUNTED = ("first", "second", "third", "nothing changed")
"""Saves whose requests are counted, by one process."""


@contextlib.contextmanager
def _running(server: S3Server, state: str, unchanged: str, *, steps: int = 0) -> Iterator[Worker]:
    """Run a process that has trained for so many steps."""
    arguments = json.dumps({"state": state, "unchanged": unchanged, "steps": steps})
    worker = Worker.start("bench.unchanged.worker", arguments, env=client_env(server))
    try:
        yield worker
    finally:
        worker.stop()


@dataclass
class Unchanged:
    """One run of the part."""

    rounds: dict[str, int]
    scratch: Path
    fast: Path
    minio: Path
    sizes: dict[str, dict[str, Any]]
    measurements: list[dict[str, Any]]

    def note(self, contender: str, op: str, where: str, round_: int, found: dict[str, Any]) -> None:
        measurement = {"contender": contender, "op": op, "where": where, "round": round_, **found}
        self.measurements.append(measurement)
        print_measurement(measurement)

    def run(self) -> None:
        with minio(self.minio, tls=True, data=self.fast / "unchanged") as server:
            server.client().create_bucket(Bucket=BUCKET)
            for state in self.rounds:
                self.timed(server, state)
        with minio(self.minio, data=self.fast / "counted") as plain:
            plain.client().create_bucket(Bucket=BUCKET)
            with proxied(self.scratch, plain, Wire()) as (server, proxy):
                self.counted(server, proxy)

    def timed(self, server: S3Server, state: str) -> None:
        """Saves of both contenders in turns. The first ones have nothing to compare with."""
        with contextlib.ExitStack() as stack:
            workers = {name: stack.enter_context(_running(server, state, name)) for name in CONTENDERS}
            for worker in workers.values():
                self.sizes[state] = worker.hear()
            for round_ in range(-1, self.rounds[state]):
                for name in CONTENDERS[:: -1 if round_ % 2 else 1]:
                    workers[name].do("step")
                    found = workers[name].do("save", url=server.url(BUCKET, f"{state}-{name}/step-{round_ + 1}"))
                    self.note(name, state if round_ >= 0 else f"{state} first", "minio", round_, found)
                    # The next save compares with the newest.
                    empty(server, BUCKET, self.fast, f"{state}-{name}/step-{round_}/")
        empty(server, BUCKET, self.fast)

    def counted(self, server: S3Server, proxy: RunningProxy) -> None:
        """Requests and bytes of saves of the LoRA-like state, and of the first save of a restarted process."""

        def save(worker: Worker, op: str, number: int) -> None:
            found = worker.do("save", url=server.url(BUCKET, f"run/step-{number}"))
            if "error" not in found:
                records = proxy.requests(found["start"], found["end"])
                found["requests"] = summary(records)
                copies = [record for record in records if kind_of(record) in COPY_KINDS]
                found["copying_s"] = max((one["end"] for one in copies), default=0.0)
                found["copying_s"] -= min((one["start"] for one in copies), default=0.0)
                # Only the newest is left, which must not need the others.
                empty(server, BUCKET, self.fast, f"run/step-{number - 1}/")
                found.update(worker.do("load", url=server.url(BUCKET, f"run/step-{number}")))
            self.note("copy", op, "count", 0, found)

        with _running(server, "lora", "copy") as worker:
            worker.hear()
            for number, op in enumerate(COUNTED):
                if op != "nothing changed":
                    worker.do("step")
                save(worker, op, number)
        with _running(server, "lora", "copy", steps=len(COUNTED) - 1) as worker:
            worker.hear()
            save(worker, "restarted", len(COUNTED))


def measure(scratch: Path, fast: Path, binary: Path, *, quick: bool) -> dict[str, Any]:
    """The `unchanged` part of the result."""
    began = time.monotonic()
    part = Unchanged(QUICK_ROUNDS if quick else ROUNDS, scratch, fast, binary, {}, [])
    part.run()
    return {
        "machine": environments.describe(binary, None),
        "quick": quick,
        "seconds": round(time.monotonic() - began),
        "sizes": part.sizes,
        "measurements": part.measurements,
    }
