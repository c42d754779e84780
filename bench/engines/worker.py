"""A process that saves and loads with one engine or another, each time in a forked child. No orchestration here.

Reads one JSON command a line on standard input and answers with one JSON line.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from typing import Any

import boto3  # noqa: F401  (in the parent, so that no child's time has the import)
import s3torchconnector.dcp  # noqa: F401
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint
from bench.contenders import Setting, _load_s3torch, _save_s3torch
from bench.lines import answer_each, speaker
from bench.resident import forget_peak, memory
from bucketpoint.stores.s3 import crt as s3_crt
from bucketpoint.transfer.options import TransferOptions

TENSORS, TENSOR_BYTES = 16, 16 << 20
PEER = "s3torchconnector"


def state(*, blank: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    numbers = TENSOR_BYTES // 4
    if blank:
        return {f"w{index}": torch.full((numbers,), -1.0) for index in range(TENSORS)}
    return {f"w{index}": torch.rand(numbers, generator=generator) for index in range(TENSORS)}


def save(name: str, connections: int, url: str, tensors: dict[str, Any]) -> None:
    if name == PEER:
        _save_s3torch(tensors, Setting(url))
        return
    writer = bucketpoint.S3Writer(url, **_options(name, connections))
    dcp.save(tensors, storage_writer=writer, no_dist=True)


def load(name: str, connections: int, url: str, tensors: dict[str, Any]) -> None:
    if name == PEER:
        _load_s3torch(tensors, Setting(url))
        return
    reader = bucketpoint.S3Reader(url, **_options(name, connections))
    dcp.load(tensors, storage_reader=reader, no_dist=True)


def _options(name: str, connections: int) -> dict[str, Any]:
    # Parts of 8 MiB: there are to be enough of them for the most connections.
    transfer = TransferOptions(connections=connections, part_bytes=8 << 20)
    return {"transfer": transfer, "storage_options": {"engine": name, "connections": connections}}


def main() -> None:
    say = speaker()
    # OpenMP's threads do not survive a fork: the parent must never start them.
    torch.set_num_threads(1)
    full, blank = state(), state(blank=True)
    answer_each(say, lambda command: _measure(command, full, blank), lambda _: ())


def _measure(command: dict[str, Any], full: dict[str, Any], blank: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(command["env"])
    name, connections, url = command["contender"], command["connections"], command["url"]
    # Large enough for the engine that is named: what a process makes once is made before the clock starts.
    little = {"w": torch.ones(s3_crt.LARGE_BYTES)}
    save(name, connections, f"{url}-warm", little)
    load(name, connections, f"{url}-warm", little)
    # The pages of the destination are there before the clock starts: whose memory it is, is not the question.
    target = full if command["op"] == "save" else {key: value.clone() for key, value in blank.items()}
    gc.collect()
    before = memory()
    forget_peak()
    cpu, start = _cpu(), time.monotonic()
    (save if command["op"] == "save" else load)(name, connections, url, target)
    wall, used = time.monotonic() - start, _cpu()
    after = memory()
    answer = {
        "wall_s": wall,
        "user_s": used[0] - cpu[0],
        "system_s": used[1] - cpu[1],
        "needed_bytes": TENSORS * TENSOR_BYTES,
        "peak_bytes": max(after["VmHWM"] - after["RssFile"] - before["anonymous"], 0),
    }
    if command["op"] == "load" and any(not torch.equal(target[key], full[key]) for key in full):
        answer["error"] = "tensors differ after the load"
    return answer


def _cpu() -> tuple[float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


if __name__ == "__main__":
    main()
