"""Fence of an attempt: an object for which a save and a sweep compete, so that only one of them continues.

A sweep removes only objects older than `MIN_SWEEP_AGE_S`. If a save reaches its commit more than `FENCE_AGE_S` after
its last sign of life, it first writes its fence, create-only, and then checks that all its data exists. A sweep writes
the same object before it removes data of the attempt. The second of the two stops. Once the data is removed, the sweep
removes the fence too, and a save that comes later finds its data missing. Faster saves write no fence.

A fence cannot stop a commit request that reaches the store half an hour after it was sent. Amazon S3 and similar stores
refuse requests that were signed more than 15 minutes before (`RequestTimeTooSkewed`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping

from bucketpoint.errors import AccessDeniedError, IncompleteSaveError, ObjectNotFoundError, PreconditionFailedError
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import content_of
from bucketpoint.stopwatch import Stopwatch
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer.checksum import crc32c

MIN_SWEEP_AGE_S = 3600.0
"""Least age in seconds of objects that a sweep removes. The half hour above `FENCE_AGE_S` is for a commit under way."""

FENCE_AGE_S = MIN_SWEEP_AGE_S / 2
"""Seconds without a sign of life after which a save must write its fence before it commits."""

ATTEMPTS = 3

SAVE, SWEEP = "save", "sweep"
"""Holders of a fence."""


class AttemptFence:
    """The fences of one attempt, written by the rank that commits: one for the token of each rank.

    Args:
        since: stopwatch that was started before any rank of the attempt sent data.

    Attributes:
        sizes: sizes in bytes of the data objects that the commit will name, by path.
    """

    def __init__(self, store: Store, prefix: str, since: Stopwatch, sizes: Mapping[str, int] | None = None) -> None:
        self.sizes = sizes or {}
        self._store = store
        self._prefix = prefix
        self._alive = since
        self._etags: dict[str, str | None] = {}

    def ensure(self) -> None:
        """Write the fences if they are needed. Must be called right before each PUT of the commit.

        Raises:
            IncompleteSaveError: a sweep has removed data, or may have.
        """
        # A loop, because the process may be suspended during `take`.
        while self._alive.seconds() >= FENCE_AGE_S:
            self.take()

    def take(self) -> None:
        """Write or renew the fences: sweeps then treat the attempt as one that has just begun. Raises as `ensure`.

        A PUT for each rank, and one LIST for each 1,000 objects.
        """
        alive = Stopwatch()
        for token in sorted({token for path in self.sizes if (token := keys.token_of(path)) is not None}):
            key = keys.join(self._prefix, keys.fence_path(token))
            self._etags[key] = self._write(key).etag
        missing = self._missing()
        if missing is not None:
            self.release()
            raise self._swept(f"{missing} is missing or has a different size")
        self._alive = alive

    def release(self) -> None:
        """Remove the fences after the commit. Best effort: a sweep removes those that stay."""
        self._store.delete([*self._etags])
        self._etags = {}

    def _write(self, key: str) -> ObjectInfo:
        body, taken, etag = memoryview(_body(SAVE)), key in self._etags, self._etags.get(key)
        for _ in range(ATTEMPTS):
            try:
                return retry_transient(
                    lambda taken=taken, etag=etag: self._store.put(  # type: ignore[misc]
                        key, [body], crc32c=crc32c(body), if_none_match=not taken, if_match=etag
                    ),
                    attempts=ATTEMPTS,
                )
            except PreconditionFailedError:
                pass
            try:
                data, info = retry_transient(lambda: self._store.get(key, first=1 << 16), attempts=ATTEMPTS)
            except ObjectNotFoundError:
                break
            if data == body:
                # This save wrote the fence; the answer to its PUT was lost.
                return info
            if _held_by(data) != SAVE:
                break
            # Another process that copies the same checkpoint wrote the fence: this process takes it over.
            taken, etag = True, info.etag
        raise self._swept("a sweep has replaced the fence of this save")

    def _missing(self) -> str | None:
        """Return the key of an object that is missing or has another size, or None."""
        # A sweep removes only objects with a token in their name.
        sizes = {keys.join(self._prefix, path): size for path, size in self.sizes.items() if keys.token_of(path)}
        if not sizes:
            return None
        try:
            there = {info.key: info.size for info in self._store.list(keys.join(self._prefix, f"{keys.DATA_FOLDER}/"))}
        except AccessDeniedError:
            # Without permission to list: one HEAD for each object. S3 then denies access to a missing object, too.
            there = {}
            for key in sizes:
                with contextlib.suppress(AccessDeniedError, ObjectNotFoundError):
                    there[key] = self._store.head(key).size
        return next((key for key, size in sizes.items() if there.get(key) != size), None)

    def _swept(self, reason: str) -> IncompleteSaveError:
        return IncompleteSaveError(
            f"A sweep deleted data of this save, because it took the save for dead; nothing was committed: {reason}",
            url=f"{self._store.url}/{self._prefix}",
            remedy="Set prune.debris_after in the policy, and --older-than of bucketpoint gc, to more than the longest "
            "save takes",
        )


def condemn(store: Store, prefix: str, token: str, there: ObjectInfo | None) -> bool:
    """Write the fence of an attempt for a sweep. Return True if the save can no longer commit: its data may be removed.

    Args:
        there: the fence as listed; None if there was none.
    """
    key, body = keys.join(prefix, keys.fence_path(token)), memoryview(_body(SWEEP))
    etag = there.etag if there is not None else None
    try:
        store.put(key, [body], crc32c=crc32c(body), if_none_match=there is None, if_match=etag)
        return True
    except PreconditionFailedError:
        try:
            return _held_by(store.get(key, first=1 << 16)[0]) == SWEEP
        except ObjectNotFoundError:
            return False


def _body(holder: str) -> bytes:
    # S3 derives an ETag from the bytes alone: with a nonce, a renewed fence has another ETag than a sweep has listed.
    return json.dumps({"held_by": holder, "nonce": os.urandom(8).hex()}).encode()


def _held_by(data: bytes) -> object:
    return content_of(data).get("held_by")
