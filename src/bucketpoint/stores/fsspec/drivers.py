"""`Driver`: operations on a filesystem, by methods that all fsspec filesystems have; drivers of particular filesystems.

The latter have conditions, checksums and multipart uploads. Paths and exceptions are those of the filesystem; callers
translate the exceptions.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import fsspec.asyn
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from bucketpoint.stores.base import Part, encoded_crc
from bucketpoint.stores.foreign import follow

WriteReply = Mapping[str, Any]
"""Description of a written object, as `info` returns it, with the ETag among other fields. May be empty."""

_TEMPORARY = ".bucketpoint-tmp-"

MIB = 1 << 20

MOST_CONNECT_RETRIES = 1
"""Retries of a failed connection to Azure. An account that refuses connections is then reported after 20 s."""

_DELETES_AT_ONCE = 32
_MEMORY_TRIES = 8

# Folders are created only for these schemes: on an object store makedirs would create the bucket.
_WITH_FOLDERS = frozenset({"file", "local", "ftp", "sftp", "ssh", "smb", "hdfs", "webhdfs", "arrow_hdfs", "dbfs"})


class Driver:
    """Driver for any filesystem. Drivers have no state.

    Attributes:
        name: name of the library, for tables.
        creates: `write_if` without an ETag is one request, whose condition the service itself checks.
        replaces: `write_if` with an ETag is one, too.
        checks: the service reports the CRC32C of the bytes that it received.
        summed: arguments of each write, with which the service does so.
        limits: limits of a multipart upload whose parts may be sent in parallel and in any order, by their names in
            `Capabilities`. Empty if there are no such uploads.
        max_put_bytes: the largest body that is sent in one request.
        private: no other process can access this filesystem's content.
        shared: as in `Capabilities`. False if unknown, as for any filesystem without a driver of its own.
        lists_uploads: as in `Capabilities`.
    """

    name = "any other"
    creates = False
    replaces = False
    checks = False
    summed: Mapping[str, str] = MappingProxyType({})
    limits: Mapping[str, Any] = MappingProxyType({})
    max_put_bytes = 1 << 62
    private = False
    shared = False
    lists_uploads = True

    def bound_retries(self, fs: AbstractFileSystem) -> None:
        """Limit the library's retries for an unreachable service, on a filesystem that bucketpoint made."""

    def write(self, fs: AbstractFileSystem, path: str, data: bytes) -> WriteReply:
        if not has_folders(fs):
            return write_reply(fs.pipe_file(path, data, **self.summed))
        _renamed(fs, path, lambda temporary: fs.pipe_file(temporary, data))
        return {}

    def copy(self, fs: AbstractFileSystem, source: str, target: str) -> None:
        """Copy one file. Raises NotImplementedError if the filesystem has no copies."""
        if has_folders(fs):
            _renamed(fs, target, lambda temporary: fs.cp_file(source, temporary))
        else:
            fs.cp_file(source, target)

    def write_if(self, fs: AbstractFileSystem, path: str, data: bytes, etag: str | None) -> WriteReply:
        """Write an object only if it still has this ETag; if `etag` is None, only if no object exists.

        Otherwise raises FileExistsError, or an exception with status 412 or 409.
        """
        condition = {"mode": "create"} if etag is None else self.matching(etag)
        return write_reply(fs.pipe_file(path, data, **condition, **self.summed))

    def matching(self, etag: str) -> dict[str, Any]:
        """Return the arguments of a write that is only made if the object still has this ETag."""
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


class Memory(Driver):
    """Driver for fsspec's memory filesystem. Its conditions are not atomic, but no other process can write to it."""

    name = "memory"
    private = True


class S3FS(Driver):
    """Driver for s3fs, which passes unknown arguments on to the S3 operation.

    A request names only the checksum algorithm, and the CRC32C in the reply is compared with that of the body. If the
    request contained the CRC32C itself, botocore would also compute a SHA-256 of the body.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObject.html, and limits from
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html.
    """

    name = "s3fs"
    shared = True
    creates = replaces = checks = True
    summed = MappingProxyType({"ChecksumAlgorithm": "CRC32C"})
    limits = MappingProxyType({"min_part_bytes": 5 * MIB, "max_part_bytes": 5 << 30, "max_parts": 10_000})
    # MinIO lists uploads only by their whole key, and s3fs does not show which service it reaches.
    lists_uploads = False
    # `pipe_file` sends a body of twice its part size or more in parts, which have no checksum of the whole body.
    max_put_bytes = 100 * MIB - 1

    def matching(self, etag: str) -> dict[str, Any]:
        return {"IfMatch": f'"{etag}"'}

    def begin(self, fs: AbstractFileSystem, path: str) -> str:
        reply = fs.call_s3("create_multipart_upload", **_bucket_and_key(fs, path), **self.summed)
        return str(reply["UploadId"])

    def send(
        self, fs: AbstractFileSystem, path: str, upload_id: str, number: int, data: bytes, crc32c: int | None
    ) -> str:
        where = {**_bucket_and_key(fs, path), "UploadId": upload_id, "PartNumber": number}
        reply = fs.call_s3("upload_part", **where, Body=data, **self.summed)
        check(reply, crc32c)
        return str(reply["ETag"]).strip('"')

    def complete(self, fs: AbstractFileSystem, path: str, upload_id: str, parts: Sequence[Part]) -> WriteReply:
        listed = [
            {
                "PartNumber": part.number,
                "ETag": f'"{part.etag}"',
                **({} if part.crc32c is None else {"ChecksumCRC32C": encoded_crc(part.crc32c)}),
            }
            for part in parts
        ]
        where = {**_bucket_and_key(fs, path), "UploadId": upload_id}
        reply = fs.call_s3("complete_multipart_upload", **where, MultipartUpload={"Parts": listed})
        return write_reply(reply)

    def abort(self, fs: AbstractFileSystem, path: str, upload_id: str) -> None:
        fs.call_s3("abort_multipart_upload", **_bucket_and_key(fs, path), UploadId=upload_id)

    def uploads(self, fs: AbstractFileSystem, path: str) -> Iterator[tuple[str, str, Any]]:
        where = _bucket_and_key(fs, path)
        marker: dict[str, str] = {}
        seen: set[Hashable] = set()
        while True:
            page = fs.call_s3("list_multipart_uploads", Bucket=where["Bucket"], Prefix=where["Key"], **marker)
            for upload in page.get("Uploads", []):
                started = {"modified": upload.get("Initiated")}
                yield f"{where['Bucket']}/{upload['Key']}", str(upload["UploadId"]), started
            if not page.get("IsTruncated"):
                return
            marker = {name: page.get(f"Next{name}") or "" for name in ("KeyMarker", "UploadIdMarker")}
            follow("".join(marker.values()), seen, "ListMultipartUploads", path)


class GCSFS(Driver):
    """Driver for gcsfs, which has a condition for creating an object and none for replacing one.

    Google reports the CRC32C of the stored object:
    https://cloud.google.com/storage/docs/json_api/v1/objects
    """

    name = "gcsfs"
    shared = True
    creates = checks = True
    # From 50 MiB on, gcsfs sends one chunk after another, and returns no description of the object.
    max_put_bytes = 50 * MIB - 1


class ADLFS(Driver):
    """Driver for adlfs (Azure's block blobs): parts are blocks with names chosen by the client, listed in one commit.

    Limits: https://learn.microsoft.com/azure/storage/blobs/scalability-targets. Blocks that were never committed are
    deleted after a week, or by the next write of the blob.
    """

    name = "adlfs"
    shared = True
    creates = replaces = True
    limits = MappingProxyType({"max_part_bytes": 4000 * MIB, "max_parts": 50_000})
    max_put_bytes = 5000 * MIB

    def bound_retries(self, fs: AbstractFileSystem) -> None:
        # The library waits 18, 24 and 42 s before its three retries of a failed connection. adlfs has no option for its
        # client's policy, so the policy is changed. Retries after answers of the service are unchanged.
        # https://learn.microsoft.com/azure/storage/blobs/storage-retry-policy-python
        policy: Any = getattr(getattr(fs.service_client, "_config", None), "retry_policy", None)
        if hasattr(policy, "connect_retries"):
            policy.connect_retries = min(policy.connect_retries, MOST_CONNECT_RETRIES)

    def matching(self, etag: str) -> dict[str, Any]:
        from azure.core import MatchConditions

        return {"etag": f'"{etag}"', "match_condition": MatchConditions.IfNotModified}

    def begin(self, fs: AbstractFileSystem, path: str) -> str:
        upload_id = secrets.token_hex(8)
        # An upload is visible only through its blocks, so a first block is sent when the upload begins.
        self.send(fs, path, upload_id, 0, b"\0", None)
        return upload_id

    def send(
        self, fs: AbstractFileSystem, path: str, upload_id: str, number: int, data: bytes, crc32c: int | None
    ) -> str:
        # All block ids of a blob must have the same length.
        block = f"bucketpoint-{upload_id}-{number:08}"
        _azure(fs, path, lambda blob: blob.stage_block(block_id=block, data=data, length=len(data)))
        return block

    def complete(self, fs: AbstractFileSystem, path: str, upload_id: str, parts: Sequence[Part]) -> WriteReply:
        from azure.core.exceptions import HttpResponseError
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(part.etag) for part in parts]
        # adlfs may treat a blob without this metadata as a folder.
        metadata = {"is_directory": "false"}
        try:
            return write_reply(_azure(fs, path, lambda blob: blob.commit_block_list(blocks, metadata=metadata)))
        except HttpResponseError as error:
            if error.error_code != "InvalidBlockList":
                raise
        raise FileNotFoundError("the blocks of the upload are gone")

    def abort(self, fs: AbstractFileSystem, path: str, upload_id: str) -> None:
        if not any(other_id == upload_id for _, other_id, _ in self.uploads(fs, path)):
            return
        # Azure has no request to delete blocks. An empty list deletes them, but leaves an empty blob, deleted below.
        _azure(fs, path, lambda blob: blob.commit_block_list([]))
        fs.rm_file(path)

    def uploads(self, fs: AbstractFileSystem, path: str) -> Iterator[tuple[str, str, Any]]:
        container, prefix, _ = fs.split_path(path)

        async def found() -> list[tuple[str, str, Any]]:
            listed = []
            async with fs.service_client.get_container_client(container=container) as client:
                async for blob in client.list_blobs(name_starts_with=prefix, include=["uncommittedblobs"]):
                    async with client.get_blob_client(blob.name) as one:
                        _, blocks = await one.get_block_list("uncommitted")
                    ids = {_upload_of(block.id) for block in blocks} - {""}
                    begun = {"modified": blob.last_modified}
                    listed += [(f"{container}/{blob.name}", upload_id, begun) for upload_id in sorted(ids)]
            return listed

        yield from fsspec.asyn.sync(fs.loop, found)


_LIBRARIES: dict[str, Driver] = {driver.name: driver for driver in (S3FS(), GCSFS(), ADLFS())}
_PLAIN, _MEMORY = Driver(), Memory()


def driver_of(fs: AbstractFileSystem) -> Driver:
    """Return the driver for a filesystem: that of its library, or the common one."""
    if isinstance(fs, MemoryFileSystem):
        return _MEMORY
    # Chosen by the library, not by the protocol: other libraries with other methods also serve s3://.
    libraries = [kind.__module__.partition(".")[0] for kind in type(fs).__mro__]
    return next((_LIBRARIES[name] for name in libraries if name in _LIBRARIES), _PLAIN)


def _bucket_and_key(fs: AbstractFileSystem, path: str) -> dict[str, str]:
    bucket, key, _ = fs.split_path(path)
    return {"Bucket": bucket, "Key": key}


def _azure(fs: AbstractFileSystem, path: str, ask: Any) -> Any:
    container, name, _ = fs.split_path(path)

    async def call() -> Any:
        async with fs.service_client.get_blob_client(container=container, blob=name) as blob:
            return await ask(blob)

    return fsspec.asyn.sync(fs.loop, call)


def _upload_of(block: str) -> str:
    """Return the id of the upload that a block belongs to; empty for a block of another program."""
    start, _, rest = block.partition("-")
    return rest.rpartition("-")[0] if start == "bucketpoint" else ""
