"""Execution of all requests of a load: one thread per request, or many ranges per call of a store with an event loop.

Two such calls are under way at a time, so that the bytes of one are copied and verified while the other waits. All
bytes of a call are held in memory as they arrive, and count against the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from bucketpoint.errors import CorruptDataError, StoreError
from bucketpoint.stores import ManyRanges, Range, Store
from bucketpoint.transfer.budget import BufferPool
from bucketpoint.transfer.download import Assembly, Request
from bucketpoint.transfer.long_reads import LongRead, fetch_long, join_requests
from bucketpoint.transfer.options import TransferOptions
from bucketpoint.transfer.progress import Meter
from bucketpoint.transfer.stalls import StallLimits
from bucketpoint.transfer.tasks import TaskGroup

CALLS = 2
"""Batches under way at once."""

RANGES = 8
"""Ranges of a full call. Fewer would not fill the connections; more cost CPU, in some libraries milliseconds each."""

_SMALLEST_PIECE = 1 << 20


@dataclass
class Batch:
    """Requests that are sent in one call, and the ranges that they are cut into."""

    requests: list[Request] = field(default_factory=list)
    cuts: list[list[Range]] = field(default_factory=list)
    held: int = 0
    """Bytes of memory: those of the ranges as they arrive, and the leased memory of the requests."""

    @property
    def ranges(self) -> list[Range]:
        return list(itertools.chain.from_iterable(self.cuts))


def fetch(
    store: Store, requests: Sequence[Request], options: TransferOptions, *, pool: BufferPool, meter: Meter
) -> None:
    """Run all requests in parallel: every extent is verified and delivered, or the first error is raised."""
    # `read_many` has no conditions, so requests with an ETag are sent one by one.
    if store.capabilities.many_ranges and not any(request.etag for request in requests):
        with TaskGroup(CALLS, name="bucketpoint-download", nice=options.nice) as group:
            for batch in batches(requests, options):
                group.start(lambda batch=batch: _fetch_batch(store, batch, options, pool, meter))  # type: ignore[misc]
        return
    if store.capabilities.streams_ranges:
        reads = join_requests(requests, options)
    else:
        reads = [LongRead([request]) for request in requests]
    stalls = StallLimits()
    with TaskGroup(options.connections, name="bucketpoint-download", nice=options.nice) as group:
        for read in reads:
            group.start(lambda read=read: fetch_long(store, read, options, pool, meter, stalls))  # type: ignore[misc]


def batches(requests: Sequence[Request], options: TransferOptions) -> Iterator[Batch]:
    """Cut large requests into ranges, so that a call can fill its connections, and group the requests into calls.

    Each call holds at most its share of the budget.
    """
    share = max(options.max_inflight_bytes // CALLS, 1)
    piece = max(share // RANGES, _SMALLEST_PIECE)
    batch = Batch()
    for request in requests:
        held = request.nbytes + request.leased
        if batch.requests and batch.held + held > share:
            yield batch
            batch = Batch()
        starts = range(request.start, request.stop, piece)
        batch.requests.append(request)
        batch.cuts.append([Range(request.key, start, min(start + piece, request.stop)) for start in starts])
        batch.held += held
    if batch.requests:
        yield batch


def _fetch_batch(store: Store, batch: Batch, options: TransferOptions, pool: BufferPool, meter: Meter) -> None:
    failed: list[Request] = []
    with pool.lease(batch.held) as lease:
        bodies = iter(cast("ManyRanges", store).read_many(batch.ranges, at_once=options.connections))
        for request, ranges in zip(batch.requests, batch.cuts, strict=True):
            room, lease = lease[: request.leased], lease[request.leased :]
            assembly = Assembly(store.url, request, take=lambda nbytes, room=room: room)  # type: ignore[misc]
            failures = 0
            for cut, body in zip(ranges, bodies, strict=False):
                if isinstance(body, StoreError):
                    failures += 1
                else:
                    assembly.put(cut.start, memoryview(body))
            try:
                if not failures:
                    assembly.finish()
            except CorruptDataError:
                failures += 1
            if failures:
                failed.append(request)
            else:
                meter.add(request.nbytes)
    # After the end of the batch's lease: each failed request has its own lease and retries.
    for request in failed:
        fetch_long(store, LongRead([request]), options, pool, meter, StallLimits())
