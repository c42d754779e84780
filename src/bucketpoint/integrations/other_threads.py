"""Callbacks before a program starts a thread, or gives work to one."""

from __future__ import annotations

import multiprocessing.queues
import queue
import threading
from asyncio import BaseEventLoop
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from logging import LogRecord
from multiprocessing.pool import Pool
from typing import Any

# No function that is called with its object's lock held, as `Condition.notify`: the act may need the same lock.
_HAND_WORK_OVER = (
    *((threading.Thread, "start"), (ThreadPoolExecutor, "submit"), (Pool, "_check_running")),
    *((queue.Queue, "put"), (multiprocessing.queues.Queue, "put")),
    *((threading.Event, "set"), (BaseEventLoop, "call_soon_threadsafe")),
)
_LOGGED = (LogRecord, str, bytes)
"""Types that a handler of log messages puts into a queue, with its lock held, for which threads of the act may wait."""

_ORIGINAL = "_bucketpoint_original"

_acts: list[Callable[[], None]] = []
_changes = threading.Lock()


@contextmanager
def before_other_threads(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` whenever, during the block, any thread of the process is about to give work to another thread.

    Blocks may end in any order. The last one restores the patched functions, unless other code replaced them.
    """
    with _changes:
        if not _acts:
            for owner, name in _HAND_WORK_OVER:
                setattr(owner, name, _acting(getattr(owner, name)))
        _acts.append(act)
    try:
        yield
    finally:
        with _changes:
            _acts.remove(act)
            for owner, name in () if _acts else _HAND_WORK_OVER:
                current = getattr(owner, name)
                setattr(owner, name, getattr(current, _ORIGINAL, current))


def _acting(original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, _LOGGED) for value in args[1:]):
            for act in tuple(_acts):
                act()
        return original(*args, **kwargs)

    setattr(call, _ORIGINAL, original)
    return call
