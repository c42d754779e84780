"""Programs of a few lines in a process of their own, which may end as they like."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1]
LIMIT_S = 500
"""Far above what any program here takes: only a hang reaches it."""


def run_program(
    program: str, *arguments: str, status: int = 0, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of Python, which can import the tests' modules, and ends with this status."""
    paths = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), *arguments],
        env={**os.environ, "PYTHONPATH": paths, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == status, f"the program ended with {done.returncode}: {done.stderr[-6000:]}"
    return done
