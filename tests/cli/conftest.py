"""The program as a function, and checkpoints on every kind of store for it to look at."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from azurite import AzureServer
from bucketpoint import BucketWriter
from bucketpoint.cli.app import run
from bucketpoint.stores.gcs import client as gcs_client
from bucketpoint.stores.s3 import client as s3_client
from bucketpoint.transfer import BufferPool
from fsspec_backends import SERVED
from kit.servers import S3Server


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


Program = Callable[..., Done]


@pytest.fixture(autouse=True)
def fresh_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps its clients, and a program its environment: tests here change the environment of one process."""
    monkeypatch.setattr(s3_client.clients, "_clients", {})
    monkeypatch.setattr(gcs_client.clients, "_clients", {})


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Program:
    """`bucketpoint` in this process, where torch is there already."""

    def call(*arguments: str) -> Done:
        capsys.readouterr()
        code = run(list(arguments))
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return call


def enter(monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str]) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def reached(minio: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """MinIO, whose endpoint and credentials the environment names."""
    enter(monkeypatch, minio.env)
    return minio


# Of the services that speak S3 one, and of the libraries' filesystems the one whose URLs no engine of ours serves.
@pytest.fixture(params=["minio", "gcs", "file", "memory", *(name for name in SERVED if name == "adlfs")])
def root(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of an empty place on each kind of store, reached as a person would: by the environment."""
    if request.param == "file":
        return f"file://{tmp_path}/runs"
    if request.param == "memory":
        return f"memory://cli/{tmp_path.name}-{id(tmp_path)}"
    if request.param == "adlfs":
        azure: AzureServer = request.getfixturevalue("azure")
        enter(monkeypatch, azure.env)
        return f"az://{azure.make_container()}/runs"
    server = request.getfixturevalue(request.param)
    enter(monkeypatch, server.env)
    return f"{'gs' if request.param == 'gcs' else 's3'}://{server.make_bucket()}/runs"


def budgets(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[BufferPool]:
    """The pools of memory that a module makes from now on."""
    pools: list[BufferPool] = []

    def pool(limit: int) -> BufferPool:
        pools.append(BufferPool(limit))
        return pools[-1]

    monkeypatch.setattr(module, "BufferPool", pool)
    return pools


def state(value: float = 1.0) -> dict[str, Any]:
    """Weights of more than one block and of less, optimizer state, an empty tensor and plain objects."""
    generator = torch.Generator().manual_seed(int(value * 1000))
    return {
        "model": {
            "large": torch.rand((3, 1 << 20), generator=generator),
            "small": torch.rand((10, 3), generator=generator).to(torch.bfloat16),
            "empty": torch.zeros(0, 4),
        },
        "optim": {"large": torch.rand(1000, generator=generator)},
        "step": int(value),
    }


def save(url: str, value: float = 1.0, **options: Any) -> None:
    dcp.save(state(value), checkpoint_id=url, storage_writer=BucketWriter(**options), no_dist=True)
