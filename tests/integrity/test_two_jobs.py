"""Several jobs that save the same step at once: exactly one checkpoint afterwards, and all are told."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.location import Location
from kit import checkpoints
from services import Service

JOBS = 4


@pytest.mark.parametrize("overwrite", [False, True])
def test_lets_one_of_several_jobs_win_and_tells_the_others(service: Service, overwrite: bool) -> None:
    options, url = service.options, service.url("run/step-1")
    together = threading.Barrier(JOBS)

    def save(number: int) -> str:
        together.wait(240)
        writer = bp.BucketWriter(overwrite=overwrite, storage_options=options)
        try:
            checkpoints.save(url, number, writer, elements=100_000)
        except dcp.CheckpointException as failed:
            return type(next(iter(failed.failures.values()))[0]).__name__
        return "won"

    with ThreadPoolExecutor(JOBS) as pool:
        told = Counter(pool.map(save, range(1, JOBS + 1)))
    assert sum(told.values()) == JOBS
    if not overwrite:
        assert told["won"] == 1
    # With overwrite=True a job that commits that begins after another's commit replaces that one, as it was asked to.
    assert told["won"] >= 1
    assert set(told) <= {"won", "CheckpointExistsError", "CommitConflictError"}
    value = checkpoints.load(url, bp.BucketReader(storage_options=options), elements=100_000)
    assert value in range(1, JOBS + 1)
    assert verify(open_checkpoint(Location.of(url, options))).ok
