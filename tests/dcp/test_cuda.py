"""Jobs on a GPU: every kind of save and load of tensors on the device, and a job that is killed and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bucketpoint
from bucketpoint import BucketReader, BucketWriter, StagingOptions
from dcp.ranks import Ranks
from services import Service

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, COLUMNS = 1000, 301
DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "complex64", "int64", "int8", "uint8", "bool"]


def _numbers(begin: int, end: int) -> torch.Tensor:
    return torch.arange(begin * COLUMNS, end * COLUMNS, dtype=torch.float32, device=DEVICE).reshape(-1, COLUMNS)


def _bounds(rank: int, world: int) -> tuple[int, int]:
    size = -(-ROWS // world)
    return min(rank * size, ROWS), min((rank + 1) * size, ROWS)


def state_of(rank: int, world: int, *, blank: bool = False) -> dict[str, Any]:
    """Rows of a tensor on the device for each rank, and a replica of every kind of tensor."""
    numbers = _numbers(*_bounds(rank, world))
    mesh = init_device_mesh(DEVICE, (world,))
    spread = DTensor.from_local(numbers, mesh, [Shard(0)], run_check=False, shape=(ROWS, COLUMNS), stride=(COLUMNS, 1))
    plain = _numbers(0, 8) % 100
    state = {
        "spread": spread,
        "kinds": {name: plain.to(getattr(torch, name)) for name in DTYPES},
        "column": plain[:, 3],
        "turned": plain.t(),
        "conjugate": plain.to(torch.complex64).conj(),
        "scalar": torch.tensor(3.5, device=DEVICE),
        "empty": torch.empty(0, 4, device=DEVICE),
        "host": torch.arange(50),
        "step": 7,
    }
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.zeros_like, state) if blank else state


def _check(state: dict[str, Any], rank: int, world: int) -> None:
    expected = state_of(rank, world)
    assert torch.equal(state["spread"].to_local(), expected["spread"].to_local())
    assert state["spread"].to_local().device.type == DEVICE
    for key in ("column", "turned", "conjugate", "scalar", "empty", "host"):
        assert torch.equal(state[key], expected[key]), key
    for name in DTYPES:
        one, two = state["kinds"][name], expected["kinds"][name]
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), name
        assert one.device.type == DEVICE


def saves_and_loads(rank: int, world: int, url: str, options: dict[str, Any], how: str) -> None:
    writer = BucketWriter(storage_options=options, staging=StagingOptions(use_async_staging="beside" in how))
    state = state_of(rank, world)
    if how == "blocking":
        dcp.save(state, checkpoint_id=url, storage_writer=writer)
    elif how == "stock":
        dcp.async_save(state, checkpoint_id=url, storage_writer=writer).result()
    else:
        kind = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
        bucketpoint.async_save(state, url, storage_writer=writer, async_checkpointer_type=kind).result()
    loads(rank, world, url, options)


def loads(rank: int, world: int, url: str, options: dict[str, Any]) -> None:
    state = state_of(rank, world, blank=True)
    dcp.load(state, checkpoint_id=url, storage_reader=BucketReader(storage_options=options))
    _check(state, rank, world)
    del state
    dist.barrier()


pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.parametrize("service", ["minio"], indirect=True),
]

JOB = Path(__file__).with_name("cuda_job.py")


@pytest.mark.parametrize("how", ["blocking", "stock", "background", "beside", "process"])
def test_saves_from_a_device_load_bit_for_bit_on_two_ranks_and_on_one(
    two_ranks: Ranks, one_rank: Ranks, service: Service, how: str
) -> None:
    url = service.url(f"run/{how}")
    two_ranks.run(saves_and_loads, url, service.options, how)
    one_rank.run(loads, url, service.options)


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
