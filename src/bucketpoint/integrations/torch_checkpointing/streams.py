"""Streams from which torch_checkpointing reads a verified file, and to which it writes one while parts are uploaded."""

from __future__ import annotations

import bisect
import io
import os
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from bucketpoint.errors import BucketpointError, CorruptDataError
from bucketpoint.integrations.torch_checkpointing.names import (
    BLOCK_BYTES,
    File,
    Sums,
    block_sums,
    encode_sums,
    file_bytes,
    joined,
)
from bucketpoint.stores import ObjectInfo, Store, pinned
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer import BufferPool, Extent, Meter, TransferOptions, fetch, plan_requests
from bucketpoint.transfer.pieces import BlockCache, RangeFile, abort, common_part_bytes
from bucketpoint.transfer.stream import StreamUpload

_SMALLEST_KEPT_BYTES = 64 << 10
"""Smaller pieces are copied, since a request with thousands of buffers costs more than the copy of their bytes."""


class Owners:
    """CPU memory of the tensors in a value, to recognise bytes of a tensor, which are then sent without a copy."""

    def __init__(self, data: object) -> None:
        found: dict[int, memoryview] = {}
        self.nbytes = 0
        for leaf in tree_leaves(data):
            tensor = getattr(leaf, "_local_tensor", leaf)
            # torch.save itself copies storages of other devices.
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
                # A subclass without memory: torch.save finds the tensors inside it.
                continue
        self._starts = sorted(found)
        self._views = [found[start] for start in self._starts]

    def keep(self, view: memoryview) -> memoryview | None:
        """Return `view` as a slice of the tensor memory that contains it; None if none does."""
        start = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
        index = bisect.bisect_right(self._starts, start) - 1
        if index < 0:
            return None
        low = start - self._starts[index]
        owner = self._views[index]
        return owner[low : low + len(view)] if low + len(view) <= len(owner) else None


class WriteStream(StreamUpload):
    """Writable stream whose bytes, followed by their checksums, become one object.

    Bytes of tensors in `owners` are sent without a copy; all others are copied once. The object becomes visible when
    the stream is closed without an error. An error in the `with` block aborts the upload, as does the deletion of an
    open stream.

    Args:
        owners: the tensors whose bytes will be written. They must not change before the stream is closed.
        done: called with the object once it exists.
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
        limits = store.capabilities
        expected = owners.nbytes if owners else 0
        largest = expected * 11 // 10
        super().__init__(store, key, options, largest_nbytes=largest, meter=Meter("save", store.url, largest, None))
        if limits.multipart:
            size = common_part_bytes([expected], options) if expected else options.part_bytes
            if limits.copies_bodies:
                size = min(size, options.copied_part_bytes)
            size = max(size, limits.min_part_bytes, -(-largest // limits.max_parts))
            self._part_bytes = max(size - size % BLOCK_BYTES, BLOCK_BYTES)
        self._most_copied = max(options.max_inflight_bytes, 2 * self._part_bytes)
        self._done, self._owners = done, owners
        self._process = os.getpid()
        self._sums: dict[int, list[int]] = {}

    def write(self, data: Any, /) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        return super().write(data)

    def close(self) -> None:
        """Send the rest and make the object visible. Raises the error of any part."""
        if self.closed:
            return
        try:
            self._write_sums()
            info = self.commit()
            self._done(ObjectInfo(self._key, self._position, info.etag, info.modified))
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
        # io.IOBase's finalizer closes the stream, which would make a truncated object visible.
        if hasattr(self, "_sums") and not self.closed:
            if self._process == os.getpid():
                # No part is under way, because each of them would hold a reference to the stream.
                self._group.abandon(self._left())
                abort(self._store, self._key, self._upload_id)
            super().close()

    def _left(self) -> BucketpointError:
        return BucketpointError("The stream was left before its end", key=self._key)

    def _abort(self, error: BaseException) -> None:
        # In a forked process the upload belongs to the parent.
        if self._process == os.getpid():
            super()._abort(error)

    def _take(self, piece: memoryview) -> None:
        kept = self._owners.keep(piece) if self._owners and len(piece) >= _SMALLEST_KEPT_BYTES else None
        if kept is None:
            self._copy(piece)
        else:
            self._seal()
            self._pieces.append(kept)

    def _checksum(self, number: int, body: Sequence[memoryview]) -> int:
        found = block_sums(body)
        with self._state:
            self._sums[number] = found
            self._state.notify_all()
        return joined(found, sum(map(len, body)))

    def _write_sums(self) -> None:
        self._seal()
        last = block_sums(self._pieces)
        with self._state:
            while len(self._sums) < self._sent:
                self._state.wait(0.2)
                self._raise_failure()
        table = [crc for _, crcs in sorted(self._sums.items()) for crc in crcs]
        super().write(encode_sums([*table, *last], self._position))


WHOLE_BYTES = 4 << 20
"""Size up to which an object is read in one request, its checksums included."""

_KEPT_BLOCKS = 8
_READ_AHEAD = BLOCK_BYTES // 2
"""Reads below this size receive a whole block, which is cached: torch's zip reader reads a few bytes at a time."""


class Files:
    """Reader of ranges of files of one store, in parallel and into the caller's memory."""

    def __init__(self, store: Store, options: TransferOptions) -> None:
        self.store = store
        self._options = options
        self._pool = BufferPool(options.max_inflight_bytes)
        self._sums: dict[str, Sums] = {}

    def whole(self, file: File) -> io.BytesIO:
        if file.object_nbytes <= WHOLE_BYTES:
            return io.BytesIO(self._small(file))
        # `sums` finds a wrong size before memory is allocated.
        nbytes = self.sums(file).nbytes
        data = io.BytesIO()
        data.seek(nbytes - 1)
        data.write(b"\0")
        data.seek(0)
        with data.getbuffer() as view:
            self.into(file, 0, view)
        return data

    def into(self, file: File, start: int, out: memoryview) -> None:
        if not len(out):
            return
        sums = self.sums(file)
        size = common_part_bytes([len(out)], self._options)
        size = max(size - size % BLOCK_BYTES, BLOCK_BYTES)
        extents = []
        low, stop = start, start + len(out)
        while low < stop:
            high = min(low - low % BLOCK_BYTES + size, stop)
            first, last = low - low % BLOCK_BYTES, min(-(-high // BLOCK_BYTES) * BLOCK_BYTES, file.nbytes)
            view = out[low - start : high - start]
            blocks = sums.blocks(first, last)
            extents.append(Extent(file.key, first, last, _nothing, blocks, view, low, file.key, self._pin(file)))
            low = high
        meter = Meter("load", self.store.url, len(out), None)
        fetch(self.store, plan_requests(extents, self._options), self._options, pool=self._pool, meter=meter)

    def sums(self, file: File) -> Sums:
        """Return the checksums of a file. Keys are never used twice, so cached checksums stay valid."""
        if file.key not in self._sums:
            nbytes = file.nbytes
            self.check(file)
            data = bytearray(file.object_nbytes - nbytes)
            view = memoryview(data)
            retry_transient(lambda: self.store.read_into(file.key, nbytes, [view], if_match=self._pin(file)))
            self._sums[file.key] = Sums.decode(view, nbytes, url=self.store.url, key=file.key)
        return self._sums[file.key]

    def _pin(self, file: File) -> str | None:
        return pinned(self.store, file.etag)

    def check(self, file: File) -> None:
        """Raise CorruptDataError if an object is too short to contain its checksums."""
        if file_bytes(file.object_nbytes) < 0:
            raise CorruptDataError("The object lacks its checksums", url=self.store.url, key=file.key)

    def _small(self, file: File) -> memoryview:
        self.check(file)
        data = memoryview(self.store.get(file.key)[0])
        nbytes = file.nbytes
        if len(data) != file.object_nbytes:
            raise CorruptDataError(
                f"An object has {len(data)} bytes, but {file.object_nbytes} were written",
                url=self.store.url,
                key=file.key,
            )
        sums = Sums.decode(data[nbytes:], nbytes, url=self.store.url, key=file.key)
        if block_sums([data[:nbytes]]) != list(sums.crcs):
            raise CorruptDataError("Checksum mismatch in a file", url=self.store.url, key=file.key)
        return data[:nbytes]


class ReadStream(RangeFile):
    """A seekable stream of a file's bytes."""

    most_bytes = sys.maxsize

    def __init__(self, files: Files, file: File) -> None:
        blocks = BlockCache(lambda key, at, out: files.into(file, at, out), block_nbytes=BLOCK_BYTES, most=_KEPT_BLOCKS)

        def read(key: str, at: int, out: memoryview) -> None:
            if len(out) >= _READ_AHEAD:
                files.into(file, at, out)
            else:
                blocks.read(key, at, out, size=file.nbytes)

        super().__init__(read, file.key, 0, file.nbytes)


def _nothing(view: memoryview | None) -> None:
    """Do nothing: the extent's bytes are in place."""
