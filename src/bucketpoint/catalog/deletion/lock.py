"""The lock of pruners, an object that expires: one pruner at a time.

Losing the lock is harmless: it only saves work, and no safety depends on it.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
from dataclasses import dataclass

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.errors import ObjectNotFoundError, PreconditionFailedError
from bucketpoint.format import catalog_keys
from bucketpoint.stores import ObjectInfo

LONGEST_S = 3600.0
"""Seconds after which any lock is free, by the store's time of its last write: pruners ask for less. A lock that says
more is that of a process whose clock was wrong."""


@dataclass(frozen=True)
class Lock:
    """The pruners' lock, held by `holder` until `expires`, seconds since the epoch."""

    holder: str
    expires: float


def holder_name() -> str:
    """Name this process for the lock: its host and its process id."""
    return f"{socket.gethostname()}-{os.getpid()}"


def acquire(catalog: Catalog, holder: str, *, seconds: float) -> Lock | None:
    """Acquire the lock; None while another holder's has not expired. One PUT if it is free."""
    key = catalog.own_key(catalog_keys.LOCK)
    lock = Lock(holder, catalog.clock() + seconds)
    body = json.dumps({"expires": lock.expires, "holder": lock.holder}, sort_keys=True).encode()
    if catalog.create(key, body):
        return lock
    try:
        data, info = catalog.store.get(key, max_bytes=1 << 16)
    except ObjectNotFoundError:
        return lock if catalog.create(key, body) else None
    if _free_at(data, info) > catalog.clock() and _holder(data) != holder:
        return None
    try:
        catalog.write(key, body, if_match=info.etag)
        return lock
    except PreconditionFailedError:
        return None


def held_by(catalog: Catalog) -> str:
    """Describe who holds the lock, and when it is free at the latest. One small GET."""
    try:
        data, info = catalog.store.get(catalog.own_key(catalog_keys.LOCK), max_bytes=1 << 16)
    except ObjectNotFoundError:
        return "another pruner was running"
    until = datetime.datetime.fromtimestamp(_free_at(data, info), datetime.timezone.utc).strftime("%H:%M:%S UTC")
    holder = (_holder(data) or "")[:80]
    return f"another pruner is running ({holder!r}); if it has died, its lock expires at {until}"


def give_back(catalog: Catalog, lock: Lock) -> None:
    """Remove the lock, unless it has expired and may belong to another pruner by now."""
    if catalog.clock() < lock.expires:
        catalog.store.delete([catalog.own_key(catalog_keys.LOCK)])


def _free_at(data: bytes, info: ObjectInfo) -> float:
    expires = _expires(data)
    return expires if info.modified is None else min(expires, info.modified + LONGEST_S)


def _expires(data: bytes) -> float:
    expires = catalog_keys.content_of(data).get("expires")
    # A lock that cannot be read, or that names no time, counts as expired.
    return expires if isinstance(expires, (int, float)) and 0 <= expires < 1e11 else 0.0


def _holder(data: bytes) -> str | None:
    holder = catalog_keys.content_of(data).get("holder")
    return holder if isinstance(holder, str) else None
