"""The start-up part of the benchmark: CPU time of a command before its first request, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import environments
from bench.start_up.report import COMMANDS, print_measurement

ROUNDS, QUICK_ROUNDS = 9, 3

PROGRAM = """
import os, sys, time
def stop(event, arguments):
    if event == "socket.connect":
        print(time.process_time(), "torch" in sys.modules, flush=True)
        os._exit(0)
sys.addaudithook(stop)
from bucketpoint.cli.app import run
run(sys.argv[1:])
"""

POLICY = "version: 1\nroot: s3://bench-start-up/run\nkeep:\n  latest: 3\n"


def measure(scratch: Path, fast: Path, binary: Path, *, quick: bool) -> dict[str, Any]:
    """The `start-up` part of the result. No server answers: the process ends as it opens its first connection."""
    began = time.monotonic()
    policy = scratch / "policy.yaml"
    policy.write_text(POLICY)
    env = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        # As after pip install: the first process compiles what it imports, and those that are measured do not.
        "PYTHONPYCACHEPREFIX": str(scratch / "bytecode"),
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_REGION": "us-east-1",
    }
    measurements = []
    for round_ in range(-1, QUICK_ROUNDS if quick else ROUNDS):
        for name, arguments in COMMANDS.items():
            given = [one.format(policy=policy) for one in arguments]
            command = [sys.executable, "-c", PROGRAM, *given]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
            cpu_s, with_torch = done.stdout.split()[-2:]
            found = {"contender": name, "op": "start", "where": "fresh process", "round": round_, "cpu_s": float(cpu_s)}
            found["torch"] = with_torch == "True"
            if round_ >= 0:
                measurements.append(found)
                print_measurement(found)
    return {
        "machine": environments.describe(binary, None),
        "quick": quick,
        "seconds": round(time.monotonic() - began),
        "measurements": measurements,
    }
