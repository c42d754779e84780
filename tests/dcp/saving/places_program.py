"""A program that saves by an upload process, for tests that start it in the ways in which people start training.

It prints a line of JSON for each rank: whether a process has uploaded, and whether it has ended with the writer.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing

import bucketpoint
from bucketpoint import BucketWriter, TransferOptions
from kit.servers import free_port

NBYTES = 96 << 20
"""More than the 64 MB that a container has in /dev/shm by default."""


def save(url: str) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = {"model": {f"weight of rank {rank}": torch.full((NBYTES,), rank + 1, dtype=torch.uint8)}}
    writer = BucketWriter(transfer=TransferOptions(background="process"))
    bucketpoint.async_save(state, checkpoint_id=url, storage_writer=writer).result()
    helper = writer.uploads.process_id
    writer.close()
    ended = helper is not None and not os.path.exists(f"/proc/{helper}")
    sys.stdout.write(json.dumps({"rank": rank, "helper": helper is not None, "ended": ended}) + "\n")
    sys.stdout.flush()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def save_as_rank(rank: int, url: str, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    save(url)


async def save_in_a_cell(url: str) -> None:
    """As in a notebook: code without a file, while a loop of events runs."""
    save(url)


def main(url: str, how: str) -> None:
    if how == "spawn":
        torch.multiprocessing.start_processes(save_as_rank, (url, free_port()), nprocs=2, start_method="spawn")
    elif how == "notebook":
        asyncio.run(save_in_a_cell(url))
    else:
        save(url)


if __name__ == "__main__":
    main(*sys.argv[1:])
