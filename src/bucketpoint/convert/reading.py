"""Ranges of the source's objects, pinned to what they were at the first look, small ones through a few cached blocks.

Nothing is known here of what the bytes mean.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections import OrderedDict

from bucketpoint.errors import CorruptDataError, MetadataError, ObjectNotFoundError, PreconditionFailedError
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import TransferOptions, retry_transient
from bucketpoint.transfer.pieces import each

BLOCK_BYTES = 256 << 10
"""Headers, directories and small items lie close together, and a request costs more time than so many bytes."""

_MOST_BLOCKS = 64
_CACHE_SHARE = 8

MAX_READ_BYTES = 256 << 20
"""What a format's own parser may ask for at once, such as an archive's directory: a wrong length takes no memory."""


class SourceBytes:
    """Reads objects of one store. Safe to use from several threads.

    Args:
        options: of `max_inflight_bytes` an eighth at most is kept as blocks.
    """

    def __init__(self, store: Store, options: TransferOptions) -> None:
        self.store = store
        self.options = options
        self._pinned = store.capabilities.pinned_reads
        self._most = max(min(_MOST_BLOCKS, options.max_inflight_bytes // _CACHE_SHARE // BLOCK_BYTES), 1)
        self._lock = threading.Lock()
        self._infos: dict[str, ObjectInfo] = {}
        self._blocks: OrderedDict[tuple[str, int], _Block] = OrderedDict()
        self.peak_bytes = 0
        """The most bytes that were ever kept as blocks."""

    def look(self, key: str) -> ObjectInfo:
        """What the store said of the object when it was first asked. Raises ObjectNotFoundError."""
        info = self._infos.get(key)
        if info is None:
            info = self._head(key)
            with self._lock:
                info = self._infos.setdefault(key, info)
        return info

    def fingerprint(self, data: bytes = b"") -> str:
        """A digest of `data` and all objects that were looked at: another one where any of them was replaced.

        Where the store has no ETags nobody can tell, so it is another one each time.
        """
        said = hashlib.sha256(self.store.identity.encode())
        said.update(hashlib.sha256(data).digest())
        for key, info in sorted(self._infos.items()):
            said.update(f"\n{key}\n{info.size} {info.etag}".encode())
            said.update(os.urandom(16) if info.etag is None else b"")
        return said.hexdigest()

    def check_unchanged(self) -> None:
        """Look at all objects again, where reads are not pinned to what they were at the first look.

        Raises:
            CorruptDataError: one was replaced meanwhile, or is gone.
        """
        if not self._pinned:
            each(self._infos.items(), lambda known: self._compare(*known), self.options)

    def _compare(self, key: str, known: ObjectInfo) -> None:
        try:
            found = self._head(key)
        except ObjectNotFoundError:
            raise self._changed(key, "it is gone") from None
        if (found.size, found.etag) != (known.size, known.etag):
            raise self._changed(key, "it was replaced")

    def read(self, key: str, start: int, out: memoryview) -> None:
        """Bytes `[start, start + len(out))` of an object.

        Raises:
            CorruptDataError: it ends before, or is not there any more, or was replaced since the first look.
        """
        if len(out) >= BLOCK_BYTES:
            self._fetch(key, start, out)
            return
        size, done = self.look(key).size, 0
        if start + len(out) > size:
            raise CorruptDataError(
                f"an object has {size} bytes, and byte {start + len(out) - 1} is needed", url=self.store.url, key=key
            )
        while done < len(out):
            number, offset = divmod(start + done, BLOCK_BYTES)
            block = self._block(key, number, size)
            piece = block[offset : offset + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)

    def take(self, key: str, start: int, nbytes: int) -> memoryview:
        """The same, in memory made for it."""
        view = memoryview(bytearray(nbytes))
        self.read(key, start, view)
        return view

    def file(self, key: str, start: int, stop: int) -> ObjectFile:
        """Bytes `[start, stop)` as a file."""
        return ObjectFile(self, key, start, stop)

    def _block(self, key: str, number: int, size: int) -> memoryview:
        where = key, number
        with self._lock:
            block = self._blocks.get(where)
            if block is None:
                block = self._blocks[where] = _Block()
                while len(self._blocks) > self._most:
                    self._blocks.popitem(last=False)
                self.peak_bytes = max(self.peak_bytes, len(self._blocks) * BLOCK_BYTES)
            else:
                self._blocks.move_to_end(where)
        # Whoever wants the same block meanwhile waits for it instead of asking for it too.
        with block.lock:
            if block.data is None:
                start = number * BLOCK_BYTES
                data = memoryview(bytearray(min(BLOCK_BYTES, size - start)))
                self._fetch(key, start, data)
                block.data = data
            return block.data

    def _fetch(self, key: str, start: int, out: memoryview) -> None:
        etag = self.look(key).etag if self._pinned else None
        try:
            retry_transient(
                lambda: self.store.read_into(key, start, [out], if_match=etag), attempts=self.options.read_attempts
            )
        except (ObjectNotFoundError, PreconditionFailedError) as error:
            raise self._changed(key, error.message) from error

    def _head(self, key: str) -> ObjectInfo:
        return retry_transient(lambda: self.store.head(key), attempts=self.options.read_attempts)

    def _changed(self, key: str, reason: str) -> CorruptDataError:
        return CorruptDataError(
            f"an object changed while it was converted: {reason}",
            url=self.store.url,
            key=key,
            remedy="Convert again once nobody writes there any more",
        )


class _Block:
    """A block that is there or on its way."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.data: memoryview | None = None


class ObjectFile(io.RawIOBase):
    """A seekable file of a range. `read` without a size, and of more than `MAX_READ_BYTES`, is refused."""

    def __init__(self, source: SourceBytes, key: str, start: int, stop: int) -> None:
        super().__init__()
        self._source = source
        self._key = key
        self._start = start
        self._nbytes = stop - start
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self._nbytes - self._position, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > MAX_READ_BYTES:
            raise MetadataError(f"A part of this file claims to have {wanted} bytes", key=self._key)
        taken = self._source.take(self._key, self._start + self._position, wanted)
        self._position += wanted
        return bytes(taken)

    def readinto(self, buffer: object, /) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        view = view[: max(self._nbytes - self._position, 0)]
        self._source.read(self._key, self._start + self._position, view)
        self._position += len(view)
        return len(view)
