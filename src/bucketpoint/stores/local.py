"""`LocalStore`: a folder of a local or network-mounted filesystem, by the operating system's own calls. No fsspec."""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bucketpoint.errors import (
    AccessDeniedError,
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    TransientStoreError,
    UploadNotFoundError,
)
from bucketpoint.stores.base import Buffers, Capabilities, DeleteFailure, ObjectInfo, OpenUpload, Part

# https://pubs.opengroup.org/onlinepubs/9799919799/basedefs/limits.h.html promises 16; Linux and macOS both have 1024.
MAX_VECTORS = 1024

_HIDDEN = ".bucketpoint-"
_TEMPORARY = _HIDDEN + "tmp-"
_UPLOAD = _HIDDEN + "upload-"
_UPLOAD_TARGET = "target"

# A folder may be pruned by a delete between its making and the first file in it.
_FOLDER_ATTEMPTS = 20


@dataclass(frozen=True)
class LocalStore:
    """Files below `root`. An object appears by link or rename of a file that is already whole and on the disk.

    A file that is there is never written to, so an open one stays what it was, and time, size and inode make an ETag.
    `//` in a key names the same file as `/`. Folders are made as they are needed, and pruned when they fall empty.
    """

    root: str

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    @property
    def identity(self) -> str:
        # ETags hold inodes, which do not survive a restored backup: a folder that was put back is another store.
        try:
            status = os.stat(self.root)
        except OSError:
            return self.url
        return f"{self.url}#{status.st_dev:x}-{status.st_ino:x}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            conditional_put=True, checksums=False, multipart=True, pinned_reads=True, conditional_delete=True
        )

    def put(
        self,
        key: str,
        body: Buffers,
        *,
        crc32c: int | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        with self._errors("put", key):
            return self._publish(key, lambda fd: _write(fd, body), if_none_match=if_none_match, if_match=if_match)

    def get(self, key: str, *, max_bytes: int | None = None, first: int | None = None) -> tuple[bytes, ObjectInfo]:
        with self._errors("get", key), open(self._path(key), "rb", buffering=0) as file:
            info = _info(key, os.fstat(file.fileno()))
            size = info.size if first is None else min(info.size, first)
            if max_bytes is not None and size > max_bytes:
                raise CorruptDataError(
                    f"the object has {info.size} bytes, and at most {max_bytes} were expected", url=self._url(key)
                )
            data = bytearray(size)
            _read(file.fileno(), 0, [memoryview(data)], self._url(key))
            return bytes(data), info

    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None:
        with self._errors("read", key), open(self._path(key), "rb", buffering=0) as file:
            if if_match is not None and _info(key, os.fstat(file.fileno())).etag != if_match:
                raise PreconditionFailedError("the object is not the one expected", url=self._url(key))
            _read(file.fileno(), offset, buffers, self._url(key))

    def head(self, key: str) -> ObjectInfo:
        with self._errors("head", key):
            status = os.stat(self._path(key))
            if not os.path.isfile(self._path(key)):
                raise ObjectNotFoundError("no such object", url=self._url(key))
            return _info(key, status)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        folder = prefix[: prefix.rfind("/") + 1]
        with self._errors("list", prefix):
            for key, entry in self._walk(folder, prefix):
                if start_after is None or key > start_after:
                    try:
                        yield _info(key, entry.stat())
                    except FileNotFoundError:
                        continue

    def list_folders(self, prefix: str) -> Iterator[str]:
        with self._errors("list", prefix):
            for name, entry in _scan(self._path(prefix)):
                if entry.is_dir() and next(self._walk(prefix + name, prefix + name), None):
                    yield prefix + name

    def delete(self, keys: Sequence[str]) -> builtins.list[DeleteFailure]:
        failures = []
        for key in keys:
            try:
                self._unlink(key)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                code = errno.errorcode.get(error.errno or 0, type(error).__name__)
                failures.append(DeleteFailure(key, code, error.strerror or ""))
                continue
            self._prune(key)
        return failures

    def delete_if(self, key: str, etag: str) -> bool:
        with self._errors("delete", key):
            try:
                self._unlink(key, etag)
            except (FileNotFoundError, NotADirectoryError):
                return True
        self._prune(key)
        return True

    def _unlink(self, key: str, etag: str | None = None) -> None:
        path = self._path(key)
        # Locked without a condition, too: what another writer compares is neither deleted nor created anew meanwhile.
        with _locked(os.path.dirname(path), needed=etag is not None):
            if etag is not None and _etag(os.stat(path)) != etag:
                raise PreconditionFailedError("the object is not the one expected", url=self._url(key))
            os.unlink(path)

    def copy(self, source: str, target: str) -> ObjectInfo:
        with self._errors("copy", source), open(self._path(source), "rb", buffering=0) as file:

            def write(fd: int) -> None:
                with open(fd, "wb", buffering=0, closefd=False) as out:
                    shutil.copyfileobj(file, out, 8 << 20)

            return self._publish(target, write)

    def create_multipart(self, key: str) -> str:
        upload_id = secrets.token_hex(8)
        with self._errors("create_multipart", key):
            # makedirs and not mkdir: the folders above may be pruned at any moment until something is in them.
            os.makedirs(self._upload(key, upload_id))
            with open(os.path.join(self._upload(key, upload_id), _UPLOAD_TARGET), "w", encoding="utf-8") as file:
                file.write(key)
        return upload_id

    def put_part(self, key: str, upload_id: str, number: int, body: Buffers, *, crc32c: int | None = None) -> Part:
        folder = self._upload(key, upload_id)
        partial = os.path.join(folder, f"{_TEMPORARY}{secrets.token_hex(8)}")
        with self._errors("put_part", key, missing=UploadNotFoundError):
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                _write(fd, body)
                status = os.fstat(fd)
            finally:
                os.close(fd)
            os.replace(partial, os.path.join(folder, str(number)))
        return Part(number, status.st_size, _etag(status), crc32c)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        folder = self._upload(key, upload_id)
        ordered = sorted(parts, key=lambda part: part.number)

        def write(fd: int) -> None:
            with open(fd, "wb", buffering=0, closefd=False) as out:
                for part in ordered:
                    with open(os.path.join(folder, str(part.number)), "rb", buffering=0) as file:
                        if _etag(os.fstat(file.fileno())) != part.etag:
                            raise StoreError(f"part {part.number} is not the one listed", url=self._url(key))
                        _copy(file.fileno(), out.fileno(), part.size)

        with self._errors("complete_multipart", key, missing=UploadNotFoundError):
            os.stat(folder)
            info = self._publish(key, write)
            shutil.rmtree(folder, ignore_errors=True)
            return info

    def abort_multipart(self, key: str, upload_id: str) -> None:
        with self._errors("abort_multipart", key):
            try:
                shutil.rmtree(self._upload(key, upload_id))
            except FileNotFoundError:
                return
        self._prune(key)

    def list_multipart(self, prefix: str) -> Iterator[OpenUpload]:
        with self._errors("list_multipart", prefix):
            for folder, names, _ in os.walk(self._path(prefix[: prefix.rfind("/") + 1])):
                for name in sorted(names):
                    if not name.startswith(_UPLOAD):
                        continue
                    target = os.path.join(folder, name, _UPLOAD_TARGET)
                    try:
                        with open(target, encoding="utf-8") as file:
                            # Where it lies tells the rest: a store with another root may have begun it.
                            key = self._key_in(folder, file.read().rpartition("/")[2])
                        started = os.stat(target).st_mtime
                    except FileNotFoundError:
                        continue
                    if key.startswith(prefix):
                        yield OpenUpload(key, name[len(_UPLOAD) :], started)

    def close(self) -> None:
        """Nothing stays open between calls."""

    def _publish(
        self,
        key: str,
        write: Callable[[int], None],
        *,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        path = self._path(key)
        folder = os.path.dirname(path)
        temporary, fd = _create_temporary(folder)
        try:
            try:
                write(fd)
                # Without it a crash of the machine can leave a file of the right name with nothing in it.
                os.fsync(fd)
                status = os.fstat(fd)
            finally:
                os.close(fd)
            if if_none_match:
                self._link(temporary, path, key)
            else:
                with _locked(folder, needed=if_match is not None):
                    if if_match is not None and self._etag_now(path) != if_match:
                        raise PreconditionFailedError("the object is not the one expected", url=self._url(key))
                    os.replace(temporary, path)
            _sync_folder(folder)
        finally:
            with contextlib.suppress(FileNotFoundError):  # os.replace took it
                os.unlink(temporary)
        return _info(key, status)

    def _link(self, temporary: str, path: str, key: str) -> None:
        try:
            os.link(temporary, path)
        except FileExistsError:
            taken = PreconditionFailedError("the object exists", url=self._url(key))
        else:
            return
        raise taken

    def _etag_now(self, path: str) -> str | None:
        try:
            return _etag(os.stat(path))
        except FileNotFoundError:
            return None

    def _walk(self, folder: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Keys below `folder` (empty or with a slash at its end) that begin with `prefix`, in key order."""
        for name, entry in _scan(self._path(folder)):
            key = folder + name
            if entry.is_dir():
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._walk(key, prefix)
            elif key.startswith(prefix):
                yield key, entry

    def _prune(self, key: str) -> None:
        folder = os.path.dirname(self._path(key))
        while len(folder) > len(self.root):
            try:
                os.rmdir(folder)
            except OSError:
                return  # not empty, or gone already
            folder = os.path.dirname(folder)

    def _path(self, key: str) -> str:
        return f"{self.root.rstrip('/')}/{key}"

    def _key_in(self, folder: str, name: str) -> str:
        above = folder[len(self.root.rstrip("/")) :].strip("/")
        return f"{above}/{name}" if above else name

    def _upload(self, key: str, upload_id: str) -> str:
        return os.path.join(os.path.dirname(self._path(key)), _UPLOAD + upload_id)

    def _url(self, key: str) -> str:
        return f"{self.url.rstrip('/')}/{key}"

    @contextlib.contextmanager
    def _errors(self, operation: str, key: str, *, missing: type[StoreError] = ObjectNotFoundError) -> Iterator[None]:
        failure: StoreError
        try:
            yield
            return
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            failure = missing(f"{operation} failed: no such file", url=self._url(key))
        except PermissionError as error:
            failure = AccessDeniedError(f"{operation} failed: {error.strerror}", url=self._url(key), remedy="")
        except OSError as error:
            retry = error.errno in (errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE)
            kind = TransientStoreError if retry else StoreError
            failure = kind(f"{operation} failed: {error.strerror or type(error).__name__}", url=self._url(key))
        raise failure


def _create_temporary(folder: str) -> tuple[str, int]:
    path = os.path.join(folder, _TEMPORARY + secrets.token_hex(8))
    for attempt in range(_FOLDER_ATTEMPTS):
        os.makedirs(folder, exist_ok=True)
        try:
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:
            if attempt == _FOLDER_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _locked(folder: str, *, needed: bool) -> Iterator[None]:
    """Keep other replacements in this folder out while an ETag is compared. It is the folder itself that is locked."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            # Some network filesystems cannot; then a plain put still can, and only a condition cannot be kept.
            if needed:
                raise
        yield
    finally:
        os.close(fd)


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(fd: int, body: Buffers) -> None:
    waiting = [view for view in body if view.nbytes]
    while waiting:
        batch = waiting[:MAX_VECTORS]
        written = os.writev(fd, batch)
        waiting = _after(batch, written) + waiting[MAX_VECTORS:]


def _read(fd: int, offset: int, buffers: Buffers, url: str) -> None:
    waiting = [view for view in buffers if view.nbytes]
    while waiting:
        batch = waiting[:MAX_VECTORS]
        count = os.preadv(fd, batch, offset)
        if not count:
            raise CorruptDataError("the object ends before the range does", url=url)
        offset += count
        waiting = _after(batch, count) + waiting[MAX_VECTORS:]


def _after(views: Sequence[memoryview], count: int) -> builtins.list[memoryview]:
    """What is left of the views when `count` bytes of them are done."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return []


def _copy(source: int, target: int, size: int) -> None:
    copy_range: Any = getattr(os, "copy_file_range", None)
    done = 0
    while done < size:
        try:
            count = copy_range(source, target, size - done) if copy_range else 0
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            count, copy_range = 0, None
        if not count:
            block = os.read(source, min(8 << 20, size - done))
            if not block:
                raise StoreError("a part is shorter than it was when it was sent")
            _write(target, [memoryview(block)])
            count = len(block)
        done += count


def _scan(folder: str) -> builtins.list[tuple[str, os.DirEntry[str]]]:
    """The entries of a folder by name, a slash after the names of folders, in the order of the keys below them."""
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name + "/" if entry.is_dir() else entry.name, entry) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((item for item in found if not item[0].startswith(_HIDDEN)), key=lambda item: item[0])


def _etag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, _etag(status), status.st_mtime)
