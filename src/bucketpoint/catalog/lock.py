"""One pruner at a time, by an object that expires. Losing it is harmless: it spares work, and guards nothing."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, replace

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.errors import ObjectNotFoundError, PreconditionFailedError
from bucketpoint.format import catalogue

_DAY_S = 86400.0
_NAME_LENGTH = 80


@dataclass(frozen=True)
class Lock:
    """Held by `holder` until `expires`, seconds since the epoch."""

    holder: str
    expires: float
    etag: str | None


def acquire(catalog: Catalog, holder: str, *, seconds: float) -> Lock | None:
    """The lock, or None while somebody else's has not expired. One PUT if it is free."""
    key = catalog.own_key(catalogue.LOCK)
    lock = Lock(holder, catalog.clock() + seconds, None)
    if catalog.create(key, _body(lock)):
        return lock
    try:
        data, info = catalog.store.get(key, max_bytes=1 << 16)
    except ObjectNotFoundError:
        return lock if catalog.create(key, _body(lock)) else None
    if _expires(data) > catalog.clock() and _holder(data) != holder:
        return None
    try:
        return replace(lock, etag=catalog.write(key, _body(lock), if_match=info.etag).etag)
    except PreconditionFailedError:
        return None


def held_by(catalog: Catalog) -> str:
    """Say who holds the lock, and when it is free at the latest. One small GET."""
    try:
        data = catalog.store.get(catalog.own_key(catalogue.LOCK), max_bytes=1 << 16)[0]
    except ObjectNotFoundError:
        return "another pruner was at work"
    expires = min(max(_expires(data), 0.0), catalog.clock() + _DAY_S)
    until = datetime.datetime.fromtimestamp(expires, datetime.timezone.utc).strftime("%H:%M:%S UTC")
    holder = (_holder(data) or "")[:_NAME_LENGTH]
    return f"another pruner is at work ({holder!r}); if it has died, a prune after {until} goes on"


def give_back(catalog: Catalog, lock: Lock) -> None:
    """Remove the lock, unless it has expired and may be another's by now."""
    if catalog.clock() < lock.expires:
        catalog.store.delete([catalog.own_key(catalogue.LOCK)])


def _body(lock: Lock) -> bytes:
    return json.dumps({"expires": lock.expires, "holder": lock.holder}, sort_keys=True).encode()


def _expires(data: bytes) -> float:
    expires = catalogue.content_of(data).get("expires")
    # A lock that cannot be read is nobody's.
    return expires if isinstance(expires, (int, float)) else 0.0


def _holder(data: bytes) -> str | None:
    holder = catalogue.content_of(data).get("holder")
    return holder if isinstance(holder, str) else None
