"""The examples run as a user would run them: as programs, against a real server."""

from __future__ import annotations

import os
import re
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


@pytest.mark.broad
@pytest.mark.parametrize("service", ["minio"], indirect=True)
def test_resumes_the_example_on_three_ranks_and_on_one_with_the_losses_of_one_run(
    service: Service,
) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")

    def job(ranks: int, folder: str, until: int) -> tuple[list[tuple[int, float, float]], list[int]]:
        """Steps with their losses and learning rates, and what each rank has counted."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launcher += ["--nproc-per-node", str(ranks)]
        output = run(service, *launcher, str(EXAMPLES / "resume.py"), service.url(folder), "--until", str(until))
        steps = re.findall(r"^step (\d+) loss (\S+) lr (\S+)$", output, re.MULTILINE)
        (counts,) = re.findall(r"^samples of each rank: \[(.*)\]$", output, re.MULTILINE)
        return [(int(step), float(loss), float(lr)) for step, loss, lr in steps], [int(n) for n in counts.split(", ")]

    expected, _ = job(2, "whole", 60)

    jobs = [job(2, "parts", 15), job(3, "parts", 45), job(1, "parts", 60)]  # 42 steps of 12 of 500 samples: an epoch

    steps = [step for steps, _ in jobs for step in steps]
    assert [step for step, _, _ in steps] == [step for step, _, _ in expected] == [*range(1, 61)]
    for (_, *found), (_, *wanted) in zip(steps, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=2e-6)  # sums over other ranks round differently
    assert [counts for _, counts in jobs] == [[90, 90], [210, 210, 120], [390]]
