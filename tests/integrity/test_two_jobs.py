"""Several jobs that save the same step at once: real processes on MinIO, and exactly one checkpoint afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint.dcp.saved import open_checkpoint
from bucketpoint.dcp.verify import verify
from bucketpoint.stores import s3_client
from servers import S3Server

JOBS = 4

JOB = """
import sys, time
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
import bucketpoint as bp

url, folder, number, overwrite = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
state = {"w": torch.full((100_000,), float(number)), "o": {"m": torch.full((10,), float(number))}}
(folder / f"ready-{number}").touch()
while not (folder / "go").exists():
    time.sleep(0.002)
try:
    dcp.save(state, checkpoint_id=url, storage_writer=bp.BucketWriter(overwrite=overwrite), no_dist=True)
    print("won")
except dcp.CheckpointException as failed:
    print(type(next(iter(failed.failures.values()))[0]).__name__)
"""


def race(minio: S3Server, url: str, folder: Path, *, overwrite: bool) -> Counter[str]:
    jobs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", JOB, url, str(folder), str(number), str(overwrite)],
            env={**os.environ, **minio.env, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(1, JOBS + 1)
    ]
    try:
        deadline = time.monotonic() + 400
        while len(list(folder.glob("ready-*"))) < JOBS and time.monotonic() < deadline:
            time.sleep(0.05)
        (folder / "go").touch()
        return Counter(job.communicate(timeout=400)[0].strip() for job in jobs)
    finally:
        for job in jobs:
            job.kill()


@pytest.mark.parametrize("overwrite", [False, True])
def test_one_of_several_jobs_wins_and_the_others_are_told(
    minio: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    # A process keeps its clients, and this one's environment may have led elsewhere before.
    monkeypatch.setattr(s3_client, "_clients", s3_client._Clients())
    for name, value in minio.env.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{minio.make_bucket()}/run/step-1"
    told = race(minio, url, tmp_path, overwrite=overwrite)
    assert sum(told.values()) == JOBS
    if not overwrite:
        assert told["won"] == 1
    # With overwrite=True a job that commits later replaces the earlier one, as it was asked to.
    assert told["won"] >= 1
    assert set(told) <= {"won", "CheckpointExistsError", "CommitConflictError"}
    target = {"w": torch.zeros(100_000), "o": {"m": torch.zeros(10)}}
    dcp.load(target, checkpoint_id=url, storage_reader=bp.BucketReader(), no_dist=True)
    values = {*target["w"].unique().tolist(), *target["o"]["m"].unique().tolist()}
    assert len(values) == 1, "never a mix"
    assert values <= set(map(float, range(1, JOBS + 1)))
    assert verify(open_checkpoint(url)).ok
