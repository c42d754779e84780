"""The stream that torch_checkpointing writes a file to: parts are uploaded while later bytes are written."""

from __future__ import annotations

import bisect
import io
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.torch_checkpointing import sums
from bucketpoint.stores import ObjectInfo, Part, Store
from bucketpoint.transfer import TaskGroup, TransferOptions
from bucketpoint.transfer.checksum import combine, crc32c
from bucketpoint.transfer.parts import abort, common_part_bytes, complete

_SMALLEST_KEPT_BYTES = 64 << 10
"""Smaller pieces are copied, since a request with thousands of buffers costs more than the copy of their bytes."""


class Owners:
    """CPU memory of the tensors in a value, to find the tensor whose bytes are written, and to keep them uncopied."""

    def __init__(self, data: object) -> None:
        found: dict[int, memoryview] = {}
        self.nbytes = 0
        for leaf in tree_leaves(data):
            tensor = getattr(leaf, "_local_tensor", leaf)
            # Storages of other devices are copied by torch.save itself.
            if not isinstance(tensor, torch.Tensor) or type(tensor).__module__.startswith("torch.distributed"):
                continue
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                continue
            try:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in found:
                    raw = torch.empty(0, dtype=torch.uint8).set_(storage)
                    found[storage.data_ptr()] = memoryview(raw.numpy())  # type: ignore[arg-type]
                    self.nbytes += storage.nbytes()
            except (RuntimeError, NotImplementedError):
                # A subclass without memory of its own, whose tensors torch.save finds in it.
                continue
        self._starts = sorted(found)
        self._views = [found[start] for start in self._starts]

    def keep(self, view: memoryview) -> memoryview | None:
        """Return the same bytes as `view` in memory that stays, or None if they are in no tensor."""
        start = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
        index = bisect.bisect_right(self._starts, start) - 1
        if index < 0:
            return None
        low = start - self._starts[index]
        owner = self._views[index]
        return owner[low : low + len(view)] if low + len(view) <= len(owner) else None


class WriteStream(io.RawIOBase):
    """A writable stream whose bytes, and then their checksums, become one object.

    Bytes of known tensors are sent from where they are; all others are copied once. The object becomes visible when
    the stream is closed without an error. A `with` block that raises, and a stream that is dropped, abort the upload.

    Args:
        owners: the tensors whose bytes will be written. They must not change before the stream is closed.
        done: called with the object once it is there.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        options: TransferOptions,
        *,
        owners: Owners | None = None,
        done: Callable[[ObjectInfo], None] = lambda info: None,
    ) -> None:
        super().__init__()
        limits = store.capabilities
        self._store, self._key, self._done, self._owners = store, key, done, owners
        expected = owners.nbytes if owners else 0
        size = common_part_bytes([expected], options) if expected else options.part_bytes
        if limits.copies_bodies:
            size = min(size, options.copied_part_bytes)
        size = max(size, limits.min_part_bytes, -(-expected * 11 // (10 * limits.max_parts)))
        self._part_bytes = max(size - size % sums.BLOCK_BYTES, sums.BLOCK_BYTES)
        self._multipart = limits.multipart
        self._most_copied = max(options.max_inflight_bytes, 2 * self._part_bytes)
        self._group = TaskGroup(options.connections, name="bucketpoint-stream", nice=options.nice)
        self._process = os.getpid()
        self._state = threading.Condition()
        self._pieces: list[memoryview] = []
        self._copies = bytearray()
        self._pending = 0
        self._copied = 0
        self._copied_waiting = 0
        self._position = 0
        self._upload_id: str | None = None
        self._started = 0
        self._sums: dict[int, list[int]] = {}
        self._parts: list[Part] = []

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        return self._position

    def write(self, data: Any, /) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        taken = 0
        while taken < len(view):
            # An object without parts is held until the end.
            room = self._part_bytes - self._pending if self._multipart else len(view)
            piece = view[taken : taken + room]
            self._take(piece)
            taken += len(piece)
            if self._multipart and self._pending == self._part_bytes:
                self._flush()
        self._position += len(view)
        return len(view)

    def close(self) -> None:
        """Send the rest and make the object visible. Raises the error of any part."""
        if self.closed:
            return
        try:
            self._finish()
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            super().close()

    def discard(self) -> None:
        """Close the stream without an object."""
        if not self.closed:
            self._abort(self._left())
            super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        # The one of io.IOBase closes the stream, which would make a truncated object visible.
        if hasattr(self, "_parts") and not self.closed:
            if self._process == os.getpid():
                # Each part under way holds the stream, so there is none.
                self._group.abandon(self._left())
                abort(self._store, self._key, self._upload_id)
            super().close()

    def _left(self) -> BucketpointError:
        return BucketpointError("The stream was left before its end", key=self._key)

    def _take(self, piece: memoryview) -> None:
        kept = self._owners.keep(piece) if self._owners and len(piece) >= _SMALLEST_KEPT_BYTES else None
        if kept is None:
            self._copies += piece
            self._copied += len(piece)
        else:
            self._seal()
            self._pieces.append(kept)
        self._pending += len(piece)

    def _seal(self) -> None:
        if self._copies:
            self._pieces.append(memoryview(self._copies))
            self._copies = bytearray()

    def _flush(self) -> None:
        """Start the upload of the pending bytes as a part."""
        self._seal()
        pieces, self._pieces = self._pieces, []
        nbytes, self._pending = self._pending, 0
        copied, self._copied = self._copied, 0
        with self._state:
            while self._copied_waiting and self._copied_waiting + copied > self._most_copied:
                self._state.wait(0.2)
                self._raise_failure()
            self._copied_waiting += copied
        if self._upload_id is None:
            self._upload_id = self._store.create_multipart(self._key)
        self._started += 1
        number = self._started
        self._group.start(lambda: self._send(number, pieces, nbytes, copied))

    def _send(self, number: int, pieces: list[memoryview], nbytes: int, copied: int) -> None:
        assert self._upload_id is not None
        found = sums.block_sums(pieces)
        with self._state:
            self._sums[number] = found
            self._state.notify_all()
        crc = sums.joined(found, nbytes)
        part = self._store.put_part(self._key, self._upload_id, number, pieces, crc32c=crc)
        with self._state:
            self._parts.append(part)
            self._copied_waiting -= copied
            self._state.notify_all()

    def _raise_failure(self) -> None:
        if self._group.cancelled:
            self._group.__exit__(None, None, None)

    def _finish(self) -> None:
        self._seal()
        last = sums.block_sums(self._pieces)
        with self._state:
            while len(self._sums) < self._started:
                self._state.wait(0.2)
                self._raise_failure()
        table = [crc for _, crcs in sorted(self._sums.items()) for crc in crcs]
        trailer = sums.encode([*table, *last], self._position)
        nbytes = self._position + len(trailer)
        if self._upload_id is None:
            crc = combine(sums.joined(last, self._position), crc32c(memoryview(trailer)), len(trailer))
            info = self._store.put(self._key, [*self._pieces, memoryview(trailer)], crc32c=crc)
        else:
            # Services want the last part to be no larger than the others, which are of one size.
            view = memoryview(trailer)
            while len(view):
                piece = view[: self._part_bytes - self._pending]
                self._pieces.append(piece)
                self._pending += len(piece)
                self._flush()
                view = view[len(piece) :]
            self._group.__exit__(None, None, None)
            info = complete(self._store, self._key, self._upload_id, self._parts, nbytes=nbytes)
        self._done(ObjectInfo(self._key, nbytes, info.etag, info.modified))

    def _abort(self, error: BaseException) -> None:
        if self._process != os.getpid():
            # The upload belongs to the process that this one was forked from.
            return
        self._group.cancel(error)
        self._group.__exit__(type(error), error, None)
        abort(self._store, self._key, self._upload_id)
