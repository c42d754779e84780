"""The engines part of the benchmark: boto3 and the CRT at 1 to 64 connections, and s3torchconnector beside them.

Orchestration only. What is measured is in `engines_worker.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import environments
from bench.endpoints import client_env
from bench.engines_report import ENGINES, OPS, PEER, print_measurement
from bucketpoint.testing.servers import S3Server, minio

ROOT = Path(__file__).resolve().parent.parent
BUCKET = "bench-engines"
CONNECTIONS = (1, 4, 16, 64)


def measure(scratch: Path, fast: Path, binary: Path, *, quick: bool) -> dict[str, Any]:
    """The `engines` part of the result."""
    began = time.monotonic()
    rounds = 1 if quick else 3
    measurements: list[dict[str, Any]] = []
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    with (
        minio(binary, tls=True, data=fast / "engines") as server,
        subprocess.Popen(
            [sys.executable, "-m", "bench.engines_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            cwd=ROOT,
        ) as worker,
    ):
        server.client().create_bucket(Bucket=BUCKET)
        for round_ in range(rounds):
            for found in _round(worker, server, round_):
                measurements.append(found)
                print_measurement(found)
            _empty(server, fast)
        assert worker.stdin is not None
        worker.stdin.close()
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


def _round(worker: subprocess.Popen[str], server: S3Server, round_: int) -> Any:
    cases = [(name, count) for count in CONNECTIONS for name in ENGINES] + [(PEER, 0)]
    shift = round_ % len(cases)
    for op in OPS:
        for name, count in [*cases[shift:], *cases[:shift]]:
            where = str(count) if count else "peer"
            command = {
                "contender": name,
                "connections": max(count, 1),
                "op": op,
                "url": f"s3://{BUCKET}/{round_}-{name}-{where}",
                "env": client_env(server),
            }
            yield {**_ask(worker, command), "contender": name, "op": op, "where": where, "round": round_}


def _ask(worker: subprocess.Popen[str], command: dict[str, Any]) -> dict[str, Any]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(command) + "\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"the measuring process ended with status {worker.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _empty(server: S3Server, fast: Path) -> None:
    """A round's checkpoints are some gigabytes, in memory."""
    client = server.client()
    for key in server.keys(BUCKET):
        client.delete_object(Bucket=BUCKET, Key=key)
    # MinIO only moves what is deleted, and frees it minutes later.
    for trash in fast.glob("*/.minio.sys/tmp/.trash/*"):
        shutil.rmtree(trash, ignore_errors=True)
