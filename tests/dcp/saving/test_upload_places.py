"""An upload process however training is started: by torchrun, as spawned ranks, in a notebook, in a small container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify

PROGRAM = Path(__file__).resolve().with_name("places_program.py")

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
SMALL_SHM = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
"""A mount namespace of its own, in which /dev/shm has the size that a container has by default."""


def ends(command: list[str], text: str | None = None) -> list[dict[str, object]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=180, env=env)
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda said: str(said["rank"]))


@pytest.mark.broad
@pytest.mark.parametrize("how", ["torchrun", "spawn", "notebook", "small shm"])
def test_uploads_by_a_process_that_ends_however_training_was_started(how: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/step-1"
    python = [sys.executable, "-W", "ignore"]
    if how == "torchrun":
        said = ends([*python, *TORCHRUN, str(PROGRAM), url, how])
    elif how == "notebook":
        said = ends([*python, "-", url, how], PROGRAM.read_text())
    elif how == "small shm":
        if subprocess.run([*SMALL_SHM, "true"], capture_output=True).returncode:
            pytest.skip("this system lets no user make a mount namespace")
        script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
        said = ends([*SMALL_SHM, script, "sh", *python, str(PROGRAM), url, how])
    else:
        said = ends([*python, str(PROGRAM), url, how])
    ranks = 2 if how in ("torchrun", "spawn") else 1
    assert said == [{"rank": rank, "helper": True, "ended": True} for rank in range(ranks)]
    assert verify(open_checkpoint(url)).ok
