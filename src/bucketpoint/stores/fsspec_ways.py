"""How a filesystem is used: `Ways`, with what all can do. See `fsspec_services` for what single ones do better.

Paths are the filesystem's own, and so are the exceptions: who calls translates them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec.asyn
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from bucketpoint.stores.base import Part

Told = Mapping[str, Any]
"""What a filesystem says of an object that it has written, as `info` would: the ETag among others. May be empty."""

_HIDDEN = ".bucketpoint-"
_UPLOAD = _HIDDEN + "upload-"
_TEMPORARY = _HIDDEN + "tmp-"

_DELETES_AT_ONCE = 32
_MEMORY_TRIES = 8

# Only here are folders made: on an object store makedirs would create the bucket.
_WITH_FOLDERS = frozenset({"file", "local", "ftp", "sftp", "ssh", "smb", "hdfs", "webhdfs", "arrow_hdfs", "dbfs"})


@dataclass(frozen=True)
class Limits:
    """Of an upload in parts."""

    min_part_bytes: int
    max_part_bytes: int
    max_parts: int


class Ways:
    """Any filesystem, by the methods that all have. Without state, as all that derive from it.

    Attributes:
        name: of the library, for tables.
        creates: `create` is one request, whose condition the service itself checks.
        replaces: `replace` is.
        checks: the service says the CRC32C of what it was sent.
        limits: of parts that may be sent in any order and at once. None where parts are objects of their own, which
            `complete` reads back and writes as one: that moves each byte three times.
        max_put_bytes: the largest body that goes up in one request.
        private: no other process has this filesystem's content.
        lists_uploads: as in `Capabilities`.
    """

    name = "any other"
    creates = False
    replaces = False
    checks = False
    limits: Limits | None = None
    max_put_bytes = 1 << 62
    private = False
    lists_uploads = True

    def write(self, fs: AbstractFileSystem, path: str, data: bytes, crc32c: int | None) -> Told:
        if not has_folders(fs):
            return told(fs.pipe_file(path, data))
        make_folder_of(fs, path)
        # A file is visible from its first byte on, and a writer that is killed would leave half of it.
        temporary = f"{path.rpartition('/')[0]}/{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            fs.pipe_file(temporary, data)
            fs.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                fs.rm_file(temporary)
            raise
        return {}

    def create(self, fs: AbstractFileSystem, path: str, data: bytes, crc32c: int | None) -> Told:
        """Raises FileExistsError, or something with the status 412 or 409."""
        return told(fs.pipe_file(path, data, mode="create"))

    def replace(self, fs: AbstractFileSystem, path: str, data: bytes, etag: str, crc32c: int | None) -> Told:
        """Raises something with the status 412."""
        raise NotImplementedError

    def begin(self, fs: AbstractFileSystem, path: str) -> str:
        upload_id = secrets.token_hex(8)
        self.write(fs, _part(path, upload_id, 0), path.encode(), None)
        return upload_id

    def send(
        self, fs: AbstractFileSystem, path: str, upload_id: str, number: int, data: bytes, crc32c: int | None
    ) -> str:
        """The ETag of a part. Raises FileNotFoundError if there is no such upload."""
        self._check(fs, path, upload_id)
        said = self.write(fs, _part(path, upload_id, number), data, crc32c)
        check(said, crc32c)
        return ""

    def complete(self, fs: AbstractFileSystem, path: str, upload_id: str, parts: Sequence[Part]) -> Told:
        """Raises FileNotFoundError if there is no such upload."""
        self._check(fs, path, upload_id)
        data = b"".join(fs.cat_file(_part(path, upload_id, part.number)) for part in parts)
        if len(data) != sum(part.size for part in parts):
            raise OSError("the parts are not the ones listed")
        said = self.write(fs, path, data, None)
        self.abort(fs, path, upload_id)
        return said

    def abort(self, fs: AbstractFileSystem, path: str, upload_id: str) -> None:
        """May raise FileNotFoundError if it is gone already."""
        folder = _part(path, upload_id, 0).rpartition("/")[0]
        fs.invalidate_cache()
        names = files_below(fs, folder)
        for name in sorted(names, reverse=True):
            fs.rm_file(name)
        if has_folders(fs) and names:
            fs.rmdir(folder)

    def uploads(self, fs: AbstractFileSystem, path: str) -> Iterator[tuple[str, str, Any]]:
        """Path, id and description of the uploads whose path begins with `path`."""
        fs.invalidate_cache()
        for name, info in sorted(files_below(fs, path[: path.rfind("/") + 1]).items()):
            folder, _, number = name.rpartition("/")
            above, _, upload = folder.rpartition("/")
            if upload.startswith(_UPLOAD) and number == "0":
                # Where it lies tells the rest: it may be reached from another root than it was begun from.
                target = f"{above}/{fs.cat_file(name).decode().rpartition('/')[2]}"
                if target.startswith(path):
                    yield target, upload[len(_UPLOAD) :], info

    def _check(self, fs: AbstractFileSystem, path: str, upload_id: str) -> None:
        marker = _part(path, upload_id, 0)
        fs.invalidate_cache(marker)
        fs.info(marker)


def is_hidden(key: str) -> bool:
    """Whether this is a part of an upload, or a file that has not got its name yet."""
    return _UPLOAD in key or key.rpartition("/")[2].startswith(_TEMPORARY)


def protocols(fs: AbstractFileSystem) -> tuple[str, ...]:
    """The schemes that a filesystem serves."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def has_folders(fs: AbstractFileSystem) -> bool:
    """Whether folders are things of their own here, which must be there before a file in them."""
    inner = getattr(fs, "fs", None)
    if isinstance(inner, AbstractFileSystem):
        return has_folders(inner)
    return not _WITH_FOLDERS.isdisjoint(protocols(fs))


def is_asynchronous(fs: AbstractFileSystem) -> bool:
    """Whether a filesystem does its work on an event loop. One around another says yes of itself in either case."""
    inner = getattr(fs, "fs", None)
    if isinstance(inner, AbstractFileSystem):
        return is_asynchronous(inner)
    return bool(getattr(fs, "async_impl", False))


def make_folder_of(fs: AbstractFileSystem, path: str) -> None:
    if has_folders(fs):
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)


def files_below(fs: AbstractFileSystem, folder: str) -> dict[str, dict[str, Any]]:
    """List the files below a folder, by path."""
    tries = _MEMORY_TRIES if isinstance(fs, MemoryFileSystem) else 1
    while True:
        tries -= 1
        try:
            found = fs.find(folder.rstrip("/") or "/", detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except RuntimeError:
            # MemoryFileSystem iterates over the dict of its objects, which another thread may have changed meanwhile.
            if tries == 0:
                raise
            continue
        return {name: info for name, info in found.items() if info.get("type") == "file"}


def remove(fs: AbstractFileSystem, paths: Sequence[str]) -> list[Exception | None]:
    """Delete files, and say of each what went wrong. At once where the filesystem is asynchronous."""
    # Not `rm`: it takes `[`, `]` and `*` in a name for a pattern.
    if not is_asynchronous(fs):
        return [_failure(lambda path=path: fs.rm_file(path)) for path in paths]  # type: ignore[misc]

    async def all_of_them() -> list[Exception | None]:
        turns = asyncio.Semaphore(_DELETES_AT_ONCE)

        async def one(path: str) -> Exception | None:
            async with turns:
                try:
                    await fs._rm_file(path)
                except Exception as error:  # noqa: BLE001 (returned)
                    return error
            return None

        return await asyncio.gather(*map(one, paths))

    return fsspec.asyn.sync(fs.loop, all_of_them)  # type: ignore[no-any-return]


def _failure(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 (returned)
        return error
    return None


def told(reply: Any) -> Told:
    """What a method answered, if that is a description."""
    return reply if isinstance(reply, Mapping) else {}


class WrongSumError(Exception):
    """The service says of what it was sent that it has another CRC32C."""


def check(said: Told, crc32c: int | None) -> None:
    """Raises WrongSumError if the service says a CRC32C, and it is not this one."""
    held = said.get("ChecksumCRC32C") or said.get("crc32c")
    if crc32c is not None and isinstance(held, str) and base64.b64decode(held) != crc32c.to_bytes(4, "big"):
        raise WrongSumError(f"the service has CRC32C {held} of it")


def _part(path: str, upload_id: str, number: int) -> str:
    return f"{path[: path.rfind('/') + 1]}{_UPLOAD}{upload_id}/{number}"
