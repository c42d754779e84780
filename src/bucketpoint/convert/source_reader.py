"""Reader of byte ranges of the source's objects, which the modules in `readers` interpret.

Reads are pinned to the version of an object at the first request. Small reads use cached blocks.
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
"""Size of a cached block. Headers, directories and small items lie close together, so a block saves requests."""

_MOST_BLOCKS = 64
_CACHE_SHARE = 8


class SourceBytes:
    """Reader of objects of one store, safe to use from several threads.

    Args:
        options: limits of the transfer; cached blocks take up to an eighth of `max_inflight_bytes`.
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
        """Return an object's size and ETag at the first call for this key. Raises ObjectNotFoundError."""
        info = self._infos.get(key)
        if info is None:
            info = self._head(key)
            with self._lock:
                info = self._infos.setdefault(key, info)
        return info

    def keys(self) -> list[str]:
        """Return the keys for which `look` has found an object."""
        return list(self._infos)

    def has(self, key: str) -> bool:
        try:
            self.look(key)
        except ObjectNotFoundError:
            return False
        return True

    def fingerprint(self, data: bytes = b"") -> str:
        """Return a digest of `data` and of the objects in `keys`, which changes if any of them is replaced.

        Without ETags a replacement cannot be detected, so the digest is random.
        """
        digest = hashlib.sha256(self.store.identity.encode())
        digest.update(hashlib.sha256(data).digest())
        for key, info in sorted(self._infos.items()):
            digest.update(f"\n{key}\n{info.size} {info.etag}".encode())
            digest.update(os.urandom(16) if info.etag is None else b"")
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Check that all objects are as at the first `look`, unless reads are pinned to that version.

        Raises:
            CorruptDataError: an object was replaced or deleted.
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
            CorruptDataError: the object is too short, or was deleted or replaced since the first `look`.
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
