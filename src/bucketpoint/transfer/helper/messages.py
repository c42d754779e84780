"""Messages between a trainer and its helper, and the channel: pickled messages and file descriptors over two sockets.

Unpickling is safe: both ends run bucketpoint, and no other process can open the sockets, which have no name.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from bucketpoint.forks import renew_in_child
from bucketpoint.transfer.options import TransferOptions
from bucketpoint.transfer.upload import ObjectSource, Segment, Uploaded
from bucketpoint.version import __version__


def this_bucketpoint() -> str:
    """Return the version and the folder of the imported bucketpoint: the first message of a helper."""
    return f"{__version__} in {os.path.dirname(os.path.realpath(__file__))}"


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
    """Segments of one object of the next order. `begins` is True in the first message of an object."""

    key: str
    begins: bool
    segments: Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class UploadOrder:
    """Order to upload the objects whose segments were sent before. The shared memory's descriptor is sent with it.

    Attributes:
        url, storage_options: arguments of `open_store`. The options are pickled separately, because the helper may be
            unable to import one of their classes.
        identity: `Store.identity` that the helper's store must have.
        environment: environment variables of the trainer. Excluded from the `repr`, because they may hold secrets.
        folder: working directory of the trainer, for relative paths of local files.
        umask: umask of the trainer; None if unknown.
        log_level: lowest level of the records that the trainer logs.
    """

    url: str
    storage_options: bytes = field(repr=False)
    identity: str
    options: TransferOptions
    memory_nbytes: int
    environment: Mapping[str, str] = field(repr=False)
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
    """Answer to an order: every object is stored. `counts` are those of `retry.Budget` during this order.

    If the options have a `node_copy`, a second one follows once the shared memory is no longer read.
    """

    uploaded: Sequence[Uploaded]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Failed:
    """Answer to an order: the upload failed, and open uploads were aborted."""

    error: BaseException
    counts: Mapping[str, int]


INLINE_BYTES = 64 << 10
"""Maximum size of a segment outside shared memory that is sent with the order. Larger segments are sent on request: an
order must not hold a copy of the state."""

AT_ONCE = 500
"""Segments in one message. Pickling them takes a tenth of the interval at which threads switch the GIL (5 ms)."""


class MappableMemory(Protocol):
    """Memory that begins at `address` in this process, and that the helper can map by `descriptor`."""

    address: int
    nbytes: int
    descriptor: int


def described(sources: Sequence[ObjectSource], memory: MappableMemory) -> Iterator[SegmentsToUpload]:
    """Describe objects for the helper, in short messages: training waits for the GIL while a message is pickled."""

    def remote(segment: Segment) -> tuple[Any, ...]:
        # The fields of a `RemoteSegment`.
        offset, inline, data = None, None, segment.data
        if data is not None and segment.digests_of:
            # A few bytes per item, no part of the state.
            inline = bytes(data)
        elif data is not None:
            # The staged state is writable; headers and pickled values are read-only bytes outside shared memory.
            if data.nbytes and not data.readonly:
                start = ctypes.addressof(ctypes.c_char.from_buffer(data)) - memory.address
                if 0 <= start <= memory.nbytes - data.nbytes:
                    offset = start
            if offset is None and data.nbytes <= INLINE_BYTES:
                inline = bytes(data)
        return (
            segment.nbytes,
            offset,
            inline,
            segment.late,
            segment.block_nbytes,
            tuple(segment.table_of),
            segment.digest_seed,
            tuple(segment.digests_of),
        )

    for source in sources:
        for start in range(0, max(len(source.segments), 1), AT_ONCE):
            some = source.segments[start : start + AT_ONCE]
            yield SegmentsToUpload(source.key, start == 0, [remote(segment) for segment in some])


_HEADER = struct.Struct("<Q")
"""Length of the pickled message, in bytes. The descriptors of the message are sent with its header."""

SIGN_OF_LIFE_S = 5.0
"""Seconds between two `Alive` messages of a helper that uploads."""


class Channel:
    """One end of the channel. Any thread may send; one thread at a time receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        # A forked child closes its copy, which would hide the trainer's end from the helper. A shutdown would also end
        # the parent's channel.
        renew_in_child(self, lambda copied: copied._socket.close())

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and duplicates of the descriptors.

        Raises:
            OSError: the other end is closed.
            pickle.PicklingError, TypeError, AttributeError: the message cannot be pickled; nothing was sent.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            socket.send_fds(self._socket, [_HEADER.pack(len(data))], descriptors)
            self._socket.sendall(data)

    def receive(self, *, until_end_of: int | None) -> tuple[Any, list[int]] | None:
        """Wait for a message, and return it with its descriptors. None if the other end is closed or breaks off.

        Args:
            until_end_of: result of `descriptor_of` for a process whose end counts as the end of the channel.

        Raises:
            Exception: the message cannot be unpickled. Further messages can be received.
        """
        # Messages of a process that has ended are no longer needed.
        if until_end_of is not None and until_end_of in self._wait(until_end_of, None):
            return None
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, 1)
            if not head:
                return None
            head += self._exactly(_HEADER.size - len(head))
            data = self._exactly(_HEADER.unpack(head)[0])
        except (ConnectionError, EOFError, BlockingIOError):
            return None
        try:
            return pickle.loads(data), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def is_quiet(self, process: int | None, within_s: float) -> bool:
        """Return True if neither a message nor the end of a process arrives within `within_s` seconds."""
        return not self._wait(process, within_s)

    def limit_waits(self, seconds: float) -> None:
        """Limit the wait for the rest of a message: then `send` raises BlockingIOError, and `receive` returns None."""
        limit = struct.pack("@ll", int(seconds), 0)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def close(self) -> None:
        """Close this end. The other end then receives None."""
        with contextlib.suppress(OSError):
            # This also wakes a receiving thread of this process.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _wait(self, process: int | None, within_s: float | None) -> list[int]:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        if process is not None:
            waiting.register(process, select.POLLIN)
        return [descriptor for descriptor, _ in waiting.poll(None if within_s is None else within_s * 1000)]

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise EOFError
            view = view[received:]
        return bytes(data)


def descriptor_of(process: int) -> int | None:
    """Return a descriptor that becomes readable when a process ends; None if the system has no such descriptors."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None
