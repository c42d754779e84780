"""The staging part of the benchmark: what an asynchronous save costs the thread that trains. Orchestration only.

The scenarios are in `staging/worker.py` (blocked time, memory) and `staging/steps.py` (training beside an upload).
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import environments, gil
from bench.endpoints import client_env
from bench.lines import Worker, environment
from bench.sink import running_sink
from bench.staging.report import print_measurement
from kit.certificates import make_certificates
from kit.servers import S3Server, free_port, minio

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "bench-staging"
CAP_BYTES_PER_S = 20e6
GB = 1_000_000_000
STEPS = ("short", "long")
CONTENDERS = (
    "bucketpoint",
    "bucketpoint-threads",
    "bucketpoint-dcp-process",
    "s3torchconnector",
    "s3torchconnector-dcp-process",
    "floor",
)

LOADING = ("bucketpoint", "s3torchconnector", "s3fs")
"""Contenders that load by themselves; the others load as one of these."""


@dataclass(frozen=True)
class Extent:
    """How much is measured. Sizes in bytes, times in seconds."""

    rounds: int = 15
    seldom_rounds: int = 4
    large_rounds: int = 5
    beside_rounds: int = 15
    first_rounds: int = 3
    saves: int = 50
    memory_bytes: int = GB // 5
    steps_bytes: int = GB // 2
    capped_cycles: int = 3
    capped_s: float = 5.0
    idle_s: float = 3.0
    full_rounds: int = 5
    s3fs_rounds: int = 2
    lock_rounds: int = 2
    cuda_rounds: int = 7


WHOLE = Extent()
QUICK = Extent(
    rounds=2,
    seldom_rounds=1,
    large_rounds=1,
    beside_rounds=3,
    first_rounds=1,
    saves=10,
    steps_bytes=GB // 5,
    capped_cycles=1,
    capped_s=3.0,
    idle_s=1.5,
    full_rounds=1,
    s3fs_rounds=1,
    lock_rounds=1,
    cuda_rounds=3,
)


@dataclass
class Steps:
    """One contender's training process."""

    name: str
    worker: Worker
    hello: dict[str, Any]

    @classmethod
    def start(cls, name: str, tensors: int, nbytes: int, env: dict[str, str]) -> Steps:
        python = environments.python_of("s3fs" if name == "s3fs" else "main")
        sizes = json.dumps({"tensors": tensors, "nbytes": nbytes})
        worker = Worker.start("bench.staging.steps", name, sizes, python=python, env=env)
        return cls(name, worker, worker.hear())

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        return self.hello if "error" in self.hello else self.worker.do(do, **arguments)

    def lock(self, do: str, url: str) -> dict[str, Any]:
        """One upload or one load, with looks at the process's interpreter lock from here."""
        place = self.hello.get("lock")
        if place is None:
            return {"error": self.hello.get("error", "the interpreter's lock was not found")}
        begun, ended = threading.Event(), threading.Event()
        found: list[gil.Held] = []
        watching = threading.Thread(
            target=lambda: found.append(gil.watch(self.hello["pid"], *place, begun.is_set, ended))
        )
        watching.start()
        answer = self.ask(do, url=url)
        if answer.pop("begun", False):
            begun.set()
            answer = self.worker.hear()
        ended.set()
        watching.join()
        held = found[0]
        if held.errors and "error" not in answer:
            answer["error"] = held.errors[0]
        return {**answer, "held": held.others, "held_by_any": held.any, "looks": held.looks}


@dataclass
class Staging:
    """One run of the staging part."""

    extent: Extent
    scratch: Path
    fast: Path
    minio: Path
    measurements: list[dict[str, Any]] = field(default_factory=list)

    def note(self, found: dict[str, Any]) -> None:
        self.measurements.append(found)
        print_measurement(found)

    def scenario(self, name: str, **arguments: Any) -> None:
        command = [sys.executable, "-m", "bench.staging.worker", name, json.dumps(arguments)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment({}), cwd=ROOT) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.note(json.loads(line))
        if process.returncode:
            error = f"the process ended with status {process.returncode}"
            place = {"contender": "bucketpoint", "op": name, "where": str(arguments["tensors"]), "round": 0}
            self.note({**place, "error": error})

    def run(self) -> None:
        extent = self.extent
        self.scenario("blocked", tensors=2000, nbytes=GB, rounds=extent.rounds, seldom=extent.seldom_rounds)
        self.scenario("blocked", tensors=32, nbytes=GB, rounds=extent.large_rounds, seldom=extent.seldom_rounds // 2)
        self.scenario("beside", tensors=2000, nbytes=GB, rounds=extent.beside_rounds)
        self.scenario("first", tensors=2000, nbytes=GB, rounds=extent.first_rounds)
        self.scenario("memory", tensors=400, nbytes=extent.memory_bytes, saves=extent.saves)
        self.scenario("cuda", tensors=2000, nbytes=10 * GB, rounds=extent.cuda_rounds)
        self.capped()
        self.full()

    def capped(self) -> None:
        """Training beside an upload that a slow store takes."""
        certificates = Path(tempfile.mkdtemp(dir=self.scratch))
        ca = make_certificates(certificates)
        port = free_port()
        server = S3Server("sink", f"https://127.0.0.1:{port}", "sink", "sink-secret", ca=ca)
        keys = {"cert": certificates / "public.crt", "key": certificates / "private.key"}
        with running_sink(port=port, bytes_per_s=CAP_BYTES_PER_S, **keys) as sink:
            running = [Steps.start(name, 2000, GB, client_env(server)) for name in ("bucketpoint", "floor")]
            try:
                timing = {"idle_s": self.extent.idle_s, "busy_s": self.extent.capped_s, "sink": sink}
                for round_, step, steps in itertools.product(range(self.extent.capped_cycles), STEPS, running):
                    found = steps.ask("beside", url=f"s3://{BUCKET}/capped", step=step, **timing)
                    self.note({"contender": steps.name, "op": "capped", "where": step, "round": round_, **found})
            finally:
                for steps in running:
                    steps.worker.stop()

    def full(self) -> None:
        """Training beside uploads at full speed, and the interpreter's lock during uploads alone."""
        rounds = dict.fromkeys(CONTENDERS, self.extent.full_rounds) | {"s3fs": self.extent.s3fs_rounds}
        running: list[Steps] = []
        with minio(self.minio, tls=True, data=self.fast / "staging") as server:
            server.client().create_bucket(Bucket=BUCKET)
            env = client_env(server)
            try:
                for name in rounds:
                    try:
                        running.append(Steps.start(name, 1000, self.extent.steps_bytes, env))
                        running[-1].ask("warm", url=f"s3://{BUCKET}/{name}/warm")
                    except (OSError, subprocess.CalledProcessError) as error:
                        self.note({"contender": name, "op": "full", "where": "minio", "round": 0, "error": str(error)})
                    self._forget()
                for round_ in range(self.extent.full_rounds):
                    shift = round_ % len(running)
                    for steps in [*running[shift:], *running[:shift]]:
                        place = {"contender": steps.name, "where": "minio", "round": round_}
                        url = f"s3://{BUCKET}/{steps.name}/{round_}"
                        for step in STEPS if round_ < rounds[steps.name] else ():
                            found = steps.ask("beside", url=url, step=step, idle_s=self.extent.idle_s / 2)
                            self.note({**place, "op": "full", **found, "where": step})
                            self._forget()
                        if steps.name == "bucketpoint":
                            self.note({**place, "op": "helper", **steps.ask("helper")})
                        if round_ < min(self.extent.lock_rounds, rounds[steps.name]):
                            self.note({**place, "op": "lock", **steps.lock("lock", url + "-lock")})
                            if steps.name in LOADING:
                                self.note({**place, "op": "lock-load", **steps.lock("lock_load", url + "-lock")})
                            self._forget()
            finally:
                for steps in running:
                    steps.worker.stop()
        shutil.rmtree(self.fast / "staging", ignore_errors=True)

    def _forget(self) -> None:
        """What has been saved only fills memory. Deleted as files: MinIO frees what is deleted minutes later."""
        for entry in (self.fast / "staging" / BUCKET).glob("*"):
            shutil.rmtree(entry, ignore_errors=True)


def measure(scratch: Path, fast: Path, binary: Path, *, quick: bool) -> dict[str, Any]:
    """The `staging` part of the result."""
    began = time.monotonic()
    staging = Staging(QUICK if quick else WHOLE, scratch, fast, binary)
    staging.run()
    return {
        "machine": environments.describe(binary, None),
        "quick": quick,
        "seconds": round(time.monotonic() - began),
        "cap_bytes_per_s": CAP_BYTES_PER_S,
        "measurements": staging.measurements,
    }
