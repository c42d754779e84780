"""Scripts on several ranks, and the kill of all of them in the middle of an upload."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import bucketpoint
from kit import FaultProxy, Kill, always
from kit.servers import S3Server, free_port


def command(program: Path, arguments: list[str], world: int) -> list[str]:
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}"]
    return [sys.executable, *launch, str(program), *arguments]


def environment(server: S3Server, env: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **server.env, "OMP_NUM_THREADS": "1", **env}


def launched(program: Path, arguments: list[str], world: int, server: S3Server, **env: str) -> Any:
    """Run a program on so many ranks."""
    return subprocess.run(
        command(program, arguments, world),
        env=environment(server, env),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def killed_in_an_upload(
    program: Path, arguments: list[str], world: int, server: S3Server, url: str, folder: Path, **env: str
) -> None:
    """Run a program until some of a checkpoint's data is in the bucket and some is not, and kill all ranks then.

    Each rank leaves a file named like its process group in the folder that the environment names as PROCESSES.
    """
    folder.mkdir()
    with FaultProxy(server.endpoint) as proxy:
        through = environment(server.at(proxy.url), {**env, "PROCESSES": str(folder)})
        with subprocess.Popen(command(program, arguments, world), env=through, stderr=subprocess.PIPE) as job:
            while len(ranks := [int(path.name) for path in folder.iterdir()]) < world:
                assert job.poll() is None
                time.sleep(0.05)
            bucket, _, key = url.removeprefix("s3://").partition("/")
            proxy.play(always(Kill(tuple(ranks)), kinds=("PutObject",), keys=f"{key}/data/*", skip=1, times=1))
            _, told = job.communicate(timeout=200)
        assert job.returncode != 0
        assert "kill" in {exchange.fault for exchange in proxy.exchanges}, told[-6000:]
    there = server.client().list_objects_v2(Bucket=bucket, Prefix=f"{key}/")["Contents"]
    assert all("/data/" in item["Key"] for item in there)
    with pytest.raises(bucketpoint.errors.IncompleteCheckpointError):
        bucketpoint.load({}, url, storage_options=server.options)
