"""Reading of objects piece by piece: a parallel loop over pieces, and a byte range as a file."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from bucketpoint.stores import Store
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer.options import MIB, TransferOptions
from bucketpoint.transfer.tasks import TaskGroup

T = TypeVar("T")


def piece_bytes(options: TransferOptions) -> int:
    """Return the piece size with which every connection has one piece within the budget.

    In whole MiB if possible, because `BufferPool` keeps buffers of whole MiB for reuse.
    """
    size = min(options.part_bytes, options.lease_bytes)
    return size - size % MIB or size


def for_each(items: Iterable[T], do: Callable[[T], None], options: TransferOptions) -> None:
    """Call `do` for each item, on one thread per connection. Items are taken from the iterable as threads get free."""
    waiting: Iterator[T] = iter(items)
    lock = threading.Lock()
    with TaskGroup(options.connections, name="bucketpoint-pieces", nice=options.nice) as group:

        def work() -> None:
            while not group.cancelled:
                with lock:
                    item = next(waiting, None)
                if item is None:
                    return
                do(item)

        for _ in range(options.connections):
            group.start(work)


class RangeFile(io.RawIOBase):
    """Bytes `[start, stop)` of an object as a seekable file.

    Each read is a request, so wrap this file in a `BufferedReader`.
    """

    def __init__(self, store: Store, key: str, start: int, stop: int, *, etag: str | None) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._start = start
        self._nbytes = stop - start
        self._etag = etag
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: object, /) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        view = view[: max(self._nbytes - self._position, 0)]
        if not len(view):
            return 0
        at = self._start + self._position
        retry_transient(lambda: self._store.read_into(self._key, at, [view], if_match=self._etag))
        self._position += len(view)
        return len(view)
