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
    if _expires(data) > catalog.clock() and _holder(data) != holder:
        return None
    try:
        catalog.write(key, body, if_match=info.etag)
        return lock
    except PreconditionFailedError:
        return None


def held_by(catalog: Catalog) -> str:
    """Describe who holds the lock, and when it is free at the latest. One small GET."""
    try:
        data = catalog.store.get(catalog.own_key(catalog_keys.LOCK), max_bytes=1 << 16)[0]
    except ObjectNotFoundError:
        return "another pruner was running"
    expires = min(max(_expires(data), 0.0), catalog.clock() + 86_400)
    until = datetime.datetime.fromtimestamp(expires, datetime.timezone.utc).strftime("%H:%M:%S UTC")
    holder = (_holder(data) or "")[:80]
    return f"another pruner is running ({holder!r}); if it has died, its lock expires at {until}"


def give_back(catalog: Catalog, lock: Lock) -> None:
    """Remove the lock, unless it has expired and may belong to another pruner by now."""
    if catalog.clock() < lock.expires:
        catalog.store.delete([catalog.own_key(catalog_keys.LOCK)])


def _expires(data: bytes) -> float:
    expires = catalog_keys.content_of(data).get("expires")
    # A lock that cannot be read counts as expired.
    return expires if isinstance(expires, (int, float)) else 0.0


def _holder(data: bytes) -> str | None:
    holder = catalog_keys.content_of(data).get("holder")
    return holder if isinstance(holder, str) else None
