"""Memory of our own, under one limit: leased buffers that are reused while they fit the budget. Knows no stores."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_GRAIN = 1 << 20


class BufferPool:
    """Hands out writable buffers whose total stays within `limit_bytes`.

    A single request above the limit is granted alone, when nothing else is leased: refusing it would make a large
    foreign item unloadable, and granting it beside others would not bound anything.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._state = threading.Condition()
        self._leased = 0
        self._cached = 0
        self._free: list[mmap.mmap] = []
        self.peak_bytes = 0
        """The most bytes that were ever held at once, free ones included."""

    @contextmanager
    def lease(self, nbytes: int) -> Iterator[memoryview]:
        """A buffer of exactly `nbytes`, valid within the block. Its content is undefined."""
        if nbytes == 0:
            yield memoryview(b"")
            return
        size = -(-nbytes // _GRAIN) * _GRAIN if nbytes >= _GRAIN else nbytes
        with self._state:
            self._state.wait_for(lambda: self._leased == 0 or self._leased + size <= self._limit)
            self._leased += size
            buffer = self._take(size)
        view = memoryview(buffer)
        try:
            yield view[:nbytes]
        finally:
            view.release()
            with self._state:
                self._leased -= size
                if len(buffer) >= _GRAIN and self._leased + self._cached + len(buffer) <= self._limit:
                    self._free.append(buffer)
                    self._cached += len(buffer)
                self._state.notify_all()

    def _take(self, size: int) -> mmap.mmap:
        for index, buffer in enumerate(self._free):
            if len(buffer) == size:
                self._cached -= size
                return self._free.pop(index)
        while self._free and self._leased + self._cached > self._limit:
            self._cached -= len(self._free.pop())
        self.peak_bytes = max(self.peak_bytes, self._leased + self._cached)
        # Anonymous maps go back to the system when dropped; heap memory of this size may not.
        return mmap.mmap(-1, size)
