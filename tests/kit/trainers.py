"""Trainers of frameworks on several ranks: launched, killed in the middle of an upload, and compared."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import bucketpoint
from kit.faults import Kill, always
from kit.proxy import FaultProxy
from kit.servers import S3Server, free_port

PAGES = Path(__file__).parents[2] / "docs"

NOTES_ITS_GROUP = """
import os, pathlib
if "LOCAL_RANK" in os.environ and os.getpgrp() == os.getpid():
    pathlib.Path(__file__).with_name(f"{os.getpgrp()}.group").touch()
"""
"""What Python runs as it starts: each rank, which torchrun makes the first of a group, leaves a file."""


def command(program: Path, arguments: list[str], world: int) -> list[str]:
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}"]
    return [sys.executable, *launch, str(program), *arguments]


def environment(server: S3Server, env: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **server.env, "OMP_NUM_THREADS": "1", **env}


def launched(
    program: Path, arguments: list[str], world: int, server: S3Server, folder: Path | None, **env: str
) -> None:
    """Run a program on so many ranks, in a working directory."""
    ran = subprocess.run(
        command(program, arguments, world),
        env=environment(server, env),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    # A model without dropout draws no random numbers from save to save, which is no reason for an alarm.
    assert "changed in" not in ran.stderr


def train(program: Path, root: str, report: Path, *more: str, world: int, server: S3Server, **env: str) -> Any:
    """Train on so many ranks, in the run at a URL. Return what rank 0 saw, which the program leaves in a file."""
    launched(program, [root, str(report), *more], world, server, None, **env)
    return json.loads(report.read_text())


def run_example(text: str, world: int, server: S3Server, folder: Path, **env: str) -> None:
    """Run a program of a page, given as its text, on so many ranks in a folder."""
    (folder / "train.py").write_text(text)
    launched(folder / "train.py", [], world, server, folder, **env)


def train_example(text: str, newest: str, world: int, server: S3Server, folder: Path, **env: str) -> None:
    """Run a program of a page. The newest checkpoint of its run is then the one at a URL."""
    run_example(text, world, server, folder, **env)
    run = newest.rpartition("/")[0]
    assert bucketpoint.latest_checkpoint(run, storage_options=server.options) == newest


def kill_and_resume(
    program: Path,
    *more: str,
    server: S3Server,
    folder: Path,
    good: int = 12,
    worlds: tuple[int, int] = (4, 2),
    parts: Mapping[str, int] | None = None,
    **env: str,
) -> None:
    """Train without a stop; kill another run in the upload of step 18, and resume it on the second number of ranks.

    Its newest whole checkpoint is that of step `good`, with some tensors in so many parts. From there on rank 0 sees
    the same.
    """
    bucket = server.make_bucket()
    first, then = worlds
    whole = train(program, f"s3://{bucket}/whole", folder / "whole", *more, world=first, server=server, **env)
    assert [step for step, *_ in whole["seen"]] == list(range(1, len(whole["seen"]) + 1))
    root = f"s3://{bucket}/run"
    arguments = [root, str(folder / "none"), *more]
    killed_in_an_upload(program, arguments, first, server, f"{root}/step-18", folder / "ranks", **env)
    newest = bucketpoint.latest_checkpoint(root, storage_options=server.options)
    assert newest == f"{root}/step-{good}"
    metadata: Any = bucketpoint.BucketReader(newest, storage_options=server.options).read_metadata()
    for key, number in (parts or {}).items():
        assert len(metadata.state_dict_metadata[key].chunks) == number
    resumed = train(program, root, folder / "resumed", *more, world=then, server=server, **env)
    assert_same_steps(resumed.pop("seen"), whole.pop("seen")[good:])
    assert resumed == whole


def killed_in_an_upload(
    program: Path, arguments: list[str], world: int, server: S3Server, url: str, folder: Path, **env: str
) -> None:
    """Run a program until some of a checkpoint's data is in the bucket and some is not, and kill all ranks then."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(NOTES_ITS_GROUP)
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with FaultProxy(server.endpoint) as proxy:
        through = environment(server.at(proxy.url), {**env, "PYTHONPATH": paths})
        with subprocess.Popen(command(program, arguments, world), env=through, stderr=subprocess.PIPE) as job:
            while len(ranks := [int(path.stem) for path in folder.glob("*.group")]) < world:
                assert job.poll() is None, job.communicate()[1][-6000:]
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


def assert_same_steps(seen: list[Any], expected: list[Any]) -> None:
    """Compare steps, each with its number, its samples and its loss, which other numbers of ranks add up in another
    order.
    """
    assert [tuple(each[:2]) for each in seen] == [tuple(each[:2]) for each in expected]
    losses, wanted = ([each[2] for each in steps] for steps in (seen, expected))
    assert losses == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def block(page: str, language: str, number: int = 0) -> str:
    """Return a block of code in a language of a page, the first by default."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return text.split(f"```{language}\n")[number + 1].split("```")[0]


def plain(page: str, number: int = 0) -> str:
    """Return an example of a page without the lines that its diff adds, five at most, and with those it removes."""
    text = re.sub(r"  # .*", "", block(page, "python", number))
    before, added = "", 0
    for line in block(page, "diff", number).splitlines(keepends=True):
        if line.startswith("-"):
            before += line[1:]
            continue
        assert line[1:] in text
        text, before, added = text.replace(line[1:], before), "", added + 1
    assert added <= 5
    assert "ucket" not in text
    return text
