"""`Driver`: operations on a filesystem, by methods that all fsspec filesystems have, and a trial of its conditions.

Paths and exceptions are those of the filesystem; the caller translates the exceptions. `services` has the drivers of
particular filesystems. A library may accept a condition that the service behind it ignores: some S3-compatible services
ignore `If-None-Match`, and a commit that relies on the condition loses checkpoints. So a process makes a trial on a
scratch object before its first commit to each bucket of a filesystem.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import fsspec.asyn
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from bucketpoint.errors import PreconditionFailedError, StoreError
from bucketpoint.forks import ProcessLock
from bucketpoint.stores.base import UNDECIDED, Capabilities, Part, Store, scratch_key

logger = logging.getLogger(__name__)

WriteReply = Mapping[str, Any]
"""Description of a written object, as `info` returns it, with the ETag among other fields. May be empty."""

_TEMPORARY = ".bucketpoint-tmp-"

_DELETES_AT_ONCE = 32
_MEMORY_TRIES = 8

# Folders are created only for these schemes: on an object store makedirs would create the bucket.
_WITH_FOLDERS = frozenset({"file", "local", "ftp", "sftp", "ssh", "smb", "hdfs", "webhdfs", "arrow_hdfs", "dbfs"})


@dataclass(frozen=True)
class Probed:
    """Result of a trial of conditions and checksums.

    Attributes:
        creates: a second exclusive create of one object was refused, and the first object stayed.
        replaces: a replacement with an outdated ETag was refused.
        checks: a body with a wrong CRC32C was refused.
        why: the reasons for failed trials, for messages; empty if there are none.
    """

    creates: bool
    replaces: bool
    checks: bool
    why: str = ""


# By filesystem, and then by bucket. A filesystem's results are dropped with the filesystem object.
_probed: weakref.WeakKeyDictionary[AbstractFileSystem, dict[str, Probed]] = weakref.WeakKeyDictionary()


def known(fs: AbstractFileSystem, root: str) -> Probed | None:
    """Return the result of an earlier trial of a filesystem's bucket, or None."""
    return _probed.get(fs, {}).get(_bucket(root))


def remember(fs: AbstractFileSystem, root: str, probed: Probed) -> None:
    """Keep the result of a trial."""
    # Filesystems with the same settings are equal. The entry moves to `fs`, because it is dropped with its key object.
    by_bucket = _probed.pop(fs, {})
    _probed[fs] = {**by_bucket, _bucket(root): probed}


def _bucket(root: str) -> str:
    return root.lstrip("/").partition("/")[0]


class Driver:
    """Driver for any filesystem. Drivers have no state.

    Attributes:
        name: name of the library, for tables.
        creates: `create` is one request, whose condition the service itself checks.
        replaces: `replace` is one request, whose condition the service itself checks.
        checks: the service reports the CRC32C of the bytes that it received.
        limits: limits of a multipart upload whose parts may be sent in parallel and in any order, by their names in
            `Capabilities`. Empty if there are no such uploads.
        max_put_bytes: the largest body that is sent in one request.
        private: no other process can access this filesystem's content.
        shared: as in `Capabilities`. False if unknown, as for any filesystem without a driver in `services`.
        lists_uploads: as in `Capabilities`.
    """

    name = "any other"
    creates = False
    replaces = False
    checks = False
    limits: Mapping[str, Any] = MappingProxyType({})
    max_put_bytes = 1 << 62
    private = False
    shared = False
    lists_uploads = True

    def bound_retries(self, fs: AbstractFileSystem) -> None:
        """Limit the library's retries for an unreachable service, on a filesystem that bucketpoint made."""

    def write(self, fs: AbstractFileSystem, path: str, data: bytes, crc32c: int | None) -> WriteReply:
        if not has_folders(fs):
            return write_reply(fs.pipe_file(path, data))
        _renamed(fs, path, lambda temporary: fs.pipe_file(temporary, data))
        return {}

    def copy(self, fs: AbstractFileSystem, source: str, target: str) -> None:
        """Copy one file. Raises NotImplementedError if the filesystem has no copies."""
        if has_folders(fs):
            _renamed(fs, target, lambda temporary: fs.cp_file(source, temporary))
        else:
            fs.cp_file(source, target)

    def create(self, fs: AbstractFileSystem, path: str, data: bytes, crc32c: int | None) -> WriteReply:
        """Write an object. If it exists already, raises FileExistsError, or an exception with status 412 or 409."""
        return write_reply(fs.pipe_file(path, data, mode="create"))

    def replace(self, fs: AbstractFileSystem, path: str, data: bytes, etag: str, crc32c: int | None) -> WriteReply:
        """Write an object only if it still has this ETag. Raises an exception with status 412 otherwise."""
        raise NotImplementedError

    def begin(self, fs: AbstractFileSystem, path: str) -> str:
        raise NotImplementedError

    def send(
        self, fs: AbstractFileSystem, path: str, upload_id: str, number: int, data: bytes, crc32c: int | None
    ) -> str:
        """Send one part and return its ETag. Raises FileNotFoundError if there is no such upload."""
        raise NotImplementedError

    def complete(self, fs: AbstractFileSystem, path: str, upload_id: str, parts: Sequence[Part]) -> WriteReply:
        """Join the parts to the object. Raises FileNotFoundError if there is no such upload."""
        raise NotImplementedError

    def abort(self, fs: AbstractFileSystem, path: str, upload_id: str) -> None:
        """Delete an upload and its parts. May raise FileNotFoundError if the upload is gone already."""
        raise NotImplementedError

    def uploads(self, fs: AbstractFileSystem, path: str) -> Iterator[tuple[str, str, Any]]:
        """Yield path, id and description of each upload whose path begins with `path`."""
        return iter(())


def is_hidden(key: str) -> bool:
    """Return True if this is a temporary file that has not been renamed yet."""
    return key.rpartition("/")[2].startswith(_TEMPORARY)


def has_folders(fs: AbstractFileSystem) -> bool:
    """Return True if this filesystem has real folders, which must exist before a file in them can be written."""
    schemes = _innermost(fs).protocol
    return not _WITH_FOLDERS.isdisjoint((schemes,) if isinstance(schemes, str) else schemes)


def _innermost(fs: AbstractFileSystem) -> AbstractFileSystem:
    inner = getattr(fs, "fs", None)
    return _innermost(inner) if isinstance(inner, AbstractFileSystem) else fs


def _renamed(fs: AbstractFileSystem, path: str, write: Callable[[str], object]) -> None:
    """Write a file under a temporary name, and rename it, so that a killed writer leaves no half file at `path`."""
    folder = path.rpartition("/")[0]
    if has_folders(fs):
        fs.makedirs(folder, exist_ok=True)
    temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}"
    try:
        write(temporary)
        fs.mv(temporary, path)
    except BaseException:
        with contextlib.suppress(Exception):
            fs.rm_file(temporary)
        raise


def files_below(fs: AbstractFileSystem, folder: str) -> dict[str, dict[str, Any]]:
    """List the files below a folder, by path."""
    tries = _MEMORY_TRIES if isinstance(fs, MemoryFileSystem) else 1
    while True:
        tries -= 1
        try:
            files = fs.find(folder.rstrip("/") or "/", detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except RuntimeError:
            # MemoryFileSystem iterates over a dict that another thread may have changed meanwhile.
            if tries == 0:
                raise
            continue
        return {name: info for name, info in files.items() if info.get("type") == "file"}


def remove(fs: AbstractFileSystem, paths: Sequence[str]) -> list[BaseException | None]:
    """Delete files, in parallel if the filesystem is asynchronous. Returns the exception, or None, for each file."""
    # Not `rm`, which treats `[`, `]` and `*` in a name as a pattern.
    outcomes: list[Any] = []

    async def remove_all() -> None:
        for start in range(0, len(paths), _DELETES_AT_ONCE):
            some = map(fs._rm_file, paths[start : start + _DELETES_AT_ONCE])
            outcomes.extend(await asyncio.gather(*some, return_exceptions=True))

    # The `async_impl` of a wrapper may be wrong.
    if getattr(_innermost(fs), "async_impl", False):
        fsspec.asyn.sync(fs.loop, remove_all)
    for path in paths[len(outcomes) :]:
        try:
            outcomes.append(fs.rm_file(path))
        except Exception as error:  # noqa: BLE001 (returned)
            outcomes.append(error)
    return [outcome if isinstance(outcome, BaseException) else None for outcome in outcomes]


def write_reply(reply: Any) -> WriteReply:
    """Return the reply of a write if it describes the object, else an empty description."""
    return reply if isinstance(reply, Mapping) else {}


class WrongSumError(Exception):
    """The service reports another CRC32C for the bytes that it received."""


def check(reply: WriteReply, crc32c: int | None) -> None:
    """Raise WrongSumError if the reply contains a CRC32C that differs from `crc32c`."""
    held = reply.get("ChecksumCRC32C") or reply.get("crc32c")
    if crc32c is not None and isinstance(held, str) and base64.b64decode(held) != crc32c.to_bytes(4, "big"):
        raise WrongSumError(f"the service computed another CRC32C: {held}")


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
            "%s has no conditional writes%s: a commit reads .metadata before and after the write. This is "
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
