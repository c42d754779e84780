"""The retention part of the benchmark: what a plan takes, what pruning beside training costs it, and its requests.

Orchestration only. What is measured is in `retention/worker.py`, a process of its own. The server runs on this
machine too, so training has one core fewer than there are.

Steps are measured in windows that take turns: without a prune, again without (the control, which tells the noise), and
beside one. It is the same prune all along; it stands still where none is wanted.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import environments
from bench.endpoints import client_env, proxied
from bench.lines import Worker
from bench.requests_seen import kind_of
from bench.retention.report import print_measurement
from kit.http import Wire
from kit.servers import S3Server, minio

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "bench-retention"
OBJECTS = 64
"""Of a checkpoint, `.metadata` among them."""


@dataclass(frozen=True)
class Extent:
    """How much is measured. Times in seconds; `cycles` of three windows each."""

    rows: int = 100_000
    plans: int = 7
    pruned: int = 120
    cycles: int = 12
    window_s: float = 2.0


WHOLE = Extent()
QUICK = Extent(plans=2, pruned=20, cycles=2, window_s=1.0)


def _start(env: dict[str, str]) -> Worker:
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    return Worker.start("bench.retention.worker", json.dumps({"threads": threads}), env=env)


@dataclass
class Retention:
    """One run of the part."""

    extent: Extent
    scratch: Path
    fast: Path
    minio: Path
    measurements: list[dict[str, Any]]

    def note(self, op: str, where: str, round_: int, found: dict[str, Any]) -> None:
        measurement = {"contender": "bucketpoint", "op": op, "where": where, "round": round_, **found}
        self.measurements.append(measurement)
        print_measurement(measurement)

    def run(self) -> None:
        with minio(self.minio, tls=True, data=self.fast / "retention") as server:
            server.client().create_bucket(Bucket=BUCKET)
            self.timed(server)
        with minio(self.minio, data=self.fast / "counted") as plain:
            plain.client().create_bucket(Bucket=BUCKET)
            with proxied(self.scratch, plain, Wire()) as (server, proxy):
                self.counted(server, proxy)

    def timed(self, server: S3Server) -> None:
        """Plans, then steps beside a prune, and beside one that takes no rests."""
        worker, root = _start(client_env(server)), server.url(BUCKET, "run")
        extent = self.extent
        try:
            for round_ in range(extent.plans):
                self.note("engine", "memory", round_, worker.do("engine", number=extent.rows))
            for number, op in enumerate(("beside", "restless")):
                first = 1 + number * (extent.pruned + 1)
                worker.do("fill", root=root, first=first, number=extent.pruned + 1, objects=OBJECTS)
                windows = {"cycles": extent.cycles, "window_s": extent.window_s}
                found = worker.do("beside", root=root, rests=op == "beside", **windows)
                for round_, cycle in enumerate(found.pop("cycles", [])):
                    self.note(op, "minio", round_, cycle)
                self.note(f"{op} in all", "minio", 0, found)
        finally:
            worker.stop()

    def counted(self, server: S3Server, proxy: Any) -> None:
        """One call at a time: the two that only look, and prunes of nothing, of one checkpoint and of several."""
        worker, root = _start(client_env(server)), server.url(BUCKET, "run")
        try:
            step = 1
            # The newest stays, so that each prune deletes as many as were added before it.
            # The first deletion tries out what the server's deletions can do, once a process: no checkpoint's cost.
            rounds = ((1, ("latest", "plan", "prune")), (1, ("prune",)), (1, ("prune",)), (5, ("prune",)))
            for added, calls in rounds:
                worker.do("fill", root=root, first=step, number=added, objects=OBJECTS)
                step += added
                for what in calls:
                    found = worker.do("once", root=root, what=what)
                    if "error" not in found:
                        records = proxy.requests(found["start"], found["end"])
                        found["requests"] = dict(Counter(map(kind_of, records)))
                    self.note(what, "count", found.get("done", 0) if what == "prune" else 0, found)
        finally:
            worker.stop()


def measure(scratch: Path, fast: Path, binary: Path, *, quick: bool) -> dict[str, Any]:
    """The `retention` part of the result."""
    began = time.monotonic()
    part = Retention(QUICK if quick else WHOLE, scratch, fast, binary, [])
    part.run()
    return {
        "machine": environments.describe(binary, None),
        "quick": quick,
        "seconds": round(time.monotonic() - began),
        "objects": OBJECTS,
        "pruned": part.extent.pruned,
        "window_s": part.extent.window_s,
        "measurements": part.measurements,
    }
