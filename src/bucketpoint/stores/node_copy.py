"""A node's own copy of data objects: a folder that the processes of a node share, with a limit on its bytes.

    used                   total bytes of the files below, roughly; locked while a process reserves some of the limit
    looked                 its modification time is that of the last check for objects that the bucket no longer has
    <place>-<object>/      hashes of the checkpoint's place, and of the object's key and ETag
        about              JSON: store, key, ETag. A process that reads bytes from the bucket locks these bytes here
        <start>-<stop>     these bytes of the object
        .bucketpoint-tmp-* an incomplete file, deleted with the object if its writer was killed

A file gets its name once it is complete, and loses it before its memory or disk blocks are used for another file. Its
readers verify its bytes by the checksums in the checkpoint's metadata. No failure of the folder is an error: the bucket
has all bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import random
import re
import secrets
import struct
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bucketpoint.errors import BucketpointError, ObjectNotFoundError
from bucketpoint.stores import retry
from bucketpoint.stores.base import Buffers, Store
from bucketpoint.stores.cutoff import current_cut
from bucketpoint.stores.local_folders import TEMPORARY, open_file, remove

logger = logging.getLogger(__name__)

CLAIM_S = 60.0
"""Longest wait for a process that reads the same bytes from the bucket: it may be suspended."""

LOOK_S = 60.0
"""Seconds between two checks of a node for objects that the bucket no longer has, of `LOOKED_AT` objects at most."""
LOOKED_AT = 32
_LOOK_DEADLINE_S = 10.0

_DIRECT_BYTES = 1 << 20
"""Bytes of a write that bypasses the page cache, which takes a tenth of the CPU time. Smaller files use the cache."""

_NOTE_BYTES = 4096
"""Upper limit on the size of the file `about`."""

_POLL_S = 0.05
_USED, _LOOKED, _ABOUT = "used", "looked", "about"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_OBJECT = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}")
_RANGE = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")

_logged: set[tuple[str, str]] = set()


class CopiedObject(NamedTuple):
    """An object of a store, identified by the store's identity, its key and its ETag."""

    store: str
    key: str
    etag: str

    @property
    def folder(self) -> str:
        # Keys of a checkpoint differ in the last three segments: see format.md.
        place = _digest(self.store, *self.key.split("/")[:-3])
        return f"{place[:16]}-{_digest(*self)[:32]}"


class NodeFolder:
    """The folder of a `NodeCopy`. Any thread and process may use it; nothing stays open between calls."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def cover(self, of: CopiedObject, start: int, stop: int) -> list[tuple[int, int, str | None]]:
        """Split bytes `[start, stop)` into ranges, each with the name of the file that has its bytes, or None."""
        ranges: list[tuple[int, int]] = []
        with self._quietly("read"), self._object(of) as (_, folder):
            matches = map(_RANGE.fullmatch, os.listdir(folder))
            ranges = [(int(match[1]), int(match[2])) for match in matches if match]
        stretches: list[tuple[int, int, str | None]] = []
        while start < stop:
            high, low = max(((high, low) for low, high in ranges if low <= start), default=(0, 0))
            name = f"{low}-{high}" if high > start else None
            end = min(high if name else min((low for low, _ in ranges if low > start), default=stop), stop)
            stretches.append((start, end, name))
            start = end
        return stretches

    def read(self, of: CopiedObject, name: str, start: int, buffers: Buffers) -> None:
        """Read bytes of the object, beginning at `start`, from the file `name`. Raises OSError."""
        with self._object(of) as (_, folder), open(open_file(name, folder), "rb", buffering=0) as file:
            file.seek(start - int(name.partition("-")[0]))
            for view in buffers:
                while len(view):
                    count = file.readinto(view)
                    if not count:
                        raise OSError(errno.EIO, "a file is shorter than its name states", name)
                    view = view[count:]

    def put(self, of: CopiedObject, start: int, views: Iterable[memoryview], nbytes: int) -> None:
        """Store bytes of the object, beginning at `start`, if the limit allows it."""
        if not nbytes:
            return
        partial = f"{of.folder}/{TEMPORARY}{secrets.token_hex(8)}"
        with self._quietly("written"), self._object(of, make=True) as (root, _):
            try:
                if self._reserve(root, nbytes, of.folder[:16], partial):
                    with open(os.open(partial, _FILE, 0o600, dir_fd=root), "rb+", buffering=0) as file:
                        _write(file.fileno(), views, nbytes)
                    name = f"{of.folder}/{start}-{start + nbytes}"
                    os.rename(partial, name, src_dir_fd=root, dst_dir_fd=root)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(partial, dir_fd=root)

    def drop(self, of: CopiedObject, names: Iterable[str]) -> None:
        """Delete files whose bytes are damaged."""
        with self._quietly("cleaned"), self._object(of) as (_, folder):
            for name in names:
                # A file that was deleted meanwhile, to make room, is not logged as damaged.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                    self._log("damaged", f"bytes of {of.key} are damaged there, and read from the bucket again")

    @contextlib.contextmanager
    def claim(self, of: CopiedObject, start: int, stop: int, wait_s: float = CLAIM_S) -> Iterator[bool]:
        """Claim bytes of the object until the block or the process ends. Until then no other claim on them succeeds.

        Yields False if another claim did not end within `wait_s` seconds, or the folder cannot be used.
        """
        with contextlib.ExitStack() as stack:
            claimed = False
            with self._quietly("locked"):
                _, folder = stack.enter_context(self._object(of, make=True))
                _, claimed = stack.enter_context(_locked(_ABOUT, folder, start, stop - start, wait_s))
            yield claimed

    def look(self, store: Store) -> None:
        """Delete copies of objects that the bucket no longer has, or has replaced, unless that was checked recently."""
        with self._quietly("cleaned"), self._root() as root:
            with open(os.open(_LOOKED, _FILE, 0o600, dir_fd=root), "rb+", buffering=0) as file:
                status = os.fstat(file.fileno())
                if status.st_size and abs(time.time() - status.st_mtime) < LOOK_S:
                    return
                file.write(b".")
            names = list(filter(_OBJECT.fullmatch, os.listdir(root)))
            for name in random.sample(names, min(len(names), LOOKED_AT)):
                if _is_gone(name, root, store):
                    _remove(name, root)

    def _reserve(self, root: int, nbytes: int, place: str, partial: str) -> bool:
        """Reserve bytes to be written. Return False if they do not fit beside the other objects of the checkpoint."""
        with _locked(_USED, root, 0, 1, CLAIM_S) as (fd, locked):
            if not locked:
                return False
            text, needed = os.pread(fd, 32, 0), nbytes + _NOTE_BYTES
            used = int(text) if text.isdigit() else self._max_bytes
            if used + needed > self._max_bytes:
                used = self._make_room(root, needed, place, partial)
            if fits := used + needed <= self._max_bytes:
                # The file has its size at once, so that another process that makes room counts it.
                with open(os.open(partial, _FILE, 0o600, dir_fd=root), "rb+", buffering=0) as file:
                    file.truncate(nbytes)
            else:
                self._log("small", f"its limit, {self._max_bytes} bytes, is smaller than a checkpoint's bytes here")
            os.pwrite(fd, b"%032d" % (used + needed if fits else used), 0)
            return fits

    def _make_room(self, root: int, nbytes: int, place: str, partial: str) -> int:
        """Delete the oldest objects, but none at `place`, until `nbytes` fit. Return the bytes that are in use.

        The last object's largest file is not deleted, but becomes `partial`: the kernel takes three times as long to
        provide new memory as to copy into memory that the file already has.
        """
        objects = []
        for name in filter(_OBJECT.fullmatch, os.listdir(root)):
            files = {}
            with contextlib.suppress(OSError), _opened(name, root) as folder:
                for file in os.listdir(folder):
                    # Another process may rename or delete the file.
                    with contextlib.suppress(FileNotFoundError):
                        files[file] = os.stat(file, dir_fd=folder, follow_symlinks=False)
            began = files[_ABOUT].st_mtime if _ABOUT in files else 0.0
            objects.append((began, name, sum(status.st_size for status in files.values()), files))
        used = sum(size for _, _, size, _ in objects)
        if nbytes + sum(size for _, name, size, _ in objects if name[:16] == place) > self._max_bytes:
            return used
        for _, name, size, files in sorted(objects, key=lambda each: each[:2]):
            if used + nbytes > self._max_bytes and name[:16] != place:
                whole = filter(_RANGE.fullmatch, files)
                largest = max(whole, key=lambda file: files[file].st_size, default=None)
                # A file with a second name is not written again: a user may have linked it as a backup.
                if largest is not None and files[largest].st_nlink == 1:
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(f"{name}/{largest}", partial, src_dir_fd=root, dst_dir_fd=root)
                _remove(name, root)
                used -= size
        return used

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        os.makedirs(self._path, 0o700, exist_ok=True)
        with _opened(self._path) as root:
            yield root

    @contextlib.contextmanager
    def _object(self, of: CopiedObject, *, make: bool = False) -> Iterator[tuple[int, int]]:
        """Open the folder, and that of an object in it, which `make` makes if it is missing."""
        with self._root() as root:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(of.folder, 0o700, dir_fd=root)
            with _opened(of.folder, root) as folder:
                if make and not os.access(_ABOUT, os.F_OK, dir_fd=folder):
                    with open(os.open(_ABOUT, _FILE, 0o600, dir_fd=folder), "w") as note:
                        json.dump(of, note)
                yield root, folder

    @contextlib.contextmanager
    def _quietly(self, done: str) -> Iterator[None]:
        """Log a failure of the folder instead of raising it. A missing file is no failure."""
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as error:
            self._log("failed", f"it cannot be {done} ({error.strerror or error}): bytes come from the bucket")

    def _log(self, kind: str, text: str) -> None:
        """Log a message, as a WARNING only for the first of its `kind` in this process."""
        level = logging.DEBUG if (self._path, kind) in _logged else logging.WARNING
        _logged.add((self._path, kind))
        logger.log(level, "the node's copy %s: %s", self._path, text)


@contextlib.contextmanager
def _opened(name: str, above: int | None = None) -> Iterator[int]:
    """Open a folder, but no link to one. Raises PermissionError if others may use it."""
    fd = os.open(name, _FOLDER, dir_fd=above)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it must belong to this user, with mode 0700")
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(name: str, above: int, start: int, nbytes: int, wait_s: float) -> Iterator[tuple[int, bool]]:
    """Open a file and lock bytes of it. Yields the file descriptor, and True if the bytes are locked.

    The end of the process releases the lock. Only Linux has locks that belong to the opener of a file, not to the
    process. On other systems nothing is locked, and True is yielded.
    """
    lock, free = (
        struct.pack("hhqqi4x", kind, os.SEEK_SET, start, nbytes, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK)
    )
    command: int | None = getattr(fcntl, "F_OFD_SETLK", None)
    fd, ends, cut = os.open(name, _FILE, 0o600, dir_fd=above), time.monotonic() + wait_s, current_cut()
    try:
        locked = command is None
        while command is not None and not locked:
            try:
                fcntl.fcntl(fd, command, lock)
                locked = True
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= ends or (cut is not None and cut.is_made):
                    break
                time.sleep(random.uniform(0, _POLL_S))
        yield fd, locked
    finally:
        if command is not None and locked:
            # A process that was forked meanwhile has the file open, and would keep the lock.
            fcntl.fcntl(fd, command, free)
        os.close(fd)


def _write(fd: int, views: Iterable[memoryview], nbytes: int) -> None:
    """Write views to a file; on a disk, bypass the page cache."""
    # A filesystem without a device, such as one in memory, copies the bytes in any case.
    if nbytes >= _DIRECT_BYTES and os.major(os.fstat(fd).st_dev) and hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        views = _in_whole_pages(views)
    for view in views:
        while len(view):
            view = view[os.write(fd, view) :]
    os.ftruncate(fd, nbytes)


def _in_whole_pages(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of views by way of a buffer at whole pages, which direct writes need."""
    buffer, filled = memoryview(mmap.mmap(-1, _DIRECT_BYTES)), 0
    for view in views:
        while len(view):
            count = min(len(view), len(buffer) - filled)
            buffer[filled : filled + count] = view[:count]
            filled, view = filled + count, view[count:]
            if filled == len(buffer):
                yield buffer
                filled = 0
    yield buffer[: -(-filled // mmap.PAGESIZE) * mmap.PAGESIZE]


def _remove(name: str, root: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        remove(name, root)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _is_gone(name: str, root: int, store: Store) -> bool:
    """Return True if the bucket no longer has the object of a folder."""
    try:
        with _opened(name, root) as folder, open(open_file(_ABOUT, folder), "rb") as file:
            identity, key, etag = json.load(file)
        with retry.deadline(_LOOK_DEADLINE_S):
            return bool(identity == store.identity and store.head(key).etag != etag)
    except ObjectNotFoundError:
        return True
    except (OSError, ValueError, BucketpointError) as error:
        logger.debug("the node's copy: whether an object still exists is not known: %s", error)
        return False
