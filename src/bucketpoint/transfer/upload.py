"""Uploads of objects of known size. Parts are sent from the caller's memory and checksummed once.

The node's copy (`NodeCopy`) gets the bytes after the upload.
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
from bucketpoint.stores.node_copy import CopiedObject, NodeFolder
from bucketpoint.transfer.checksum import BLOCK_BYTES, DIGEST_BYTES, CrcAccumulator, block_digest, combine, crc32c, fold
from bucketpoint.transfer.options import MIB, Meter, TransferOptions
from bucketpoint.transfer.pieces import PartPlan, abort, common_part_bytes, complete, plan_parts
from bucketpoint.transfer.tasks import BufferPool, TaskGroup

Fill = Callable[[int, memoryview], None]
"""`fill(start, out)` writes bytes `[start, start + len(out))` of a segment into `out`. Called from several threads."""


@dataclass(frozen=True)
class Segment:
    """A byte range of an object: bytes in memory (`data`), bytes produced on demand (`fill`), or a table.

    Attributes:
        late: True if `fill` may be called only after all bytes before the segment have been read. Only other late
            segments and tables may follow.
        block_nbytes: size of the blocks whose CRC32C are computed; 0 for none.
        table_of: numbers of earlier segments. This segment is the table of the CRC32C of their blocks, 4 bytes each,
            little-endian. Only other tables may follow.
        digest_seed: seed of the segment's digest; None to compute no digest. With a digest, `fill` produces a block
            twice if the end of a part divides it.
        digests_of: numbers of earlier segments. This segment holds their digests, followed by `data`. Only other tables
            may follow.
    """

    nbytes: int
    data: memoryview | None = None
    fill: Fill | None = None
    late: bool = False
    block_nbytes: int = 0
    table_of: Sequence[int] = ()
    digest_seed: bytes | None = None
    digests_of: Sequence[int] = ()

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes `[start, stop)` of a segment that is no table. Bytes of `fill` are in new memory."""
        if self.fill is None:
            assert self.data is not None
            return self.data[start:stop]
        out = memoryview(bytearray(stop - start))
        self.fill(start, out)
        return out


@dataclass(frozen=True)
class ObjectSource:
    """One object to write: its key and its segments."""

    key: str
    segments: Sequence[Segment]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)


@dataclass(frozen=True)
class Uploaded:
    """An uploaded object as the store acknowledged it, with the checksums and digests computed during the upload.

    Attributes:
        block_crcs: for each segment the CRC32C of each block.
        digests: for each segment its digest; None without a `digest_seed`.
    """

    info: ObjectInfo
    block_crcs: Sequence[Sequence[int]]
    digests: Sequence[bytes | None]


def upload_objects(
    store: Store,
    sources: Sequence[ObjectSource],
    options: TransferOptions,
    *,
    pool: BufferPool,
    meter: Meter,
    acknowledged: Callable[[int, Uploaded], None] = lambda number, uploaded: None,
    begun: Callable[[str, str], None] = lambda key, upload_id: None,
    ending: Callable[[], None] = lambda: None,
) -> list[Uploaded]:
    """Upload all objects, with the parts of all of them in parallel, and return once the store has acknowledged each.

    On the first error, parts not yet begun are dropped, running parts are waited for, and all open multipart uploads
    are aborted before the error is raised. So no upload stays open, to be billed or completed by accident.

    Args:
        acknowledged: called from several threads with the number and the result of each acknowledged object.
        begun: called from several threads with the key and the id of each multipart upload, before a part is sent.
        ending: called from several threads before the request that makes an object visible. Raises to prevent it.
    """
    part_bytes = common_part_bytes([source.nbytes for source in sources], options)
    jobs = [
        _ObjectUpload(
            store, source, options, part_bytes, pool, meter, functools.partial(acknowledged, number), begun, ending
        )
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
    """Upload of one object: `planned -> sending -> complete`, or aborted."""

    store: Store
    source: ObjectSource
    options: TransferOptions
    part_bytes: int
    pool: BufferPool
    meter: Meter
    acknowledged: Callable[[Uploaded], None]
    begun: Callable[[str, str], None]
    ending: Callable[[], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _upload_id: str | None = None
    _info: ObjectInfo | None = None

    def __post_init__(self) -> None:
        segments = self.source.segments
        self._ends = list(accumulate(segment.nbytes for segment in segments))
        self._nbytes = self._ends[-1] if segments else 0
        self._parts: dict[int, Part] = {}
        self._crcs = [CrcAccumulator(segment.nbytes) for segment in segments]
        # One slot per block: threads write to different slots, so they need no lock.
        self._block_digests = {
            index: bytearray(DIGEST_BYTES * -(-segment.nbytes // BLOCK_BYTES))
            for index, segment in enumerate(segments)
            if segment.digest_seed is not None
        }
        self._checksummed = 0

    def start(self, group: TaskGroup) -> None:
        limits = self.store.capabilities
        if not limits.multipart or self._nbytes <= min(self.options.single_put_bytes, limits.max_put_bytes):
            group.start(self._put)
            return
        copied = any(segment.fill is not None for segment in self.source.segments)
        # Parts that need a leased buffer are kept small, so that every connection gets a buffer within the budget.
        size = min(self.part_bytes, self.options.lease_bytes) if copied else self.part_bytes
        if limits.copies_bodies:
            size = min(size, self.options.copied_part_bytes)
        plan = plan_parts(self._nbytes, size, limits)
        group.start(lambda: self._create(group, plan))

    def result(self) -> Uploaded:
        if self._info is None:
            raise BucketpointError("An upload ended without an acknowledgement", key=self.source.key)
        numbers = range(len(self.source.segments))
        return Uploaded(self._info, list(map(self._block_crcs, numbers)), list(map(self._digest, numbers)))

    def abort(self) -> None:
        if self._info is None:
            abort(self.store, self.source.key, self._upload_id)

    def _put(self) -> None:
        with self._body(0, self._nbytes) as (body, crc):
            self.ending()
            self._info = self.store.put(self.source.key, body, crc32c=crc)
        self.meter.add(self._nbytes)
        self.acknowledged(self.result())

    def _create(self, group: TaskGroup, plan: PartPlan) -> None:
        self._upload_id = self.store.create_multipart(self.source.key)
        self.begun(self.source.key, self._upload_id)
        self.meter.add(0)
        for number in range(1, max(self._before_tables(plan), 1) + 1):
            group.start(lambda number=number: self._send(group, plan, number))  # type: ignore[misc]

    def _before_tables(self, plan: PartPlan) -> int:
        """Return the number of parts that contain no bytes of a table or of a late segment."""
        tables = sum(
            segment.nbytes for segment in self.source.segments if segment.table_of or segment.digests_of or segment.late
        )
        return (self._nbytes - tables) // plan.part_bytes if tables else plan.count

    def _start_next(self, group: TaskGroup, plan: PartPlan) -> None:
        """Start the next part with a table or a late segment, once the parts before it have been read and checksummed.

        Called once for each part, after its body was prepared.
        """
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
            self.ending()
            parts = self._parts.values()
            self._info = complete(self.store, self.source.key, self._upload_id, parts, nbytes=self._nbytes)
            self.meter.add(0)
            self.acknowledged(self.result())

    @contextlib.contextmanager
    def _body(self, start: int, stop: int) -> Iterator[tuple[list[memoryview], int]]:
        """Yield the buffers with bytes `[start, stop)`, valid within the `with` block, and their CRC32C."""
        stretches = list(self._stretches(start, stop))
        copied = sum(high - low for index, low, high in stretches if self.source.segments[index].fill is not None)
        # The lease also counts the copy that the store's client makes elsewhere. Its pages for that copy are never
        # touched, so they take no memory.
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
                    crcs = [crc for index in segment.table_of for crc in self._block_crcs(index)]
                    view = memoryview(struct.pack(f"<{len(crcs)}I", *crcs))[low:high]
                elif segment.digests_of:
                    digests = [self._digest(index) or b"" for index in segment.digests_of]
                    view = memoryview(b"".join([*digests, segment.data or b""]))[low:high]
                else:
                    view = segment.read(low, high)
                body.append(view)
                crc = combine(crc, self._checksum(index, low, view), high - low)
            yield body, crc

    def _stretches(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield bytes `[start, stop)` of the object as ranges of segments: (segment's index, start, stop)."""
        index = bisect_right(self._ends, start)
        while start < stop:
            end = self._ends[index]
            base = end - self.source.segments[index].nbytes
            if end > start:
                yield index, start - base, min(end, stop) - base
                start = min(end, stop)
            index += 1

    def _checksum(self, index: int, low: int, view: memoryview) -> int:
        """Return the CRC32C of a range of a segment, and record the checksums and digests of its blocks."""
        segment = self.source.segments[index]
        digested = segment.digest_seed is not None
        if not segment.block_nbytes and not digested:
            return crc32c(view)
        block, high = segment.block_nbytes or segment.nbytes, low + len(view)
        position = low
        while position < high:
            stop = min(position + block - position % block, high)
            if digested:
                # Also cut at the digest's blocks, so that each is digested while it is in the CPU cache.
                stop = min(stop, position + BLOCK_BYTES - position % BLOCK_BYTES)
            self._crcs[index].take(position, view[position - low : stop - low])
            if digested and position % BLOCK_BYTES == 0:
                self._digest_block(index, position, view[position - low :])
            position = stop
        return self._crcs[index].between(low, high)

    def _digest_block(self, index: int, start: int, view: memoryview) -> None:
        """Record the digest of the block at `start`. `view` holds the bytes from `start` to the end of the part."""
        segment = self.source.segments[index]
        nbytes = min(BLOCK_BYTES, segment.nbytes - start)
        if len(view) < nbytes:
            # The block ends in the next part, whose view lacks the beginning of the block.
            view = segment.read(start, start + nbytes)
        slot = start // BLOCK_BYTES * DIGEST_BYTES
        self._block_digests[index][slot : slot + DIGEST_BYTES] = block_digest(view[:nbytes])

    def _digest(self, index: int) -> bytes | None:
        blocks = self._block_digests.get(index)
        if blocks is None:
            return None
        segment = self.source.segments[index]
        return fold(segment.digest_seed or b"", segment.nbytes, blocks)

    def _block_crcs(self, index: int) -> list[int]:
        nbytes, block = self.source.segments[index].nbytes, self.source.segments[index].block_nbytes
        starts = range(0, nbytes, block) if block else ()
        return [self._crcs[index].between(start, min(start + block, nbytes)) for start in starts]


_NODE_COPY_NICE = 19


def keep_uploaded(
    store: Store, sources: Sequence[ObjectSource], uploaded: Sequence[Uploaded], options: TransferOptions
) -> None:
    """Store the bytes of uploaded objects in the node's copy, on a thread of the lowest priority."""
    if options.node_copy is None:
        return
    folder = NodeFolder(options.node_copy.path, options.node_copy.max_bytes)
    with TaskGroup(1, name="bucketpoint-node-copy", nice=_NODE_COPY_NICE) as group:
        for source, done in zip(sources, uploaded, strict=True):
            if done.info.etag is not None:
                of = CopiedObject(store.identity, source.key, done.info.etag)
                group.start(functools.partial(folder.put, of, 0, _bytes_of(source, done), source.nbytes))


def _bytes_of(source: ObjectSource, uploaded: Uploaded) -> Iterator[memoryview]:
    for segment in source.segments:
        if segment.fill is not None:
            for start in range(0, segment.nbytes, MIB):
                yield segment.read(start, min(start + MIB, segment.nbytes))
        elif segment.table_of:
            crcs = [crc for index in segment.table_of for crc in uploaded.block_crcs[index]]
            yield memoryview(struct.pack(f"<{len(crcs)}I", *crcs))
        else:
            for index in segment.digests_of:
                yield memoryview(uploaded.digests[index] or b"")
            yield segment.data or memoryview(b"")
