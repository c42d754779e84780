"""What a filesystem does as asked, found by trying it on a scratch object. Once a process, for each bucket of each.

That a library takes a condition says nothing of the service behind it: some that speak S3's protocol ignore
`If-None-Match`, and a commit that trusts them loses checkpoints. So the first commit tries it out.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsspec.spec import AbstractFileSystem

from bucketpoint.errors import (
    BucketNotFoundError,
    CredentialsError,
    EndpointError,
    PreconditionFailedError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)

if TYPE_CHECKING:
    from bucketpoint.stores.fsspec import FsspecStore

logger = logging.getLogger(__name__)

SCRATCH = ".bucketpoint-probe-"
"""What scratch objects are called, before something random."""

# These say nothing of what the store can do.
UNDECIDED = (BucketNotFoundError, EndpointError, CredentialsError, ThrottledError, TransientStoreError)


@dataclass(frozen=True)
class Probed:
    """What was found.

    Attributes:
        creates: a second exclusive create of one object was refused, and the first object stayed.
        replaces: a replacement of an object that is not there any more was refused.
        checks: a body with a wrong CRC32C was refused.
        why: what went otherwise, for messages; empty if nothing did.
    """

    creates: bool
    replaces: bool
    checks: bool
    why: str = ""


class _Cache:
    """What was found in this process, for as long as the filesystem lives."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.found: weakref.WeakKeyDictionary[AbstractFileSystem, dict[str, Probed]] = weakref.WeakKeyDictionary()


_cache = _Cache()


def known(store: FsspecStore) -> Probed | None:
    """What an earlier `probe` found out about this store's filesystem and bucket."""
    found = _cache.found.get(store.fs)
    return None if found is None else found.get(_bucket(store))


def probe(store: FsspecStore, prefix: str) -> Probed:
    """Try what this store's filesystem is known to have, in a scratch object below `prefix`, and delete that again.

    Six small requests at most, the first time; none where the filesystem has nothing to try. Says once, in the log,
    where commits will have to do without a condition.

    Raises:
        BucketNotFoundError, EndpointError, CredentialsError, ThrottledError, TransientStoreError: nothing was found
            out.
    """
    with _cache.lock:
        found = known(store)
        if found is None:
            found = _tried(store, prefix) if store.ways.creates else Probed(False, False, False)
            _cache.found.setdefault(store.fs, {})[_bucket(store)] = found
            if not (found.creates or store.ways.private):
                logger.warning(
                    "%s has no conditional writes%s: a commit there looks, writes and looks again, which is safe "
                    "against crashes and not against two jobs that save to one URL in one instant",
                    store.url,
                    f" ({found.why})" if found.why else "",
                )
    return found


def _tried(store: FsspecStore, prefix: str) -> Probed:
    key = f"{prefix}/{SCRATCH}" if prefix else SCRATCH
    key += secrets.token_hex(8)
    why: list[str] = []
    try:
        creates = _is_refused(lambda: _creates(store, key), "an exclusive create", why)
        replaces = creates and store.ways.replaces and _is_refused(lambda: _replaces(store, key), "a replacement", why)
        checks = store.ways.checks and _checks(store, f"{key}-sum")
    finally:
        with contextlib.suppress(StoreError):
            # Without the right to delete two tiny objects stay, as does whatever that job saves.
            store.delete([key, f"{key}-sum"])
    return Probed(creates, replaces, checks, "; ".join(why))


def _is_refused(attempt: Callable[[], None], what: str, why: list[str]) -> bool:
    try:
        attempt()
    except PreconditionFailedError:
        return True
    except UNDECIDED:
        raise
    except StoreError as error:
        why.append(f"{what} was not understood: {error.message}")
        return False
    why.append(f"the service ignores the condition of {what}")
    return False


def _creates(store: FsspecStore, key: str) -> None:
    """Raises PreconditionFailedError if all is well."""
    try:
        store.create_unseen(key, b"first")
    except PreconditionFailedError as error:
        raise StoreError(f"it was refused where nothing was: {error.message}", url=store.url) from None
    try:
        store.create_unseen(key, b"second")
    except PreconditionFailedError:
        if store.get(key)[0] != b"first":
            raise StoreError("it was refused and done all the same", url=store.url) from None
        raise


def _replaces(store: FsspecStore, key: str) -> None:
    """Raises PreconditionFailedError if all is well."""
    before = store.head(key).etag or ""
    try:
        store.replace_unseen(key, b"third", before)
    except PreconditionFailedError as error:
        raise StoreError(f"it was refused for the object that is there: {error.message}", url=store.url) from None
    store.replace_unseen(key, b"fourth", before)


def _checks(store: FsspecStore, key: str) -> bool:
    try:
        store.put(key, [memoryview(b"checksum")], crc32c=1)
    except UNDECIDED:
        raise
    except StoreError:
        return True
    return False


def _bucket(store: FsspecStore) -> str:
    return store.root.lstrip("/").partition("/")[0]
