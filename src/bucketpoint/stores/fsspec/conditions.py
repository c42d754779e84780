"""Trial of a filesystem's conditional writes and checksums on a scratch object.

A library may accept a condition that the service behind it ignores: some services that speak S3's protocol ignore
`If-None-Match`, and a commit that trusts them loses checkpoints. So the first commit of a process to each bucket of a
filesystem makes a trial.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsspec.spec import AbstractFileSystem

from bucketpoint.errors import (
    PreconditionFailedError,
    StoreError,
)
from bucketpoint.forks import ProcessLock
from bucketpoint.stores.trials import UNDECIDED, scratch_key

if TYPE_CHECKING:
    from bucketpoint.stores.fsspec.store import FsspecStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probed:
    """Result of a trial.

    Attributes:
        creates: a second exclusive create of one object was refused, and the first object stayed.
        replaces: a replacement of an object that is not there any more was refused.
        checks: a body with a wrong CRC32C was refused.
        why: the reasons for failed trials, for messages; empty if there are none.
    """

    creates: bool
    replaces: bool
    checks: bool
    why: str = ""


_lock = ProcessLock()
# Results of the trials of this process by bucket, each kept as long as its filesystem object lives.
_results: weakref.WeakKeyDictionary[AbstractFileSystem, dict[str, Probed]] = weakref.WeakKeyDictionary()


def known(store: FsspecStore) -> Probed | None:
    """Return the result of an earlier `probe` of this store's filesystem and bucket, or None."""
    return _results.get(store.fs, {}).get(_bucket(store))


def probe(store: FsspecStore, prefix: str) -> Probed:
    """Try the conditions and checksums of this store's filesystem on a scratch object below `prefix`, then delete it.

    Takes at most six small requests the first time; none if the library of the filesystem has no conditions to try.
    Logs a warning, once, if commits to this store will have no conditional writes.

    Raises:
        BucketNotFoundError, EndpointError, CredentialsError, ThrottledError, TransientStoreError: the trial was
            undecided.
    """
    with _lock:
        probed = known(store)
        if probed is None:
            probed = _tried(store, prefix) if store.driver.creates else Probed(False, False, False)
            # Filesystems of the same settings are equal. The entry must not end with an older one of them.
            by_bucket = _results.pop(store.fs, {})
            _results[store.fs] = {**by_bucket, _bucket(store): probed}
            if not (probed.creates or store.driver.private):
                logger.warning(
                    "%s has no conditional writes%s: a commit reads .metadata before and after it writes it. This is "
                    "safe against crashes, but not against two jobs that save to the same URL at the same time",
                    store.url,
                    f" ({probed.why})" if probed.why else "",
                )
    return probed


def _tried(store: FsspecStore, prefix: str) -> Probed:
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
            # Without the permission to delete, two tiny objects stay, like everything else that such a job saves.
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


def _creates(store: FsspecStore, key: str) -> None:
    """Create an object twice. Raises PreconditionFailedError if exclusive creates work."""
    try:
        store.create_unseen(key, b"first")
    except PreconditionFailedError as error:
        raise StoreError(f"it was refused although there was no object: {error.message}", url=store.url) from None
    try:
        store.create_unseen(key, b"second")
    except PreconditionFailedError:
        if store.get(key)[0] != b"first":
            raise StoreError("it was refused, but the object was replaced", url=store.url) from None
        raise


def _replaces(store: FsspecStore, key: str) -> None:
    """Replace an object twice, expecting the same ETag. Raises PreconditionFailedError if the condition works."""
    before = store.head(key).etag or ""
    try:
        store.replace_unseen(key, b"third", before)
    except PreconditionFailedError as error:
        raise StoreError(f"it was refused although the ETag was right: {error.message}", url=store.url) from None
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
