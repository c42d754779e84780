"""One pruner at a time, by an object that expires. Losing it is harmless: it spares work, and guards nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.errors import ObjectNotFoundError, PreconditionFailedError
from bucketpoint.format import catalogue


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
