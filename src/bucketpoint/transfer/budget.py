"""Memory of our own, under one limit: leased buffers that are reused while they fit the budget. Knows no stores."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bucketpoint.errors import BucketpointError

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
        with self._lease(nbytes, waits=True) as view:
            assert view is not None
            yield view

    @contextmanager
    def lease_now(self, nbytes: int) -> Iterator[memoryview | None]:
        """The same for whoever must not wait for it: None if that many bytes are not free within the limit."""
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
                # Counted once it is there: what the system refuses is not held.
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
            # Anonymous maps go back to the system when dropped; heap memory of this size may not.
            return mmap.mmap(-1, size)
        except (OSError, OverflowError, ValueError) as error:
            # A length in metadata that somebody else wrote may be any number.
            raise BucketpointError(f"{size} bytes of memory cannot be had to take an item whole: {error}") from None
