"""Options, reads and copies that S3 and GCS share: `StoreOptions` and `HttpStore`."""

from __future__ import annotations

import contextlib
import difflib
import functools
import http.client
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from typing_extensions import Self

from bucketpoint.errors import Action, BucketpointError, CorruptDataError, StoreError, TransientStoreError
from bucketpoint.stores.base import Buffers, Capabilities, CopiesInside, ObjectInfo, RangeReply, Store
from bucketpoint.stores.client_cache import ClientCache, FirstEnvironment, frozen
from bucketpoint.stores.http_body import Receiver, discard
from bucketpoint.stores.retry import DEADLINE_S, READ_ATTEMPTS, RetryPolicy, run

DEFAULT_CONNECTIONS = 32
"""Connections kept open: more than a 10 Gbit/s link needs at the 50 MB/s that one connection to S3 carries."""

DEFAULT_MAX_ATTEMPTS = 6
"""Attempts of one request. botocore's default of 3 is used up within seconds, too soon for a store that restarts."""

_TUNING = (
    "asynchronous batch_size listings_expiry_time loop max_paths skip_instance_cache use_listings_cache version_aware"
)
"""Options of fsspec's filesystems that are ignored, because there are no listing caches and no event loop here."""


@dataclass(frozen=True)
class StoreOptions:
    """Settings of the connection to a bucket, named as in this class or as in fsspec's library for the service.

    Attributes:
        service_name: name of the service, for messages.
        aliases: name in this class for each name that only fsspec's library has.
        tuning: further options that only tune fsspec's library, and are ignored.
        replaced: replacement for each option of earlier versions.
        further: remedy for unknown options: where to pass other arguments.
        endpoint_url: another endpoint than the service's own.
        connections: connections kept open in the pool.
        retry_deadline_s: seconds for all attempts of one request together.
    """

    service_name: ClassVar[str]
    tuning: ClassVar[str]
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    replaced: ClassVar[Mapping[str, str]] = MappingProxyType({})
    further: ClassVar[str] = ""

    endpoint_url: str | None = field(default=None, repr=False)
    connections: int = DEFAULT_CONNECTIONS
    retry_deadline_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        for option in fields(self):
            if option.type in ("str", "str | None"):
                check_text(option.name, getattr(self, option.name))
        self._check_positive("connections")

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not (isinstance(value, int | float) and value >= 1):
            raise BucketpointError(f"{name} must be at least 1, not {value}")

    @classmethod
    def from_storage_options(cls, storage_options: Mapping[str, Any] | None = None) -> Self:
        """Make options from a dict with the option names of fsspec's library, of this class, or both.

        Raises:
            BucketpointError: an option is not known, is given under two names, or has a value that is not valid.
        """
        known = {option.name for option in fields(cls)}
        values: dict[str, Any] = {}
        unknown: list[str] = []
        for name, value in (storage_options or {}).items():
            target = cls.aliases.get(name, name)
            if name in f"{_TUNING} {cls.tuning}".split():
                continue
            if target not in known:
                unknown.append(name)
            elif value is None:
                continue
            elif target in values:
                raise BucketpointError(f"the storage option {name} is given twice, under two names")
            else:
                values[target] = value
        if unknown:
            raise BucketpointError(
                f"unknown storage options for {cls.service_name}: {', '.join(sorted(unknown))}",
                remedy=cls._remedy(sorted(unknown), sorted({*known, *cls.aliases})),
            )
        return cls(**values)

    @classmethod
    def _remedy(cls, unknown: Sequence[str], known: Sequence[str]) -> str:
        parts = [f"Pass {cls.replaced[name]} in place of {name}." for name in unknown if name in cls.replaced]
        others = [name for name in unknown if name not in cls.replaced]
        near = [match for name in others for match in difflib.get_close_matches(name, known, n=1)]
        if near:
            parts.append(f"Did you mean {', '.join(near)}?")
        if others:
            parts.append(cls.further or f"The known options are: {', '.join(known)}")
        return " ".join(parts).rstrip(".")

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def cache_key(self) -> tuple[Any, ...]:
        """Return a hashable value that is equal for options that can share one client, in this environment."""
        return tuple(frozen(getattr(self, option.name)) for option in fields(self))


def check_text(name: str, value: Any) -> None:
    """Raise BucketpointError if an option is neither text nor None. The message omits its value, perhaps a secret."""
    if value is not None and not isinstance(value, str):
        raise BucketpointError(
            f"the storage option {name} is {type(value).__name__}, not text",
            remedy="Write it in quotes: YAML, for example, reads digits as a number",
        )


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
    part: ContentRange | None


@dataclass(frozen=True)
class HttpStore(Store, CopiesInside):
    """A bucket of a service that answers GET requests for objects and ranges of them (RFC 9110).

    A store is pickled without its client, which each process makes at the first use. `put` and `put_part` read the
    body's memory until they return, again for each retry: the memory must not change meanwhile.

    Attributes:
        pin: the environment in which the store was first used.
        scheme: scheme of the service's URLs.
        reads: name of the service's operation that reads an object, for messages.
        clients: the clients of this process.
        translated: calls a function, and translates exceptions of the client library: `(act, operation, url)`.
    """

    bucket: str
    options: Any
    pin: FirstEnvironment = field(default_factory=FirstEnvironment, init=False, repr=False, compare=False)

    scheme: ClassVar[str]
    reads: ClassVar[str]
    clients: ClassVar[ClientCache[Any]]
    translated: ClassVar[Callable[..., Any]]

    @abstractmethod
    def _open(self, key: str, wanted: str | None, if_match: str | None = None) -> Reply:
        """Request an object, or only the bytes that the Range header `wanted` names."""

    @property
    @abstractmethod
    def _endpoint(self) -> str | None:
        """The URL of the service; None if the bucket's name is unique without it."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    @property
    def identity(self) -> str:
        if self._endpoint is None:
            return self.url
        parts = urlsplit(self._endpoint)
        # Drop the text before an "@", which may hold credentials.
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{self.bucket}"

    def get(self, key: str, *, max_bytes: int | None = None, first: int | None = None) -> tuple[bytes, ObjectInfo]:
        # `_open` repeats a request that fails. The loop here repeats it when the body breaks off.
        return run(lambda: self._get(key, max_bytes, first), RetryPolicy(READ_ATTEMPTS))

    def _get(self, key: str, max_bytes: int | None, first: int | None) -> tuple[bytes, ObjectInfo]:
        try:
            reply = self._open(key, None if first is None else f"bytes=0-{first - 1}")
        except CorruptDataError:
            if first is None:
                raise
            # A range of an empty object is invalid, because the object has no first byte.
            return self._get(key, max_bytes, None)
        self._refuse_other_part(reply, 0, key)
        if reply.length is None:
            discard(reply.body)
            raise StoreError(
                "the reply has no Content-Length",
                url=self._url(key),
                remedy="A proxy before the store removes Content-Length: configure it to pass replies on unchanged",
            )
        length = reply.length
        # A store, or a proxy, may ignore the range, and send the whole object.
        size = length if first is None else min(length, first)
        if max_bytes is not None and size > max_bytes:
            discard(reply.body)
            raise CorruptDataError(
                f"the object has {reply.info.size} bytes, and at most {max_bytes} were expected", url=self._url(key)
            )
        data, receiver = bytearray(size), self._receiver(reply.body, length, key)
        receiver.receive([memoryview(data)])
        receiver.drop()
        return bytes(data), reply.info

    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None:
        size = sum(view.nbytes for view in buffers)
        if size:
            self.open_range(key, offset, size, if_match=if_match).receive(buffers)

    def open_range(self, key: str, offset: int, nbytes: int, *, if_match: str | None = None) -> RangeReply:
        reply = self._open(key, f"bytes={offset}-{offset + nbytes - 1}", if_match)
        body, length = reply.body, reply.length
        if reply.part is None and (offset or length != nbytes):
            discard(body)
            raise StoreError("the store ignored the range of a read", url=self._url(key))
        self._refuse_other_part(reply, offset, key)
        if length is not None and length != nbytes:
            discard(body)
            raise CorruptDataError(
                f"the object is too short: {length} of the {nbytes} bytes from {offset} exist",
                url=self._url(key),
            )
        return self._receiver(body, nbytes, key)

    def _refuse_other_part(self, reply: Reply, offset: int, key: str) -> None:
        """Refuse a reply with other bytes than requested, as from a proxy or a cache: not all bytes have a checksum."""
        start = None if reply.part is None else reply.part.start
        if start not in (None, offset):
            discard(reply.body)
            raise TransientStoreError(
                f"the reply has the bytes from {start}, but those from {offset} were requested", url=self._url(key)
            )

    def _receiver(self, body: Any, nbytes: int, key: str) -> Receiver:
        def translated(act: Callable[[], None]) -> None:
            try:
                self.translated(act, self.reads, self._url(key))
            except StoreError as error:
                # The error carries the deadline, because the loops that request a body again do not have the options.
                error.limit_s = self.options.retry_deadline_s
                if error.action is Action.OUTAGE:
                    # The store has answered this request. If it is down now, the next request waits for it.
                    error.action = Action.RETRY
                raise

        return Receiver(body, nbytes, translated)

    def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
        return self.copy_from(self, source, target)

    def can_copy_from(self, other: Store) -> bool:
        if not isinstance(other, type(self)):
            return False
        return self.identity.removesuffix(self.bucket) == other.identity.removesuffix(other.bucket)

    @property
    def client(self) -> Any:
        """This process's client for the options, made at the first use."""
        make = functools.partial(self.clients.get, self.options, self.pin)
        return self.translated(make, f"making the client of {self.scheme}:// URLs", self.url)

    def _url(self, key: str | None) -> str:
        return f"{self.url}/{key}" if key else self.url


LENGTH = re.compile(r"[0-9]{1,18}")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})")


class ContentRange(NamedTuple):
    """First byte of the part in a reply with status 206, and the whole object's size; None without Content-Range."""

    start: int | None
    whole: int | None

    @classmethod
    def of(cls, status: int, header: str | None) -> ContentRange | None:
        """Parse a header such as `bytes 0-9/1234` (RFC 9110, 14.4). Returns None for a reply with the whole object."""
        if status != http.client.PARTIAL_CONTENT:
            return None
        match = _CONTENT_RANGE.fullmatch(header or "")
        return cls(int(match[1]), int(match[2])) if match else cls(None, None)


def http_seconds(header: str | None) -> float | None:
    """Convert the time in a header to seconds since the epoch. Returns None if there is none, or a malformed one."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return parsedate_to_datetime(header).timestamp() if header else None
    return None
