"""A program that saves beside training by an upload process, for tests that start it in many ways or kill either.

It prints lines of JSON: once the upload is under way, the process ids of its helper and of a worker; or in the end,
for each rank, whether a process has uploaded, and whether it has ended with the writer.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import bucketpoint
from bucketpoint import BucketWriter, S3Writer, TransferOptions
from kit.servers import free_port

PROCESS = TransferOptions(background="process", part_bytes=5 << 20, connections=2, single_put_bytes=1 << 20)


def state(value: int, *, name: str = "weight", mib: int = 16) -> dict[str, Any]:
    return {"model": {name: torch.full((mib << 20,), value, dtype=torch.uint8)}, "step": value}


def save_until_the_end(url: str, end: str, options: str) -> None:
    writer = S3Writer(storage_options=json.loads(options), transfer=PROCESS)
    handle = bucketpoint.async_save(state(1), checkpoint_id=url, storage_writer=writer)
    while handle.progress is None:
        time.sleep(0.01)
    fork = 0
    if end == "fork":
        fork = os.fork()
        if not fork:
            # A worker of a data loader, which outlives a trainer that is killed.
            time.sleep(120)
            os._exit(0)
    print(json.dumps({"helper": writer.uploads.process_id, "fork": fork}), flush=True)
    if end == "return":
        return
    if end == "raise":
        raise ZeroDivisionError
    # Until it is killed.
    handle.result()


def save(url: str) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    writer = BucketWriter(transfer=TransferOptions(background="process"))
    # More than the 64 MB that a container has in /dev/shm by default.
    saved = {"model": state(rank + 1, name=f"weight of rank {rank}", mib=96)["model"]}
    bucketpoint.async_save(saved, checkpoint_id=url, storage_writer=writer).result()
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


def main(url: str, how: str, *options: str) -> None:
    if how == "spawn":
        torch.multiprocessing.start_processes(save_as_rank, (url, free_port()), nprocs=2, start_method="spawn")
    elif how == "notebook":
        asyncio.run(save_in_a_cell(url))
    elif options:
        save_until_the_end(url, how, *options)
    else:
        save(url)


if __name__ == "__main__":
    main(*sys.argv[1:])
