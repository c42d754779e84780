"""Buffers under one memory limit: leased to transfers, and reused as long as they fit the budget."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bucketpoint.errors import BucketpointError

_GRAIN = 1 << 20


class BufferPool:
    """A pool of writable buffers whose total size stays within `limit_bytes`.

    A single lease above the limit is granted only while nothing else is leased. Refusing such a lease would make a
    large item of another writer unloadable, and granting it beside other leases would leave memory unbounded.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._state = threading.Condition()
        self._leased = 0
        self._cached = 0
        self._free: list[mmap.mmap] = []
        self.peak_bytes = 0
        """The most bytes that were ever held at once, cached free buffers included."""

    @contextmanager
    def lease(self, nbytes: int) -> Iterator[memoryview]:
        """Lease a buffer of exactly `nbytes`, valid within the block. Waits until the limit allows the lease.

        The buffer's content is undefined.
        """
        with self._lease(nbytes, waits=True) as view:
            assert view is not None
            yield view

    @contextmanager
    def lease_now(self, nbytes: int) -> Iterator[memoryview | None]:
        """Lease a buffer like `lease`, but without waiting: yields None if the limit does not allow the lease now."""
        with self._lease(nbytes, waits=False) as view:
            yield view

    @contextmanager
    def _lease(self, nbytes: int, *, waits: bool) -> Iterator[memoryview | None]:
        if nbytes == 0:
            yield memoryview(b"")
            return
        size = -(-nbytes // _GRAIN) * _GRAIN if nbytes >= _GRAIN else nbytes
        with self._state:
            if waits:
                self._state.wait_for(lambda: self._leased == 0 or self._leased + size <= self._limit)
            granted = waits or self._leased + size <= self._limit
            if granted:
                # Counted only after the allocation, because the system may refuse it.
                buffer = self._take(size)
                self._leased += size
                self.peak_bytes = max(self.peak_bytes, self._leased + self._cached)
        if not granted:
            yield None
            return
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
        while self._free and self._leased + size + self._cached > self._limit:
            self._cached -= len(self._free.pop())
        try:
            # An anonymous map is returned to the system when it is dropped; heap memory of this size may not be.
            return mmap.mmap(-1, size)
        except (OSError, OverflowError, ValueError) as error:
            # Metadata of another writer may contain any number as a length.
            raise BucketpointError(f"{size} bytes of memory cannot be had to take an item whole: {error}") from None
