"""What the coordinator of a save spends on each item: the real planner, writer and metadata, all ranks in one process.

DCP's calls are made in DCP's order, for all ranks one after the other; what DCP would send is pickled and unpickled as
it would be. Only what rank 0 does for all is timed, in CPU seconds, on one thread of torch's as `torchrun` sets it:
idle ones that wait for more work would be counted too.
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter, SavePlanner, TransferOptions
from bucketpoint.format.metadata.codec import decode_metadata
from sim.copied_ranks import CopiedPlanner, CopiedWriter, FirstPlanner
from sim.layouts import Layout, state_of

T = TypeVar("T")

OURS, STOCK = "bucketpoint", "DCP"

PLAYED_RANKS = 100
"""In larger jobs all ranks but the first are copies of it."""


class Ledger(dict[str, float]):
    """CPU seconds and bytes, by what they were spent on."""

    def timed(self, name: str, work: Callable[..., T], *arguments: Any) -> T:
        began = time.process_time()
        result = work(*arguments)
        self[name] = self.get(name, 0.0) + time.process_time() - began
        return result


def measure(layout: Layout, who: str) -> dict[str, Any]:
    """Two saves of the same state and a look at the metadata, in a process of its own."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(layout, who, send))
    child.start()
    send.close()
    try:
        found: dict[str, Any] = receive.recv()
    except EOFError:
        raise SystemExit(f"the measurement of {layout} ended without a result: out of memory?") from None
    finally:
        child.join()
    return found


def _child(layout: Layout, who: str, send: Any) -> None:
    torch.set_num_threads(1)
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="simulate-", dir=shm if shm.is_dir() else None) as folder:
        send.send(_measure(layout, who, Path(folder)))
    send.close()


def _measure(layout: Layout, who: str, folder: Path) -> dict[str, Any]:
    ranks = range(layout.ranks)
    if who == OURS and layout.ranks > PLAYED_RANKS:
        first = FirstPlanner()
        writers: list[Any] = [_writer(who), *map(CopiedWriter, ranks[1:])]
        planners: list[Any] = [first, *[CopiedPlanner(first, layout, rank) for rank in ranks[1:]]]
        states = [state_of(layout, 0)] * layout.ranks
    else:
        writers = [_writer(who) for _ in ranks]
        planners = [SavePlanner() if who == OURS else dcp.DefaultSavePlanner() for _ in ranks]
        states = [state_of(layout, rank) for rank in ranks]
    before = _peak_bytes()
    saves = []
    for number in range(2):
        url = folder / f"step-{number}"
        saves.append(_save(writers, planners, states, url))
        if number == 0:
            first_peak = _peak_bytes()
        path = url / ".metadata"
        index = path.stat().st_size
        extra = _small_files(url)
        if number == 0:
            shutil.rmtree(url)
    ledger = Ledger()
    del writers, planners
    peak = _peak_bytes()
    # All of `.metadata`: `sim/index.py` measures the index.
    read: Any = (lambda: decode_metadata(path.read_bytes())) if who == OURS else dcp.FileSystemReader(url).read_metadata
    metadata = ledger.timed("read", read)
    items = len(metadata.storage_data)
    return {
        "who": who,
        "model": layout.model.name,
        "ranks": layout.ranks,
        "replicas": layout.replicas,
        "gathered": layout.gathered,
        "kept": items,
        "first": saves[0],
        "second": saves[1],
        "read_s": ledger["read"],
        "metadata_bytes": index,
        "other_index_bytes": extra,
        "memory_bytes": first_peak - before,
        "peak_bytes": peak,
    }


def _writer(who: str) -> Any:
    if who == OURS:
        return BucketWriter(progress=False, transfer=TransferOptions(connections=1))
    return dcp.FileSystemWriter("unused", sync_files=False)


def _save(writers: list[Any], planners: list[Any], states: list[dict[str, Any]], url: Path) -> dict[str, Any]:
    """One `dcp.save` of all ranks, with what rank 0 spends on it."""
    ledger, sent = Ledger(), {}
    asked = []
    began = time.process_time()
    for rank, (writer, planner, state) in enumerate(zip(writers, planners, states, strict=True)):
        writer.reset(str(url))
        planner.set_up_planner(state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        asked.append(_sent(writer.prepare_local_plan(planner.create_local_plan())))
    ranks_s = time.process_time() - began
    # The garbage collector of a real coordinator does not walk what other ranks hold.
    gc.freeze()
    sent["plans_up"] = sum(map(len, asked))
    plans = ledger.timed("gather", _arrived, asked)
    del asked
    plans, metadata = ledger.timed("plan", planners[0].create_global_plan, plans)
    plans = ledger.timed("plan", writers[0].prepare_global_plan, plans)
    dealt = ledger.timed("scatter", _sent_each, plans)
    del plans
    sent["plans_down"] = sum(map(len, dealt))
    began = time.process_time()
    results = []
    for writer, planner in zip(writers, planners, strict=True):
        plan = planner.finish_plan(pickle.loads(dealt.pop(0)))
        results.append(_sent(writer.write_data(plan, planner).value()))
    ranks_s += time.process_time() - began
    gc.freeze()
    sent["results"] = sum(map(len, results))
    found = ledger.timed("results", _arrived, results)
    del results
    ledger.timed("finish", writers[0].finish, metadata, found)
    sent["metadata_down"] = len(ledger.timed("broadcast", _sent, metadata))
    return {"cpu_s": dict(ledger), "sent": sent, "ranks_cpu_s": ranks_s}


def _sent(value: Any) -> bytes:
    return pickle.dumps(value)


def _sent_each(values: list[Any]) -> list[bytes]:
    return [pickle.dumps(value) for value in values]


def _arrived(sent: list[bytes]) -> list[Any]:
    return [pickle.loads(data) for data in sent]


def _small_files(folder: Path) -> int:
    """Bytes of everything that is neither data nor `.metadata`."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files if path.suffix != ".distcp" and path.name != ".metadata")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
