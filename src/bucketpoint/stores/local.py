"""`LocalStore`: a folder of a local or network-mounted filesystem, accessed with system calls and not with fsspec."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import secrets
import stat
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
from bucketpoint.stores.local_folders import (
    HIDDEN,
    LinkedFolderError,
    enter,
    folder,
    in_folder,
    locked,
    prune,
    remove,
    scan,
    split,
    sync,
)

_SMALL_BYTES = 64 << 10
"""Smaller buffers are joined in one system call, and larger ones are read and written directly."""

_TEMPORARY = HIDDEN + "tmp-"
_LONGEST_NAMED = 100
"""Bytes of the longest name that the name of a temporary file may quote: the two must fit into a name together."""

_UPLOAD = HIDDEN + "upload-"
_UPLOAD_TARGET = "target"

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

_ABSENT = (FileNotFoundError, NotADirectoryError)

_NO_LINKS = (
    "Name the target of the link in the URL (only the folder of the URL itself may be a link), or mount the target in "
    "place of the link (mount --bind)"
)


def this_url(store: Any) -> str:
    """Return "this URL" for an error, and for a local path say so: it may be a URL that has lost its scheme."""
    return "this URL (a local path)" if isinstance(store, LocalStore) else "this URL"


@dataclass(frozen=True)
class LocalStore:
    """A store whose objects are files below `root`.

    A new object is written to a temporary file and synced to the disk, and then gets its name by link or rename. An
    existing file is never written to, so an open file does not change, and mtime, size and inode make an ETag. `//` in
    a key names the same file as `/`. Folders are created when needed, and removed when they become empty.

    The root may be a symbolic link. Links to folders below the root are never followed, wherever they lead: listings
    leave them out, and a key with such a link in its path is refused. A link to a file is read as that file; a write or
    a deletion replaces or removes the link, not the file.

    A temporary file, which a killed process may have left, is listed and aborted like a multipart upload.
    """

    root: str

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    @property
    def identity(self) -> str:
        # ETags contain inodes, which change when a backup is restored: a restored folder is another store.
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
        with self._errors("get", key), self._opened(key) as (fd, info):
            size = info.size if first is None else min(info.size, first)
            if max_bytes is not None and size > max_bytes:
                raise CorruptDataError(
                    f"the object has {info.size} bytes, and at most {max_bytes} were expected", url=self._url(key)
                )
            data = bytearray(size)
            _read(fd, 0, [memoryview(data)], self._url(key))
            return bytes(data), info

    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None:
        with self._errors("read", key), self._opened(key) as (fd, info):
            self._check_etag(info, if_match)
            _read(fd, offset, buffers, self._url(key))

    def head(self, key: str) -> ObjectInfo:
        with self._errors("head", key), self._above(key) as (above, name):
            status = os.stat(name, dir_fd=above)
            if not stat.S_ISREG(status.st_mode):
                raise ObjectNotFoundError("no such object", url=self._url(key))
            return _info(key, status)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        folder = prefix[: prefix.rfind("/") + 1]
        with self._errors("list", prefix), contextlib.suppress(*_ABSENT), self._above(folder) as (above, _):
            for key, where in self._walk(above, folder, prefix):
                if start_after is None or key > start_after:
                    with contextlib.suppress(FileNotFoundError):
                        yield _info(key, os.stat(key.rpartition("/")[2], dir_fd=where))

    def list_folders(self, prefix: str) -> Iterator[str]:
        with self._errors("list", prefix), contextlib.suppress(*_ABSENT), self._above(prefix) as (above, _):
            for name, is_folder in scan(above):
                if is_folder and next(self._walk(above, prefix, prefix + name), None):
                    yield prefix + name

    def delete(self, keys: Sequence[str]) -> builtins.list[DeleteFailure]:
        failures = []
        for key in keys:
            try:
                self._unlink(key)
            except _ABSENT:
                pass
            except OSError as error:
                code = errno.errorcode.get(error.errno or 0, type(error).__name__)
                failures.append(DeleteFailure(key, code, error.strerror or ""))
                continue
            prune(self.root, split(key)[0])
        return failures

    def delete_if(self, key: str, etag: str) -> bool:
        with self._errors("delete", key):
            with contextlib.suppress(*_ABSENT):
                self._unlink(key, etag)
            prune(self.root, split(key)[0])
        return True

    def _unlink(self, key: str, etag: str | None = None) -> None:
        # Locked without an ETag, too: otherwise the file could be deleted while another writer compares its ETag.
        with self._above(key) as (above, name), locked(above, needed=etag is not None):
            if etag is not None and _etag(os.stat(name, dir_fd=above)) != etag:
                raise PreconditionFailedError("the ETag of the object is not the expected one", url=self._url(key))
            # If the name is a link to a file, the link is removed and the file stays.
            os.unlink(name, dir_fd=above)

    def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
        with self._errors("copy", source.key), self._opened(source.key) as (fd, info):
            self._check_etag(info, source.etag)
            return self._publish(target, lambda out: _copy(fd, out, info.size))

    def create_multipart(self, key: str) -> str:
        upload_id = secrets.token_hex(8)

        def make(above: int) -> None:
            with open(os.open(_UPLOAD_TARGET, _NEW, 0o666, dir_fd=above), "w", encoding="utf-8") as file:
                file.write(key)

        with self._errors("create_multipart", key):
            in_folder(self.root, self._upload(key, upload_id), make)
        return upload_id

    def put_part(self, key: str, upload_id: str, number: int, body: Buffers, *, crc32c: int | None = None) -> Part:
        partial, names = _TEMPORARY + secrets.token_hex(8), self._upload(key, upload_id)
        with self._errors("put_part", key, missing=UploadNotFoundError), folder(self.root, names) as parts:
            fd = os.open(partial, _NEW, 0o666, dir_fd=parts)
            try:
                _write(fd, body)
                status = os.fstat(fd)
            finally:
                os.close(fd)
            os.replace(partial, str(number), src_dir_fd=parts, dst_dir_fd=parts)
        return Part(number, status.st_size, _etag(status), crc32c)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        ordered = sorted(parts, key=lambda part: part.number)
        *above, upload = self._upload(key, upload_id)
        with self._errors("complete_multipart", key, missing=UploadNotFoundError):
            with folder(self.root, [*above, upload]) as sent:

                def write(fd: int) -> None:
                    for part in ordered:
                        source = os.open(str(part.number), os.O_RDONLY | os.O_CLOEXEC, dir_fd=sent)
                        try:
                            if _etag(os.fstat(source)) != part.etag:
                                raise StoreError(
                                    f"the ETag of part {part.number} is not the listed one", url=self._url(key)
                                )
                            _copy(source, fd, part.size)
                        finally:
                            os.close(source)

                info = self._publish(key, write)
            with contextlib.suppress(OSError), folder(self.root, above) as outer:
                remove(upload, outer)
            return info

    def abort_multipart(self, key: str, upload_id: str) -> None:
        *above, upload = self._upload(key, upload_id)
        with self._errors("abort_multipart", key), contextlib.suppress(FileNotFoundError):
            with folder(self.root, above) as outer:
                try:
                    os.unlink(_temporary(upload_id, split(key)[1]), dir_fd=outer)
                except FileNotFoundError:
                    remove(upload, outer)
            prune(self.root, above)

    def list_multipart(self, prefix: str) -> Iterator[OpenUpload]:
        start = prefix[: prefix.rfind("/") + 1]
        with self._errors("list_multipart", prefix), contextlib.suppress(*_ABSENT), self._above(start) as (above, _):
            for path, folders, files, fd in os.fwalk(".", dir_fd=above):
                for name, upload_id, started in _open_uploads(fd, [*folders, *files]):
                    # The folders come from the position of the upload below this root, because a store with another
                    # root may have begun the upload.
                    key = start + os.path.normpath(f"{path}/{name}")
                    if key.startswith(prefix):
                        yield OpenUpload(key, upload_id, started)

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def _publish(
        self, key: str, write: Callable[[int], None], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        names, name = split(key)
        temporary = _temporary(secrets.token_hex(8), name)
        fd = in_folder(self.root, names, lambda above: os.open(temporary, _NEW, 0o666, dir_fd=above))
        with folder(self.root, names) as above:
            try:
                try:
                    write(fd)
                    # Without fsync a crash of the machine can leave a file with the right name and no content.
                    os.fsync(fd)
                    status = os.fstat(fd)
                finally:
                    os.close(fd)
                if if_none_match:
                    try:
                        os.link(temporary, name, src_dir_fd=above, dst_dir_fd=above)
                    except FileExistsError:
                        raise PreconditionFailedError("the object exists", url=self._url(key)) from None
                else:
                    with locked(above, needed=if_match is not None):
                        if if_match is not None and _etag_now(name, above) != if_match:
                            raise PreconditionFailedError(
                                "the ETag of the object is not the expected one", url=self._url(key)
                            )
                        os.replace(temporary, name, src_dir_fd=above, dst_dir_fd=above)
                sync(above)
            finally:
                with contextlib.suppress(FileNotFoundError):  # os.replace took it
                    os.unlink(temporary, dir_fd=above)
        return _info(key, status)

    @contextlib.contextmanager
    def _above(self, key: str) -> Iterator[tuple[int, str]]:
        """Open the folder of an object. Yields its file descriptor and the object's name in it."""
        names, name = split(key)
        with folder(self.root, names) as above:
            yield above, name

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, ObjectInfo]]:
        """Open an object for reading. A link to a file is followed, since some caches keep their files elsewhere."""
        with self._above(key) as (above, name):
            # O_NONBLOCK: opening a pipe would otherwise wait for a writer.
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=above)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a file", name)
            yield fd, _info(key, status)
        finally:
            os.close(fd)

    def _check_etag(self, info: ObjectInfo, expected: str | None) -> None:
        if expected is not None and info.etag != expected:
            raise PreconditionFailedError("the ETag of the object is not the expected one", url=self._url(info.key))

    def _walk(self, above: int, folder: str, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the keys below `folder` (empty or ending with a slash) that begin with `prefix`, in key order, each
        with the file descriptor of the file's folder.
        """
        for name, is_folder in scan(above):
            key = folder + name
            if not is_folder:
                if key.startswith(prefix):
                    yield key, above
            elif key.startswith(prefix) or prefix.startswith(key):
                # The folder may have been removed meanwhile, or replaced by a link: then it is skipped.
                with contextlib.suppress(*_ABSENT), enter(above, name[:-1]) as inner:
                    yield from self._walk(inner, key, prefix)

    def _upload(self, key: str, upload_id: str) -> builtins.list[str]:
        return [*split(key)[0], _UPLOAD + upload_id]

    def _url(self, key: str) -> str:
        return f"{self.url.rstrip('/')}/{key}"

    @contextlib.contextmanager
    def _errors(self, operation: str, key: str, *, missing: type[StoreError] = ObjectNotFoundError) -> Iterator[None]:
        failure: StoreError
        try:
            yield
            return
        except LinkedFolderError as error:
            failure = StoreError(f"{operation} failed: {error.strerror}", url=self._url(key), remedy=_NO_LINKS)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            failure = missing(f"{operation} failed: no such file", url=self._url(key))
        except PermissionError as error:
            failure = AccessDeniedError(f"{operation} failed: {error.strerror}", url=self._url(key), remedy="")
        except OSError as error:
            retry = error.errno in (errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE)
            kind = TransientStoreError if retry else StoreError
            failure = kind(f"{operation} failed: {error.strerror or type(error).__name__}", url=self._url(key))
        raise failure


def _open_uploads(fd: int, names: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Yield the object's name, the id, and the beginning of each upload, or the last write to each temporary file."""
    for name in sorted(names):
        # It may end meanwhile.
        with contextlib.suppress(*_ABSENT):
            if name.startswith(_UPLOAD):
                with enter(fd, name) as upload:
                    target = os.open(_UPLOAD_TARGET, os.O_RDONLY | os.O_CLOEXEC, dir_fd=upload)
                with open(target, encoding="utf-8") as file:
                    yield file.read().rpartition("/")[2], name[len(_UPLOAD) :], os.fstat(target).st_mtime
            elif name.startswith(_TEMPORARY):
                upload_id, named, of = name[len(_TEMPORARY) :].partition("-")
                if named:
                    yield of, upload_id, os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime


def _temporary(upload_id: str, name: str) -> str:
    """Return the name of the file that is written before it gets the object's name."""
    return f"{_TEMPORARY}{upload_id}-{name}" if len(os.fsencode(name)) <= _LONGEST_NAMED else _TEMPORARY + upload_id


def _write(fd: int, body: Buffers) -> None:
    with open(fd, "wb", buffering=_SMALL_BYTES, closefd=False) as file:
        file.writelines(body)


def _read(fd: int, offset: int, buffers: Buffers, url: str) -> None:
    # `seek` would refuse an offset beyond what the filesystem can hold, which damaged metadata may name.
    if offset > os.fstat(fd).st_size:
        raise CorruptDataError("the object ends before the range does", url=url)
    with open(fd, "rb", buffering=_SMALL_BYTES, closefd=False) as file:
        file.seek(offset)
        for view in buffers:
            if file.readinto(view) < view.nbytes:  # type: ignore[attr-defined]
                raise CorruptDataError("the object ends before the range does", url=url)


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
                raise StoreError("the file was truncated while it was copied")
            _write(target, [memoryview(block)])
            count = len(block)
        done += count


def _etag_now(name: str, above: int) -> str | None:
    try:
        return _etag(os.stat(name, dir_fd=above))
    except FileNotFoundError:
        return None


def _etag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, _etag(status), status.st_mtime)
