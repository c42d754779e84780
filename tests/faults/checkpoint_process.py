"""DCP's checkpoint process, forked beforehand: to spawn one takes seconds of imports, and every kill ends one.

What runs in it is DCP's own, and so is what crosses. Only how it came to be differs.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from torch.distributed.checkpoint import _async_process_executor as executor


def fork_beforehand() -> None:
    """In a rank, before it has threads: from now on DCP gets the process that is made here."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_wait_for_work, args=(theirs, ours), daemon=True)
    process.start()
    theirs.close()

    class Ready:
        """What DCP takes for the process that it makes."""

        def __init__(self, *, target: Any, args: tuple[Any, ...], daemon: bool = True) -> None:
            self._work = target, args

        def start(self) -> None:
            ours.send(self._work)

        def __getattr__(self, name: str) -> Any:
            return getattr(process, name)

    prepared = SimpleNamespace(Process=Ready, Pipe=context.Pipe)
    executor.mp = SimpleNamespace(get_context=lambda method: prepared)  # type: ignore[assignment]


def _wait_for_work(pipe: Connection, other_end: Connection) -> None:
    other_end.close()
    try:
        target, args = pipe.recv()
    except EOFError:
        return
    target(*args)
