"""Several jobs that save the same step at once on MinIO: exactly one checkpoint afterwards, and all are told."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint.dcp.saved import open_checkpoint
from bucketpoint.dcp.verify import verify
from bucketpoint.testing.kills import Job
from servers import S3Server

JOBS = 4


def save(number: int, url: str, options: dict[str, Any], overwrite: bool) -> str:
    state = {"w": torch.full((100_000,), float(number)), "o": {"m": torch.full((10,), float(number))}}
    writer = bp.BucketWriter(overwrite=overwrite, storage_options=options)
    try:
        dcp.save(state, checkpoint_id=url, storage_writer=writer, no_dist=True)
    except dcp.CheckpointException as failed:
        return type(next(iter(failed.failures.values()))[0]).__name__
    return "won"


def save_as_rank(rank: int, world: int, url: str, options: dict[str, Any], overwrite: bool) -> str:
    torch.distributed.barrier()
    return save(rank + 1, url, options, overwrite)


def in_threads(url: str, options: dict[str, Any], overwrite: bool) -> list[str]:
    together = threading.Barrier(JOBS)

    def one(number: int) -> str:
        together.wait(240)
        return save(number, url, options, overwrite)

    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(one, range(1, JOBS + 1)))


def in_processes(url: str, options: dict[str, Any], overwrite: bool) -> list[str]:
    with Job(JOBS) as job:
        job.ready()
        outcomes = job.run(save_as_rank, url, options, overwrite)
    assert not [one.text for one in outcomes if one.text]
    return [one.value for one in outcomes]


@pytest.mark.parametrize("race", [in_threads, pytest.param(in_processes, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_one_of_several_jobs_wins_and_the_others_are_told(minio: S3Server, race: Any, overwrite: bool) -> None:
    options, url = minio.options, f"s3://{minio.make_bucket()}/run/step-1"
    told = Counter(race(url, options, overwrite))
    assert sum(told.values()) == JOBS
    if not overwrite:
        assert told["won"] == 1
    # With overwrite=True a job that commits later replaces the earlier one, as it was asked to.
    assert told["won"] >= 1
    assert set(told) <= {"won", "CheckpointExistsError", "CommitConflictError"}
    target = {"w": torch.zeros(100_000), "o": {"m": torch.zeros(10)}}
    dcp.load(target, checkpoint_id=url, storage_reader=bp.BucketReader(storage_options=options), no_dist=True)
    values = {*target["w"].unique().tolist(), *target["o"]["m"].unique().tolist()}
    assert len(values) == 1, "never a mix"
    assert values <= set(map(float, range(1, JOBS + 1)))
    assert verify(open_checkpoint(url, storage_options=options)).ok
