"""Exports to safetensors, and loads from them, by four ranks beside a save and a load of the same bytes (MinIO).

`PYTHONPATH=tests:tools:. python -m bench.safetensors_export [MB]` prints one JSON object a measurement.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import get_minio
from bench.resident import forget_peak, memory
from bucketpoint import BucketReader, BucketWriter
from bucketpoint.convert import detect, export_safetensors, pipeline
from bucketpoint.convert.source import SourceBytes
from bucketpoint.transfer import TransferOptions
from dcp.ranks import Ranks
from kit.servers import minio
from transfer.wrappers import CountingStore

WORLD, TENSORS, ROUNDS = 4, 32, 5
_stores: list[CountingStore] = []


def _state(nbytes: int, fill: float) -> dict[str, Any]:
    """Tensors of equal size, of which each rank has a part of the rows."""
    mesh, columns = init_device_mesh("cpu", (WORLD,)), 1024
    rows = nbytes // TENSORS // columns // 4 // WORLD
    parts = [torch.full((rows, columns), fill + number) for number in range(TENSORS)]
    return {f"layers.{number}.w": DTensor.from_local(part, mesh, [Shard(0)]) for number, part in enumerate(parts)}


def _counted(store: Any) -> CountingStore:
    _stores.append(CountingStore(store))
    return _stores[-1]


class _Source(SourceBytes):
    def __init__(self, store: Any, options: TransferOptions) -> None:
        super().__init__(_counted(store), options)


def work(rank: int, world: int, environment: dict[str, str], what: str, url: str, nbytes: int, shard_bytes: int) -> Any:
    """Carry one operation out on a rank; return seconds, bytes read and written, and memory above what it held."""
    os.environ.update(environment)
    state = _state(nbytes, 1.0 if what == "save" else 0.0) if what != "export" else {}
    original = pipeline.open_place
    detect.SourceBytes = _Source  # type: ignore[misc]
    pipeline.open_place = lambda place: (_counted(original(place)[0]), original(place)[1])
    _stores.clear()
    dist.barrier()
    forget_peak()
    before, began, read = memory()["anonymous"], time.monotonic(), 0
    if what == "save":
        dcp.save(state, checkpoint_id=url, storage_writer=BucketWriter(overwrite=True))
    elif what == "export":
        export_safetensors(url, f"{url}-{shard_bytes}", shard_bytes=shard_bytes, overwrite=True)
    elif what == "load" or rank == 1:
        # Of four ranks' rows, a quarter is what one rank loads, here alone.
        reader = BucketReader()
        dcp.load(state, checkpoint_id=url, storage_reader=reader, no_dist=what == "quarter")
        read = reader.stats.read_bytes if reader.stats is not None else 0
        assert all(float(part.to_local()[-1, -1]) == 1 + number for number, part in enumerate(state.values()))
    seconds, after = time.monotonic() - began, memory()
    pipeline.open_place = original
    read += sum(store.received for store in _stores)
    return seconds, read, sum(store.sent for store in _stores), after["VmHWM"] - before - after["RssFile"]


def main(nbytes: int) -> None:
    """Print the walls of three rounds; bytes read and written over the bytes; memory of the rank that takes most."""
    binary = get_minio.find()
    assert binary is not None, "run `make minio`"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, minio(binary, data=Path(folder)) as server:
        root, ranks = f"s3://{server.make_bucket()}/run", Ranks(WORLD)
        walls: dict[str, list[float]] = {}
        figures: dict[str, Any] = {}
        one, five = 2 * nbytes, -(-TENSORS // 5) * nbytes // TENSORS
        steps = [("save", root, 0), ("load", root, 0), ("export", root, one), ("export", root, five)]
        steps += [("load", f"{root}-{five}", 0), ("quarter", root, 0), ("quarter", f"{root}-{five}", 0)]
        for _ in range(ROUNDS):
            for what, url, shard_bytes in steps:
                label = what + (f" to {'one file' if shard_bytes == one else 'five files'}" if shard_bytes else "")
                label += " of safetensors" if url != root else ""
                done = ranks.run(work, dict(server.env), what, url, nbytes, shard_bytes)
                walls.setdefault(label, []).append(max(seconds for seconds, *_ in done))
                needed = nbytes // WORLD if what == "quarter" else nbytes
                figures[label] = {
                    "read": round(sum(read for _, read, *_ in done) / needed, 4),
                    "written": round(sum(sent for _, _, sent, _ in done) / nbytes, 4),
                    "memory_mb": round(max(peak for *_, peak in done) / 1e6),
                }
        ranks.close()
    for label, seconds in walls.items():
        print(json.dumps({"what": label, "wall_s": [round(wall, 2) for wall in seconds], **figures[label]}))


if __name__ == "__main__":
    main(int(sys.argv[1] if len(sys.argv) > 1 else 1000) * 1_000_000)
