"""The stream that torch_checkpointing reads a file from. Every byte that it returns has been verified."""

from __future__ import annotations

import io
from typing import Any

from bucketpoint.errors import CorruptDataError
from bucketpoint.integrations.torch_checkpointing.sums import BLOCK_BYTES, Sums, block_sums, file_bytes
from bucketpoint.integrations.torch_checkpointing.tree import File
from bucketpoint.stores import Store
from bucketpoint.transfer import BufferPool, Extent, Meter, TransferOptions, fetch, plan_requests, retry_transient
from bucketpoint.transfer.parts import common_part_bytes
from bucketpoint.transfer.pieces import BlockCache

WHOLE_BYTES = 4 << 20
"""Smaller objects are read in one request, their checksums included."""

_KEPT_BLOCKS = 8
_READ_AHEAD = BLOCK_BYTES // 2
"""Reads below this size receive a whole block, which is kept: torch's zip reader asks for a few bytes at a time."""


class Files:
    """Reads ranges of files of one store, in parallel and into the caller's memory."""

    def __init__(self, store: Store, options: TransferOptions) -> None:
        self.store = store
        self._options = options
        self._pool = BufferPool(options.max_inflight_bytes)
        self._sums: dict[str, Sums] = {}

    def whole(self, file: File) -> bytearray:
        """Read a file."""
        if file.object_nbytes <= WHOLE_BYTES:
            return bytearray(self._small(file))
        # A size that is wrong is found before so much memory is taken.
        data = bytearray(self.sums(file).nbytes)
        self.into(file, 0, memoryview(data))
        return data

    def into(self, file: File, start: int, out: memoryview) -> None:
        """Read bytes from `start` on into `out`."""
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
        """Return the checksums of a file. The keys of files are never used twice, so what was read stays right."""
        if file.key not in self._sums:
            nbytes = file.nbytes
            self.check(file)
            data = bytearray(file.object_nbytes - nbytes)
            view = memoryview(data)
            retry_transient(lambda: self.store.read_into(file.key, nbytes, [view], if_match=self._pin(file)))
            self._sums[file.key] = Sums.decode(view, nbytes, url=self.store.url, key=file.key)
        return self._sums[file.key]

    def _pin(self, file: File) -> str | None:
        return file.etag if self.store.capabilities.pinned_reads else None

    def check(self, file: File) -> None:
        """Raise CorruptDataError if an object is too short for a file."""
        if file_bytes(file.object_nbytes) < 0:
            raise CorruptDataError("An object is too short for a file", url=self.store.url, key=file.key)

    def _small(self, file: File) -> memoryview:
        self.check(file)
        data = memoryview(self.store.get(file.key)[0])
        nbytes = file.nbytes
        if len(data) != file.object_nbytes:
            raise CorruptDataError(
                f"An object has {len(data)} bytes, and {file.object_nbytes} were written",
                url=self.store.url,
                key=file.key,
            )
        sums = Sums.decode(data[nbytes:], nbytes, url=self.store.url, key=file.key)
        if block_sums([data[:nbytes]]) != list(sums.crcs):
            raise CorruptDataError("Checksum mismatch in a file", url=self.store.url, key=file.key)
        return data[:nbytes]


class ReadStream(io.RawIOBase):
    """A seekable stream of a file's bytes.

    Args:
        whole: the file's bytes, if they have been read.
    """

    def __init__(self, files: Files, file: File, whole: bytearray | None = None) -> None:
        super().__init__()
        self._files, self._file = files, file
        self._whole = None if whole is None else memoryview(whole)
        self._nbytes = file.nbytes
        self._position = 0
        self._blocks = BlockCache(
            lambda key, at, out: files.into(file, at, out), block_nbytes=BLOCK_BYTES, most=_KEPT_BLOCKS
        )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._check_open()
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"whence is {whence}, and not 0, 1 or 2")
        position = offset + (0, self._position, self._nbytes)[whence]
        if position < 0:
            raise ValueError(f"a position before the beginning: {position}")
        self._position = position
        return position

    def tell(self) -> int:
        self._check_open()
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        self._check_open()
        view = memoryview(buffer).cast("B")
        view = view[: max(self._nbytes - self._position, 0)]
        if self._whole is not None:
            view[:] = self._whole[self._position : self._position + len(view)]
        elif len(view) >= _READ_AHEAD:
            self._files.into(self._file, self._position, view)
        else:
            self._blocks.read(self._file.key, self._position, view, size=self._nbytes)
        self._position += len(view)
        return len(view)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes; all of the rest by default. Fewer only at the end."""
        self._check_open()
        rest = max(self._nbytes - self._position, 0)
        count = rest if size is None or size < 0 else min(size, rest)
        if self._whole is not None:
            self._position += count
            return bytes(self._whole[self._position - count : self._position])
        data = bytearray(count)
        view = memoryview(data)
        while len(view):
            view = view[self.readinto(view) :]
        return bytes(data)

    def readall(self) -> bytes:
        return self.read()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")


def _nothing(view: memoryview | None) -> None:
    """Ignore that an extent has arrived: its bytes are where they belong."""
