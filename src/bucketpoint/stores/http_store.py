"""`HttpStore`: the reads and copies that `S3Store` and `GCSStore` have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bucketpoint.errors import Action, CorruptDataError, StoreError
from bucketpoint.stores.base import Buffers, Capabilities, CopiesInside, ObjectInfo, RangeReply, Store
from bucketpoint.stores.http_body import Receiver, discard
from bucketpoint.stores.retry import READ_ATTEMPTS, RetryPolicy, run

CAPABILITIES = Capabilities(
    conditional_put=True,
    checksums=True,
    multipart=True,
    pinned_reads=True,
    streams_ranges=True,
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
    # https://cloud.google.com/storage/quotas
    min_part_bytes=5 << 20,
    max_part_bytes=5 << 30,
    max_parts=10_000,
)
"""Capabilities of Amazon S3 and of GCS, whose XML API has the multipart uploads of S3 with the same limits."""


@dataclass(frozen=True)
class Reply:
    """The reply to a GET of an object. The body, of `length` bytes if that is known, has not been received yet."""

    info: ObjectInfo
    body: Any
    length: int | None
    partial: bool


@dataclass(frozen=True)
class HttpStore(Store, CopiesInside):
    """A bucket of a service that answers GET requests for objects and ranges of them (RFC 9110)."""

    bucket: str
    options: Any

    @abstractmethod
    def _open(self, key: str, wanted: str | None, if_match: str | None = None) -> Reply:
        """Request an object, or only the bytes that the Range header `wanted` names."""

    @abstractmethod
    def _translated(self, act: Callable[[], None], key: str) -> None:
        """Call `act`, which receives a body, and translate the exceptions of the client library."""

    def get(self, key: str, *, max_bytes: int | None = None, first: int | None = None) -> tuple[bytes, ObjectInfo]:
        # `_open` repeats a request that fails. The loop here repeats it when the body breaks off.
        return run(lambda: self._get(key, max_bytes, first), RetryPolicy(READ_ATTEMPTS))

    def _get(self, key: str, max_bytes: int | None, first: int | None) -> tuple[bytes, ObjectInfo]:
        try:
            reply = self._open(key, None if first is None else f"bytes=0-{first - 1}")
        except CorruptDataError:
            if first is None:
                raise
            # The range of an empty object is invalid: it has no first byte.
            return self._get(key, max_bytes, None)
        size = reply.length or 0
        if max_bytes is not None and size > max_bytes:
            discard(reply.body)
            raise CorruptDataError(
                f"the object has {reply.info.size} bytes, and at most {max_bytes} were expected", url=self._url(key)
            )
        data = bytearray(size)
        self._received(lambda: Receiver(reply.body, size).receive([memoryview(data)]), key)
        return bytes(data), reply.info

    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None:
        size = sum(view.nbytes for view in buffers)
        if size:
            self.open_range(key, offset, size, if_match=if_match).receive(buffers)

    def open_range(self, key: str, offset: int, nbytes: int, *, if_match: str | None = None) -> RangeReply:
        reply = self._open(key, f"bytes={offset}-{offset + nbytes - 1}", if_match)
        body, length = reply.body, reply.length
        if not reply.partial and (offset or length != nbytes):
            discard(body)
            raise StoreError("the store ignored the range of a read", url=self._url(key))
        if length is not None and length != nbytes:
            discard(body)
            raise CorruptDataError(
                f"the object ends before the range does: {length} of the {nbytes} bytes from {offset} are there",
                url=self._url(key),
            )

        return _OpenRange(self, key, Receiver(body, nbytes))

    def _received(self, act: Callable[[], None], key: str) -> None:
        try:
            self._translated(act, key)
        except StoreError as error:
            # A body is sent for again by loops that do not know the options.
            error.limit_s = self.options.retry_deadline_s
            if error.action is Action.OUTAGE:
                # The store has answered. If it is away now, the next request waits for it.
                error.action = Action.RETRY
            raise

    def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
        return self.copy_from(self, source, target)

    def can_copy_from(self, other: Store) -> bool:
        if not isinstance(other, type(self)):
            return False
        return self.identity.removesuffix(self.bucket) == other.identity.removesuffix(other.bucket)

    def _url(self, key: str | None) -> str:
        return f"{self.url}/{key}" if key else self.url


@dataclass(frozen=True)
class _OpenRange:
    """Implementation of `RangeReply`."""

    store: HttpStore
    key: str
    receiver: Receiver

    def receive(self, buffers: Buffers) -> None:
        self.store._received(lambda: self.receiver.receive(buffers), self.key)

    def drop(self) -> None:
        self.receiver.drop()


def whole_size(content_range: Any, received: int) -> int:
    """Return the size of the whole object from the Content-Range of a reply: `bytes 0-9/1234` (RFC 9110, 14.4)."""
    whole = str(content_range or "").rpartition("/")[2]
    return int(whole) if whole.isdecimal() else received
