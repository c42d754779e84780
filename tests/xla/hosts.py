"""Processes for tests with torch_xla, each with virtual CPU devices of its own; they stay up, as it imports slowly."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

TIMEOUT_S = 300


class Host:
    """A process that sees `devices` devices and is in no process group: what runs there makes one if it wants one."""

    def __init__(self, devices: int) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, (devices,))

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._pool.submit(function, *args)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.start(function, *args).result(TIMEOUT_S)

    def close(self) -> None:
        processes = [*self._pool._processes.values()]
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.join(10)
            process.kill()


def _begin(devices: int) -> None:
    # torch_xla reads them when it is first imported, and receiving a function of the scenarios imports it.
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(devices), OMP_NUM_THREADS="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The process ends without what torch_xla would do then.
    multiprocessing.util.Finalize(None, os._exit, (0,), exitpriority=0)
