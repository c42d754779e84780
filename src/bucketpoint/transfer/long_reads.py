"""The reads of a load, on threads: requests whose ranges follow each other are received from a single reply.

A request alone is a long read of one. A store without replies that can be received in pieces fills the memory of each
request in one call, or, if its client holds a copy of what it receives, in calls within the budget.

A request that needs leased memory is small, because every connection needs such memory at the same time. But each
request to a store costs milliseconds of CPU time and a round trip. So neighbouring requests are sent as one. The same
leased memory receives each request's bytes in turn, after the ones before were verified and delivered.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from bucketpoint.stores import OpensRanges, RangeReply, Store
from bucketpoint.stores.pace import silent_for
from bucketpoint.stores.retry import RetryPolicy, run
from bucketpoint.transfer.budget import BufferPool
from bucketpoint.transfer.download import Request, cut, deliver, is_worth_reading
from bucketpoint.transfer.node_bytes import NodeBytes
from bucketpoint.transfer.options import TransferOptions
from bucketpoint.transfer.parts import SMALLEST_USEFUL_PART
from bucketpoint.transfer.progress import Meter
from bucketpoint.transfer.tasks import TaskGroup

LEAST_S = 5.0
"""Shortest limit on a store's silence, in seconds. A store under load may take seconds for its first byte."""

MEDIANS = 4.0
"""The limit on a store's silence in medians of the recent waits, so that reads of a slow store are not cut off."""

LONGEST_PARTS = 4
"""Parts in one read of a large load. A request to S3 holds the interpreter's lock for 2 to 4 ms, at 32 MiB a part as
long as the bytes do."""

FEWEST_READS = 8
"""Reads of a connection, below which none is longer than a part: the last ones end at different times."""

_RECENT = 128

_SKIPPED_BYTES = 64 << 10
"""Size of the reused memory that receives the bytes between two requests."""


def fetch(
    store: Store, requests: Sequence[Request], options: TransferOptions, *, pool: BufferPool, meter: Meter
) -> None:
    """Run all requests in parallel: every extent is verified and delivered, or the first error is raised."""
    streams = store.capabilities.streams_ranges
    reads = join_requests(requests, options) if streams else [LongRead([request]) for request in requests]
    copy, stalls = options.node_copy, StallLimits()
    node = None if copy is None else NodeBytes(copy, store, options, meter)
    if node is not None:
        # Processes of a node that load the same begin at different places, and read each other's bytes.
        first = random.randrange(len(reads) or 1)
        reads = reads[first:] + reads[:first]
    with TaskGroup(options.connections, name="bucketpoint-download", nice=options.nice) as group:
        for read in reads:
            group.start(lambda read=read: fetch_long(store, read, options, pool, meter, stalls, node))  # type: ignore[misc]
        if node is not None:
            group.start(node.look)


class StallLimits:
    """The limits on a store's silence in one load, by the waits for its recent replies.

    A read without a byte for this time is cut off and sent again. A request that a store, or something before it, has
    lost would otherwise hold up the whole load until the client's timeout of a minute.
    """

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_RECENT)

    def add(self, seconds: float) -> None:
        """Add the time from a request to its reply."""
        self._waits.append(seconds)

    def doubling(self) -> Callable[[], float]:
        """Return a function that returns the limit for each attempt of one read, in seconds.

        It doubles with each attempt, so that a sudden slowdown of the store fails no load.
        """
        attempts = itertools.count()
        return lambda: 2 ** next(attempts) * max(LEAST_S, MEDIANS * statistics.median(list(self._waits) or [0.0]))


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

    A read is no larger than a part, and if the requests are few, no larger than a connection's share of them; if they
    are many, it is several parts long.
    """
    share = sum(request.nbytes for request in requests) // options.connections
    most = min(options.part_bytes, max(share, SMALLEST_USEFUL_PART))
    most = max(most, min(LONGEST_PARTS * options.part_bytes, share // FEWEST_READS))
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
    store: Store,
    read: LongRead,
    options: TransferOptions,
    pool: BufferPool,
    meter: Meter,
    stalls: StallLimits,
    node: NodeBytes | None = None,
) -> None:
    """Run the requests of a read on the current thread: receive, verify and deliver the bytes of each in turn.

    If the reply breaks off, or its bytes are damaged, the rest is requested again, from the first byte on that was not
    delivered.
    """
    most, copied = max(request.nbytes for request in read.requests), 0
    if store.capabilities.copies_bodies:
        # As in an upload, the lease also counts the client's copy, and its pages for that copy are never touched.
        most = copied = min(most, options.lease_bytes)
    with pool.lease(read.leased + copied) as lease:

        def receive(requests: list[Request]) -> None:
            long = LongRead(requests)
            reception = _Reception(store, long, lease[:_SKIPPED_BYTES], most, options, meter, stalls)
            try:
                for request in requests:
                    kept = (lambda buffers: None) if node is None else functools.partial(node.keep, request)
                    deliver(store.url, request, lease, functools.partial(reception.receive, request), options, kept)
                    meter.add(request.nbytes, requests=0)
            finally:
                reception.drop()

        if node is None:
            receive(read.requests)
        else:
            node.deliver_or(receive, read.requests, lease)


class _Reception:
    """The reply from which a long read is received, requested again after each failure."""

    def __init__(
        self,
        store: Store,
        read: LongRead,
        spare: memoryview,
        most: int,
        options: TransferOptions,
        meter: Meter,
        stalls: StallLimits,
    ) -> None:
        self._store = store
        self._streams = cast("OpensRanges", store) if store.capabilities.streams_ranges else None
        self._read = read
        self._spare = spare
        self._most = most
        self._policy = RetryPolicy(options.read_attempts)
        self._meter = meter
        self._stalls = stalls
        self._silence_s = stalls.doubling()
        self._reply: RangeReply | None = None
        self._position = 0

    def receive(self, request: Request, buffers: list[memoryview]) -> None:
        """Receive the bytes of the next request, or those of the last again. Bytes in between are discarded."""
        if not request.nbytes:
            return
        if self._streams is None:
            starts = range(request.start, request.stop, self._most)
            pieces = cut(buffers, [min(self._most, request.stop - start) for start in starts])
            for start, piece in zip(starts, pieces, strict=True):
                # Each piece has its own attempts: of many pieces, one fails in nearly every attempt at all of them.
                run(functools.partial(self._fill, request, start, piece), self._policy)
            return
        if request.start < self._position:
            # They have been received, and were damaged.
            self.drop()
        if self._reply is None:
            self._meter.add(0)
            nbytes, sent = self._read.stop - request.start, time.monotonic()
            with silent_for(self._silence_s):
                self._reply = self._streams.open_range(request.key, request.start, nbytes, if_match=request.etag)
            self._stalls.add(time.monotonic() - sent)
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

    def _fill(self, request: Request, start: int, piece: list[memoryview]) -> None:
        self._meter.add(0)
        self._store.read_into(request.key, start, piece, if_match=request.etag)

    def drop(self) -> None:
        """Close the connection, unless the whole reply has been received."""
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.drop()
