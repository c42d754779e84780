"""The pruners' lock, an object that expires, and the check of the permission to delete.

The lock only avoids double work: two pruners at once do no harm.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.state import Pruned
from bucketpoint.errors import AccessDeniedError, ObjectNotFoundError, PreconditionFailedError
from bucketpoint.format import catalog_keys
from bucketpoint.stopwatch import Stopwatch
from bucketpoint.stores import ObjectInfo
from bucketpoint.stores.base import SCRATCH

LOCK_SECONDS = 900.0
"""Seconds for which a lock is valid, from its write by the store's clock. Longer than the deletion of a batch."""

_GIVEN_BACK = ""
"""Holder in a lock that was released by a pruner without permission to delete it."""


@dataclass(frozen=True)
class Lock:
    """The pruners' lock.

    Attributes:
        catalog: the catalog, whose `now` is the store's time of the lock's write, used for the whole round.
        watch: stopwatch that was started before the lock was written.
        etag: ETag of the lock; None if the store has no ETags.
    """

    catalog: Catalog
    watch: Stopwatch
    etag: str | None

    @property
    def holds(self) -> bool:
        """True while the lock cannot have expired, so that no other pruner can acquire it."""
        return self.watch.seconds() < LOCK_SECONDS


def acquire(catalog: Catalog, holder: str) -> Lock | None:
    """Acquire the lock; None while the lock of another holder is valid. One PUT if there is no lock."""
    key, watch = catalog.own_key(catalog_keys.LOCK), Stopwatch()
    # `expires`, by the holder's clock, is for version 0.2, and for stores without times.
    body = json.dumps({"expires": catalog.clock() + LOCK_SECONDS, "holder": holder}, sort_keys=True).encode()
    written = catalog.create(key, body)
    if written is None:
        try:
            data, info = catalog.store.get(key, first=1 << 16)
        except ObjectNotFoundError:
            written = catalog.create(key, body)
        else:
            if _holder(data) not in (holder, _GIVEN_BACK) and not _is_free(catalog, data, info):
                return None
            with contextlib.suppress(PreconditionFailedError):
                written = catalog.write(key, body, if_match=info.etag)
    return None if written is None else Lock(catalog.dated(written), watch, written.etag)


def under_lock(catalog: Catalog, holder: str, work: Callable[[Lock], Pruned]) -> Pruned:
    """Run `work` under the lock and return its report. If another pruner holds the lock, return a report naming it."""
    lock = acquire(catalog, holder)
    if lock is None:
        return Pruned(stopped=held_by(catalog))
    try:
        return work(lock)
    finally:
        give_back(lock)


def held_by(catalog: Catalog) -> str:
    """Return a text with the lock's holder and the time of its expiry. One small GET."""
    try:
        data, info = catalog.store.get(catalog.own_key(catalog_keys.LOCK), first=1 << 16)
    except ObjectNotFoundError:
        return "another pruner was running"
    ends = info.modified + LOCK_SECONDS if info.modified is not None else _expires(data)
    until = datetime.datetime.fromtimestamp(ends, datetime.timezone.utc).strftime("%H:%M:%S UTC")
    return f"another pruner is running ({(_holder(data) or '')[:80]!r}); if it has died, its lock expires at {until}"


def give_back(lock: Lock) -> None:
    """Release the lock: delete it, or, without permission to delete, overwrite it without a holder.

    Do nothing if the lock has expired: it may belong to another pruner.
    """
    if not lock.holds:
        return
    key = lock.catalog.own_key(catalog_keys.LOCK)
    with contextlib.suppress(AccessDeniedError):
        if not lock.catalog.store.delete([key]):
            return
    with contextlib.suppress(PreconditionFailedError):
        lock.catalog.write(key, json.dumps({"expires": 0, "holder": _GIVEN_BACK}).encode(), if_match=lock.etag)


def _is_free(catalog: Catalog, data: bytes, info: ObjectInfo) -> bool:
    """Return True if another holder's lock has expired. Two requests, to get the store's present time."""
    now = catalog.at_store_time().now
    if now is None or info.modified is None:
        # The store returns no times, so the machines' clocks decide. An error is harmless: two pruners do double work.
        return _expires(data) <= catalog.clock()
    return info.modified + LOCK_SECONDS <= now


def _expires(data: bytes) -> float:
    expires = catalog_keys.content_of(data).get("expires")
    # A lock that cannot be parsed, or has no time, counts as expired.
    return expires if isinstance(expires, (int, float)) and 0 <= expires < 1e11 else 0.0


def _holder(data: bytes) -> str | None:
    holder = catalog_keys.content_of(data).get("holder")
    return holder if isinstance(holder, str) else None


_NOBODYS = f"{SCRATCH}delete"
"""Name of an object that never exists. In a bucket with versioning its deletion leaves a delete marker."""

_granted: set[tuple[str, str]] = set()
"""Stores and prefixes for which the permission to delete was checked."""


def require_deletes(catalog: Catalog, folder: str, *, written: int = 0) -> None:
    """Check the permission to delete data in a checkpoint's folder, by deleting an object that does not exist.

    A role that may only write could still replace `.metadata` by a deletion marker, which ends the checkpoint, and then
    be unable to delete the data. One request for each store and prefix.

    Args:
        written: number of tombstones that this prune has written, for the error's text.

    Raises:
        AccessDeniedError: the deletion was refused.
        StoreError: the request failed, after all retries.
    """
    place = catalog.store.identity, catalog.prefix
    if place in _granted:
        return
    try:
        # The object's key is among the data: a trainer may have permission to delete notes only.
        kept = next(iter(catalog.store.delete([catalog.key(f"{folder}/{_NOBODYS}")])), None)
        reason, remedy = (f"{kept.code}: {kept.message}", kept.remedy) if kept is not None else (None, None)
    except AccessDeniedError as error:
        reason, remedy = error.message, error.remedy
    if reason is not None:
        left = f"; the next prune with this permission carries out {written} tombstones of this one" if written else ""
        raise AccessDeniedError(
            f"These credentials may not delete data, so no checkpoint was deleted ({reason.rstrip('.')}){left}",
            url=catalog.url,
            remedy=f"{f'{remedy}. ' if remedy else ''}Delete with the role pruner, and set when: manual in "
            "the policy of other jobs",
        )
    _granted.add(place)
