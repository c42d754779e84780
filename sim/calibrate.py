"""Real processes save into and load from an endpoint with known limits; the model predicts how long that takes."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketReader, BucketWriter, TransferOptions
from sim.services import Cluster, Service
from sim.store import simulate
from sim.stub import running_stub
from sim.transfers import load_work, partitions, save_work

MIB = 1 << 20
TENSOR_BYTES, TENSORS = 8 * MIB, 5
"""One of the five is called a weight, as a fifth of a training state's bytes are."""

CHUNKS = {"model": [1.0], "optim": [1.0] * (TENSORS - 1)}
OPTIONS = TransferOptions(part_bytes=5 * MIB, connections=4, single_put_bytes=MIB)
COMMIT_REQUESTS, METADATA_REQUESTS = 2, 1
TIMEOUT_S = 120
RANDOM_RUNS, SEEDS = 3, range(10)

LIMITS = Service(
    partitions=1,
    latency_s=0.100,
    latency_sigma=0.0,
    slow_share=0.0,
    connection_bytes_per_s=10e6,
    ceiling_bytes_per_s=40e6,
)
SLOW_REQUESTS = replace(LIMITS, writes_per_s=15.0, reads_per_s=15.0, ceiling_bytes_per_s=1e9)


@dataclass(frozen=True)
class Case:
    """So many processes at a store with these limits. `refuse`: it answers 503 above its request rate."""

    title: str
    processes: int
    service: Service
    refuse: bool = False


CASES = (
    Case("one connection's rate", 1, LIMITS),
    Case("the store's ceiling", 2, LIMITS),
    Case("the store's ceiling", 4, LIMITS),
    Case("the store's ceiling", 8, LIMITS),
    Case("the request rate", 4, SLOW_REQUESTS),
    Case("503 above the request rate", 4, SLOW_REQUESTS, refuse=True),
)


def compare(case: Case) -> dict[str, Any]:
    """Seconds of a save and of a load: measured, and predicted by the model."""
    runs = [_run(case) for _ in range(RANDOM_RUNS if case.refuse else 1)]
    real_save, real_load = (statistics.mean(each) for each in zip(*runs, strict=True))
    save, load = predicted(case)
    return {
        "title": case.title,
        "processes": case.processes,
        "save_s": real_save,
        "save_predicted_s": save,
        "load_s": real_load,
        "load_predicted_s": load,
    }


def predicted(case: Case) -> tuple[float, float]:
    """Seconds that the model gives for the save and the load of one case."""
    nbytes = TENSORS * TENSOR_BYTES
    cluster = Cluster(
        case.processes, ranks_per_node=1, nic_bytes_per_s=1e12, connections=OPTIONS.connections, start_spread_s=0.0
    )
    where = partitions(case.processes, nbytes, 1)
    latency = case.service.latency_s
    save, load = (
        statistics.mean(
            simulate(work, where, cluster, case.service, seed=seed, refuse=case.refuse).wall_s
            for seed in (SEEDS if case.refuse else SEEDS[:1])
        )
        for work in (save_work(nbytes, OPTIONS), load_work(nbytes, OPTIONS, chunks=CHUNKS))
    )
    return save + COMMIT_REQUESTS * latency, load + METADATA_REQUESTS * latency


def _run(case: Case) -> tuple[float, float]:
    context = multiprocessing.get_context("fork")
    with running_stub(case.service, refuse=case.refuse) as url:
        barrier, times = context.Barrier(case.processes), context.SimpleQueue()
        children = [context.Process(target=_rank, args=(rank, url, barrier, times)) for rank in range(case.processes)]
        for child in children:
            child.start()
        for child in children:
            child.join(TIMEOUT_S)
        late = [child for child in children if child.is_alive()]
        for child in late:
            child.kill()
        if late or any(child.exitcode for child in children):
            raise SystemExit("a process of the calibration failed")
        found = [times.get() for _ in children]
    saved = max(each[1] for each in found) - min(each[0] for each in found)
    loaded = max(each[3] for each in found) - min(each[2] for each in found)
    return saved, loaded


def _rank(rank: int, url: str, barrier: Any, times: Any) -> None:
    torch.set_num_threads(1)
    settings = {
        "key": "stub",
        "secret": "stub",
        "client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }
    state = {
        "model": {"weight": _filled(rank)},
        "optim": {"state": {f"moment{at}": _filled(rank + at) for at in range(1, TENSORS)}},
    }
    target = {
        "model": {"weight": _filled(-1)},
        "optim": {"state": {f"moment{at}": _filled(-1) for at in range(1, TENSORS)}},
    }
    warm = {"model": {"weight": torch.zeros(4)}}
    _save(warm, f"s3://stub/warm/{rank}", settings)
    _load(warm, f"s3://stub/warm/{rank}", settings)
    moments = []
    for work, subject in ((_save, state), (_load, target)):
        barrier.wait(TIMEOUT_S)
        moments.append(time.monotonic())
        work(subject, f"s3://stub/run/{rank}", settings)
        moments.append(time.monotonic())
    if not torch.equal(state["optim"]["state"]["moment1"], target["optim"]["state"]["moment1"]):  # type: ignore[index]
        raise SystemExit("what was loaded is not what was saved")
    times.put(moments)


def _save(state: dict[str, Any], url: str, settings: dict[str, Any]) -> None:
    writer = BucketWriter(url, storage_options=settings, transfer=OPTIONS, progress=False)
    dcp.save(state, storage_writer=writer, no_dist=True)


def _load(state: dict[str, Any], url: str, settings: dict[str, Any]) -> None:
    reader = BucketReader(url, storage_options=settings, transfer=OPTIONS, progress=False)
    dcp.load(state, storage_reader=reader, no_dist=True)


def _filled(value: int) -> torch.Tensor:
    return torch.full((TENSOR_BYTES // 4,), float(value))
