"""`FsspecStore`: any filesystem that fsspec knows, by its public, blocking methods. Nothing here is for one service."""

from __future__ import annotations

import builtins
import datetime
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from bucketpoint.errors import (
    AccessDeniedError,
    BucketpointError,
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    TransientStoreError,
    UploadNotFoundError,
)
from bucketpoint.stores.base import Buffers, Capabilities, DeleteFailure, ObjectInfo, OpenUpload, Part

_UPLOAD = ".bucketpoint-upload-"

# Only here are folders made: on an object store makedirs would create the bucket.
_WITH_FOLDERS = frozenset({"file", "local", "ftp", "sftp", "ssh", "smb", "hdfs", "webhdfs", "arrow_hdfs", "dbfs"})

_ETAG_NAMES = ("ETag", "etag", "generation", "md5Hash", "content_md5", "checksum")
_TIME_NAMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")

# fsspec's conditional writes are there for some filesystems only, so conditions are checked here, one writer at a time.
_one_writer = threading.Lock()


@dataclass(frozen=True)
class FsspecStore:
    """Objects below `root` of a filesystem.

    Bodies are joined and written whole by `pipe_file`: of all the ways to write, it alone cannot publish half an object
    when it fails. Conditions are checked before the write; only in memory, which no other process has, is that atomic.
    Multipart uploads are emulated: parts are objects of their own, read back and written as one at the end. That moves
    each byte three times, so the capabilities say that there is no multipart, and callers do better with one `put`.
    """

    fs: AbstractFileSystem
    root: str

    def __post_init__(self) -> None:
        if getattr(self.fs, "asynchronous", False):
            raise BucketpointError(
                "the filesystem was made with asynchronous=True, and is called from threads here",
                remedy="Pass one made without it",
            )

    @property
    def url(self) -> str:
        return str(self.fs.unstrip_protocol(self.root))

    @property
    def identity(self) -> str:
        return self.url

    @property
    def capabilities(self) -> Capabilities:
        private = isinstance(self.fs, MemoryFileSystem)
        return Capabilities(conditional_put=private, checksums=False, multipart=False, pinned_reads=private)

    def put(
        self,
        key: str,
        body: Buffers,
        *,
        crc32c: int | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        data = b"".join(body)
        with self._errors("put", key):
            if not if_none_match and if_match is None:
                self._write(key, data)
                return self._written(key, len(data))
            with _one_writer:
                present = self._find(key)
                if if_none_match and present is not None:
                    raise PreconditionFailedError("the object exists", url=self._url(key))
                if if_match is not None and (present is None or present.etag != if_match):
                    raise PreconditionFailedError("the object is not the one expected", url=self._url(key))
                self._write(key, data)
                return self._written(key, len(data))

    def get(self, key: str, *, max_bytes: int | None = None, first: int | None = None) -> tuple[bytes, ObjectInfo]:
        info = self.head(key)
        part = first is not None and info.size > first
        if max_bytes is not None and not part and info.size > max_bytes:
            raise CorruptDataError(
                f"the object has {info.size} bytes, and at most {max_bytes} were expected", url=self._url(key)
            )
        with self._errors("get", key):
            limits = {"start": 0, "end": first} if part else {}
            return bytes(self.fs.cat_file(self._path(key), **limits)), info

    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None:
        size = sum(view.nbytes for view in buffers)
        if not size:
            return
        self._check_etag(key, if_match)
        with self._errors("read", key):
            data = memoryview(self.fs.cat_file(self._path(key), start=offset, end=offset + size))
        if data.nbytes != size:
            raise CorruptDataError("the object ends before the range does", url=self._url(key))
        # Again: what was read between two equal ETags is what they stand for.
        self._check_etag(key, if_match)
        start = 0
        for view in buffers:
            view[:] = data[start : start + view.nbytes]
            start += view.nbytes

    def head(self, key: str) -> ObjectInfo:
        with self._errors("head", key):
            found = self._find(key)
        if found is None:
            raise ObjectNotFoundError("no such object", url=self._url(key))
        return found

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        folder = prefix[: prefix.rfind("/") + 1]
        with self._errors("list", prefix):
            self.fs.invalidate_cache()
            found = self._descend(folder)
        for key, info in sorted(found.items()):
            if key.startswith(prefix) and (start_after is None or key > start_after) and _UPLOAD not in key:
                yield _info(key, info)

    def list_folders(self, prefix: str) -> Iterator[str]:
        # Not by `ls`: filesystems with folders would name empty ones, which hold no object.
        seen = ""
        for info in self.list(prefix):
            head, slash, _ = info.key[len(prefix) :].partition("/")
            folder = prefix + head + slash
            if slash and folder != seen:
                seen = folder
                yield folder

    def delete(self, keys: Sequence[str]) -> builtins.list[DeleteFailure]:
        failures = []
        for key in keys:
            try:
                with self._errors("delete", key):
                    # Not `rm`: it takes `[`, `]` and `*` in a key for a pattern.
                    self.fs.rm_file(self._path(key))
            except ObjectNotFoundError:
                continue
            except StoreError as error:
                failures.append(DeleteFailure(key, type(error).__name__, error.message))
        return failures

    def copy(self, source: str, target: str) -> ObjectInfo:
        size = self.head(source).size
        with self._errors("copy", source):
            self._make_folder(target)
            self.fs.cp_file(self._path(source), self._path(target))
            return self._written(target, size)

    def create_multipart(self, key: str) -> str:
        upload_id = secrets.token_hex(8)
        with self._errors("create_multipart", key):
            self._write(self._part(key, upload_id, 0), key.encode())
        return upload_id

    def put_part(self, key: str, upload_id: str, number: int, body: Buffers, *, crc32c: int | None = None) -> Part:
        self._check_upload(key, upload_id)
        data = b"".join(body)
        part = self._part(key, upload_id, number)
        with self._errors("put_part", key):
            self._write(part, data)
        return Part(number, len(data), self.head(part).etag or "", crc32c)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        self._check_upload(key, upload_id)
        ordered = sorted(parts, key=lambda part: part.number)
        with self._errors("complete_multipart", key):
            names = [self._path(self._part(key, upload_id, part.number)) for part in ordered]
            data = b"".join(self.fs.cat_file(name) for name in names)
            if len(data) != sum(part.size for part in ordered):
                raise StoreError("the parts are not the ones listed", url=self._url(key))
            self._write(key, data)
            info = self._written(key, len(data))
        self.abort_multipart(key, upload_id)
        return info

    def abort_multipart(self, key: str, upload_id: str) -> None:
        folder = self._part(key, upload_id, 0).rsplit("/", 1)[0] + "/"
        with self._errors("abort_multipart", key):
            self.fs.invalidate_cache()
            names = self._descend(folder)
            for name in sorted(names, reverse=True):
                self.fs.rm_file(self._path(name))
            if _has_folders(self.fs) and names:
                self.fs.rmdir(self._path(folder.rstrip("/")))

    def list_multipart(self, prefix: str) -> Iterator[OpenUpload]:
        folder = prefix[: prefix.rfind("/") + 1]
        with self._errors("list_multipart", prefix):
            self.fs.invalidate_cache()
            found = self._descend(folder)
        for name, info in sorted(found.items()):
            above, _, number = name.rpartition("/")
            upload = above.rpartition("/")[2]
            if upload.startswith(_UPLOAD) and number == "0":
                key = self.get(name)[0].decode()
                if key.startswith(prefix):
                    yield OpenUpload(key, upload[len(_UPLOAD) :], _seconds(info))

    def close(self) -> None:
        """The filesystem belongs to whoever made it."""

    def _write(self, key: str, data: bytes) -> None:
        self._make_folder(key)
        self.fs.pipe_file(self._path(key), data)

    def _written(self, key: str, size: int) -> ObjectInfo:
        found = self._find(key)
        return ObjectInfo(key, size) if found is None else found

    def _make_folder(self, key: str) -> None:
        if _has_folders(self.fs):
            self.fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)

    def _find(self, key: str) -> ObjectInfo | None:
        self.fs.invalidate_cache(self._path(key))
        try:
            info = self.fs.info(self._path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _info(key, info) if info.get("type") == "file" else None

    def _descend(self, folder: str) -> dict[str, dict[str, Any]]:
        """What lies below a folder, by key."""
        try:
            found = self.fs.find(self._path(folder).rstrip("/") or "/", detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        above = len(self._path(""))
        return {name[above:]: info for name, info in found.items() if info.get("type") == "file"}

    def _check_etag(self, key: str, if_match: str | None) -> None:
        if if_match is not None and self.head(key).etag != if_match:
            raise PreconditionFailedError("the object is not the one expected", url=self._url(key))

    def _check_upload(self, key: str, upload_id: str) -> None:
        with self._errors("upload", key):
            found = self._find(self._part(key, upload_id, 0))
        if found is None:
            raise UploadNotFoundError("no such multipart upload", url=self._url(key))

    def _part(self, key: str, upload_id: str, number: int) -> str:
        return f"{key[: key.rfind('/') + 1]}{_UPLOAD}{upload_id}/{number}"

    def _path(self, key: str) -> str:
        return f"{self.root.rstrip('/')}/{key}"

    def _url(self, key: str) -> str:
        return f"{self.url.rstrip('/')}/{key}"

    @contextmanager
    def _errors(self, operation: str, key: str) -> Iterator[None]:
        failure: StoreError
        try:
            yield
            return
        except BucketpointError:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            failure = ObjectNotFoundError(f"{operation} failed: no such object or bucket", url=self._url(key))
        except PermissionError as error:
            failure = AccessDeniedError(f"{operation} failed: {error.strerror or 'not permitted'}", url=self._url(key))
        except (TimeoutError, ConnectionError) as error:
            failure = TransientStoreError(f"{operation} failed: {type(error).__name__}: {error}", url=self._url(key))
        except Exception as error:  # noqa: BLE001 (each filesystem has exceptions of its own; none may escape unnamed)
            failure = StoreError(f"{operation} failed: {type(error).__name__}: {error}", url=self._url(key))
        raise failure


def _has_folders(fs: AbstractFileSystem) -> bool:
    inner = getattr(fs, "fs", None)
    if isinstance(inner, AbstractFileSystem):
        return _has_folders(inner)
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not _WITH_FOLDERS.isdisjoint(protocols)


def _info(key: str, info: dict[str, Any]) -> ObjectInfo:
    return ObjectInfo(key, int(info.get("size") or 0), _etag(info), _seconds(info))


def _etag(info: dict[str, Any]) -> str | None:
    for name in _ETAG_NAMES:
        if info.get(name):
            return str(info[name]).strip('"')
    seconds = _seconds(info)
    return None if seconds is None else f"{seconds:.6f}-{info.get('size')}-{info.get('ino', '')}"


def _seconds(info: dict[str, Any]) -> float | None:
    for name in _TIME_NAMES:
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
    return None
