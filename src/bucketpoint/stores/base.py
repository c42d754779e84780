"""The `Store` protocol: where bytes live. Plain blocking calls; no tensors, no DCP, and no threads of its own.

A store is one bucket (or one filesystem root) reached with one set of credentials. It is safe to call from several
threads. Every failure is one of the kinds in `bucketpoint.errors`; nothing here retries a body that broke off, which is
the business of `transfer`.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from bucketpoint.errors import StoreError

Buffers = Sequence[memoryview]
"""Byte-format (`"B"`), C-contiguous views that follow each other in an object."""


@dataclass(frozen=True)
class Capabilities:
    """What a store can do, so that callers ask instead of trying.

    Attributes:
        conditional_put: `if_none_match` and `if_match` are honoured atomically.
        checksums: the store verifies the CRC32C sent with a body.
        multipart: parts of one object may be sent in parallel and in any order.
        min_part_bytes, max_part_bytes, max_parts: the service's limits for one multipart upload.
        max_put_bytes: the largest body of a single PUT.
        pinned_reads: `if_match` on a read is honoured.
        lists_uploads: `list_multipart` finds uploads by any prefix of their keys, and not by the whole key only.
        conditional_replace: where there is `conditional_put`, `if_match` is one too; otherwise only `if_none_match` is.
        copies_bodies: a copy of each body is held while it goes up, and of each range as it comes down.
        many_ranges: the store has `read_many`, which asks for many ranges in one call: see `ManyRanges`.
        conditional_delete: `delete_if` compares and deletes in one step. Otherwise it looks first, and does not notice
            a write between the look and the deletion.
        expiring_delete: the store has `expiring_delete`, and the service refuses it after its time: see
            `ExpiringDeletes`.
    """

    conditional_put: bool
    checksums: bool
    multipart: bool
    pinned_reads: bool
    min_part_bytes: int = 1
    max_part_bytes: int = 1 << 62
    max_parts: int = 1 << 31
    max_put_bytes: int = 1 << 62
    lists_uploads: bool = True
    conditional_replace: bool = True
    copies_bodies: bool = False
    many_ranges: bool = False
    conditional_delete: bool = False
    expiring_delete: bool = False


@dataclass(frozen=True)
class ObjectInfo:
    """An object as the store describes it. `etag` is opaque, without quotes, and None where the store has none."""

    key: str
    size: int
    etag: str | None = None
    modified: float | None = None
    """Seconds since the epoch, by the store's clock."""


@dataclass(frozen=True)
class Part:
    """An uploaded part: number from 1, the store's ETag, the CRC32C that was sent with it."""

    number: int
    size: int
    etag: str
    crc32c: int | None = None


@dataclass(frozen=True)
class DeleteFailure:
    """A key that a batched delete could not remove, and why."""

    key: str
    code: str
    message: str


@dataclass(frozen=True)
class OpenUpload:
    """A multipart upload that was neither completed nor aborted."""

    key: str
    upload_id: str = field(repr=False)
    started: float | None = None


class RangeReply(Protocol):
    """The reply to a ranged read, whose body is still on its connection."""

    def receive(self, buffers: Buffers) -> None:
        """Receive the body, once, into writable `buffers`, whose length is that of the range.

        Raises:
            TransientStoreError: the body broke off, or was dropped; the buffers' content is undefined.
        """
        ...

    def drop(self) -> None:
        """Close the connection. From any thread and at any time: a `receive` under way then raises, and nothing is
        written any more once it has. Without effect on a reply that has been received."""
        ...


@runtime_checkable
class OpensRanges(Protocol):
    """A store that reads a range in two steps, so that a reply can be given up before anything is written."""

    def open_range(self, key: str, offset: int, nbytes: int, *, if_match: str | None = None) -> RangeReply:
        """Ask for a range of at least one byte. Returns when the reply's head is there; raises as `read_into` does."""
        ...


@runtime_checkable
class Store(Protocol):
    """Objects under string keys. Keys are relative to `url`, never begin with a slash, and are never normalised."""

    @property
    def url(self) -> str:
        """`scheme://bucket` or the root URL, without credentials. Used in messages."""
        ...

    @property
    def identity(self) -> str:
        """Which store this is, without credentials: stores with the same `url` at different endpoints differ here."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def put(
        self,
        key: str,
        body: Buffers,
        *,
        crc32c: int | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        """Write a whole object in one request.

        Args:
            crc32c: CRC32C of the whole body, sent so that the store verifies it.
            if_none_match: only if no object has this key.
            if_match: only if the object still has this ETag.

        Raises:
            PreconditionFailedError: a condition did not hold; nothing was written by this call, unless an earlier
                attempt of the same call was and its answer was lost. The caller reads back to find out.
        """
        ...

    def get(self, key: str, *, max_bytes: int | None = None, first: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole small object, in one request.

        Args:
            first: only so many bytes of its beginning, if it has more. Its size is told all the same.

        Raises:
            ObjectNotFoundError: no such key.
            CorruptDataError: the object is larger than `max_bytes`.
        """
        ...

    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None:
        """Receive one contiguous byte range that begins at `offset` into writable `buffers`, in order, in one request.

        The length of the range is the sum of the buffers' lengths. The memory is received into directly where the
        client library allows it.

        Raises:
            ObjectNotFoundError: no such key.
            PreconditionFailedError: the object's ETag is not `if_match`.
            CorruptDataError: the object ends before the range does.
            TransientStoreError: the body broke off; the buffers' content is undefined.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Describe one object. Raises ObjectNotFoundError."""
        ...

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, in key order, lazily page by page."""
        ...

    def list_folders(self, prefix: str) -> Iterator[str]:
        """Distinct `prefix + name + "/"` one level below `prefix` (which is empty or ends with a slash), in order."""
        ...

    def delete(self, keys: Sequence[str]) -> builtins.list[DeleteFailure]:
        """Delete many objects in as few requests as the service allows. A key that is not there counts as deleted."""
        ...

    def delete_if(self, key: str, etag: str) -> bool:
        """Delete one object only if it still has this ETag, in one step where there is `conditional_delete`.

        True if it is gone: by this call, or because it was not there any more.

        Raises:
            PreconditionFailedError: there is another object under the key now. It stays.
        """
        ...

    def copy(self, source: str, target: str) -> ObjectInfo:
        """Copy one object inside the store without moving its bytes through this process where possible."""
        ...

    def create_multipart(self, key: str) -> str:
        """Begin a multipart upload and return its id."""
        ...

    def put_part(self, key: str, upload_id: str, number: int, body: Buffers, *, crc32c: int | None = None) -> Part:
        """Send part `number` (from 1). Sending a number again replaces that part."""
        ...

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        """Make the object visible, of `parts` in the order of their numbers.

        Raises:
            UploadNotFoundError: the upload is gone. After a lost answer it may have been completed by an earlier
                attempt: the caller finds out with `head`.
        """
        ...

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts. Not an error if it is gone already."""
        ...

    def list_multipart(self, prefix: str) -> Iterator[OpenUpload]:
        """Uploads in progress whose key begins with `prefix` (on MinIO: equals it)."""
        ...

    def close(self) -> None:
        """Release connections. The store may be used again afterwards; it then opens new ones."""
        ...


@runtime_checkable
class CopiesInside(Protocol):
    """A store whose service can copy from another of its buckets, so that no byte passes through this process."""

    def can_copy_from(self, other: Store) -> bool:
        """Whether the service may be asked to. That it will not refuse is found out by asking."""
        ...

    def copy_from(self, other: Any, source: ObjectInfo, target: str) -> ObjectInfo:
        """Copy what `other.head` described, of a store that `can_copy_from` said yes to."""
        ...


@runtime_checkable
class ExpiringDeletes(Protocol):
    """A store that can sign a deletion now and send it later. Ask `Capabilities.expiring_delete` whether it expires."""

    def prove_deletes(self, prefix: str) -> Capabilities:
        """`capabilities`, of which the two of deletions were tried out below `prefix` if only a trial tells."""
        ...

    def expiring_delete(self, key: str, seconds: int) -> Callable[[], bool]:
        """Sign the deletion of one object now. What is returned sends it, once for each call.

        It returns True if the object is gone, and False if the service refused the request because it arrived more
        than `seconds` after it was signed. So a process that was suspended in between deletes nothing. The time is
        reckoned from this machine's clock to the service's: what the two differ in comes on top.
        """
        ...


@dataclass(frozen=True)
class Range:
    """Bytes `[start, stop)` of the object at `key`."""

    key: str
    start: int
    stop: int


@runtime_checkable
class ManyRanges(Protocol):
    """What a store has besides where one call for many ranges costs less than a thread for each."""

    def read_many(self, ranges: Sequence[Range], *, at_once: int) -> Sequence[bytes | StoreError]:
        """The bytes of each range, exactly so many, or why they could not be had; so many under way `at_once`."""
        ...
