"""Trial of a filesystem's conditional writes and checksums on a scratch object.

A library may accept a condition that the service behind it ignores: some S3-compatible services ignore `If-None-Match`,
and a commit that relies on the condition loses checkpoints. So a process makes a trial before its first commit to each
bucket of a filesystem.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from fsspec.spec import AbstractFileSystem

from bucketpoint.errors import PreconditionFailedError, StoreError
from bucketpoint.forks import ProcessLock
from bucketpoint.stores.base import UNDECIDED, Capabilities, Store, scratch_key
from bucketpoint.stores.fsspec.drivers import Driver, Probed, known, remember

logger = logging.getLogger(__name__)

_lock = ProcessLock()


class _FilesystemStore(Store, Protocol):
    """A store on a filesystem with `put_unseen`, which relies on the service's condition alone."""

    @property
    def fs(self) -> AbstractFileSystem: ...
    @property
    def root(self) -> str: ...
    @property
    def driver(self) -> Driver: ...
    def put_unseen(self, key: str, data: bytes, etag: str | None = None) -> None: ...


def prove(store: _FilesystemStore, prefix: str) -> Capabilities:
    """Return the capabilities of a store. The first call of a process for a bucket makes the trial.

    The trial sends about ten small requests for two scratch objects below `prefix`, and deletes the objects. Logs a
    warning, once, if commits to this store will have no conditional writes. Raises as `proven`.
    """
    with _lock:
        if known(store.fs, store.root) is None:
            _probe(store, prefix)
    return store.capabilities


def _probe(store: _FilesystemStore, prefix: str) -> None:
    probed = _tried(store, prefix) if store.driver.creates else Probed(False, False, False)
    remember(store.fs, store.root, probed)
    if not (probed.creates or store.driver.private):
        logger.warning(
            "%s has no conditional writes%s: a commit reads .metadata before and after it writes it. This is "
            "safe against crashes, but not against two jobs that save to the same URL at the same time",
            store.url,
            f" ({probed.why})" if probed.why else "",
        )


def _tried(store: _FilesystemStore, prefix: str) -> Probed:
    key = scratch_key(prefix)
    why: list[str] = []
    try:
        creates = _is_refused(lambda: _creates(store, key), "an exclusive create", why)
        replaces = (
            creates and store.driver.replaces and _is_refused(lambda: _replaces(store, key), "a replacement", why)
        )
        checks = store.driver.checks and _checks(store, f"{key}-sum")
    finally:
        with contextlib.suppress(StoreError):
            # Without the permission to delete, two tiny objects remain, like everything else that such a job saves.
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
        why.append(f"{what} failed: {error.message}")
        return False
    why.append(f"the service ignores the condition of {what}")
    return False


def _creates(store: _FilesystemStore, key: str) -> None:
    """Create an object twice. Raises PreconditionFailedError if exclusive creates work."""
    try:
        store.put_unseen(key, b"first")
    except PreconditionFailedError as error:
        raise StoreError(f"it was refused although there was no object: {error.message}", url=store.url) from None
    try:
        store.put_unseen(key, b"second")
    except PreconditionFailedError:
        if store.get(key)[0] != b"first":
            raise StoreError("it was refused, but the object was replaced", url=store.url) from None
        raise


def _replaces(store: _FilesystemStore, key: str) -> None:
    """Replace an object twice, expecting the same ETag. Raises PreconditionFailedError if the condition works."""
    before = store.head(key).etag or ""
    try:
        store.put_unseen(key, b"third", before)
    except PreconditionFailedError as error:
        raise StoreError(f"it was refused although the ETag was right: {error.message}", url=store.url) from None
    store.put_unseen(key, b"fourth", before)


def _checks(store: _FilesystemStore, key: str) -> bool:
    try:
        store.put(key, [memoryview(b"checksum")], crc32c=1)
    except UNDECIDED:
        raise
    except StoreError:
        return True
    return False
