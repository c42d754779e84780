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
    """Arguments of `open_store`, with which the helper opens the trainer's store.

    The options are pickled separately, because the helper may be unable to import one of their classes.
    """

    url: str
    storage_options: bytes = field(repr=False)


@dataclass(frozen=True)
class Ready:
    """First message of a helper, with the version and path of the bucketpoint that it has imported."""

    version: str
    folder: str

    @staticmethod
    def of_this_process() -> Ready:
        return Ready(__version__, os.path.dirname(os.path.realpath(__file__)))

    def __str__(self) -> str:
        return f"{self.version} in {self.folder}"


@dataclass(frozen=True)
class Alive:
    """Message that a helper sends every few seconds while it uploads, so that it does not count as hanging."""


class RemoteSegment(NamedTuple):
    """Description of a `Segment` for the helper: its bytes lie in shared memory, in the message, or in the trainer.

    Sent as a plain tuple, which is pickled ten times as fast: training waits for the GIL during pickling.

    Attributes:
        offset: position in the shared memory; None if the bytes are elsewhere.
        inline: the bytes of a small segment, or None. If `offset` is None too, the trainer sends the bytes on request.
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
    """Segments of one object of the next order. Of an object's messages, the first has `begins` set."""

    key: str
    begins: bool
    segments: Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class UploadOrder:
    """Order to upload the objects whose segments were sent before. The shared memory's descriptor is sent with it.

    Attributes:
        identity: `Store.identity` that the helper's store must have.
        environment: environment variables, if changed since the last order or the start of the helper; else None.
            Excluded from the `repr`, because they may hold secrets.
        folder: working directory of the trainer, for relative paths of local files.
        umask: umask of the trainer; None if unknown.
        log_level: lowest level of the records that the trainer logs.
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
    """Report of a new multipart upload, which the trainer aborts if the helper dies."""

    key: str
    upload_id: str = field(repr=False)


@dataclass(frozen=True)
class Moved:
    """Progress since the last message: bytes that the store has acknowledged, and requests."""

    nbytes: int
    requests: int


@dataclass(frozen=True)
class Logged:
    """A log record of the helper, with its message already formatted."""

    record: logging.LogRecord


@dataclass(frozen=True)
class OrderRefused:
    """Answer to an order that the helper cannot carry out. No request was sent to the store."""

    reason: str


@dataclass(frozen=True)
class Done:
    """Answer to an order: every object is stored. `counts` are those of `retry.Budget` during this order."""

    uploaded: Sequence[Uploaded]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Failed:
    """Answer to an order: the upload failed, and open uploads were aborted."""

    error: BaseException
    counts: Mapping[str, int]
