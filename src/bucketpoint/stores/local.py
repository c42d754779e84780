"""`LocalStore`: a folder of a local or network-mounted filesystem, accessed with system calls and not with fsspec."""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ParamSpec, TypeVar

from bucketpoint.errors import (
    AccessDeniedError,
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    ThrottledError,
    TransientStoreError,
    UploadNotFoundError,
)
from bucketpoint.stores import retry
from bucketpoint.stores.base import Buffers, Capabilities, DeleteFailure, ObjectInfo, OpenUpload, Part, check_conditions
from bucketpoint.stores.local_folders import (
    HIDDEN,
    NEW,
    REMEDIES,
    TEMPORARY,
    LinkError,
    beneath,
    enter,
    folder,
    in_folder,
    open_file,
    prune,
    quote,
    remove,
    scan,
    split,
    sync,
    temporary,
)
from bucketpoint.stores.local_lock import LockedError, locked

_SMALL_BYTES = 64 << 10
"""Smaller buffers are joined into one system call; larger buffers are read and written directly."""

_UPLOAD = HIDDEN + "upload-"
_UPLOAD_TARGET = "target"

_LONGEST_TARGET = 1 << 14
"""Limit on the bytes read from `_UPLOAD_TARGET`, which holds the key of an object with a name over `_LONGEST_NAMED`."""

_MOST_LINKS = 8
_PAGE = 100

_PASSING = frozenset({errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE})
"""Errors that may pass at the next attempt. NFS gives ESTALE for a file that another client has just replaced."""
_NOT_OFFERED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM})

_ABSENT = (FileNotFoundError, NotADirectoryError)

_NO_FOLDER_LINKS = (
    "Name the target of the link in the URL (only the folder of the URL itself may be a link), or mount the target in "
    "place of the link (mount --bind)"
)
_NO_FILE_LINKS = (
    "If only people whom you trust can write to this folder, as to a cache of your own, pass "
    'storage_options={"follow_links": True} (--storage-option follow_links=true)'
)
_NO_RENAMES = (
    "This filesystem can neither link nor rename files, so no file can be created atomically. Pass the URL of the "
    "bucket behind the mount (s3://, gs://), or another folder"
)


P = ParamSpec("P")
T = TypeVar("T")
Entry = TypeVar("Entry", ObjectInfo, str)


def _retried(request: Callable[P, T]) -> Callable[P, T]:
    """Repeat a request after failures that may pass, and while another writer holds a lock."""

    @functools.wraps(request)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return retry.run(lambda: request(*args, **kwargs), retry.RetryPolicy())

    return run


def this_url(store: Any) -> str:
    """Return "this URL" for an error, with a hint if it is a local path, which may be a URL without its scheme."""
    return "this URL (a local path)" if isinstance(store, LocalStore) else "this URL"


@dataclass(frozen=True)
class LocalStore:
    """A store whose objects are files below `root`.

    A new object is written to a temporary file and synced to the disk, and then gets its name by link or rename. An
    existing file is never written to, so an open file does not change, and mtime, size and inode make an ETag. `//` in
    a key names the same file as `/`. Folders are created when needed, and removed when they become empty.

    The root may be a symbolic link. Below the root, a link to a folder is never followed, and a link to a file only if
    its target is below the root. Listings leave out all other links, and a key with such a link in its path is refused.
    A write or a deletion replaces or removes the link, not the file.

    Conditions are checked under the lock of the file (`local_lock`). An object is created by a hard link, which fails
    if the name exists, or under the lock on filesystems without hard links.

    A temporary file, which a killed process may have left, is listed and aborted like a multipart upload.
    """

    root: str
    follow_links: bool = False
    """Read files through links that leave the root, as in caches. Anybody with write access to the root can then make
    this process read any file that it may read."""

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
        # Without the path: a folder that is named in several ways, as through a link, is one store.
        return f"file:#{status.st_dev:x}-{status.st_ino:x}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            conditional_put=True, checksums=False, multipart=True, pinned_reads=True, conditional_delete=True
        )

    @_retried
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

    @_retried
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

    @_retried
    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None:
        with self._errors("read", key), self._opened(key) as (fd, info):
            check_conditions(info, self._url(key), if_match=if_match)
            _read(fd, offset, buffers, self._url(key))

    @_retried
    def head(self, key: str) -> ObjectInfo:
        with self._errors("head", key), self._above(key) as (above, name):
            return _info(key, self._status(key, above, name))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return _paged(lambda last: self._listed(prefix, last.key if last else None))

    def _listed(self, prefix: str, start_after: str | None) -> Iterator[ObjectInfo]:
        folder = prefix[: prefix.rfind("/") + 1]
        with self._errors("list", prefix), contextlib.suppress(*_ABSENT), self._above(folder) as (above, _):
            for key, where in self._walk(above, folder, prefix):
                if start_after is None or key > start_after:
                    with contextlib.suppress(FileNotFoundError, LinkError):
                        yield _info(key, self._status(key, where, key.rpartition("/")[2]))

    def list_folders(self, prefix: str) -> Iterator[str]:
        return _paged(lambda last: self._listed_folders(prefix, last or ""))

    def _listed_folders(self, prefix: str, start_after: str) -> Iterator[str]:
        with self._errors("list", prefix), contextlib.suppress(*_ABSENT), self._above(prefix) as (above, _):
            for name, is_folder in scan(above):
                key = prefix + name
                if is_folder and key > start_after and self._has_files(above, name):
                    yield key

    def _has_files(self, above: int, name: str) -> bool:
        with contextlib.suppress(*_ABSENT), enter(above, name[:-1]) as inner:
            return next(self._walk(inner, "", ""), None) is not None
        return False

    def delete(self, keys: Sequence[str]) -> builtins.list[DeleteFailure]:
        failures = []
        for key in keys:
            try:
                self._deleted(key)
            except StoreError as error:
                failures.append(DeleteFailure(key, type(error).__name__, error.message, error.remedy))
        return failures

    def delete_if(self, key: str, etag: str) -> None:
        self._deleted(key, etag)

    @_retried
    def _deleted(self, key: str, etag: str | None = None) -> None:
        with self._errors("delete", key):
            with (
                contextlib.suppress(*_ABSENT),
                self._above(key) as (above, name),
                # Locked even without an ETag: the file must not be deleted while another writer compares its ETag.
                locked(above, name, needed=etag is not None) as ensure,
            ):
                if etag is not None:
                    check_conditions(_info(key, self._status(key, above, name)), self._url(key), if_match=etag)
                ensure()
                # If the name is a link to a file, the link is removed and the file stays.
                os.unlink(name, dir_fd=above)
            prune(self.root, split(key)[0])

    @_retried
    def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
        with self._errors("copy", source.key), self._opened(source.key) as (fd, info):
            check_conditions(info, self._url(source.key), if_match=source.etag)
            return self._publish(target, lambda out: _copy(fd, out, info.size))

    @_retried
    def create_multipart(self, key: str) -> str:
        unique, name = secrets.token_hex(8), split(key)[1]
        # One system call makes an upload that is listed: the process may be killed before a second call.
        upload_id = quote(unique, name)

        def make(above: int) -> None:
            if upload_id == unique:
                with open(os.open(_UPLOAD_TARGET, NEW, 0o666, dir_fd=above), "wb") as file:
                    file.write(os.fsencode(key))

        with self._errors("create_multipart", key):
            in_folder(self.root, self._upload(key, upload_id), make)
        return upload_id

    @_retried
    def put_part(self, key: str, upload_id: str, number: int, body: Buffers, *, crc32c: int | None = None) -> Part:
        partial, names = TEMPORARY + secrets.token_hex(8), self._upload(key, upload_id)
        with self._errors("put_part", key, missing=UploadNotFoundError), folder(self.root, names) as parts:
            fd = os.open(partial, NEW, 0o666, dir_fd=parts)
            try:
                _write(fd, body)
                status = os.fstat(fd)
            finally:
                os.close(fd)
            os.replace(partial, str(number), src_dir_fd=parts, dst_dir_fd=parts)
        return Part(number, status.st_size, _etag(status), crc32c)

    @_retried
    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        ordered = sorted(parts, key=lambda part: part.number)
        *above, upload = self._upload(key, upload_id)
        with self._errors("complete_multipart", key, missing=UploadNotFoundError):
            with folder(self.root, [*above, upload]) as sent:

                def write(fd: int) -> None:
                    for part in ordered:
                        source = open_file(str(part.number), sent)
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

    @_retried
    def abort_multipart(self, key: str, upload_id: str) -> None:
        *above, upload = self._upload(key, upload_id)
        with self._errors("abort_multipart", key), contextlib.suppress(FileNotFoundError):
            with folder(self.root, above) as outer:
                try:
                    os.unlink(TEMPORARY + upload_id, dir_fd=outer)
                except FileNotFoundError:
                    remove(upload, outer)
            prune(self.root, above)

    @_retried
    def list_multipart(self, prefix: str) -> Iterator[OpenUpload]:
        start, uploads = prefix[: prefix.rfind("/") + 1], builtins.list[OpenUpload]()
        with self._errors("list_multipart", prefix), contextlib.suppress(*_ABSENT), self._above(start) as (above, _):
            for path, folders, files, fd in os.fwalk(".", dir_fd=above):
                for name, upload_id, started in _open_uploads(fd, [*folders, *files]):
                    # The upload's place below this root gives the key: a store with another root may have begun it.
                    key = start + os.path.normpath(f"{path}/{name}")
                    if key.startswith(prefix):
                        uploads.append(OpenUpload(key, upload_id, started))
        return iter(uploads)

    def has_hard_links(self, key: str) -> bool:
        """Return True if a trial shows that objects beside this key are created by hard links, not under a lock."""

        def attempt(above: int) -> bool:
            trial, linked = (TEMPORARY + secrets.token_hex(8) for _ in range(2))
            os.close(os.open(trial, NEW, 0o666, dir_fd=above))
            try:
                os.link(trial, linked, src_dir_fd=above, dst_dir_fd=above, follow_symlinks=False)
                os.unlink(linked, dir_fd=above)
            except OSError:
                return False
            finally:
                os.unlink(trial, dir_fd=above)
            return True

        with self._errors("put", key):
            return in_folder(self.root, split(key)[0], attempt)

    def _publish(
        self, key: str, write: Callable[[int], None], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        names, name = split(key)
        partial = temporary(secrets.token_hex(8), name)
        fd = in_folder(self.root, names, lambda above: os.open(partial, NEW, 0o666, dir_fd=above))
        with folder(self.root, names) as above:
            try:
                try:
                    write(fd)
                    # Without fsync a crash of the machine can leave a file with the right name and no content.
                    os.fsync(fd)
                    status = os.fstat(fd)
                finally:
                    os.close(fd)
                self._name(key, partial, above, if_none_match=if_none_match, if_match=if_match)
                sync(above)
            finally:
                # After `os.replace` the file is gone. If it cannot be deleted, it is listed as an upload.
                with contextlib.suppress(OSError):
                    os.unlink(partial, dir_fd=above)
        return _info(key, status)

    def _name(self, key: str, partial: str, above: int, *, if_none_match: bool, if_match: str | None) -> None:
        """Give a written file the name of its object."""
        name = split(key)[1]
        exists, can_link = PreconditionFailedError("the object exists", url=self._url(key)), True
        if if_match is None:
            try:
                # A link that somebody put in the place of the temporary file must not be followed.
                os.link(partial, name, src_dir_fd=above, dst_dir_fd=above, follow_symlinks=False)
                return
            except FileExistsError:
                self._refuse_no_file(key, above, name)
                if if_none_match:
                    raise exists from None
            except OSError as error:
                if error.errno in (errno.ENOENT, *_PASSING):
                    raise
                can_link = False  # as on gcsfuse, SMB and exFAT
        with locked(above, name) as ensure:
            if if_none_match and _is_there(name, above):
                raise exists
            if if_match is not None:
                check_conditions(self._present(key, above, name), self._url(key), if_match=if_match)
            ensure()
            try:
                os.replace(partial, name, src_dir_fd=above, dst_dir_fd=above)
            except OSError as error:
                if can_link or error.errno not in _NOT_OFFERED:
                    raise
                raise StoreError(
                    f"put failed: the filesystem has no links and no renames: {error.strerror}",
                    url=self._url(key),
                    remedy=_NO_RENAMES,
                ) from None

    def _refuse_no_file(self, key: str, above: int, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                raise StoreError(
                    "put failed: a folder, a pipe, a device or a socket has the name of the object",
                    url=self._url(key),
                    remedy="Move it away, or save to another folder",
                )

    @contextlib.contextmanager
    def _above(self, key: str) -> Iterator[tuple[int, str]]:
        """Open the folder of an object. Yields the folder's file descriptor and the object's name in it."""
        names, name = split(key)
        with folder(self.root, names) as above:
            yield above, name

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, ObjectInfo]]:
        """Open an object for reading. Yields its file descriptor and its description."""
        fd = self._open(key, _MOST_LINKS)
        try:
            yield fd, _info(key, os.fstat(fd))
        finally:
            os.close(fd)

    def _open(self, key: str, links: int) -> int:
        with self._above(key) as (above, name):
            try:
                return open_file(name, above, follow=self.follow_links)
            except LinkError:
                target = beneath(key, os.readlink(name, dir_fd=above)) if links else None
        if target is None:
            raise LinkError(os.path.join(self.root, key))
        return self._open(target, links - 1)

    def _status(self, key: str, above: int, name: str) -> os.stat_result:
        """Describe the file that a read of the object would open. Raises FileNotFoundError if there is no file."""
        status = os.stat(name, dir_fd=above, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            with self._opened(key) as (fd, _):
                return os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a file", name)
        return status

    def _present(self, key: str, above: int, name: str) -> ObjectInfo | None:
        with contextlib.suppress(FileNotFoundError):
            return _info(key, self._status(key, above, name))
        return None

    def _walk(self, above: int, folder: str, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the keys below `folder` that begin with `prefix`, in order, each with the descriptor of its folder."""
        for name, is_folder in scan(above):
            key = folder + name
            if not is_folder:
                if key.startswith(prefix):
                    yield key, above
            elif key.startswith(prefix) or prefix.startswith(key):
                # The folder is skipped if it was removed meanwhile, or replaced by a link.
                with contextlib.suppress(*_ABSENT), enter(above, name[:-1]) as inner:
                    yield from self._walk(inner, key, prefix)

    def _upload(self, key: str, upload_id: str) -> builtins.list[str]:
        return [*split(key)[0], _UPLOAD + upload_id]

    def _url(self, key: str) -> str:
        return f"{self.url.rstrip('/')}/{key}"

    @contextlib.contextmanager
    def _errors(self, operation: str, key: str, *, missing: type[StoreError] = ObjectNotFoundError) -> Iterator[None]:
        try:
            yield
            return
        except OSError as error:
            failure = self._failure(error, operation, key, missing)
        raise failure

    def _failure(
        self, error: OSError, operation: str, key: str, missing: type[StoreError] = ObjectNotFoundError
    ) -> StoreError:
        kind: type[StoreError] = TransientStoreError if error.errno in _PASSING else StoreError
        reason, remedy = error.strerror or type(error).__name__, REMEDIES.get(error.errno or 0)
        if isinstance(error, LinkError):
            remedy = _NO_FOLDER_LINKS if error.is_folder else _NO_FILE_LINKS
        elif isinstance(error, LockedError):
            # Throttled requests are retried until the deadline, and not only a few times.
            kind, remedy = ThrottledError, "If no job writes to this folder, delete the lock file"
        elif isinstance(error, NotADirectoryError) and operation in ("put", "create_multipart"):
            reason, remedy = "a file has the name of a folder", "Save below another folder, or move that file"
        elif isinstance(error, IsADirectoryError) and operation == "delete":
            remedy = "This is a folder that contains other objects: name those"
        elif isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            kind, reason = missing, "no such file"
        elif isinstance(error, PermissionError):
            kind = AccessDeniedError
        return kind(f"{operation} failed: {reason}", url=self._url(key), remedy=remedy)


def _paged(listing: Callable[[Entry | None], Iterator[Entry]]) -> Iterator[Entry]:
    """Yield the entries of a listing. After a failure that may pass, continue after the last entry."""
    last: Entry | None = None
    entries = listing(None)

    def page() -> list[Entry]:
        nonlocal entries
        try:
            return list(islice(entries, _PAGE))
        except StoreError:
            entries = listing(last)
            raise

    while read := retry.run(page, retry.RetryPolicy()):
        yield from read
        last = read[-1]


def _open_uploads(fd: int, names: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Yield object name, id and time of the last write for each upload and each temporary file."""
    for name in sorted(names):
        is_upload = name.startswith(_UPLOAD)
        if not is_upload and not name.startswith(TEMPORARY):
            continue
        upload_id = name[len(_UPLOAD if is_upload else TEMPORARY) :]
        _, named, of = upload_id.partition("-")
        # The upload may end meanwhile.
        with contextlib.suppress(LinkError, *_ABSENT):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if is_upload and not named:
                with enter(fd, name) as upload, open(open_file(_UPLOAD_TARGET, upload), "rb") as file:
                    of = os.fsdecode(file.read(_LONGEST_TARGET)).rpartition("/")[2]
            if of and stat.S_ISDIR(status.st_mode) == is_upload:
                yield of, upload_id, status.st_mtime


def _write(fd: int, body: Buffers) -> None:
    with open(fd, "wb", buffering=_SMALL_BYTES, closefd=False) as file:
        file.writelines(body)


def _read(fd: int, offset: int, buffers: Buffers, url: str) -> None:
    # `seek` refuses an offset beyond the filesystem's limit, and damaged metadata may contain any offset.
    if offset > os.fstat(fd).st_size:
        raise CorruptDataError("the object is too short for the range", url=url)
    with open(fd, "rb", buffering=_SMALL_BYTES, closefd=False) as file:
        file.seek(offset)
        for view in buffers:
            if file.readinto(view) < view.nbytes:  # type: ignore[attr-defined]
                raise CorruptDataError("the object is too short for the range", url=url)


def _copy(source: int, target: int, size: int) -> None:
    copy_range: Any = getattr(os, "copy_file_range", None)
    done = 0
    while done < size:
        try:
            count = copy_range(source, target, size - done) if copy_range else 0
        except OSError as error:
            if error.errno not in (errno.EXDEV, *_NOT_OFFERED):
                raise
            count, copy_range = 0, None
        if not count:
            block = os.read(source, min(8 << 20, size - done))
            if not block:
                raise StoreError("the file was truncated while it was copied")
            _write(target, [memoryview(block)])
            count = len(block)
        done += count


def _is_there(name: str, above: int) -> bool:
    try:
        os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _etag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, _etag(status), status.st_mtime)
