"""Descriptions of segments for the helper: positions of bytes in shared memory, and copies of other small segments."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from bucketpoint.transfer.helper.messages import SegmentsToUpload
from bucketpoint.transfer.upload import ObjectSource, Segment

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


def read_stretch(segment: Segment, start: int, nbytes: int) -> bytes:
    """Return bytes of a segment outside shared memory."""
    if segment.fill is None:
        assert segment.data is not None
        return bytes(segment.data[start : start + nbytes])
    out = bytearray(nbytes)
    segment.fill(start, memoryview(out))
    return bytes(out)
