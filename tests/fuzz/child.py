"""Program: feed damaged inputs to readers, in a process that may die of them.

Arguments: a file of three numbers (job, input, failures) that outlives the process, the jobs as JSON ([target, first,
count]), and the seed. Each failure is a line of JSON on standard output.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import random
import resource
import signal
import struct
import sys
import time
from pathlib import Path

from bucketpoint.errors import BucketpointError
from fuzz.mutations import mutated
from fuzz.readers import TARGETS

SECONDS, SECONDS_OF_BYTES = 1.0, 64 << 10
"""A second of CPU time for so many bytes of input."""

MULTIPLE, FREE_BYTES = 8, 24 << 20
"""What the process may grow by: a multiple of the input, and what small Python objects take beside it."""

_STUCK_SECONDS = 20.0
_SPACE_BYTES = 1 << 30
_PROGRESS = struct.Struct("<2Q")


def input_of(name: str, seed: int, number: int) -> bytes:
    """The same input for the same numbers, in every process."""
    return mutated(random.Random(f"{seed}:{name}:{number}"), TARGETS[name].seeds)


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _judged(name: str, data: bytes) -> str | None:
    """What is wrong with how an input is read."""
    signal.setitimer(signal.ITIMER_PROF, _STUCK_SECONDS)
    before, started = _resident(), time.process_time()
    error = None
    try:
        TARGETS[name].read(data)
    except BucketpointError:
        pass
    except BaseException as raised:  # noqa: BLE001 - all of them are failures
        error = f"{type(raised).__name__}: {raised}"[:300]
    took, grown = time.process_time() - started, _resident() - before
    if error is None and took > SECONDS * max(1.0, len(data) / SECONDS_OF_BYTES):
        error = f"time-out: {took:.2f} s"
    if error is None and grown > MULTIPLE * len(data) + FREE_BYTES:
        error = f"allocation: {grown} bytes"
    return error


def main(place: str, jobs: list[tuple[str, int, int]], seed: int) -> None:
    for name, _, _ in jobs:
        for data in TARGETS[name].seeds:  # whatever they import, they import now
            with contextlib.suppress(BucketpointError):
                TARGETS[name].read(data)
    gc.collect()
    space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (space + _SPACE_BYTES, resource.RLIM_INFINITY))
    with open(place, "r+b") as file, mmap.mmap(file.fileno(), _PROGRESS.size) as progress:
        for number, (name, first, count) in enumerate(jobs):
            for index in range(first, first + count):
                _PROGRESS.pack_into(progress, 0, number, index)
                data = input_of(name, seed, index)
                said = _judged(name, data)
                if said is not None:
                    print(json.dumps([name, index, len(data), said]), flush=True)
    signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
