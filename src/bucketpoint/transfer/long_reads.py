"""Long reads: requests whose ranges follow each other, received one after the other from a single reply.

Every range of a load is received here, unless the store has a call for many ranges: a request alone is a long read of
one. A store without replies that can be received in pieces fills the memory of each request in one call.

A request that needs leased memory is small, because every connection needs such memory at the same time. But each
request to a store costs milliseconds of CPU time and a round trip. So neighbouring requests are sent as one. The same
leased memory receives each request's bytes in turn, after the ones before were verified and delivered.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from bucketpoint.stores import OpensRanges, RangeReply, Store
from bucketpoint.transfer.budget import BufferPool
from bucketpoint.transfer.download import Request, deliver, is_worth_reading
from bucketpoint.transfer.options import TransferOptions
from bucketpoint.transfer.parts import SMALLEST_USEFUL_PART
from bucketpoint.transfer.progress import Meter
from bucketpoint.transfer.stalls import StallLimit, StallLimits

_SKIPPED_BYTES = 64 << 10
"""Size of the reused memory that receives the bytes between two requests."""


@dataclass
class LongRead:
    """Requests for ranges of one object, in order, with small gaps between them."""

    requests: list[Request]

    @property
    def start(self) -> int:
        return self.requests[0].start

    @property
    def stop(self) -> int:
        return self.requests[-1].stop

    @property
    def leased(self) -> int:
        """Bytes of leased memory that the read needs: those of the request that needs the most."""
        skipped = _SKIPPED_BYTES if len(self.requests) > 1 else 0
        return max(skipped, *(request.leased for request in self.requests))


def join_requests(requests: Sequence[Request], options: TransferOptions) -> list[LongRead]:
    """Join requests to long reads, the largest first.

    A read is no larger than a part, and if the requests are few, no larger than a connection's share of them.
    """
    share = sum(request.nbytes for request in requests) // options.connections
    most = min(options.part_bytes, max(share, SMALLEST_USEFUL_PART))
    reads: list[LongRead] = []
    wanted = 0
    for request in sorted(requests, key=lambda request: (request.key, request.start, request.stop)):
        if reads and _follows(reads[-1], request, wanted, most, options):
            reads[-1].requests.append(request)
        else:
            reads.append(LongRead([request]))
            wanted = 0
        wanted += request.wanted
    reads.sort(key=lambda read: read.start - read.stop)
    return reads


def _follows(read: LongRead, request: Request, wanted: int, most: int, options: TransferOptions) -> bool:
    last, span = read.requests[-1], request.stop - read.start
    if (request.key, request.etag) != (last.key, last.etag) or request.start < last.stop or span > most:
        return False
    return is_worth_reading(request.start - last.stop, span, wanted + request.wanted, options)


def fetch_long(
    store: Store, read: LongRead, options: TransferOptions, pool: BufferPool, meter: Meter, stalls: StallLimits
) -> None:
    """Run the requests of a read on the current thread: receive, verify and deliver the bytes of each in turn.

    If the reply breaks off, or its bytes are damaged, the rest is requested again, from the first byte on that was not
    delivered.
    """
    with pool.lease(read.leased) as lease:
        reception = _Reception(store, read, lease[:_SKIPPED_BYTES], StallLimit(stalls))
        try:
            for request in read.requests:
                deliver(store.url, request, lease, functools.partial(reception.receive, request), options)
                meter.add(request.nbytes, requests=reception.take_count())
        finally:
            reception.drop()


class _Reception:
    """The reply from which a long read is received, requested again after each failure."""

    def __init__(self, store: Store, read: LongRead, spare: memoryview, limit: StallLimit) -> None:
        self._store = store
        self._streams = cast("OpensRanges", store) if store.capabilities.streams_ranges else None
        self._read = read
        self._spare = spare
        self._limit = limit
        self._reply: RangeReply | None = None
        self._position = 0
        self._count = 0

    def receive(self, request: Request, buffers: list[memoryview]) -> None:
        """Receive the bytes of the next request, or those of the last again. Bytes in between are discarded."""
        if not request.nbytes:
            return
        if self._streams is None:
            self._count += 1
            self._store.read_into(request.key, request.start, buffers, if_match=request.etag)
            return
        if request.start < self._position:
            # They have been received, and were damaged.
            self.drop()
        if self._reply is None:
            self._count += 1
            nbytes = self._read.stop - request.start
            with self._limit.watch():
                self._reply = self._streams.open_range(request.key, request.start, nbytes, if_match=request.etag)
            self._position = request.start
        gap = request.start - self._position
        skipped = [self._spare] * (gap // _SKIPPED_BYTES) + [self._spare[: gap % _SKIPPED_BYTES]]
        try:
            # Without a gap there may be no memory to receive one.
            self._reply.receive([*skipped, *buffers] if gap else buffers)
        except BaseException:
            self.drop()
            raise
        self._position = request.stop

    def drop(self) -> None:
        """Close the connection, unless the whole reply has been received."""
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.drop()

    def take_count(self) -> int:
        """Return how many requests were sent since the last call."""
        count, self._count = self._count, 0
        return count
