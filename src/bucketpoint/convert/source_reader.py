"""Reader of ranges of the source's objects, pinned to the version at the first look. Small reads use cached blocks.

The meaning of the bytes is the business of the modules in `readers`.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import threading

from bucketpoint.errors import CorruptDataError, MetadataError, ObjectNotFoundError, PreconditionFailedError
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import TransferOptions, retry_transient
from bucketpoint.transfer.pieces import for_each

BLOCK_BYTES = 256 << 10
"""Size of a cached block.

Headers, directories and small items lie close together, and a request costs more than a block.
"""

_MOST_BLOCKS = 64
_CACHE_SHARE = 8

MAX_READ_BYTES = 256 << 20
"""Limit on one read by a format's own parser, such as of an archive's directory: a wrong length takes no memory."""


class SourceBytes:
    """Reads objects of one store. Safe to use from several threads.

    Args:
        options: at most an eighth of `max_inflight_bytes` is used for cached blocks.
    """

    def __init__(self, store: Store, options: TransferOptions) -> None:
        self.store = store
        self.options = options
        self._pinned = store.capabilities.pinned_reads
        most = max(min(_MOST_BLOCKS, options.max_inflight_bytes // _CACHE_SHARE // BLOCK_BYTES), 1)
        self._lock = threading.Lock()
        self._infos: dict[str, ObjectInfo] = {}
        self._blocks = functools.lru_cache(most)(lambda key, number: _Block())

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were ever held in cached blocks."""
        return self._blocks.cache_info().currsize * BLOCK_BYTES

    def look(self, key: str) -> ObjectInfo:
        """Return the object's facts as of the first request for it. Raises ObjectNotFoundError."""
        info = self._infos.get(key)
        if info is None:
            info = self._head(key)
            with self._lock:
                info = self._infos.setdefault(key, info)
        return info

    def has(self, key: str) -> bool:
        try:
            self.look(key)
        except ObjectNotFoundError:
            return False
        return True

    def fingerprint(self, data: bytes = b"") -> str:
        """Return a digest of `data` and of all objects looked at. It changes if any of them is replaced.

        If the store has no ETags, a replacement cannot be detected, so the digest is a new one each time.
        """
        digest = hashlib.sha256(self.store.identity.encode())
        digest.update(hashlib.sha256(data).digest())
        for key, info in sorted(self._infos.items()):
            digest.update(f"\n{key}\n{info.size} {info.etag}".encode())
            digest.update(os.urandom(16) if info.etag is None else b"")
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Look at all objects again, unless reads are pinned to the version at the first look.

        Raises:
            CorruptDataError: an object was replaced meanwhile, or is gone.
        """
        if not self._pinned:
            for_each(self._infos, self._compare, self.options)

    def _compare(self, key: str) -> None:
        known = self._infos[key]
        try:
            now = self._head(key)
        except ObjectNotFoundError:
            raise self._changed(key, "the object was deleted") from None
        if (now.size, now.etag) != (known.size, known.etag):
            raise self._changed(key, "the object was replaced")

    def read(self, key: str, start: int, out: memoryview) -> None:
        """Read the bytes `[start, start + len(out))` of an object into `out`.

        Raises:
            CorruptDataError: the object ends before, is gone, or was replaced since the first look.
        """
        if len(out) >= BLOCK_BYTES:
            self._fetch(key, start, out)
            return
        size, done = self.look(key).size, 0
        if start + len(out) > size:
            raise CorruptDataError(
                f"an object has {size} bytes, but byte {start + len(out) - 1} is needed", url=self.store.url, key=key
            )
        while done < len(out):
            number, offset = divmod(start + done, BLOCK_BYTES)
            block = self._block(key, number, size)
            piece = block[offset : offset + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)

    def take(self, key: str, start: int, nbytes: int) -> memoryview:
        """Read `nbytes` bytes from `start` on into new memory."""
        view = memoryview(bytearray(nbytes))
        self.read(key, start, view)
        return view

    def file(self, key: str, start: int, stop: int) -> ObjectFile:
        """Return the bytes `[start, stop)` of an object as a file."""
        return ObjectFile(self, key, start, stop)

    def _block(self, key: str, number: int, size: int) -> memoryview:
        with self._lock:
            block = self._blocks(key, number)
        # A thread that wants the same block meanwhile waits for this one instead of requesting it again.
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
            f"the source changed during the conversion: {reason}",
            url=self.store.url,
            key=key,
            remedy="Convert again when no other process writes to the source",
        )


class _Block:
    """A block that is cached or being fetched."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.data: memoryview | None = None


class ObjectFile(io.RawIOBase):
    """A seekable file over a range of an object.

    Refuses a read of more than `MAX_READ_BYTES`, also one without a size.
    """

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

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self._nbytes - self._position, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > MAX_READ_BYTES:
            raise MetadataError(f"A part of the file claims to have {wanted} bytes, which is too many", key=self._key)
        taken = self._source.take(self._key, self._start + self._position, wanted)
        self._position += wanted
        return bytes(taken)

    def readinto(self, buffer: object, /) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        view = view[: max(self._nbytes - self._position, 0)]
        self._source.read(self._key, self._start + self._position, view)
        self._position += len(view)
        return len(view)
