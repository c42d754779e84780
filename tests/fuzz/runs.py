"""Runs of damaged inputs in child processes, which go on behind an input that ended one."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

_PROGRESS = struct.Struct("<2Q")
_STUCK_SECONDS = 7200


def run(counts: dict[str, int], *, seed: int) -> list[tuple[str, int, int, str]]:
    """Try so many inputs of each target. Returns (target, number of the input, its length, what was wrong)."""
    failures: list[tuple[str, int, int, str]] = []
    jobs = [(name, 0, count) for name, count in counts.items()]
    tests = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    while jobs:
        with tempfile.NamedTemporaryFile() as progress:
            progress.write(bytes(_PROGRESS.size))
            progress.flush()
            command = [sys.executable, "-W", "ignore", "-m", "fuzz.child", progress.name, json.dumps(jobs), str(seed)]
            died = None
            try:
                done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_STUCK_SECONDS)
                told, died = done.stdout, done.returncode
            except subprocess.TimeoutExpired as error:
                told, died = (error.stdout or b"").decode(), -signal.SIGKILL
            number, index = _PROGRESS.unpack(Path(progress.name).read_bytes())
        failures += [tuple(json.loads(line)) for line in told.splitlines() if line.startswith("[")]
        if died == 0:
            break
        if died > 0:
            raise RuntimeError(f"the child failed: {done.stderr[-3000:]}")
        name, start, count = jobs[number]
        what = "time-out: killed" if died in (-signal.SIGPROF, -signal.SIGKILL) else f"signal {-died}"
        failures.append((name, index, -1, what))
        left = start + count - index - 1
        jobs = [*([(name, index + 1, left)] if left else []), *jobs[number + 1 :]]
    return failures
