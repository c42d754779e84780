"""Jobs that can be killed like a machine: ranks in a gloo group, each with its subprocesses, killed in one instant.

Ranks are forked from a server process that has imported torch and has no threads, so that replacing one is cheap.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

PRELOAD = (
    "boto3.s3.inject",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.utils.serialization.config",
    "bucketpoint.dcp.async_save",
    "bucketpoint.dcp.api",
    "bucketpoint.dcp.reader",
    "bucketpoint.catalog.save_log",
)
"""Modules that the server imports once for all ranks.

The first job in a process starts the server and fixes the list.
"""

GROUP_TIMEOUT_S = 120.0
JOIN_S = 240.0


@dataclass(frozen=True)
class Outcome:
    """Result of a rank.

    Attributes:
        value: return value of the rank's function.
        error: exception of the function, if it could be pickled.
        text: traceback of that exception.
        died: True if the rank ended without an answer.
        seconds: time since the start of the job's work.
    """

    value: Any = None
    error: BaseException | None = None
    text: str = ""
    died: bool = False
    seconds: float = 0.0


class Job:
    """A job of `world` ranks that wait for `run`. Each rank leads a process group of its own, which `Kill` can take.

    Args:
        before: called in each rank before anything else, while the rank has one thread.
        group_timeout_s: timeout of the gloo process group.
    """

    def __init__(
        self, world: int, *, before: Callable[[], None] | None = None, group_timeout_s: float = GROUP_TIMEOUT_S
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="bucketpoint-job-", ignore_cleanup_errors=True)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            place = (rank, world, f"file://{self._folder.name}/store", group_timeout_s)
            process = context.Process(target=_serve, args=(*place, before, theirs), daemon=False)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Job:  # noqa: PYI034 (Self needs Python 3.11)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def groups(self) -> tuple[int, ...]:
        """Process groups, by rank."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def ready(self) -> None:
        """Wait until all ranks have joined the group."""
        for rank in range(self.world):
            answer = self._answer(rank, JOIN_S)
            if answer != "ready":
                raise RuntimeError(f"rank {rank} did not start: {answer}")

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = JOIN_S) -> list[Outcome]:
        """Call `function(rank, world, *args)` on each rank, once, and wait until all ranks have ended or died."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((function, args))
        began = time.monotonic()
        outcomes = []
        for rank in range(self.world):
            answer = self._answer(rank, timeout_s - (time.monotonic() - began))
            if isinstance(answer, Outcome):
                outcomes.append(answer)
            elif answer is None:
                outcomes.append(Outcome(died=True, seconds=time.monotonic() - began))
            else:
                raise TimeoutError(f"rank {rank} neither ended nor died within {timeout_s} s")
        return outcomes

    def _answer(self, rank: int, timeout_s: float) -> Any:
        """Return the next message of a rank; None if the rank is gone, and `...` if no message comes in time."""
        try:
            if not self._pipes[rank].poll(max(timeout_s, 0)):
                return ...
            return self._pipes[rank].recv()
        except (EOFError, ConnectionError):
            return None

    def close(self) -> None:
        """Kill all ranks that are left. None is asked to exit: a rank may hang on purpose."""
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(JOIN_S)
        self._folder.cleanup()


def _serve(
    rank: int,
    world: int,
    store: str,
    group_timeout_s: float,
    before: Callable[[], None] | None,
    pipe: Connection,
) -> None:
    gc.freeze()  # as in `dcp.ranks`
    os.setpgid(0, 0)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if before is not None:
        before()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Joining takes as long as a busy machine needs; the shorter timeout of the group applies only afterwards.
    patience = timedelta(seconds=max(group_timeout_s, GROUP_TIMEOUT_S))
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=patience)
    if group_timeout_s < GROUP_TIMEOUT_S:
        _set_timeout(timedelta(seconds=group_timeout_s))
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        function, args = pipe.recv()
        began = time.monotonic()
        try:
            outcome = Outcome(function(rank, world, *args), seconds=time.monotonic() - began)
        except BaseException as error:  # noqa: BLE001 (returned to the process that started the job)
            text = traceback.format_exc()
            outcome = Outcome(error=_sendable(error), text=text, seconds=time.monotonic() - began)
        pipe.send(outcome)
        with contextlib.suppress(EOFError):
            pipe.recv()
    os._exit(0)


def _set_timeout(timeout: timedelta) -> None:
    import torch.distributed as dist

    # Only newer versions of torch have the public name.
    set_timeout: Callable[[timedelta], None] | None = getattr(dist, "set_timeout", None)
    (set_timeout or dist.distributed_c10d._set_pg_timeout)(timeout)


def _sendable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 (its text is sent instead)
        return None
    return error
