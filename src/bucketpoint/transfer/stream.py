"""Upload of an object of unknown length while its bytes are written to a stream."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from bucketpoint.errors import BucketpointError
from bucketpoint.forks import Monitor
from bucketpoint.stores import ObjectInfo, Part, Store
from bucketpoint.stores.base import crc_of
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.options import Meter, TransferOptions
from bucketpoint.transfer.pieces import abort, complete
from bucketpoint.transfer.tasks import TaskGroup


class StreamUpload(io.RawIOBase):
    """A writable stream whose bytes become one object. Parts are uploaded while later bytes are written; if the store
    has no multipart uploads, all bytes are held until the commit.

    Use as a context manager around all writes and `commit()`. Only `commit()` makes the object visible: leaving the
    block without a commit aborts the upload. A stream that completed on exit would publish a truncated object whenever
    its producer fails.

    Args:
        largest_nbytes: upper bound of the bytes that will be written, from which the part size is derived.
    """

    def __init__(self, store: Store, key: str, options: TransferOptions, *, largest_nbytes: int, meter: Meter) -> None:
        super().__init__()
        limits = store.capabilities
        self._store = store
        self._key = key
        self._meter = meter
        part_bytes = max(options.lease_bytes, limits.min_part_bytes, -(-largest_nbytes // limits.max_parts))
        self._part_bytes = part_bytes if limits.multipart else sys.maxsize
        self._most_copied = options.max_inflight_bytes
        self._group = TaskGroup(options.connections, name="bucketpoint-stream", nice=options.nice)
        self._state = Monitor()
        self._pieces: list[memoryview] = []
        self._copies = bytearray()
        self._pending = 0
        self._copied = 0
        self._copied_waiting = 0
        self._position = 0
        self._sent = 0
        self._upload_id: str | None = None
        self._parts: list[Part] = []
        self._item_crc = 0
        self._info: ObjectInfo | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        taken = 0
        while taken < len(view):
            piece = view[taken : taken + self._part_bytes - self._pending]
            self._take(piece)
            self._pending += len(piece)
            taken += len(piece)
            if self._pending == self._part_bytes:
                self._flush_part()
        self._position += len(view)
        return len(view)

    def take_crc32c(self) -> int:
        """Return the CRC32C of the bytes written since the last call."""
        crc, self._item_crc = self._item_crc, 0
        return crc

    def commit(self) -> ObjectInfo:
        """Send the remaining bytes and make the object visible."""
        if self._upload_id is None:
            body = self._cut()
            self._info = self._store.put(self._key, body, crc32c=self._checksum(1, body))
            self._meter.add(self._position)
            return self._info
        if self._pending:
            self._flush_part()
        self._group.__exit__(None, None, None)
        self._info = complete(self._store, self._key, self._upload_id, self._parts, nbytes=self._position)
        return self._info

    def __enter__(self) -> StreamUpload:  # noqa: PYI034 (Self needs Python 3.11)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._info is None:
            self._abort(error or BucketpointError("The stream was left without a commit", key=self._key))

    def _abort(self, error: BaseException) -> None:
        self._group.cancel(error)
        self._group.__exit__(type(error), error, None)
        abort(self._store, self._key, self._upload_id)

    def _take(self, piece: memoryview) -> None:
        """Hold written bytes until the part is full."""
        self._item_crc = crc32c(piece, self._item_crc)
        self._copy(piece)

    def _copy(self, piece: memoryview) -> None:
        self._copies += piece
        self._copied += len(piece)

    def _cut(self) -> list[memoryview]:
        """Return the held pieces, and forget them."""
        self._seal()
        pieces, self._pieces, self._pending = self._pieces, [], 0
        return pieces

    def _seal(self) -> None:
        if self._copies:
            self._pieces.append(memoryview(self._copies))
            self._copies = bytearray()

    def _flush_part(self) -> None:
        nbytes, body = self._pending, self._cut()
        copied, self._copied = self._copied, 0
        with self._state:
            while self._copied_waiting and self._copied_waiting + copied > self._most_copied:
                self._state.wait(0.2)
                self._raise_failure()
            self._copied_waiting += copied
        if self._upload_id is None:
            self._upload_id = self._store.create_multipart(self._key)
            self._meter.add(0)
        self._sent += 1
        number = self._sent
        self._group.start(lambda: self._send(number, body, nbytes, copied))

    def _send(self, number: int, body: Sequence[memoryview], nbytes: int, copied: int) -> None:
        assert self._upload_id is not None
        part = self._store.put_part(self._key, self._upload_id, number, body, crc32c=self._checksum(number, body))
        with self._state:
            self._parts.append(part)
            self._copied_waiting -= copied
            self._state.notify_all()
        self._meter.add(nbytes)

    def _checksum(self, number: int, body: Sequence[memoryview]) -> int:
        """Return the CRC32C of a part. Called by several threads."""
        return crc_of(body)

    def _raise_failure(self) -> None:
        if self._group.cancelled:
            self._group.__exit__(None, None, None)
