"""Messages between a trainer and its helper."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bucketpoint.transfer.options import TransferOptions
from bucketpoint.transfer.upload import Uploaded
from bucketpoint.version import __version__


@dataclass(frozen=True)
class StoreConfig:
    """Everything needed to open a store again in another process.

    Attributes:
        url: URL of the checkpoint, as `open_store` takes it.
        storage_options: as `open_store` takes them, pickled: a class of the program's own may not exist in the helper.
    """

    url: str
    storage_options: bytes = field(repr=False)


@dataclass(frozen=True)
class Ready:
    """First message of a helper: it has started, with this version and path of bucketpoint."""

    version: str
    folder: str

    @staticmethod
    def of_this_process() -> Ready:
        return Ready(__version__, os.path.dirname(os.path.realpath(__file__)))

    def __str__(self) -> str:
        return f"{self.version} in {self.folder}"


@dataclass(frozen=True)
class Alive:
    """Sign of life of a helper, sent every few seconds while it uploads."""


class RemoteSegment(NamedTuple):
    """Description of a `Segment` for the helper: its bytes lie in shared memory, in the message, or in the trainer.

    It is sent as a plain tuple, which is pickled ten times as fast: pickling holds the interpreter's lock, which
    training needs.

    Attributes:
        offset: position in the shared memory; None if the bytes are elsewhere.
        inline: the bytes, if they are few; None otherwise. With neither, the trainer sends them on request.
        late, block_nbytes, table_of, digest_seed, digests_of: as in `Segment`.
    """

    nbytes: int
    offset: int | None
    inline: bytes | None
    late: bool
    block_nbytes: int
    table_of: tuple[int, ...]
    digest_seed: bytes | None
    digests_of: tuple[int, ...]


@dataclass(frozen=True)
class SegmentsToUpload:
    """Some segments of one object of the next order: its first ones, or those that follow the ones sent before.

    Attributes:
        key: key of the object.
        begins: True if these are its first ones.
    """

    key: str
    begins: bool
    segments: Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class UploadOrder:
    """An order to upload the objects sent before it. The descriptor of the shared memory is sent with it.

    Attributes:
        identity: identity that the store must have.
        memory_nbytes: size of the shared memory.
        environment: environment variables, if they have changed since the helper was started; else None. They may hold
            secrets.
        folder: working directory of the trainer, from which relative paths of local files lead.
        umask: the trainer's mask for modes of new files; None if it is not known.
        log_level: least level of the records that the trainer logs.
    """

    store: StoreConfig
    identity: str
    options: TransferOptions
    memory_nbytes: int
    environment: Mapping[str, str] | None = field(repr=False)
    folder: str | None
    umask: int | None
    log_level: int


@dataclass(frozen=True)
class Wanted:
    """Request for bytes `[start, start + nbytes)` of a segment that only the trainer can read."""

    request: int
    number: int
    segment: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class Given:
    """Answer to `Wanted`."""

    request: int
    data: bytes


@dataclass(frozen=True)
class Begun:
    """Note of a multipart upload that has begun: if the helper dies, the trainer aborts it."""

    key: str
    upload_id: str = field(repr=False)


@dataclass(frozen=True)
class Moved:
    """Progress since the last message: bytes that the store has acknowledged, and requests."""

    nbytes: int
    requests: int


@dataclass(frozen=True)
class Logged:
    """A log record of the helper, with its text complete."""

    record: logging.LogRecord


@dataclass(frozen=True)
class OrderRefused:
    """Answer to an order that the helper cannot carry out, before any request was made."""

    reason: str


@dataclass(frozen=True)
class Done:
    """Answer to an order: every object is stored. `counts` are those of `retry.Budget` for this order."""

    uploaded: Sequence[Uploaded]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Failed:
    """Answer to an order: the upload failed, and open uploads were aborted."""

    error: BaseException
    counts: Mapping[str, int]
