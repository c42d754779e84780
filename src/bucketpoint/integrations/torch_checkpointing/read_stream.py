"""Stream from which torch_checkpointing reads a file. Every byte is verified by its checksum."""

from __future__ import annotations

import io
import sys

from bucketpoint.errors import CorruptDataError
from bucketpoint.integrations.torch_checkpointing.sums import BLOCK_BYTES, Sums, block_sums, file_bytes
from bucketpoint.integrations.torch_checkpointing.tree import File
from bucketpoint.stores import Store, pinned
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer import BufferPool, Extent, Meter, TransferOptions, fetch, plan_requests
from bucketpoint.transfer.parts import common_part_bytes
from bucketpoint.transfer.pieces import BlockCache, RangeFile

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
