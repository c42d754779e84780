"""A training loop on random numbers with asynchronous saves beside it. Runs one contender in a process of its own.

Reads one JSON command a line and answers with one JSON line. A short step is 60 small operations and a small matrix
product, about 1 ms of mostly Python, as an eager step on a GPU looks to its host. A long step is 200 small operations,
some plain Python and one large matrix product, about 30 ms, with torch's own number of threads.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bench import gil
from bench import state as states
from bench.contenders import CONTENDERS, Setting
from bench.lines import commands, speaker
from bench.resident import cpu_s, memory

SETTLE_S = 0.3


@dataclass(frozen=True)
class Work:
    """What one step does."""

    small_ops: int
    python_loops: int
    matrix: int


WORK = {"short": Work(60, 0, 128), "long": Work(200, 20_000, 1024)}


class Trainer:
    """One step at a time."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._small = torch.ones(64)
        self._left, self._right = torch.ones(work.matrix, work.matrix), torch.ones(work.matrix, work.matrix)
        self._out = torch.empty(work.matrix, work.matrix)

    def step(self) -> float:
        begun = time.perf_counter()
        small = self._small
        for _ in range(self._work.small_ops // 2):
            small = small * 1.0001 + 0.0001
        total = 0
        for index in range(self._work.python_loops):
            total += index & 7
        torch.mm(self._left, self._right, out=self._out)
        return time.perf_counter() - begun

    def steps(self, until: Callable[[], bool]) -> list[float]:
        taken = [self.step()]
        while not until():
            taken.append(self.step())
        return taken


Save = Callable[[Any, str], "Future[Any]"]

WRITERS: list[Any] = []
"""The writer of this process, if it is bucketpoint's."""


def _bucketpoint(background: str = "auto", *, checkpoint_process: bool = False) -> Save:
    from bucketpoint import S3Writer, TransferOptions, async_save

    writer = S3Writer(progress=False, transfer=TransferOptions(background=background))
    WRITERS.append(writer)
    arguments = _executor(checkpoint_process)

    def save(state: Any, url: str) -> Future[Any]:
        return async_save(state, checkpoint_id=url, storage_writer=writer, **arguments)

    return save


def _s3torchconnector(*, checkpoint_process: bool = False) -> Save:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageWriter

    arguments = _executor(checkpoint_process)

    def save(state: Any, url: str) -> Future[Any]:
        # Path-style because the server is an IP address; everything else is the library's default.
        writer = S3StorageWriter(
            os.environ["AWS_REGION"], url, s3client_config=S3ClientConfig(force_path_style=True), overwrite=True
        )
        return _begun(dcp.async_save(state, storage_writer=writer, **arguments))

    return save


def _executor(checkpoint_process: bool) -> dict[str, Any]:
    """Arguments for DCP's thread, or for its checkpoint process, which needs a process group."""
    if not checkpoint_process:
        return {"no_dist": True}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}


def _floor() -> Save:
    """Another process of niceness 19 uploads the same bytes, of its own: nothing is copied and nothing is shared."""
    command = [sys.executable, "-m", "bench.staging.floor"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(command: dict[str, Any]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        process.stdout.readline()

    pool = ThreadPoolExecutor(1)
    made: list[bool] = []

    def save(state: Any, url: str) -> Future[Any]:
        if not made:
            made.append(True)
            ask({"tensors": len(state), "nbytes": states.nbytes(state)})
        return pool.submit(ask, {"url": url})

    return save


def _s3fs() -> Save:
    from torch.distributed.checkpoint import FsspecWriter

    def save(state: Any, url: str) -> Future[Any]:
        return _begun(dcp.async_save(state, storage_writer=FsspecWriter(url), no_dist=True))

    return save


def _begun(returned: Any) -> Future[Any]:
    future: Future[Any] = returned if isinstance(returned, Future) else returned.upload_completion
    return future


SAVES: dict[str, Callable[[], Save]] = {
    "bucketpoint": _bucketpoint,
    "bucketpoint-threads": lambda: _bucketpoint("thread"),
    "bucketpoint-dcp-process": lambda: _bucketpoint(checkpoint_process=True),
    "s3torchconnector": _s3torchconnector,
    "s3torchconnector-dcp-process": lambda: _s3torchconnector(checkpoint_process=True),
    "s3fs": _s3fs,
    "floor": _floor,
}


class Process:
    """The commands of one contender."""

    def __init__(self, name: str, tensors: int, nbytes: int) -> None:
        self.name = name
        self.state = states.equal_tensors(tensors, nbytes)
        self.trainers = {name: Trainer(work) for name, work in WORK.items()}
        self.save = SAVES[name]()
        for trainer in self.trainers.values():
            for _ in range(20):
                trainer.step()

    def warm(self, url: str) -> dict[str, Any]:
        self.save(self.state, url).result()
        return {}

    def helper(self) -> dict[str, Any]:
        """Memory of the process that uploads, and how soon another one is ready."""
        from bucketpoint.transfer.helper.process import UploadHelper

        found = memory(WRITERS[-1].uploads.process_id)
        helper = UploadHelper()
        begun = time.perf_counter()
        helper.start_soon()
        helper._start()._becomes_ready()
        ready_s = time.perf_counter() - begun
        helper.close()
        return {"resident_mb": (found["RssAnon"] + found["RssFile"]) / 1e6, "ready_s": ready_s}

    def beside(self, url: str, step: str, idle_s: float, busy_s: float = 0.0, sink: int = 0) -> dict[str, Any]:
        """Steps without an upload before and after, and steps during one: for `busy_s` of it, if that is given.

        The sink's cap is lifted once that time is over.
        """
        if sink:
            os.kill(sink, signal.SIGUSR2)
        trainer = self.trainers[step]
        idle = self._idle(trainer, idle_s / 2)
        begun = time.monotonic()
        upload = self.save(self.state, url)
        blocked = time.monotonic() - begun
        started, sink_cpu = time.monotonic(), cpu_s(sink) if sink else 0.0
        busy = trainer.steps(lambda: upload.done() or bool(busy_s and time.monotonic() - started >= busy_s))
        finished_early, sink_cpu = upload.done(), cpu_s(sink) - sink_cpu if sink else 0.0
        lasted = time.monotonic() - started
        if sink:
            os.kill(sink, signal.SIGUSR1)
        upload.result()
        upload_s = time.monotonic() - started
        idle += self._idle(trainer, idle_s / 2)
        # What training has lost to this save: the time in `async_save`, and what its steps took longer.
        lost_s = blocked + sum(busy) - len(busy) * statistics.mean(idle)
        answer = {
            "blocked_s": blocked,
            "upload_s": upload_s,
            "lost_s_per_gb": lost_s / (states.nbytes(self.state) / 1e9),
            "sink_cpu": sink_cpu / lasted,
            "idle": _summary(idle),
            "busy": _summary(busy),
        }
        if busy_s and finished_early:
            answer["error"] = "the upload ended before the time was over: the cap did not hold"
        return answer

    def _idle(self, trainer: Trainer, seconds: float) -> list[float]:
        gc.collect()
        time.sleep(SETTLE_S)
        end = time.monotonic() + seconds
        return trainer.steps(lambda: time.monotonic() >= end)

    def lock(self, url: str, say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """One upload with nothing beside it, while another process looks at the interpreter's lock."""
        gc.collect()
        time.sleep(SETTLE_S)
        ours = self.name.startswith("bucketpoint")
        with _cpu_of_helper_uploads() if ours else contextlib.nullcontext([]) as taken:
            upload = self.save(self.state, url)
            say({"begun": True})
            begun = time.monotonic()
            upload.result()
        upload_s = time.monotonic() - begun
        return {"ended": True, "upload_s": upload_s, "nbytes": states.nbytes(self.state), "order_cpu_s": taken}

    def lock_load(self, url: str, say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """A load of what was saved, while another process looks at the interpreter's lock."""
        state = torch.utils._pytree.tree_map(torch.empty_like, self.state)
        gc.collect()
        time.sleep(SETTLE_S)
        say({"begun": True})
        begun = time.monotonic()
        CONTENDERS[self.name].load(state, Setting(url))
        return {"ended": True, "upload_s": time.monotonic() - begun, "nbytes": states.nbytes(state)}


@contextlib.contextmanager
def _cpu_of_helper_uploads() -> Iterator[list[float]]:
    """CPU seconds that each upload by a process takes here, without planning and commit."""
    from bucketpoint.transfer.helper.process import UploadHelper

    taken: list[float] = []
    upload = UploadHelper.upload

    def timed(self: Any, work: Any, meter: Any) -> Any:
        begun = time.thread_time()
        try:
            return upload(self, work, meter)
        finally:
            taken.append(time.thread_time() - begun)

    UploadHelper.upload = timed
    try:
        yield taken
    finally:
        UploadHelper.upload = upload


def _summary(steps: list[float]) -> dict[str, float]:
    ordered = sorted(steps)
    return {
        "count": len(ordered),
        "mean_s": statistics.mean(ordered),
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
            spoken = {"say": say} if do in ("lock", "lock_load") else {}
            found = getattr(process, do)(**spoken, **command)
        except Exception as error:  # noqa: BLE001 (reported)
            found = {"error": f"{type(error).__name__}: {error}"}
        say(found)


if __name__ == "__main__":
    main()
