"""A training loop on random numbers with asynchronous saves beside it. Runs one contender in a process of its own.

Reads one JSON command a line and answers with one JSON line. A step is 200 small operations, some plain Python and one
large matrix product, with torch's own number of threads.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from bench import gil
from bench import state as states
from bench.lines import commands, speaker

SMALL_OPS, PYTHON_LOOPS, MATRIX = 200, 20_000, 1024
SETTLE_S = 0.3


class Trainer:
    """One step at a time."""

    def __init__(self) -> None:
        self._small = torch.ones(64)
        self._left, self._right = torch.ones(MATRIX, MATRIX), torch.ones(MATRIX, MATRIX)
        self._out = torch.empty(MATRIX, MATRIX)

    def step(self) -> float:
        begun = time.perf_counter()
        small = self._small
        for _ in range(SMALL_OPS // 2):
            small = small * 1.0001 + 0.0001
        total = 0
        for index in range(PYTHON_LOOPS):
            total += index & 7
        torch.mm(self._left, self._right, out=self._out)
        return time.perf_counter() - begun

    def steps(self, until: Callable[[], bool]) -> list[float]:
        taken = [self.step()]
        while not until():
            taken.append(self.step())
        return taken


def _bucketpoint() -> Callable[[Any, str], Future[Any]]:
    from bucketpoint import S3Writer

    writer = S3Writer(progress=False)

    def save(state: Any, url: str) -> Future[Any]:
        return _begun(dcp.async_save(state, checkpoint_id=url, storage_writer=writer, no_dist=True))

    return save


def _s3torchconnector() -> Callable[[Any, str], Future[Any]]:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageWriter

    def save(state: Any, url: str) -> Future[Any]:
        # Path-style because the server is an IP address; everything else is the library's default.
        writer = S3StorageWriter(
            os.environ["AWS_REGION"], url, s3client_config=S3ClientConfig(force_path_style=True), overwrite=True
        )
        return _begun(dcp.async_save(state, storage_writer=writer, no_dist=True))

    return save


def _s3fs() -> Callable[[Any, str], Future[Any]]:
    from torch.distributed.checkpoint import FsspecWriter

    def save(state: Any, url: str) -> Future[Any]:
        return _begun(dcp.async_save(state, storage_writer=FsspecWriter(url), no_dist=True))

    return save


def _begun(returned: Any) -> Future[Any]:
    future: Future[Any] = returned if isinstance(returned, Future) else returned.upload_completion
    return future


SAVES = {"bucketpoint": _bucketpoint, "s3torchconnector": _s3torchconnector, "s3fs": _s3fs}


class Process:
    """The commands of one contender."""

    def __init__(self, name: str, tensors: int, nbytes: int) -> None:
        self.state = states.equal_tensors(tensors, nbytes)
        self.trainer = Trainer()
        self.save = SAVES[name]()
        for _ in range(20):
            self.trainer.step()

    def warm(self, url: str) -> dict[str, Any]:
        self.save(self.state, url).result()
        return {}

    def beside(self, url: str, idle_s: float, busy_s: float = 0.0, sink: int = 0) -> dict[str, Any]:
        """Steps without an upload before and after, and steps during one: for `busy_s` of it, if that is given.

        The sink's cap is lifted once that time is over.
        """
        if sink:
            os.kill(sink, signal.SIGUSR2)
        idle = self._idle(idle_s / 2)
        begun = time.monotonic()
        upload = self.save(self.state, url)
        blocked = time.monotonic() - begun
        started, sink_cpu = time.monotonic(), _cpu_s(sink)
        busy = self.trainer.steps(lambda: upload.done() or bool(busy_s and time.monotonic() - started >= busy_s))
        finished_early, sink_cpu = upload.done(), _cpu_s(sink) - sink_cpu
        lasted = time.monotonic() - started
        if sink:
            os.kill(sink, signal.SIGUSR1)
        upload.result()
        upload_s = time.monotonic() - started
        idle += self._idle(idle_s / 2)
        answer = {
            "blocked_s": blocked,
            "upload_s": upload_s,
            "sink_cpu": sink_cpu / lasted,
            "idle": _summary(idle),
            "busy": _summary(busy),
        }
        if busy_s and finished_early:
            answer["error"] = "the upload ended before the time was over: the cap did not hold"
        return answer

    def _idle(self, seconds: float) -> list[float]:
        gc.collect()
        time.sleep(SETTLE_S)
        end = time.monotonic() + seconds
        return self.trainer.steps(lambda: time.monotonic() >= end)

    def lock(self, url: str, say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """One upload with nothing beside it, while another process looks at the interpreter's lock."""
        gc.collect()
        time.sleep(SETTLE_S)
        upload = self.save(self.state, url)
        say({"begun": True})
        begun = time.monotonic()
        upload.result()
        return {"ended": True, "upload_s": time.monotonic() - begun}


def _cpu_s(pid: int) -> float:
    if not pid:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _summary(steps: list[float]) -> dict[str, float]:
    ordered = sorted(steps)
    return {
        "count": len(ordered),
        "median_s": statistics.median(ordered),
        "p95_s": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
    }


def main() -> None:
    say = speaker()
    place = gil.locate()
    try:
        process = Process(sys.argv[1], **json.loads(sys.argv[2]))
    except Exception as error:  # noqa: BLE001 (reported)
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"pid": os.getpid(), "lock": place})
    for command in commands():
        do = command.pop("do")
        try:
            found = process.lock(say=say, **command) if do == "lock" else getattr(process, do)(**command)
        except Exception as error:  # noqa: BLE001 (reported)
            found = {"error": f"{type(error).__name__}: {error}"}
        say(found)


if __name__ == "__main__":
    main()
