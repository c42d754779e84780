"""A training step of about 10 ms on the GPU, alone, beside a copy into host memory, and beside a whole save."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import staging as torch_staging

import bucketpoint
from bench import state as states
from bench.staging.steps import Trainer
from bucketpoint import S3Writer, Stager, StagingOptions, TransferOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GOAL_S = 0.010
ROUNDS = 3


class DeviceTrainer(Trainer):
    """Matrix products, queued together and waited for at the end of each step."""

    def __init__(self) -> None:
        size = 8192 if DEVICE == "cuda" else 512
        make = {"dtype": torch.bfloat16 if DEVICE == "cuda" else torch.float32, "device": DEVICE}
        self._left, self._right, self._out = (torch.randn(size, size, **make) for _ in range(3))
        self._count = 1
        self.step()
        self._count = max(1, round(GOAL_S / min(self.step() for _ in range(20))))

    def step(self) -> float:
        begun = time.perf_counter()
        for _ in range(self._count):
            torch.mm(self._left, self._right, out=self._out)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun


def _figures(taken: list[float]) -> str:
    ordered = sorted(taken)
    return (
        f"mean {statistics.mean(taken) * 1e3:.2f} ms, p50 {ordered[len(ordered) // 2] * 1e3:.2f}, "
        f"p99 {ordered[int(0.99 * (len(ordered) - 1))] * 1e3:.2f}, max {ordered[-1] * 1e3:.1f}, {len(taken)} steps"
    )


def _savers(state: dict[str, Any]) -> dict[str, Callable[[str], Any]]:
    def ours(background: Any, beside: bool) -> Callable[[str], Any]:
        writer = S3Writer(
            progress=False,
            transfer=TransferOptions(background=background),
            staging=StagingOptions(use_async_staging=beside),
        )
        return lambda url: bucketpoint.async_save(state, url, storage_writer=writer)

    savers = {
        "bucketpoint": ours("auto", False),
        "bucketpoint, copy beside": ours("auto", True),
        "bucketpoint, threads": ours("thread", False),
    }
    try:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageWriter
    except ImportError:
        return savers

    def theirs(url: str) -> Any:
        writer = S3StorageWriter(
            os.environ["AWS_REGION"], url, s3client_config=S3ClientConfig(force_path_style=True), overwrite=True
        )
        # A stager for each save: torch closes it after the save, and a closed one cannot stage again.
        stager = torch_staging.DefaultStager(torch_staging.StagingOptions(True, True, True, True))
        begun = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
        return getattr(begun, "upload_completion", begun)

    return {**savers, "s3torchconnector, DefaultStager": theirs}


def main() -> None:
    nbytes = int(sys.argv[1])
    trainer, state = DeviceTrainer(), states.equal_tensors(1000, nbytes, DEVICE)
    idle = trainer.steps(_after(2.0))
    mean = statistics.mean(idle)
    print(f"idle: {_figures(idle)}", flush=True)
    stager = Stager(StagingOptions(use_async_staging=True))
    for round_ in range(4):
        begun = time.perf_counter()
        copying: Any = stager.stage(state)
        called = time.perf_counter() - begun
        taken = trainer.steps(copying.done)
        lasted = time.perf_counter() - begun
        if round_:
            print(
                f"beside a copy of {nbytes / 1e9:.1f} GB: call {called * 1e3:.1f} ms, copy {lasted:.3f} s, "
                f"{statistics.mean(taken) / mean:.3f} x; {_figures(taken)}",
                flush=True,
            )
        del copying
    stager.close()
    for name, save in _savers(state).items():
        for round_ in range(ROUNDS):
            gc.collect()
            begun = time.perf_counter()
            saving = save(f"s3://device/steps/{name.replace(' ', '-').replace(',', '')}-{round_}")
            blocked = time.perf_counter() - begun
            taken = trainer.steps(saving.done)
            saving.result()
            lasted = time.perf_counter() - begun
            lost = blocked + sum(taken) - len(taken) * mean
            print(
                f"{name}{' (first)' if not round_ else ''}: blocked {blocked * 1e3:.1f} ms, save {lasted:.2f} s, "
                f"{statistics.mean(taken) / mean:.3f} x, lost {lost / nbytes * 1e9:.4f} s/GB; {_figures(taken)}",
                flush=True,
            )
            del saving
            for found in Path(os.environ["BENCH_DATA"]).glob("tls/device/*"):
                shutil.rmtree(found, ignore_errors=True)


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


if __name__ == "__main__":
    main()
