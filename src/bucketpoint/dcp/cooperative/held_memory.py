"""Buffers of a cooperative load: counted, and reused instead of allocated anew."""

from __future__ import annotations

import mmap
import threading

_GRAIN = 256 << 10


class HeldMemory:
    """Pool of buffers that counts the buffers in use and those kept for reuse.

    The first write to a page costs 20 times as much as later ones, so returned buffers are kept as long as all buffers
    together stay within the limit. `take` never refuses, even beyond the limit: the caller bounds the memory in use.

    Args:
        limit_bytes: total bytes above which no buffer is kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._taken = 0
        self._kept = 0
        self.peak_bytes = 0
        """Most bytes that were held at once, in use or kept."""

    def take(self, nbytes: int) -> memoryview:
        """Return a buffer of `nbytes`, with undefined content."""
        if not nbytes:
            return memoryview(b"")
        size = _size(nbytes)
        with self._lock:
            self._taken += size
            found = self._free.get(size)
            if found:
                self._kept -= size
                buffer = found.pop()
            else:
                self._let_go()
                buffer = mmap.mmap(-1, size)
            self.peak_bytes = max(self.peak_bytes, self._taken + self._kept)
        return memoryview(buffer)[:nbytes]

    def give(self, view: memoryview) -> None:
        """Return a buffer from `take` to the pool, once nobody reads or writes it any more."""
        buffer = view.obj
        if not isinstance(buffer, mmap.mmap):
            return
        with self._lock:
            self._taken -= len(buffer)
            if len(buffer) >= _GRAIN and self._taken + self._kept + len(buffer) <= self._limit:
                self._kept += len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)

    def count(self, nbytes: int) -> None:
        """Count memory that was allocated elsewhere as in use."""
        with self._lock:
            self._taken += nbytes
            self._let_go()
            self.peak_bytes = max(self.peak_bytes, self._taken + self._kept)

    def _let_go(self) -> None:
        while self._free and self._taken + self._kept > self._limit:
            size, buffers = next(iter(self._free.items()))
            if buffers:
                buffers.pop()
                self._kept -= size
            if not buffers:
                del self._free[size]


def _size(nbytes: int) -> int:
    return -(-nbytes // _GRAIN) * _GRAIN if nbytes >= _GRAIN else nbytes
