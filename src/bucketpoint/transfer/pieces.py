"""Reading of objects piece by piece: a parallel loop over pieces, a byte range as a file, and a cache of blocks."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from bucketpoint.errors import MetadataError
from bucketpoint.transfer.options import MIB, TransferOptions
from bucketpoint.transfer.tasks import TaskGroup

T = TypeVar("T")

Read = Callable[[str, int, memoryview], None]
"""`read(key, start, out)` fills `out` with the bytes of an object from offset `start` on."""

MAX_READ_BYTES = 256 << 20
"""Limit on one read by a file parser, such as of a zip archive's directory: a false length must not exhaust memory."""


def piece_bytes(options: TransferOptions) -> int:
    """Return the piece size: one piece per connection fits the budget, in whole MiB if possible, for reuse."""
    size = min(options.part_bytes, options.lease_bytes)
    return size - size % MIB or size


def for_each(items: Iterable[T], do: Callable[[T], None], options: TransferOptions) -> None:
    """Call `do` for each item, on one thread per connection. A thread takes its next item when it is done with one."""
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
    """Bytes `[start, stop)` of an object as a seekable file, unbuffered: each read of the file calls `read`."""

    most_bytes = MAX_READ_BYTES
    """Limit on one `read`: only a damaged or malicious file claims to need more."""

    def __init__(self, read: Read, key: str, start: int, stop: int) -> None:
        super().__init__()
        self._read = read
        self._key = key
        self._start = start
        self._nbytes = stop - start
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self._nbytes - self._position, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > self.most_bytes:
            raise MetadataError(f"A part of the file claims to have {wanted} bytes, which is too many", key=self._key)
        data = bytearray(wanted)
        self.readinto(data)
        return bytes(data)

    def readinto(self, buffer: object, /) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        view = view[: max(self._nbytes - self._position, 0)]
        if len(view):
            self._read(self._key, self._start + self._position, view)
            self._position += len(view)
        return len(view)


class BlockCache:
    """Thread-safe reader of byte ranges smaller than a block, with a cache of the `most` blocks used last.

    Ranges that are read together are usually adjacent, and a request costs more than reading a block.
    """

    def __init__(self, read: Read, *, block_nbytes: int, most: int) -> None:
        self._read = read
        self._block_nbytes = block_nbytes
        self._lock = threading.Lock()
        self._blocks = functools.lru_cache(most)(lambda key, number: _Block())

    @property
    def nbytes(self) -> int:
        """Upper bound on the bytes in the cached blocks."""
        return self._blocks.cache_info().currsize * self._block_nbytes

    def read(self, key: str, start: int, out: memoryview, *, size: int) -> None:
        """Fill `out` with the bytes from offset `start` on. The range must lie within the object of `size` bytes."""
        done = 0
        while done < len(out):
            number, offset = divmod(start + done, self._block_nbytes)
            piece = self._block(key, number, size)[offset : offset + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)

    def _block(self, key: str, number: int, size: int) -> memoryview:
        with self._lock:
            block = self._blocks(key, number)
        # Another thread that needs this block waits for the lock instead of reading the block again.
        with block.lock:
            if block.data is None:
                start = number * self._block_nbytes
                data = memoryview(bytearray(min(self._block_nbytes, size - start)))
                self._read(key, start, data)
                block.data = data
            return block.data


class _Block:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.data: memoryview | None = None
