"""Parallel reads of a load. Requests for neighbouring ranges are joined into one long read, which has a single reply.

A long read is a list of requests for ranges of one object, in order, with small gaps between them.

A request that needs leased memory is small, because every connection needs such memory at the same time. But each HTTP
request costs milliseconds of CPU time and a round trip. In a long read, the same leased memory receives the bytes of
each request in turn, once those of the previous request are verified and delivered.

If a store cannot stream replies, each request is read in one call, or in several within the budget if the store's
client copies what it receives.

With a copy on the node (`NodeCopy`), a load reads the copy before the bucket. Only verified bytes are copied, so the
copy is not a wrapper of a store: a store does not have the checksums of a request. Ranges without a checksum, such as
those of other writers' objects, are always read from the bucket.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import cast

from bucketpoint.errors import CorruptDataError
from bucketpoint.stores import OpensRanges, RangeReply, Store
from bucketpoint.stores.cutoff import limited
from bucketpoint.stores.node_copy import CopiedObject, NodeFolder
from bucketpoint.stores.retry import RetryPolicy, run
from bucketpoint.transfer.download import Request, cut, deliver, is_worth_reading
from bucketpoint.transfer.options import Meter, NodeCopy, TransferOptions
from bucketpoint.transfer.pieces import SMALLEST_USEFUL_PART
from bucketpoint.transfer.tasks import BufferPool, TaskGroup

LEAST_S = 5.0
"""Shortest time without a byte, in seconds, after which a read is cut off. A busy store may need seconds to respond."""

MEDIANS = 4.0
"""The same limit as a multiple of the median of recent waits, so that reads of a slow store are not cut off."""

LONGEST_PARTS = 4
"""Limit on the length of a read in a large load, in parts. A request to S3 holds the GIL for 2 to 4 ms, as long as the
reception of 32 MiB does."""

FEWEST_READS = 8
"""Reads are longer than a part only if each connection gets at least this many. With fewer reads, some connections
would be idle at the end of the load."""

_RECENT = 128

_SKIPPED_BYTES = 64 << 10
"""Size of the scratch memory that receives the bytes between two requests."""


def fetch(
    store: Store, requests: Sequence[Request], options: TransferOptions, *, pool: BufferPool, meter: Meter
) -> None:
    """Run all requests in parallel: every extent is verified and delivered, or the first error is raised."""
    streams = store.capabilities.streams_ranges
    reads = join_requests(requests, options) if streams else [[request] for request in requests]
    copy, stalls = options.node_copy, StallLimits()
    node = None if copy is None else NodeBytes(copy, store, options, meter)
    if node is not None:
        # Processes of a node that load the same checkpoint start at different reads, and share them in the node's copy.
        first = random.randrange(len(reads) or 1)
        reads = reads[first:] + reads[:first]
    with TaskGroup(options.connections, name="bucketpoint-download", nice=options.nice) as group:
        for read in reads:
            group.start(lambda read=read: fetch_long(store, read, options, pool, meter, stalls, node))  # type: ignore[misc]
        if node is not None:
            group.start(node.look)


class StallLimits:
    """Limits on the time without a byte in one load, derived from the waits for recent replies.

    A read that exceeds its limit is cut off and sent again. Otherwise a request that the store or a proxy has lost
    would delay the whole load until the client's timeout of a minute.
    """

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_RECENT)

    def add(self, seconds: float) -> None:
        """Add the time from a request to its reply."""
        self._waits.append(seconds)

    def doubling(self) -> Callable[[], float]:
        """Return a function for one read. Each call returns the limit for the next attempt, in seconds.

        The limit doubles with each attempt, so that a load survives a sudden slowdown of the store.
        """
        attempts = itertools.count()
        return lambda: 2 ** next(attempts) * max(LEAST_S, MEDIANS * statistics.median(list(self._waits) or [0.0]))


def join_requests(requests: Sequence[Request], options: TransferOptions) -> list[list[Request]]:
    """Join requests into long reads, the largest first.

    A read is limited to the size of a part. In a small load the limit is a connection's share of all bytes; in a large
    load it is up to `LONGEST_PARTS` parts.
    """
    share = sum(request.nbytes for request in requests) // options.connections
    most = min(options.part_bytes, max(share, SMALLEST_USEFUL_PART))
    most = max(most, min(LONGEST_PARTS * options.part_bytes, share // FEWEST_READS))
    reads: list[list[Request]] = []
    wanted = 0
    for request in sorted(requests, key=attrgetter("key", "start", "stop")):
        if reads and _follows(reads[-1], request, wanted, most, options):
            reads[-1].append(request)
        else:
            reads.append([request])
            wanted = 0
        wanted += request.wanted
    reads.sort(key=lambda read: read[0].start - read[-1].stop)
    return reads


def _follows(read: list[Request], request: Request, wanted: int, most: int, options: TransferOptions) -> bool:
    last, span = read[-1], request.stop - read[0].start
    if (request.key, request.etag) != (last.key, last.etag) or request.start < last.stop or span > most:
        return False
    return is_worth_reading(request.start - last.stop, span, wanted + request.wanted, options)


def fetch_long(
    store: Store,
    read: list[Request],
    options: TransferOptions,
    pool: BufferPool,
    meter: Meter,
    stalls: StallLimits,
    node: NodeBytes | None = None,
) -> None:
    """Run the requests of a read on the current thread: receive, verify and deliver the bytes of each in turn.

    If the reply breaks off, or its bytes are damaged, the range from the first undelivered request on is read again.
    """
    most, copied = max(request.nbytes for request in read), 0
    if store.capabilities.copies_bodies:
        # The lease also counts the client's copy. Its pages for that copy are never touched, so they take no memory.
        most = copied = min(most, options.lease_bytes)
    leased = max(_SKIPPED_BYTES if len(read) > 1 else 0, *(request.leased for request in read))
    with pool.lease(leased + copied) as lease:

        def receive(requests: list[Request]) -> None:
            stop = requests[-1].stop
            reception = _Reception(store, stop, lease[:_SKIPPED_BYTES], most, options, meter, stalls)
            try:
                for request in requests:
                    kept = (lambda buffers: None) if node is None else functools.partial(node.keep, request)
                    deliver(store.url, request, lease, functools.partial(reception.receive, request), options, kept)
                    meter.add(request.nbytes, requests=0)
            finally:
                reception.drop()

        if node is None:
            receive(read)
        else:
            node.deliver_or(receive, read, lease)


class _Reception:
    """Reply from which a long read is received; it is requested again after each failure."""

    def __init__(
        self,
        store: Store,
        stop: int,
        spare: memoryview,
        most: int,
        options: TransferOptions,
        meter: Meter,
        stalls: StallLimits,
    ) -> None:
        self._store = store
        self._streams = cast("OpensRanges", store) if store.capabilities.streams_ranges else None
        self._stop = stop
        self._spare = spare
        self._most = most
        self._policy = RetryPolicy(options.read_attempts)
        self._meter = meter
        self._stalls = stalls
        self._silence_s = stalls.doubling()
        self._reply: RangeReply | None = None
        self._position = 0

    def receive(self, request: Request, buffers: list[memoryview]) -> None:
        """Receive the bytes of the next request, or of the last one again. Bytes between two requests are discarded."""
        if not request.nbytes:
            return
        if self._streams is None:
            starts = range(request.start, request.stop, self._most)
            pieces = cut(buffers, [min(self._most, request.stop - start) for start in starts])
            for start, piece in zip(starts, pieces, strict=True):
                # Attempts are counted for each piece: with many pieces, nearly every attempt at all of them would fail.
                run(functools.partial(self._fill, request, start, piece), self._policy)
            return
        if request.start < self._position:
            # The bytes were received before, and were damaged.
            self.drop()
        if self._reply is None:
            self._meter.add(0)
            nbytes, sent = self._stop - request.start, time.monotonic()
            with limited(silence_s=self._silence_s):
                self._reply = self._streams.open_range(request.key, request.start, nbytes, if_match=request.etag)
            self._stalls.add(time.monotonic() - sent)
            self._position = request.start
        gap = request.start - self._position
        skipped = [self._spare] * (gap // _SKIPPED_BYTES) + [self._spare[: gap % _SKIPPED_BYTES]]
        try:
            # Without a gap, `skipped` is a single empty view.
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


# -- the copy on the node ----------------------------------------------------------------------------------------------

Stretches = list[tuple[int, int, str | None]]


class NodeBytes:
    """Access of one load to the node's copy."""

    def __init__(self, copy: NodeCopy, store: Store, options: TransferOptions, meter: Meter) -> None:
        self._folder = NodeFolder(copy.path, copy.max_bytes)
        self._store = store
        self._options = options
        self._meter = meter

    def deliver_or(
        self, receive: Callable[[list[Request]], None], requests: Sequence[Request], lease: memoryview
    ) -> None:
        """Deliver neighbouring requests of one object from the node's copy, and `receive` the others from the bucket.

        Waits for bytes that another process is receiving.
        """
        for left in self._left(requests, lease, partly=False):
            of = next(filter(None, map(self._of, left)), None)
            with self._folder.claim(of, left[0].start, left[-1].stop) if of else contextlib.nullcontext():
                for missing in self._left(left, lease, partly=True):
                    receive(missing)

    def keep(self, request: Request, buffers: Sequence[memoryview]) -> None:
        """Store the bytes of a request in the node's copy, if they have been verified."""
        self._keep(self._of(request), [(request.start, request.stop, None)], buffers)

    def look(self) -> None:
        """Delete copies of objects that are no longer in the bucket."""
        self._folder.look(self._store)

    def _left(self, requests: Sequence[Request], lease: memoryview, *, partly: bool) -> list[list[Request]]:
        """Deliver the requests whose bytes are in the copy. Return the others, grouped by neighbours.

        With `partly`, a part in the copy is enough: the rest of the request is read from the bucket.
        """
        runs = itertools.groupby(requests, lambda request: self._delivered(request, lease, partly=partly))
        return [list(run) for delivered, run in runs if not delivered]

    def _delivered(self, request: Request, lease: memoryview, *, partly: bool) -> bool:
        of = self._of(request)
        if of is None:
            return False
        stretches = self._folder.cover(of, request.start, request.stop)
        held = sum(stop - start for start, stop, name in stretches if name is not None)
        if held < (1 if partly else request.nbytes):
            return False
        read = functools.partial(self._read, of, stretches)
        try:
            deliver(self._store.url, request, lease, read, self._options, functools.partial(self._keep, of, stretches))
        except CorruptDataError:
            self._folder.drop(of, {name for *_, name in stretches if name is not None})
            return False
        self._meter.add(request.nbytes, requests=0, from_node=held)
        return True

    def _read(self, of: CopiedObject, stretches: Stretches, buffers: list[memoryview]) -> None:
        for start, name, piece in _pieces(stretches, buffers):
            if name is None:
                self._meter.add(0)
                self._store.read_into(of.key, start, piece, if_match=of.etag)
                continue
            try:
                self._folder.read(of, name, start, piece)
            except OSError as error:
                raise CorruptDataError(f"the node's copy cannot be read: {error.strerror}", key=of.key) from error

    def _keep(self, of: CopiedObject | None, stretches: Stretches, buffers: Sequence[memoryview]) -> None:
        for start, name, piece in _pieces(stretches, buffers):
            if of is not None and name is None:
                self._folder.put(of, start, piece, sum(map(len, piece)))

    def _of(self, request: Request) -> CopiedObject | None:
        """Return the object of a request; None if its bytes cannot be verified without those of other requests."""
        alone = all(extent.blocks or extent.check is not None or not extent.nbytes for extent in request.extents)
        return CopiedObject(self._store.identity, request.key, request.etag) if request.etag and alone else None


def _pieces(stretches: Stretches, buffers: Sequence[memoryview]) -> Iterator[tuple[int, str | None, list[memoryview]]]:
    """Yield start and file of each stretch, and its memory in `buffers`."""
    pieces = cut(buffers, [stop - start for start, stop, _ in stretches])
    return ((start, name, piece) for (start, _, name), piece in zip(stretches, pieces, strict=True))
