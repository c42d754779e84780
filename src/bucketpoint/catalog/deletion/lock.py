"""The lock of pruners, an object that expires, and the check that this process may delete.

Losing the lock is harmless: it only avoids double work.
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
"""Seconds for which a lock holds, by the store's time of its write. Longer than the deletion of a batch."""

_GIVEN_BACK = ""
"""Holder of a lock that a pruner without the right to delete has given back."""


@dataclass(frozen=True)
class Lock:
    """The pruners' lock.

    Attributes:
        catalog: the catalog at the store's time of the lock, which is the time of its holder's round.
        watch: stopwatch, started before the lock was written.
        etag: ETag of the lock; None if the store has none.
    """

    catalog: Catalog
    watch: Stopwatch
    etag: str | None

    @property
    def holds(self) -> bool:
        """True while the lock cannot have expired, so that no other pruner holds it."""
        return self.watch.seconds() < LOCK_SECONDS


def acquire(catalog: Catalog, holder: str) -> Lock | None:
    """Acquire the lock; None while another holder's has not expired. One PUT if it is free."""
    key, watch = catalog.own_key(catalog_keys.LOCK), Stopwatch()
    # Version 0.2 goes by `expires`, a time by the clock of the holder's machine.
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
    """Return the report of `work`, which runs under the lock, or a report that names the lock's holder."""
    lock = acquire(catalog, holder)
    if lock is None:
        return Pruned(stopped=held_by(catalog))
    try:
        return work(lock)
    finally:
        give_back(lock)


def held_by(catalog: Catalog) -> str:
    """Describe who holds the lock, and when it is free at the latest. One small GET."""
    try:
        data, info = catalog.store.get(catalog.own_key(catalog_keys.LOCK), first=1 << 16)
    except ObjectNotFoundError:
        return "another pruner was running"
    ends = info.modified + LOCK_SECONDS if info.modified is not None else _expires(data)
    until = datetime.datetime.fromtimestamp(ends, datetime.timezone.utc).strftime("%H:%M:%S UTC")
    return f"another pruner is running ({(_holder(data) or '')[:80]!r}); if it has died, its lock expires at {until}"


def give_back(lock: Lock) -> None:
    """Remove the lock, unless it has expired and may belong to another pruner by now. Or overwrite it without a
    holder."""
    if not lock.holds:
        return
    key = lock.catalog.own_key(catalog_keys.LOCK)
    with contextlib.suppress(AccessDeniedError):
        if not lock.catalog.store.delete([key]):
            return
    with contextlib.suppress(PreconditionFailedError):
        lock.catalog.write(key, json.dumps({"expires": 0, "holder": _GIVEN_BACK}).encode(), if_match=lock.etag)


def _is_free(catalog: Catalog, data: bytes, info: ObjectInfo) -> bool:
    """Return True if another's lock has expired. Two requests, as only an object written now has the store's time."""
    now = catalog.at_store_time().now
    if now is None or info.modified is None:
        # The store returns no times. A lock only saves work, so the machines' clocks decide.
        return _expires(data) <= catalog.clock()
    return info.modified + LOCK_SECONDS <= now


def _expires(data: bytes) -> float:
    expires = catalog_keys.content_of(data).get("expires")
    # A lock that cannot be read, or that names no time, counts as expired.
    return expires if isinstance(expires, (int, float)) and 0 <= expires < 1e11 else 0.0


def _holder(data: bytes) -> str | None:
    holder = catalog_keys.content_of(data).get("holder")
    return holder if isinstance(holder, str) else None


_NOBODYS = f"{SCRATCH}delete"
"""Name of an object that is never written. In a bucket with versioning its deletion leaves a delete marker."""

_granted: set[tuple[str, str]] = set()
"""Stores and prefixes where this process may delete."""


def require_deletes(catalog: Catalog, folder: str, *, written: int = 0) -> None:
    """Check that data in a checkpoint's folder may be deleted, by a deletion of an object that does not exist.

    A marker in place of `.metadata` ends a checkpoint, and a role that may only save can write one. Without the right
    to delete, such a role would end checkpoints and leave all their data. One request for each store and prefix.

    Args:
        written: number of tombstones that this prune has written, for the error.

    Raises:
        AccessDeniedError: the deletion was refused.
        StoreError: the request failed, after all retries.
    """
    place = catalog.store.identity, catalog.prefix
    if place in _granted:
        return
    try:
        # Among the data, because a trainer may be allowed to delete notes.
        kept = next(iter(catalog.store.delete([catalog.key(f"{folder}/{_NOBODYS}")])), None)
        reason, remedy = (f"{kept.code}: {kept.message}", kept.remedy) if kept is not None else (None, None)
    except AccessDeniedError as error:
        reason, remedy = error.message, error.remedy
    if reason is not None:
        left = (
            f"; the next prune with that right carries out {written} tombstones that this one wrote" if written else ""
        )
        raise AccessDeniedError(
            f"These credentials may not delete data, so no checkpoint was deleted ({reason.rstrip('.')}){left}",
            url=catalog.url,
            remedy=f"{f'{remedy}. ' if remedy else ''}Delete with the role pruner, and set when: manual in "
            "the policy of other jobs",
        )
    _granted.add(place)
