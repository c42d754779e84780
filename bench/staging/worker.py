"""Measures what staging costs the thread that trains. Runs one scenario in a process of its own; no orchestration.

    python -m bench.staging.worker blocked '{"tensors": 2000, "nbytes": 1000000000, "rounds": 15, "seldom": 5}'

Each measurement is one JSON line on standard output: contender, op, where, round, and figures. Contenders take turns
within one process, in an order that shifts by one each round, and every upload has ended before the next turn.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import staging as torch_staging

from bench import state as states
from bench.lines import in_child, speaker
from bench.resident import memory as memory_of
from bench.sink import sink_writer

Found = Iterator[dict[str, Any]]
SETTLE_S = 0.03
"""A save's future is done a moment before its threads and its memory are gone."""

SELDOM = ("torch", "s3torchconnector")
"""No threshold needs them, and on new memory for each save they take most of the time."""


class Memcpy:
    """The same bytes, copied in one stretch into memory that has been written before."""

    def __init__(self, nbytes: int) -> None:
        self._source = torch.empty(nbytes, dtype=torch.uint8).fill_(1)
        self._target = torch.empty(nbytes, dtype=torch.uint8).fill_(2)
        self._pool = ThreadPoolExecutor(torch.get_num_threads())

    def torch(self) -> float:
        begun = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - begun

    def threads(self) -> float:
        count, nbytes = torch.get_num_threads(), self._source.nbytes
        edges = [nbytes * index // count for index in range(count + 1)]
        target, source = self._target.data_ptr(), self._source.data_ptr()

        def copy(index: int) -> None:
            # A foreign call: the interpreter's lock is released.
            low, high = edges[index], edges[index + 1]
            ctypes.memmove(target + low, source + low, high - low)

        begun = time.perf_counter()
        for done in [self._pool.submit(copy, index) for index in range(count)]:
            done.result()
        return time.perf_counter() - begun


class _NoUpload:
    """Takes the place of a writer's upload, and leaves its staging as it is."""

    def reset(self, checkpoint_id: Any = None) -> None: ...
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...
    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        done: Any = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Any, results: Any) -> None: ...
    def storage_meta(self) -> None:
        return None


class _TorchWriter(_NoUpload, dcp.FileSystemWriter):
    pass


def _s3torch_writer() -> Any:
    from s3torchconnector.dcp import S3StorageWriter

    class Writer(_NoUpload, S3StorageWriter):
        pass

    return Writer("us-east-1", "s3://staged/only")


def _blocked(state: dict[str, Any], **arguments: Any) -> float:
    """How long `async_save` keeps the caller. Returns when the save has ended and let go."""
    begun = time.perf_counter()
    upload = dcp.async_save(state, no_dist=True, **arguments)
    blocked = time.perf_counter() - begun
    upload.result()
    del upload
    time.sleep(SETTLE_S)
    return blocked


def _turns(
    contenders: dict[str, Callable[[], dict[str, float]]], rounds: int, op: str, where: str, seldom: int = 0
) -> Found:
    for round_ in range(-1, rounds):
        names = [name for name in contenders if name not in SELDOM or -1 < round_ < seldom]
        shift = round_ % len(names)
        for name in [*names[shift:], *names[:shift]]:
            gc.collect()
            found = contenders[name]()
            # Round -1 allocates: what is measured is every save after the first.
            if round_ >= 0:
                yield {"contender": name, "op": op, "where": where, "round": round_, **found}


def blocked(tensors: int, nbytes: int, rounds: int, seldom: int) -> Found:
    """Blocked time of `async_save` after the first one, beside plain copies of the same bytes."""
    state = states.equal_tensors(tensors, nbytes)
    memcpy = Memcpy(states.nbytes(state))
    ours, borrowed, stock = sink_writer(), sink_writer(), _TorchWriter("unused")
    reused = torch_staging.DefaultStager(torch_staging.StagingOptions(False, False, False, False))
    calls: dict[str, Callable[[], float]] = {
        "memcpy": memcpy.torch,
        "memcpy-threads": memcpy.threads,
        "bucketpoint": lambda: _blocked(state, storage_writer=ours),
        "stager-reused": lambda: _blocked(state, storage_writer=borrowed, async_stager=reused),
        "torch": lambda: _blocked(state, storage_writer=stock),
    }
    try:
        theirs = _s3torch_writer()
        calls["s3torchconnector"] = lambda: _blocked(state, storage_writer=theirs)
    except Exception as error:  # noqa: BLE001 (reported)
        yield {"contender": "s3torchconnector", "op": "blocked", "where": f"{tensors}", "round": 0, "error": str(error)}
    timed = {name: (lambda call=call: {"seconds": call()}) for name, call in calls.items()}
    yield from _turns(timed, rounds, "blocked", f"{tensors}", seldom)
    ours.close()


def beside(tensors: int, nbytes: int, rounds: int) -> Found:
    """Asynchronous staging: how long the caller is kept, and when the copy is complete."""
    from bucketpoint import StagingOptions

    state = states.equal_tensors(tensors, nbytes)
    memcpy = Memcpy(states.nbytes(state))
    writer = sink_writer(staging=StagingOptions(use_async_staging=True))

    def ours() -> dict[str, float]:
        return _asynchronous_save(state, writer)

    contenders = {"memcpy": lambda: {"seconds": memcpy.torch()}, "bucketpoint": ours}
    yield from _turns(contenders, rounds, "beside", f"{tensors}")
    writer.close()


def _asynchronous_save(state: dict[str, Any], writer: Any) -> dict[str, float]:
    """How long the caller is kept, and when the copy is complete, in seconds; the upload has ended on return."""
    begun = time.perf_counter()
    response: Any = dcp.async_save(state, storage_writer=writer, no_dist=True)
    kept = time.perf_counter() - begun
    response.staging_completion.result()
    staged = time.perf_counter() - begun
    response.upload_completion.result()
    del response
    time.sleep(SETTLE_S)
    return {"seconds": kept, "staged_s": staged}


def first(tensors: int, nbytes: int, rounds: int) -> Found:
    """The first save of a process, each in a fork of its own."""
    # OpenMP's threads do not survive a fork: the parent must never start them.
    torch.set_num_threads(1)
    state = states.equal_tensors(tensors, nbytes)

    def ours(*, prefault: bool) -> float:
        writer = sink_writer()
        if prefault:
            writer.prefault(state)
        return _blocked(state, storage_writer=writer)

    def theirs() -> float:
        stager = torch_staging.DefaultStager(torch_staging.StagingOptions(False, False, False, False))
        return _blocked(state, storage_writer=sink_writer(), async_stager=stager)

    kinds: dict[str, Callable[[], float]] = {
        "bucketpoint-prefault": lambda: ours(prefault=True),
        "bucketpoint": lambda: ours(prefault=False),
        "stager-reused": theirs,
    }
    for round_ in range(rounds):
        for name, call in kinds.items():
            found = in_child(lambda call=call: _after_memcpy(call, states.nbytes(state)))
            yield {"contender": name, "op": "first", "where": f"{tensors}", "round": round_, **found}


def _after_memcpy(call: Callable[[], float], nbytes: int) -> dict[str, Any]:
    torch.set_num_threads(os.cpu_count() or 1)
    memcpy = Memcpy(nbytes)
    plain = statistics.median(memcpy.torch() for _ in range(5))
    del memcpy
    return {"seconds": call(), "memcpy_s": plain}


def memory(tensors: int, nbytes: int, saves: int) -> Found:
    """Bytes held for staging, resident memory and descriptors over many saves, and what `close()` returns."""
    from bucketpoint import Stager

    state = states.equal_tensors(tensors, nbytes)
    stager, writer = Stager(), sink_writer()
    before = memory_of()["anonymous"]
    seen = []
    # Two saves more than are counted: threads and imports are made on first use.
    for _ in range(saves + 2):
        _blocked(state, storage_writer=writer, async_stager=stager)
        gc.collect()
        seen.append((memory_of()["anonymous"], _descriptors()))
    staged = stager.staged_bytes
    stager.close()
    gc.collect()
    counted = seen[2:]
    yield {
        "contender": "bucketpoint",
        "op": "memory",
        "where": f"{tensors}",
        "round": 0,
        "state_bytes": states.nbytes(state),
        "tensors": tensors,
        "saves": saves,
        "staged_bytes": staged,
        "resident_before": before,
        "resident": [resident for resident, _ in counted],
        "descriptors": [descriptors for _, descriptors in counted],
        "resident_after_close": memory_of()["anonymous"],
        "descriptors_after_close": _descriptors(),
    }


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def cuda(tensors: int, nbytes: int, rounds: int) -> Found:
    """Staging from a device beside one pinned copy of the same bytes, and what asynchronous staging blocks."""
    from bucketpoint import Stager, StagingOptions

    place = {"op": "cuda", "where": f"{tensors}"}
    if not torch.cuda.is_available():
        yield {"contender": "bucketpoint", **place, "round": 0, "not_run": "no CUDA device"}
        return
    # Nested, as a model's state is: DCP's async_save takes 30 us for each key at the top.
    state = states.equal_tensors(tensors, nbytes, "cuda")
    flat = torch.ones(states.nbytes(state), dtype=torch.uint8, device="cuda")
    pinned = torch.empty(flat.nbytes, dtype=torch.uint8, pin_memory=True)
    stager, writer = Stager(), sink_writer(staging=StagingOptions(use_async_staging=True))

    def plain() -> dict[str, float]:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        pinned.copy_(flat, non_blocking=True)
        torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - begun}

    def staging() -> dict[str, float]:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        staged: Any = stager.stage(state)
        taken = time.perf_counter() - begun
        del staged
        return {"seconds": taken}

    def asynchronous() -> dict[str, float]:
        torch.cuda.synchronize()
        return _asynchronous_save(state, writer)

    def theirs() -> dict[str, float]:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        # Each time a new one: in torch 2.11 a stager can stage once.
        peer = torch_staging.DefaultStager(torch_staging.StagingOptions(True, True, True, True))
        copying: Any = peer.stage(state)
        copying.result()
        taken = time.perf_counter() - begun
        peer.close()
        return {"seconds": taken}

    turns = {"memcpy": plain, "bucketpoint": staging, "bucketpoint-async": asynchronous, "torch-stager": theirs}
    for found in _turns(turns, rounds, "cuda", f"{tensors}"):
        yield {**found, "nbytes": flat.nbytes}
    held = memory_of()["anonymous"]
    stager.close()
    writer.close()
    gc.collect()
    freed = held - memory_of()["anonymous"]
    yield {"contender": "bucketpoint", **place, "op": "cuda-close", "round": 0, "held": held, "freed": freed}


SCENARIOS: dict[str, Callable[..., Found]] = {
    "blocked": blocked,
    "beside": beside,
    "first": first,
    "memory": memory,
    "cuda": cuda,
}


def main() -> None:
    say = speaker()
    for found in SCENARIOS[sys.argv[1]](**json.loads(sys.argv[2])):
        say(found)


if __name__ == "__main__":
    main()
