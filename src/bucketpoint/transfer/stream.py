"""Upload of an object of unknown length while it is written, for bytes that only a stream can produce."""

from __future__ import annotations

import io
import sys
import threading
from types import TracebackType

from bucketpoint.errors import BucketpointError
from bucketpoint.stores import ObjectInfo, Part, Store
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.options import TransferOptions
from bucketpoint.transfer.parts import abort, complete
from bucketpoint.transfer.progress import Meter
from bucketpoint.transfer.tasks import TaskGroup


class StreamUpload(io.RawIOBase):
    """A writable stream whose bytes become one object. Parts are uploaded while later ones are written; where the
    store has no parts, all bytes are held until the commit.

    Use as a context manager around all writes and `commit()`. Only `commit()` makes the object visible: leaving the
    block without it aborts the upload, and neither `close()` nor the garbage collector completes it. A stream that
    completed on exit would publish a truncated object whenever its producer fails.

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
        slots = max(options.max_inflight_bytes // self._part_bytes, 1)
        self._slots = threading.Semaphore(min(slots, options.connections + 1))
        self._group = TaskGroup(options.connections, name="bucketpoint-stream", nice=options.nice)
        self._buffer = bytearray()
        self._position = 0
        self._sent = 0
        self._upload_id: str | None = None
        self._parts: list[Part] = []
        self._lock = threading.Lock()
        self._item_crc = 0
        self._info: ObjectInfo | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: object, /) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self._item_crc = crc32c(view, self._item_crc)
        taken = 0
        while taken < len(view):
            room = self._part_bytes - len(self._buffer)
            piece = view[taken : taken + room]
            self._buffer += piece
            taken += len(piece)
            if len(self._buffer) == self._part_bytes:
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
            body = memoryview(self._buffer)
            self._info = self._store.put(self._key, [body], crc32c=crc32c(body))
            self._meter.add(len(body))
            return self._info
        if self._buffer:
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
            error = error or BucketpointError("The stream was left without a commit", key=self._key)
            self._group.cancel(error)
            self._group.__exit__(type(error), error, None)
            abort(self._store, self._key, self._upload_id)

    def _flush_part(self) -> None:
        while not self._slots.acquire(timeout=0.2):
            if self._group.cancelled:
                self._group.__exit__(None, None, None)
        if self._upload_id is None:
            self._upload_id = self._store.create_multipart(self._key)
            self._meter.add(0)
        self._sent += 1
        number = self._sent
        buffer, self._buffer = self._buffer, bytearray()
        self._group.start(lambda: self._send(number, buffer))

    def _send(self, number: int, buffer: bytearray) -> None:
        assert self._upload_id is not None
        body = memoryview(buffer)
        part = self._store.put_part(self._key, self._upload_id, number, [body], crc32c=crc32c(body))
        with self._lock:
            self._parts.append(part)
        self._meter.add(len(body))
        self._slots.release()
