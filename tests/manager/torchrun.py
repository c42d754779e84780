"""Jobs that torchrun starts on this machine, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def start(script: Path, *arguments: str, ranks: int, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Begin a job of a script that the environment's Python runs on each rank; its output is that of all ranks."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks), str(script), *arguments]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(job: subprocess.Popen[str], limit_s: float = 240) -> str:
    """Wait for a job to end well, and return its output. One that does not end is killed, with its ranks."""
    try:
        output, _ = job.communicate(timeout=limit_s)
    except BaseException:
        job.terminate()
        output, _ = job.communicate(timeout=60)
        sys.stderr.write(output[-5000:])
        raise
    assert job.returncode == 0, output[-5000:]
    return output
