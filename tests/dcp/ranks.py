"""Real ranks for tests: processes with a gloo group that stay up, so that each test does not pay for their start."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from background import choose_uploads
from kit.kills import PRELOAD

TIMEOUT_S = 400
MOST_THREADS = 60
"""A group that a test has made lives on in caches of torch's, with three threads, one of which wakes a hundred times a
second. Hundreds of them, on each of four ranks, leave no processor for anything else."""


class RankFailedError(AssertionError):
    """A rank raised, with the text of its traceback."""


class Ranks:
    """`world` processes in one gloo group. `run` calls a function on each and returns what each returned."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._start()

    def _start(self) -> None:
        # Forked from a process that has imported torch and has no threads: ranks need not import it again.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._asked = 0
        self._threads = 0
        self._processes = []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, f"file://{self._folder.name}/store", theirs)
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        # A test that measures how soon ranks answer must not measure how long they take to import torch.
        for rank in range(self.world):
            self._answer_of(rank)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if self._threads > MOST_THREADS:
            self.close()
            self._start()
        self._asked += 1
        for pipe in self._pipes:
            pipe.send((self._asked, function, args))
        answers = [self._answer_of(rank) for rank in range(self.world)]
        for rank, (failed, value) in enumerate(answers):
            if failed:
                raise RankFailedError(f"rank {rank}:\n{value}")
        return [value for _, value in answers]

    def _answer_of(self, rank: int) -> tuple[bool, Any]:
        while True:
            if not self._pipes[rank].poll(TIMEOUT_S):
                raise RankFailedError(f"rank {rank} did not answer within {TIMEOUT_S} s")
            number, *answer = self._pipes[rank].recv()
            # An earlier answer is that of a test which was ended while it waited.
            if number == self._asked:
                failed, value, self._threads = answer
                return failed, value

    def __enter__(self) -> Ranks:  # noqa: PYI034 (Self needs Python 3.11)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    # What was imported before the fork stays, and is not looked through at each collection.
    gc.freeze()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    choose_uploads()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    pipe.send((0, False, None, 0))
    try:
        while True:
            number, function, args = pipe.recv()
            try:
                answer = (number, False, function(rank, world, *args))
            except BaseException:  # noqa: BLE001 (told to the test)
                answer = (number, True, traceback.format_exc())
            pipe.send((*answer, len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0))
    except EOFError:
        pass
    os._exit(0)
