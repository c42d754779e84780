"""Jobs on a GPU: every kind of save and load of tensors on the device, and a job that is killed and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dcp import cuda_scenarios as scenarios
from dcp.ranks import Ranks
from services import Service

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.parametrize("service", ["minio"], indirect=True),
]

JOB = Path(__file__).with_name("cuda_job.py")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("how", ["blocking", "stock", "background", "beside", "process"])
def test_saves_from_a_device_load_bit_for_bit_on_two_ranks_and_on_one(
    two_ranks: Ranks, one_rank: Ranks, service: Service, how: str
) -> None:
    url = service.url(f"run/{how}")
    two_ranks.run(scenarios.saves_and_loads, url, service.options, how)
    one_rank.run(scenarios.loads, url, service.options)


def test_continues_a_killed_job_with_the_same_losses(service: Service) -> None:
    whole = _lines(_job(service, "whole", 8))
    killed = _job(service, "killed", 8, 5)
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    resumed = _lines(_job(service, "killed", 8))
    restored = int(resumed.pop(0).split()[1])
    assert restored in (4, 5)
    assert resumed == whole[restored:]


def _job(service: Service, run: str, *steps: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(JOB), service.url(run), *map(str, steps)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **service.server.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def _lines(job: subprocess.CompletedProcess[str]) -> list[str]:
    assert job.returncode == 0, job.stdout[-5000:]
    return [line for line in job.stdout.splitlines() if line.startswith(("restored", "loss", "model"))]
