"""Compares a save through torch_checkpointing's storage with one of our DCP writer: the same bytes, by turns, one rank.

Arguments: a URL with room for the checkpoints, MiB of state (default 512), and rounds (default 5).
Needs torch_checkpointing; the store's endpoint and keys come from the environment.
"""

from __future__ import annotations

import statistics
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch_checkpointing import CheckpointManager

import bucketpoint
from bucketpoint.integrations.torch_checkpointing import BucketStorageConfig

MIB = 1 << 20


def timed(save: Callable[[], Any]) -> float:
    """Return the seconds that a save took."""
    begun = time.perf_counter()
    save()
    return time.perf_counter() - begun


def main(url: str, mib: int = 512, rounds: int = 5) -> None:
    """Save by turns and print the medians and their ratio."""
    root = f"{url.rstrip('/')}/{uuid.uuid4().hex}"
    count = 16
    model = {f"layer.{number}": torch.randn(mib * MIB // 4 // count) for number in range(count)}
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = BucketStorageConfig(f"{root}/tc")
    manager = config.build()
    writer = bucketpoint.BucketWriter()
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds + 1):
        for value in model.values():
            value.add_(1)
        dcp = timed(
            lambda number=number: torch.distributed.checkpoint.save(  # type: ignore[misc]
                {"model": model}, checkpoint_id=f"{root}/dcp/step-{number}", storage_writer=writer
            )
        )
        storage = timed(lambda number=number: manager.save(f"step-{number}", {"model": model}))  # type: ignore[misc]
        # The first round opens connections.
        if number:
            ours.append(dcp)
            theirs.append(storage)
            print(f"round {number}: DCP {mib / dcp:.0f} MiB/s, torch_checkpointing {mib / storage:.0f} MiB/s")
    first, second = statistics.median(ours), statistics.median(theirs)
    print(f"median: DCP {mib / first:.0f} MiB/s, torch_checkpointing {mib / second:.0f} MiB/s, {first / second:.2f} x")
    manager.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
