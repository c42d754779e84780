"""Objects go up: parts planned from the known size, sent from the caller's memory, checksummed once, aborted on error.

Knows segments of bytes and stores; what the bytes mean is the business of `format` and `dcp`.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from bucketpoint.errors import BucketpointError
from bucketpoint.stores import ObjectInfo, Part, Store
from bucketpoint.transfer.budget import BufferPool
from bucketpoint.transfer.checksum import combine, crc32c
from bucketpoint.transfer.multipart import abort, complete
from bucketpoint.transfer.options import TransferOptions
from bucketpoint.transfer.parts import PartPlan, common_part_bytes, plan_parts
from bucketpoint.transfer.progress import Meter
from bucketpoint.transfer.tasks import TaskGroup

Fill = Callable[[int, memoryview], None]
"""`fill(start, out)` writes bytes `[start, start + len(out))` of a segment into `out`. Called from several threads."""


@dataclass(frozen=True)
class Segment:
    """A stretch of an object: bytes that lie in memory (`data`), are produced on demand (`fill`), or are a table.

    Attributes:
        late: `fill` is not called before all that lies before the stretch has been read. Only more of the kind, and
            tables, come after it.
        block_nbytes: cuts the stretch into blocks whose CRC32C are wanted; 0 for none.
        table_of: the stretch holds the CRC32C of the blocks of these segments, by number, 4 bytes each, little-endian.
            They all come before it, and nothing but another table comes after it.
    """

    nbytes: int
    data: memoryview | None = None
    fill: Fill | None = None
    late: bool = False
    block_nbytes: int = 0
    table_of: Sequence[int] = ()


@dataclass(frozen=True)
class ObjectSource:
    """One object to write: its key and the segments it is made of."""

    key: str
    segments: Sequence[Segment]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)


@dataclass(frozen=True)
class Uploaded:
    """What the store acknowledged, and for each segment the CRC32C of each of its blocks."""

    info: ObjectInfo
    block_crcs: Sequence[Sequence[int]]


def upload_objects(
    store: Store,
    sources: Sequence[ObjectSource],
    options: TransferOptions,
    *,
    pool: BufferPool,
    meter: Meter,
    acknowledged: Callable[[int, Uploaded], None] = lambda number, uploaded: None,
) -> list[Uploaded]:
    """Upload all objects, parts of all of them in parallel, and return once every one is acknowledged.

    On the first error the parts not yet begun are dropped, running ones are waited for, and every multipart upload that
    was begun is aborted before the error is raised: nothing becomes visible by accident, nothing is left to be billed.

    Args:
        acknowledged: called with the number of each object once it is there, from several threads.
    """
    part_bytes = common_part_bytes([source.nbytes for source in sources], options)
    jobs = [
        _ObjectUpload(store, source, options, part_bytes, pool, meter, functools.partial(acknowledged, number))
        for number, source in enumerate(sources)
    ]
    try:
        with TaskGroup(options.connections, name="bucketpoint-upload", nice=options.nice) as group:
            for job in jobs:
                job.start(group)
    except BaseException:
        for job in jobs:
            job.abort()
        raise
    return [job.result() for job in jobs]


@dataclass
class _ObjectUpload:
    """One object under way: `planned -> sending -> complete`, or aborted."""

    store: Store
    source: ObjectSource
    options: TransferOptions
    part_bytes: int
    pool: BufferPool
    meter: Meter
    acknowledged: Callable[[Uploaded], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _upload_id: str | None = None
    _info: ObjectInfo | None = None

    def __post_init__(self) -> None:
        segments = self.source.segments
        self._ends = list(accumulate(segment.nbytes for segment in segments))
        self._nbytes = self._ends[-1] if segments else 0
        self._parts: dict[int, Part] = {}
        self._pieces: list[list[tuple[int, int, int]]] = [[] for _ in segments]
        self._checksummed = 0

    def start(self, group: TaskGroup) -> None:
        limits = self.store.capabilities
        if not limits.multipart or self._nbytes <= min(self.options.single_put_bytes, limits.max_put_bytes):
            group.start(self._put)
            return
        copied = any(segment.fill is not None for segment in self.source.segments)
        # Parts that need a buffer of ours are kept small, so that every connection gets one within the budget.
        size = min(self.part_bytes, self.options.lease_bytes) if copied else self.part_bytes
        if limits.copies_bodies:
            size = min(size, self.options.copied_part_bytes)
        plan = plan_parts(self._nbytes, size, limits)
        group.start(lambda: self._create(group, plan))

    def result(self) -> Uploaded:
        if self._info is None:
            raise BucketpointError("An upload ended without an acknowledgement", key=self.source.key)
        return Uploaded(self._info, [self._fold_blocks(index) for index in range(len(self.source.segments))])

    def abort(self) -> None:
        """Drop the upload if it is still open."""
        if self._info is None:
            abort(self.store, self.source.key, self._upload_id)

    def _put(self) -> None:
        with self._body(0, self._nbytes) as (body, crc):
            self._info = self.store.put(self.source.key, body, crc32c=crc)
        self.meter.add(self._nbytes)
        self.acknowledged(self.result())

    def _create(self, group: TaskGroup, plan: PartPlan) -> None:
        self._upload_id = self.store.create_multipart(self.source.key)
        self.meter.add(0)
        for number in range(1, max(self._before_tables(plan), 1) + 1):
            group.start(lambda number=number: self._send(group, plan, number))  # type: ignore[misc]

    def _before_tables(self, plan: PartPlan) -> int:
        """How many parts hold nothing of a table, and nothing that is late."""
        tables = sum(segment.nbytes for segment in self.source.segments if segment.table_of or segment.late)
        return (self._nbytes - tables) // plan.part_bytes if tables else plan.count

    def _start_next(self, group: TaskGroup, plan: PartPlan) -> None:
        """Begin a part with a table once the blocks before it are known: they are when their parts begin to be sent."""
        with self._lock:
            self._checksummed += 1
            number = self._checksummed + 1
        if max(self._before_tables(plan), 1) < number <= plan.count:
            group.start(lambda: self._send(group, plan, number))

    def _send(self, group: TaskGroup, plan: PartPlan, number: int) -> None:
        assert self._upload_id is not None
        start, stop = plan.bounds(number)
        with self._body(start, stop) as (body, crc):
            self._start_next(group, plan)
            part = self.store.put_part(self.source.key, self._upload_id, number, body, crc32c=crc)
        self.meter.add(stop - start)
        with self._lock:
            self._parts[number] = part
            last = len(self._parts) == plan.count
        if last and not group.cancelled:
            self._complete(self._upload_id)

    def _complete(self, upload_id: str) -> None:
        self._info = complete(self.store, self.source.key, upload_id, self._parts.values(), nbytes=self._nbytes)
        self.meter.add(0)
        self.acknowledged(self.result())

    @contextlib.contextmanager
    def _body(self, start: int, stop: int) -> Iterator[tuple[list[memoryview], int]]:
        """The buffers of bytes `[start, stop)` and their CRC32C, valid within the block."""
        stretches = list(self._stretches(start, stop))
        copied = sum(high - low for index, low, high in stretches if self.source.segments[index].fill is not None)
        # What the store copies lies elsewhere, and is of ours all the same. Pages that nobody touches take no memory.
        held = stop - start if self.store.capabilities.copies_bodies else 0
        with self.pool.lease(copied + held) as lease:
            body: list[memoryview] = []
            crc = used = 0
            for index, low, high in stretches:
                segment = self.source.segments[index]
                if segment.fill is not None:
                    view = lease[used : used + high - low]
                    used += high - low
                    segment.fill(low, view)
                elif segment.table_of:
                    view = self._table(segment)[low:high]
                else:
                    assert segment.data is not None
                    view = segment.data[low:high]
                body.append(view)
                crc = combine(crc, self._checksum(index, low, view), high - low)
            yield body, crc

    def _stretches(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where `[start, stop)` of the object meets its segments: (index, from, to) within the segment."""
        index = bisect_right(self._ends, start)
        while start < stop:
            end = self._ends[index]
            base = end - self.source.segments[index].nbytes
            if end > start:
                yield index, start - base, min(end, stop) - base
                start = min(end, stop)
            index += 1

    def _checksum(self, index: int, low: int, view: memoryview) -> int:
        """CRC32C of a stretch, noting that of each block or piece of a block on the way."""
        block = self.source.segments[index].block_nbytes
        if not block:
            return crc32c(view)
        total = position = 0
        noted = []
        while position < len(view):
            at = low + position
            size = min(block - at % block, len(view) - position)
            crc = crc32c(view[position : position + size])
            noted.append((at, size, crc))
            total = combine(total, crc, size)
            position += size
        with self._lock:
            self._pieces[index] += noted
        return total

    def _table(self, segment: Segment) -> memoryview:
        crcs = [crc for index in segment.table_of for crc in self._fold_blocks(index)]
        return memoryview(struct.pack(f"<{len(crcs)}I", *crcs))

    def _fold_blocks(self, index: int) -> list[int]:
        segment = self.source.segments[index]
        if not segment.block_nbytes:
            return []
        crcs = [0] * -(-segment.nbytes // segment.block_nbytes)
        for at, size, crc in sorted(self._pieces[index]):
            block = at // segment.block_nbytes
            crcs[block] = combine(crcs[block], crc, size)
        return crcs
