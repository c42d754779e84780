"""Reader of ranges of the source's objects, pinned to the version at the first look. Small reads use cached blocks.

The meaning of the bytes is the business of the modules in `readers`.
"""

from __future__ import annotations

import hashlib
import os
import threading

from bucketpoint.errors import CorruptDataError, ObjectNotFoundError, PreconditionFailedError
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.pieces import BlockCache, RangeFile, for_each

BLOCK_BYTES = 256 << 10
"""Size of a cached block.

Headers, directories and small items lie close together, and a request costs more than a block.
"""

_MOST_BLOCKS = 64
_CACHE_SHARE = 8


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
        self.cache = BlockCache(self._fetch, block_nbytes=BLOCK_BYTES, most=most)

    def look(self, key: str) -> ObjectInfo:
        """Return the object's facts as of the first request for it. Raises ObjectNotFoundError."""
        info = self._infos.get(key)
        if info is None:
            info = self._head(key)
            with self._lock:
                info = self._infos.setdefault(key, info)
        return info

    def keys(self) -> list[str]:
        """Return the keys of the objects that were looked at."""
        return list(self._infos)

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
        size = self.look(key).size
        if start + len(out) > size:
            raise CorruptDataError(
                f"an object has {size} bytes, but byte {start + len(out) - 1} is needed", url=self.store.url, key=key
            )
        self.cache.read(key, start, out, size=size)

    def take(self, key: str, start: int, nbytes: int) -> memoryview:
        """Read `nbytes` bytes from `start` on into new memory."""
        view = memoryview(bytearray(nbytes))
        self.read(key, start, view)
        return view

    def file(self, key: str, start: int, stop: int) -> RangeFile:
        """Return the bytes `[start, stop)` of an object as a file."""
        return RangeFile(self.read, key, start, stop)

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
