"""Orders for a helper in tests: shared memory with random bytes, objects of segments in it or elsewhere; its end."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bucketpoint.staging.pool import Arena
from bucketpoint.stores import open_store
from bucketpoint.transfer import Meter, ObjectSource, Progress, Segment, TransferOptions
from bucketpoint.transfer.helper.process import Upload

MIB = 1 << 20
OPTIONS = TransferOptions(part_bytes=5 * MIB, connections=3, single_put_bytes=MIB, max_inflight_bytes=16 * MIB)


def filled_arena(nbytes: int) -> Arena:
    arena = Arena(nbytes, shared=True)
    arena.memory.copy_(torch.frombuffer(bytearray(os.urandom(arena.nbytes)), dtype=torch.uint8))
    return arena


_EMPTY = Arena(0, shared=True)
"""The shared memory of orders that have no byte in it."""


def view_of(arena: Arena, start: int, nbytes: int) -> memoryview:
    """The arena's bytes as a save sends them. The arena lives as long as they do."""
    if not nbytes:
        return memoryview(b"")
    array: Any = (ctypes.c_ubyte * nbytes).from_address(arena.memory.data_ptr() + start)
    array.arena = arena
    return memoryview(array).cast("B")


def upload_of(
    url: str,
    sources: Sequence[ObjectSource],
    arena: Arena | None = None,
    *,
    storage_options: dict[str, Any] | None = None,
    options: TransferOptions = OPTIONS,
) -> Upload:
    store, _ = open_store(url, storage_options=storage_options)
    memory = (arena or _EMPTY).shared_memory
    assert memory is not None
    return Upload(store, url, pickle.dumps(storage_options or {}), sources, options, memory)


def whole(arena: Arena, key: str = "a/whole") -> ObjectSource:
    return ObjectSource(key, [Segment(arena.nbytes, view_of(arena, 0, arena.nbytes), block_nbytes=MIB)])


def meter(callback: Callable[[Progress], None] | None = None) -> Meter:
    return Meter("save", "x", 0, callback)


def has_ended(process: int) -> bool:
    """True once a process has ended, whether its parent has looked or not."""
    return _condition(Path(f"/proc/{process}/stat")) in "ZX"


def stop(process: int) -> None:
    """Stop a process, and wait until each of its threads has stopped: on a busy machine that takes a while."""
    os.kill(process, signal.SIGSTOP)
    threads = Path(f"/proc/{process}/task")
    wait_until(lambda: all(_condition(each / "stat") in "TX" for each in threads.iterdir()))


def _condition(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        # It has ended, a thread since its folder was listed.
        return "X"


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.02)
