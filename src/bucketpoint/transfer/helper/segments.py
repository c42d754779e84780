"""Description of segments for the helper: bytes in shared memory by position, small others by value."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from bucketpoint.transfer.helper.messages import SegmentsToUpload
from bucketpoint.transfer.upload import ObjectSource, Segment

INLINE_BYTES = 64 << 10
"""Size up to which bytes outside of shared memory are sent with the order. Larger ones are sent when they are needed:
an order must not hold a copy of the state."""

AT_ONCE = 500
"""Segments in one message. To pickle them takes a tenth of the interval at which threads take turns (5 ms)."""


class MappableMemory(Protocol):
    """Memory of this process that the helper can map.

    Attributes:
        address: first byte, in this process.
        nbytes: size in bytes.
        descriptor: a descriptor of the memory.
    """

    address: int
    nbytes: int
    descriptor: int


def described(sources: Sequence[ObjectSource], memory: MappableMemory) -> Iterator[SegmentsToUpload]:
    """Describe objects for the helper, a limited number of segments at a time.

    Training waits for the interpreter's lock while a message is pickled.
    """

    def remote(segment: Segment) -> tuple[Any, ...]:
        # The fields of a `RemoteSegment`.
        offset, inline, data = None, None, segment.data
        if data is not None and segment.digests_of:
            # Some bytes for each item, and no part of the state.
            inline = bytes(data)
        elif data is not None:
            # Memory that can be written is the state's; the bytes of headers and of pickled values are read-only.
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
    """Return bytes of a segment that is not in shared memory."""
    if segment.fill is None:
        assert segment.data is not None
        return bytes(segment.data[start : start + nbytes])
    out = bytearray(nbytes)
    segment.fill(start, memoryview(out))
    return bytes(out)
