"""A bucket in memory with S3's semantics, and the `Store` through which one process sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import botocore.exceptions as boto
from tests.simulation.scheduler import here

from bucketpoint.errors import CorruptDataError, ObjectNotFoundError, PreconditionFailedError, UploadNotFoundError
from bucketpoint.stores import Capabilities, DeleteFailure, ObjectInfo, OpenUpload, Part, retry
from bucketpoint.stores.s3 import errors

T = TypeVar("T")

URL = "s3://bucket"
POLICY = retry.RetryPolicy(attempts=6, deadline_s=300.0)


class Held(NamedTuple):
    """An object: its bytes, its ETag, and when it was written by the store's clock."""

    data: bytes
    etag: str
    modified: float


@dataclass
class Upload:
    key: str
    started: float
    parts: dict[int, bytes] = field(default_factory=dict)


class Refusal(NamedTuple):
    """The answer to all reads of objects below `prefix` before the time `until`."""

    prefix: str
    until: float
    status: int
    code: str


@dataclass
class Bucket:
    """Objects and open uploads. `changed` is told of each change, and `listed` of each page that somebody got."""

    clock: Callable[[], float]
    changed: Callable[[Any, str, Held | None, Held | None], None] = lambda op, key, before, after: None
    listed: Callable[[Any, str, list[ObjectInfo], bool], None] = lambda op, prefix, page, first: None
    page: int = 4
    delete_page: int = 1000
    conditional_delete: bool = True
    expiring_delete: bool = False
    lists_uploads: bool = True
    copies_inside: bool = False
    dates_writes: bool = True
    """Whether the reply to a write contains the time of the object."""
    objects: dict[str, Held] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    numbers: int = 0

    def info(self, key: str) -> ObjectInfo:
        held = self.there(key)
        return ObjectInfo(key, len(held.data), held.etag, held.modified)

    def there(self, key: str) -> Held:
        held = self.objects.get(key)
        if held is None:
            raise ObjectNotFoundError("no such key", key=key)
        return held

    def read(self, key: str) -> Held:
        """Return an object for a read of its bytes, which the store may refuse for a while."""
        for one in self.refusals:
            if key.startswith(one.prefix) and self.clock() < one.until:
                reply = {"Error": {"Code": one.code}, "ResponseMetadata": {"HTTPStatusCode": one.status}}
                raise errors.translate(boto.ClientError(reply, "GetObject"), "GetObject", f"{URL}/{key}")  # type: ignore[arg-type]
        return self.there(key)

    def put(self, op: Any, key: str, data: bytes, etag: str | None = None) -> ObjectInfo:
        before = self.objects.get(key)
        # Equal bytes have equal ETags, as on S3.
        held = Held(data, etag or hashlib.md5(data, usedforsecurity=False).hexdigest(), self.clock())
        self.objects[key] = held
        self.changed(op, key, before, held)
        return ObjectInfo(key, len(data), held.etag, held.modified if self.dates_writes else None)

    def remove(self, op: Any, key: str) -> None:
        before = self.objects.pop(key, None)
        if before is not None:
            self.changed(op, key, before, None)

    def keys(self, prefix: str, after: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix) and key > after)


class View:
    """A `Store`: the bucket as the process of the calling thread sees it."""

    url = URL
    identity = URL

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    @property
    def capabilities(self) -> Capabilities:
        bucket = self.bucket
        return Capabilities(
            conditional_put=True,
            checksums=True,
            multipart=True,
            pinned_reads=True,
            lists_uploads=bucket.lists_uploads,
            conditional_delete=bucket.conditional_delete,
            expiring_delete=bucket.expiring_delete,
        )

    def _request(self, name: str, key: str, act: Callable[[Any], T]) -> T:
        found = here()
        if found is None:
            raise RuntimeError(f"{name} {key} by a thread that nobody knows")
        scheduler, task = found
        return retry.run(lambda: scheduler.request(task, name, key, act), POLICY)

    def put(
        self,
        key: str,
        body: Sequence[memoryview],
        *,
        crc32c: int | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        data, bucket = b"".join(body), self.bucket

        def act(op: Any) -> ObjectInfo:
            there = bucket.objects.get(key)
            if if_none_match and there is not None:
                raise PreconditionFailedError("it exists", key=key)
            if if_match is not None and (there is None or there.etag != if_match):
                raise PreconditionFailedError("it is another", key=key)
            return bucket.put(op, key, data)

        condition = " if-none-match" if if_none_match else " if-match" if if_match is not None else ""
        return self._request("PUT" + condition, key, act)

    def get(self, key: str, *, max_bytes: int | None = None, first: int | None = None) -> tuple[bytes, ObjectInfo]:
        def act(op: Any) -> tuple[bytes, ObjectInfo]:
            held = self.bucket.read(key)
            if max_bytes is not None and len(held.data) > max_bytes:
                raise CorruptDataError("too large", key=key)
            return (held.data if first is None else held.data[:first]), self.bucket.info(key)

        return self._request("GET", key, act)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview], *, if_match: str | None = None) -> None:
        def act(op: Any) -> bytes:
            held = self.bucket.read(key)
            if if_match is not None and held.etag != if_match:
                raise PreconditionFailedError("it is another", key=key)
            return held.data

        data = self._request("GET range", key, act)
        for buffer in buffers:
            if offset + len(buffer) > len(data):
                raise CorruptDataError("the object is too short for the range", key=key)
            buffer[:] = data[offset : offset + len(buffer)]
            offset += len(buffer)

    def head(self, key: str) -> ObjectInfo:
        return self._request("HEAD", key, lambda op: self.bucket.info(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        after, more = "", True
        while more:

            def act(op: Any, after: str = after) -> tuple[list[ObjectInfo], bool]:
                found = self.bucket.keys(prefix, after)
                page = [self.bucket.info(key) for key in found[: self.bucket.page]]
                return page, len(found) > len(page)

            page, more = self._request("LIST", prefix, act)
            if (found := here()) is not None:
                self.bucket.listed(found[1].op, prefix, page, not after)
            yield from page
            after = page[-1].key if page else after

    def list_folders(self, prefix: str) -> Iterator[str]:
        after, more = "", True
        while more:

            def act(op: Any, after: str = after) -> tuple[list[str], bool]:
                below = (key[len(prefix) :] for key in self.bucket.keys(prefix, ""))
                names = sorted({prefix + name.split("/")[0] + "/" for name in below if "/" in name})
                names = [name for name in names if name > after]
                return names[: self.bucket.page], len(names) > self.bucket.page

            page, more = self._request("LIST folders", prefix, act)
            yield from page
            after = page[-1] if page else after

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        for start in range(0, len(keys), self.bucket.delete_page):
            batch = list(keys[start : start + self.bucket.delete_page])

            def act(op: Any, batch: Sequence[str] = batch) -> None:
                for key in batch:
                    self.bucket.remove(op, key)

            self._request("DELETE", " ".join(batch), act)
        return []

    def delete_if(self, key: str, etag: str) -> None:
        def act(op: Any) -> None:
            there = self.bucket.objects.get(key)
            if self.bucket.conditional_delete and there is not None and there.etag != etag:
                raise PreconditionFailedError("it is another", key=key)
            self.bucket.remove(op, key)

        if not self.bucket.conditional_delete:
            try:
                if self.head(key).etag != etag:
                    raise PreconditionFailedError("it is another", key=key)
            except ObjectNotFoundError:
                return
        self._request("DELETE if-match", key, act)

    def prove_deletes(self, prefix: str) -> Capabilities:
        return self.capabilities

    def expiring_delete(self, key: str, seconds: int) -> Callable[[], bool]:
        found = here()
        assert found is not None
        ends = found[0].signed(found[1].process) + seconds

        def act(op: Any) -> bool:
            if self.bucket.clock() > ends:
                return False
            self.bucket.remove(op, key)
            return True

        # Once: a repeated one could arrive after a save that found nothing any more.
        return lambda: found[0].request(found[1], f"DELETE within {seconds} s", key, act)

    def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
        return self.copy_from(self, source, target)

    def can_copy_from(self, other: Any) -> bool:
        return self.bucket.copies_inside

    def copy_from(self, other: Any, source: ObjectInfo, target: str) -> ObjectInfo:
        def act(op: Any) -> ObjectInfo:
            held = self.bucket.read(source.key)
            if source.etag is not None and held.etag != source.etag:
                raise PreconditionFailedError("it is another", key=source.key)
            return self.bucket.put(op, target, held.data)

        return self._request("COPY", target, act)

    def create_multipart(self, key: str) -> str:
        def act(op: Any) -> str:
            self.bucket.numbers += 1
            name = f"upload-{self.bucket.numbers}"
            self.bucket.uploads[name] = Upload(key, self.bucket.clock())
            return name

        return self._request("CREATE upload", key, act)

    def put_part(
        self, key: str, upload_id: str, number: int, body: Sequence[memoryview], *, crc32c: int | None = None
    ) -> Part:
        data = b"".join(body)

        def act(op: Any) -> Part:
            upload = self._upload(upload_id)
            upload.parts[number] = data
            return Part(number, len(data), hashlib.md5(data, usedforsecurity=False).hexdigest(), crc32c)

        return self._request("PUT part", key, act)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        def act(op: Any) -> ObjectInfo:
            upload = self._upload(upload_id)
            data = b"".join(upload.parts[part.number] for part in parts)
            sums = "".join(part.etag for part in parts).encode()
            del self.bucket.uploads[upload_id]
            etag = f"{hashlib.md5(sums, usedforsecurity=False).hexdigest()}-{len(parts)}"
            return self.bucket.put(op, key, data, etag)

        return self._request("COMPLETE upload", key, act)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self._request("ABORT upload", key, lambda op: self.bucket.uploads.pop(upload_id, None))

    def list_multipart(self, prefix: str) -> Iterator[OpenUpload]:
        exact = not self.bucket.lists_uploads

        def act(op: Any) -> list[OpenUpload]:
            return [
                OpenUpload(one.key, name, one.started)
                for name, one in self.bucket.uploads.items()
                if (one.key == prefix if exact else one.key.startswith(prefix))
            ]

        yield from self._request("LIST uploads", prefix, act)

    def _upload(self, upload_id: str) -> Upload:
        found = self.bucket.uploads.get(upload_id)
        if found is None:
            raise UploadNotFoundError("no such upload")
        return found
