"""The engines part of the benchmark: boto3 and the CRT at 1 to 64 connections, and s3torchconnector beside them.

Orchestration only. What is measured is in `engines/worker.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench import environments
from bench.endpoints import client_env, empty
from bench.engines.report import ENGINES, OPS, PEER, print_measurement
from bench.lines import Worker
from bucketpoint.testing.servers import S3Server, minio

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "bench-engines"
CONNECTIONS = (1, 4, 16, 64)


def measure(scratch: Path, fast: Path, binary: Path, *, quick: bool) -> dict[str, Any]:
    """The `engines` part of the result."""
    began = time.monotonic()
    rounds = 1 if quick else 3
    measurements: list[dict[str, Any]] = []
    with minio(binary, tls=True, data=fast / "engines") as server:
        server.client().create_bucket(Bucket=BUCKET)
        worker = Worker.start("bench.engines.worker")
        try:
            for round_ in range(rounds):
                for found in _round(worker, server, round_):
                    measurements.append(found)
                    print_measurement(found)
                # A round's checkpoints are some gigabytes.
                empty(server, BUCKET, fast)
        finally:
            worker.stop()
    state_bytes = next((found["needed_bytes"] for found in measurements if "needed_bytes" in found), 0)
    return {
        "machine": environments.describe(binary, None),
        "quick": quick,
        "rounds": rounds,
        "seconds": round(time.monotonic() - began),
        "connections": list(CONNECTIONS),
        "state_bytes": state_bytes,
        "measurements": measurements,
    }


def _round(worker: Worker, server: S3Server, round_: int) -> Any:
    # The peer has no number of connections: it is measured again beside each, so that what is compared lies close.
    cases = [(name, count) for count in CONNECTIONS for name in (*ENGINES, PEER)]
    shift = round_ % len(cases)
    for op in OPS:
        for name, count in [*cases[shift:], *cases[:shift]]:
            command = {
                "contender": name,
                "connections": count,
                "op": op,
                "url": f"s3://{BUCKET}/{round_}-{name}-{count}",
                "env": client_env(server),
            }
            answer = worker.ask(command)
            if worker.ended:
                raise SystemExit(answer["error"])
            yield {**answer, "contender": name, "op": op, "where": str(count), "round": round_}
