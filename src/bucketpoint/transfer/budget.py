"""`BufferPool`: reusable buffers for transfers, with a limit on their total size."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bucketpoint.errors import BucketpointError


class BufferPool:
    """A pool of writable buffers. The total size of leased and cached buffers stays within `limit_bytes`.

    A single lease above the limit is granted only while nothing else is leased. Refusing such a lease would make a
    large item of another writer unloadable, and granting it beside other leases would leave memory unbounded.

    Args:
        grain: buffers of at least `grain` bytes are rounded up to a multiple of it, and cached for reuse: the first
            write to a memory page costs 20 times as much as later writes.
    """

    def __init__(self, limit_bytes: int, *, grain: int = 1 << 20) -> None:
        self._limit = limit_bytes
        self._grain = grain
        self._state = threading.Condition()
        self._taken = 0
        self._kept = 0
        self._free: dict[int, list[mmap.mmap | bytearray]] = {}
        self.peak_bytes = 0
        """Maximum of the bytes held at once, cached free buffers included."""

    @contextmanager
    def lease(self, nbytes: int) -> Iterator[memoryview]:
        """Lease a buffer of `nbytes`, with undefined content, in a `with` block. Waits until the limit allows it."""
        size = self._rounded(nbytes)
        with self._state:
            self._state.wait_for(lambda: not nbytes or not self._taken or self._taken + size <= self._limit)
            view = self.take(nbytes)
        try:
            yield view
        finally:
            self.give(view)

    def take(self, nbytes: int) -> memoryview:
        """Return a buffer of `nbytes`, with undefined content. Never waits: the caller must bound the memory."""
        if not nbytes:
            return memoryview(b"")
        size = self._rounded(nbytes)
        with self._state:
            kept = self._free.get(size)
            if kept:
                buffer = kept.pop()
                self._kept -= size
            else:
                self._let_go(size)
                try:
                    # The system gets the memory of a freed map back, but not always that of the heap. Small buffers
                    # are heap memory: a load may hold 100,000 of them, and the number of maps is limited.
                    buffer = mmap.mmap(-1, size) if size >= mmap.PAGESIZE else bytearray(size)
                except (OSError, OverflowError, ValueError) as error:
                    # Metadata of another writer may contain any number as a length.
                    raise BucketpointError(
                        f"{size} bytes of memory for an item could not be allocated: {error}"
                    ) from None
            # Counted only after the allocation, because the system may refuse it.
            self._taken += size
            self.peak_bytes = max(self.peak_bytes, self._taken + self._kept)
        return memoryview(buffer)[:nbytes]

    def give(self, view: memoryview) -> None:
        """Return a buffer from `take` to the pool, once it is no longer read or written."""
        buffer = view.obj
        if not isinstance(buffer, mmap.mmap | bytearray):
            return
        size = len(buffer)
        with self._state:
            self._taken -= size
            if size >= self._grain and self._taken + self._kept + size <= self._limit:
                self._kept += size
                self._free.setdefault(size, []).append(buffer)
            self._state.notify_all()

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._grain) * self._grain if nbytes >= self._grain else nbytes

    def _let_go(self, nbytes: int) -> None:
        """Free cached buffers until `nbytes` more fit the limit, or the cache is empty."""
        while self._free and self._taken + nbytes + self._kept > self._limit:
            size, buffers = next(iter(self._free.items()))
            if buffers:
                buffers.pop()
                self._kept -= size
            if not buffers:
                del self._free[size]
