"""Processes for tests with torch_xla, each with virtual CPU devices of its own; they stay up, as it imports slowly."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 300


class HostFailedError(AssertionError):
    """A host raised, with the text of its traceback."""


class Host:
    """A process that sees `devices` devices and is in no process group: what runs there makes one if it wants one."""

    def __init__(self, devices: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(devices, theirs))
        self._process.start()
        theirs.close()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((function, args))

    def result(self) -> Any:
        """What the function that was started returned; one call for each `start`."""
        if not self._pipe.poll(TIMEOUT_S):
            raise HostFailedError(f"a host did not answer within {TIMEOUT_S} s")
        failed, value = self._pipe.recv()
        if failed:
            raise HostFailedError(value)
        return value

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        self.start(function, *args)
        return self.result()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(devices: int, pipe: Any) -> None:
    # torch_xla reads them when it is first imported, and receiving a function of the scenarios imports it.
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(devices), OMP_NUM_THREADS="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        while True:
            function, args = pipe.recv()
            try:
                answer = (False, function(*args))
            except BaseException:  # noqa: BLE001 (told to the test)
                answer = (True, traceback.format_exc())
            pipe.send(answer)
    except EOFError:
        pass
    os._exit(0)
