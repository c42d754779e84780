"""Division of objects into parts and of items into batches, and reads of objects piece by piece or as a file."""

from __future__ import annotations

import functools
import io
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bucketpoint.errors import BucketpointError, MetadataError, UploadNotFoundError
from bucketpoint.stores import Capabilities, ObjectInfo, Part, Store, retry
from bucketpoint.transfer.options import MIB, TransferOptions
from bucketpoint.transfer.tasks import TaskGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

Read = Callable[[str, int, memoryview], None]
"""`read(key, start, out)` fills `out` with the bytes of an object from offset `start` on."""

MAX_READ_BYTES = 256 << 20
"""Limit on one read by a file parser, such as of a zip archive's directory: a false length must not exhaust memory."""


def piece_bytes(options: TransferOptions) -> int:
    """Return the piece size: the budget holds one per connection; whole MiB if possible, so that buffers are reused."""
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


SMALLEST_USEFUL_PART = 8 * MIB
"""Minimum size when parts are made smaller for parallelism: for smaller parts the latency of a request dominates."""

ABORT_DEADLINE_S = 30.0
"""Deadline of an abort, in seconds. A longer cleanup would delay the error of the save, which has failed already."""

_GROWTH = 1.02


@dataclass(frozen=True)
class PartPlan:
    """A division into `count` parts of `part_bytes` each; the last part has the rest."""

    nbytes: int
    part_bytes: int
    count: int

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the byte range `[start, stop)` of part `number`, counted from 1."""
        start = (number - 1) * self.part_bytes
        return start, min(start + self.part_bytes, self.nbytes)


def batched(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Split items into batches of at most `most` bytes. A larger item is alone in its batch."""
    batches: list[list[T]] = []
    size = 0
    for item in items:
        if not batches or size + nbytes(item) > most:
            batches.append([])
            size = 0
        batches[-1].append(item)
        size += nbytes(item)
    return batches


def common_part_bytes(sizes: Sequence[int], options: TransferOptions) -> int:
    """Return a part size with which objects of these sizes, uploaded together, keep all connections busy to the end.

    33 parts over 32 connections take as long as 64 parts. So a size near `part_bytes` is chosen with which the parts
    fill whole rounds of the connections. The size is at least the smaller of `SMALLEST_USEFUL_PART` and `part_bytes`,
    and at most about 1.5 times `part_bytes`.
    """
    total = sum(sizes)
    largest = options.part_bytes * 3 // 2
    waves = max(round(total / (options.part_bytes * options.connections)), 1)
    size = max(-(-total // (waves * options.connections)), min(SMALLEST_USEFUL_PART, options.part_bytes), 1)
    while size < largest and sum(-(-nbytes // size) for nbytes in sizes) > waves * options.connections:
        size = int(size * _GROWTH) + 1
    return size


def plan_parts(nbytes: int, part_bytes: int, limits: Capabilities) -> PartPlan:
    """Divide an object into equal parts, which some S3-compatible stores require, within the service's limits.

    Raises:
        BucketpointError: the object is too large for the service.
    """
    wanted = min(max(part_bytes, limits.min_part_bytes), limits.max_part_bytes)
    count = min(max(-(-nbytes // wanted), 1), limits.max_parts)
    size = max(-(-nbytes // count), 1)
    if count > 1:
        size = max(size, limits.min_part_bytes)
    if size > limits.max_part_bytes:
        raise BucketpointError(
            f"An object of {nbytes} bytes does not fit {limits.max_parts} parts of {limits.max_part_bytes} bytes",
            remedy="Lower target_object_bytes so that a rank writes several objects",
        )
    return PartPlan(nbytes=nbytes, part_bytes=size, count=max(-(-nbytes // size), 1))


def complete(store: Store, key: str, upload_id: str, parts: Iterable[Part], *, nbytes: int) -> ObjectInfo:
    """Complete a multipart upload of `nbytes`, even if an earlier attempt completed it and the reply was lost."""
    try:
        return store.complete_multipart(key, upload_id, sorted(parts, key=lambda part: part.number))
    except UploadNotFoundError:
        # An earlier attempt may have completed the upload. Only this save attempt uses the key, so an object of the
        # right size under the key can only be the completed upload.
        info = store.head(key)
        if info.size != nbytes:
            raise
        return info


def abort(store: Store, key: str, upload_id: str | None) -> None:
    """Abort a multipart upload, if one was begun. A failure is only logged: it must not hide the error of the save."""
    if upload_id is None:
        return
    try:
        with retry.deadline(ABORT_DEADLINE_S):
            store.abort_multipart(key, upload_id)
    except BucketpointError as error:
        logger.warning("could not abort the multipart upload of %s: %s", key, error)
