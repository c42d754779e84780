"""The `Store` protocol: blocking calls on the objects of one bucket.

A store is one bucket (or one filesystem root) reached with one set of credentials. It is safe to call from several
threads. Every failure is raised as one of the classes in `bucketpoint.errors`. A range whose body broke off is retried
by `transfer`, not by the store; a `get`, for small objects, by the store.
"""

from __future__ import annotations

import base64
import builtins
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from awscrt import checksums

from bucketpoint.errors import (
    BucketNotFoundError,
    CredentialsError,
    EndpointError,
    PreconditionFailedError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)

SCRATCH = ".bucketpoint-probe-"
"""Prefix of the names of scratch objects; random characters follow."""

UNDECIDED = (BucketNotFoundError, EndpointError, CredentialsError, ThrottledError, TransientStoreError)
"""Errors that leave a trial without a result: they do not show whether the store supports what was tried."""

Buffers = Sequence[memoryview]
"""Views (format `"B"`, C-contiguous) of bytes that are consecutive in an object."""


@dataclass(frozen=True)
class Capabilities:
    """Features and limits of a store.

    Attributes:
        conditional_put: `if_none_match` and `if_match` are honoured atomically.
        checksums: the store verifies the CRC32C sent with a body.
        multipart: parts of one object may be sent in parallel and in any order.
        min_part_bytes, max_part_bytes, max_parts: the service's limits for one multipart upload.
        max_put_bytes: the largest body of a single PUT.
        pinned_reads: `if_match` on a read is honoured.
        lists_uploads: `list_multipart` finds uploads by any prefix of their keys, not only by the whole key.
        conditional_replace: `conditional_put` applies to `if_match`, too; if False, only to `if_none_match`.
        copies_bodies: the client holds a copy of each body while it is sent, and of each range while it is received.
        streams_ranges: the store is an `OpensRanges`, and the body of its replies can be received piece by piece.
        conditional_delete: `delete_if` compares the ETag and deletes in one step. Otherwise it reads the ETag first,
            and misses a write between that read and the deletion.
        expiring_delete: the store has `expiring_delete`, and the service refuses the signed request once it has
            expired: see `ExpiringDeletes`.
        shared: another process that opens the same URL with the same options reaches the same objects.
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
    streams_ranges: bool = False
    conditional_delete: bool = False
    expiring_delete: bool = False
    shared: bool = True


@dataclass(frozen=True)
class ObjectInfo:
    """An object as the store describes it. `etag` is opaque, without quotes, and None if the store has no ETags."""

    key: str
    size: int
    etag: str | None = None
    modified: float | None = None
    """Seconds since the epoch, by the store's clock."""


@dataclass(frozen=True)
class Part:
    """An uploaded part: its number, counted from 1, the store's ETag, and the CRC32C that was sent with the part."""

    number: int
    size: int
    etag: str
    crc32c: int | None = None


@dataclass(frozen=True)
class DeleteFailure:
    """A key that a batched delete could not remove, with the reason and its remedy."""

    key: str
    code: str
    message: str
    remedy: str | None = None


@dataclass(frozen=True)
class OpenUpload:
    """A multipart upload in progress."""

    key: str
    upload_id: str = field(repr=False)
    started: float | None = None


class RangeReply(Protocol):
    """The reply to a ranged read, whose body has not been received yet."""

    def receive(self, buffers: Buffers) -> None:
        """Receive the body into writable `buffers`, whose total length is that of the range.

        If the store has `streams_ranges`, the buffers may be shorter: each call receives the next bytes of the body.

        Raises:
            TransientStoreError: the body broke off; the buffers' content is undefined.
        """
        ...

    def drop(self) -> None:
        """Close the connection, unless the body was already received."""
        ...


class OpensRanges(Protocol):
    """A store that can read a range in two steps: the headers of the reply, and the body in pieces."""

    def open_range(self, key: str, offset: int, nbytes: int, *, if_match: str | None = None) -> RangeReply:
        """Request a range of at least one byte, and wait for the headers of the reply. Raises like `read_into`."""
        ...


class Store(Protocol):
    """Access to the objects of a bucket. Keys are relative to `url`, begin with no slash, and are never normalised."""

    @property
    def url(self) -> str:
        """`scheme://bucket` or the root URL, without credentials. Used in messages."""
        ...

    @property
    def identity(self) -> str:
        """A unique name of this store, without credentials. It differs for the same `url` at different endpoints."""
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
            if_none_match: write only if no object has this key.
            if_match: write only if the object still has this ETag.

        Raises:
            PreconditionFailedError: a condition did not hold. The call wrote nothing, unless an earlier attempt of the
                same call succeeded and its answer was lost: the caller must read the object back to find out.
        """
        ...

    def get(self, key: str, *, max_bytes: int | None = None, first: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole small object in one request.

        Args:
            max_bytes: refuse a larger object.
            first: read at most this many bytes, from the beginning. The returned info has the whole object's size.

        Raises:
            ObjectNotFoundError: no such key.
            CorruptDataError: the object is larger than `max_bytes`.
        """
        ...

    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None:
        """Read one contiguous byte range, from `offset`, into writable `buffers` in order, in one request.

        The length of the range is the sum of the buffers' lengths. The bytes are received directly into the buffers
        if the client library allows it.

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

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose key begins with `prefix`, in key order, fetching page by page."""
        ...

    def list_folders(self, prefix: str) -> Iterator[str]:
        """Yield each `prefix + name + "/"` one level below `prefix` (empty, or ending with `/`), sorted."""
        ...

    def delete(self, keys: Sequence[str]) -> builtins.list[DeleteFailure]:
        """Delete many objects in as few requests as the service allows. A missing key counts as deleted."""
        ...

    def delete_if(self, key: str, etag: str) -> None:
        """Delete one object only if it still has this ETag; in one step if the store has `conditional_delete`.

        A missing key counts as deleted.

        Raises:
            PreconditionFailedError: the key now belongs to another object, which is not deleted.
        """
        ...

    def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
        """Copy one object inside the store, without moving its bytes through this process if possible.

        Returns:
            The copy with its own ETag, and with the size of `source` if the reply does not contain the copy's.

        Raises:
            ObjectNotFoundError: there is no object at `source.key`.
            PreconditionFailedError: the object no longer has `source.etag`. An ETag of None is not checked.
        """
        ...

    def create_multipart(self, key: str) -> str:
        """Begin a multipart upload and return its id."""
        ...

    def put_part(self, key: str, upload_id: str, number: int, body: Buffers, *, crc32c: int | None = None) -> Part:
        """Send part `number` (counted from 1). Sending a number again replaces that part."""
        ...

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        """Make the object visible, joined from `parts` in the order of their numbers.

        Raises:
            UploadNotFoundError: the upload is gone. An earlier attempt whose answer was lost may have completed it: the
                caller finds out with `head`.
        """
        ...

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Abort an upload and delete its parts. A missing upload is not an error."""
        ...

    def list_multipart(self, prefix: str) -> Iterator[OpenUpload]:
        """Yield the uploads in progress whose key begins with `prefix` (on MinIO: equals `prefix`)."""
        ...


@runtime_checkable
class CopiesInside(Protocol):
    """A store whose service can copy from another of its buckets, without moving bytes through this process."""

    def can_copy_from(self, other: Store) -> bool:
        """Return True if the service can be asked to copy from `other`. The service may still refuse the request."""
        ...

    def copy_from(self, other: Any, source: ObjectInfo, target: str) -> ObjectInfo:
        """Copy an object of `other`, like `Store.copy`. `can_copy_from(other)` must have returned True."""
        ...


class ExpiringDeletes(Protocol):
    """A store that can sign a deletion now and send it later: see `Capabilities.expiring_delete`."""

    def expiring_delete(self, key: str, seconds: int) -> Callable[[], bool]:
        """Sign the deletion of one object now, and return a function that sends the request once per call.

        The function returns True if the object is gone, and False if the service refused the request because it
        arrived more than `seconds` after it was signed. So a process that was suspended for longer deletes nothing.
        The signing time is from this machine's clock, and the arrival time from the service's: a difference between
        the two clocks makes the limit that much longer or shorter.
        """
        ...


def scratch_key(prefix: str) -> str:
    """Return a new key for a scratch object below `prefix`."""
    return f"{prefix}{prefix and '/'}{SCRATCH}{secrets.token_hex(8)}"


def proven(store: Store, prefix: str) -> Capabilities:
    """Return the capabilities of a store, with its support for conditions found by a trial below `prefix` if necessary.

    Raises:
        StoreError: the trial was undecided.
    """
    # Not by isinstance: from Python 3.12 on, protocols do not find methods that a wrapper forwards by `__getattr__`.
    prove: Callable[[str], Capabilities] | None = getattr(store, "prove_conditions", None)
    return store.capabilities if prove is None else prove(prefix)


def proven_deletes(store: Store, prefix: str) -> Capabilities:
    """Return the capabilities of a store, with `conditional_delete` and `expiring_delete` found by trial if necessary.

    The trial is made once per process for each bucket, with a scratch object below `prefix`, where the caller must be
    allowed to write and delete.

    Raises:
        StoreError: the trial was undecided.
    """
    prove: Callable[[str], Capabilities] | None = getattr(store, "prove_deletes", None)
    return store.capabilities if prove is None else prove(prefix)


def pinned(store: Store, etag: str | None) -> str | None:
    """Return the `if_match` that pins a read to the object with this ETag; None if the store cannot pin reads."""
    return etag if store.capabilities.pinned_reads else None


def check_conditions(info: ObjectInfo | None, url: str, *, if_none_match: bool = False, if_match: str | None) -> None:
    """Raise PreconditionFailedError unless the object at `url` (None: there is none) fulfils the conditions."""
    if if_none_match and info is not None:
        raise PreconditionFailedError("the object exists", url=url)
    if if_match is not None and (info is None or info.etag != if_match):
        raise PreconditionFailedError("the ETag of the object is not the expected one", url=url)


def delete_all(store: Store, keys: Sequence[str]) -> None:
    """Delete objects. Raises StoreError if the store refuses to delete some of them."""
    failures = store.delete(keys) if keys else []
    if failures:
        first = failures[0]
        raise StoreError(
            f"The store did not delete {len(failures)} of {len(keys)} objects: {first.code} {first.message}",
            url=store.url,
            key=first.key,
            remedy=first.remedy,
        )


def crc_of(body: Buffers, known: int | None = None) -> int:
    """Return the CRC32C of a body: `known` if given, else computed."""
    if known is not None:
        return known
    crc = 0
    for view in body:
        crc = checksums.crc32c(view, crc)
    return crc


def encoded_crc(crc32c: int) -> str:
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()
