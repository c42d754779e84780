"""Callbacks before a program starts a thread, or gives work to one."""

from __future__ import annotations

import threading
from asyncio import BaseEventLoop
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.pool import Pool
from typing import Any

_HAND_WORK_OVER = (
    *((threading.Thread, "start"), (ThreadPoolExecutor, "submit"), (Pool, "_check_running")),
    # Queues, events, semaphores and barriers notify.
    *((threading.Condition, "notify"), (BaseEventLoop, "call_soon_threadsafe")),
)
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
        for act in tuple(_acts):
            act()
        return original(*args, **kwargs)

    setattr(call, _ORIGINAL, original)
    return call
