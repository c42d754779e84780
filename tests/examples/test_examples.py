"""The examples run as a user would run them: as programs, against a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.servers import free_port
from services import Service

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 500
"""Far above the few seconds it takes: only a hang reaches it."""


def run(service: Service, *command: str) -> str:
    """The output of an example; its exit code must be 0."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ
        | service.env
        | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.parametrize("service", ["minio"], indirect=True)
def test_saves_and_loads_on_two_ranks_with_the_async_save_recipe(service: Service) -> None:
    root = service.url("recipe")

    output = run(service, str(EXAMPLES / "async_save_recipe.py"), root)

    assert f"{root}/first/step4 holds what was saved" in output
    assert f"{root}/second/step4 holds what was saved" in output
    commits = [key for key in service.listed() if key.endswith("/.metadata")]
    assert commits == sorted(f"recipe/{half}/step{step}/.metadata" for half in ("first", "second") for step in range(5))


def test_saves_the_state_of_the_moment_of_the_call_with_the_zero_overhead_recipe(service: Service) -> None:
    root = service.url("zero")

    output = run(service, str(EXAMPLES / "zero_overhead.py"), root, "--width", "256")

    assert f"{root}/step-12 holds what was saved" in output
    assert output.count("before optimizer.step()") == 2
    commits = [key for key in service.listed() if key.endswith("/.metadata")]
    assert commits == sorted(f"zero/step-{step}/.metadata" for step in (4, 8, 12))
