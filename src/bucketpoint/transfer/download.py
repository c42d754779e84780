"""Extents come down: neighbours in an object coalesced into one request, received in place or through leased memory.

Knows byte ranges, checksums and stores; what the bytes mean is the business of `format` and `dcp`.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bucketpoint.errors import CorruptDataError
from bucketpoint.transfer.budget import BufferPool
from bucketpoint.transfer.checksum import combine, crc32c
from bucketpoint.transfer.hedge import Reads
from bucketpoint.transfer.options import TransferOptions
from bucketpoint.transfer.progress import Meter
from bucketpoint.transfer.retry import retry_transient

SMALL_EXTENT_BYTES = 64 << 10
"""Direct extents below this are copied out of a leased buffer instead: a socket read for each would cost more."""


@dataclass(frozen=True)
class Block:
    """An expected checksum: the next `nbytes` of an extent have this CRC32C."""

    nbytes: int
    crc32c: int


class Whole:
    """An expected checksum of what several extents make up. They come in any order, from any thread."""

    def __init__(self, nbytes: int, crc32c: int) -> None:
        self.nbytes = nbytes
        self.crc32c = crc32c
        self._lock = threading.Lock()
        self._parts: dict[int, tuple[int, int]] = {}

    def found(self, start: int, nbytes: int, crc: int) -> int | None:
        """Take in the checksum of one extent; that of the whole, once all have come."""
        with self._lock:
            self._parts[start] = nbytes, crc
            if sum(size for size, _ in self._parts.values()) < self.nbytes:
                return None
            total = 0
            for _, (size, part) in sorted(self._parts.items()):
                total = combine(total, part, size)
            return total


@dataclass(frozen=True)
class Extent:
    """Bytes `[start, stop)` of the object at `key`, and where they go.

    Attributes:
        blocks: expected checksums that cover the extent from its first byte on; empty for none.
        part_of: what the extent is checked as a part of, where it has no blocks. The last part to come raises.
        direct: memory of the caller that receives the bytes from `direct_start` on; what lies before and after it in
            the extent is received only to verify the blocks at its borders.
        deliver: called with the extent's bytes on a worker thread once they are verified, unless `direct` is given,
            then with None. The view is valid during the call alone.
        label: the state-dict key, for messages.
        etag: the object must still have this ETag.
        deliver_there: instead of `deliver`, for bytes that the caller holds on a device, in a form of its own. None:
            they must come through host memory.
    """

    key: str
    start: int
    stop: int
    deliver: Callable[[memoryview | None], None]
    blocks: Sequence[Block] = ()
    direct: memoryview | None = None
    direct_start: int = 0
    label: str = ""
    etag: str | None = None
    deliver_there: Callable[[Any], None] | None = None
    part_of: Whole | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass
class Request:
    """One ranged read: extents of one object in order, with gaps between them."""

    key: str
    etag: str | None
    extents: list[Extent] = field(default_factory=list)
    wanted: int = 0
    leased: int = 0

    @property
    def start(self) -> int:
        return self.extents[0].start

    @property
    def stop(self) -> int:
        return self.extents[-1].stop

    @property
    def on_device(self) -> bool:
        """Whether its bytes can go from one device to another."""
        return self.extents[0].deliver_there is not None


def plan_requests(extents: Iterable[Extent], options: TransferOptions) -> list[Request]:
    """Sort extents by object and offset, and join neighbours by the cost model.

    Two are joined if the gap costs less time than another request would, as long as what is fetched stays within
    `max_overread` of what is needed (tiny gaps are free), the request stays within a part, and what must be leased
    for it fits one connection's share of the budget.
    """
    requests: list[Request] = []
    current: Request | None = None
    for extent in sorted(extents, key=lambda extent: (extent.key, extent.start, extent.stop)):
        if current is None or not _joins(current, extent, options):
            current = Request(extent.key, extent.etag)
            requests.append(current)
        elif current.extents:
            current.leased += extent.start - current.stop
        current.extents.append(extent)
        current.wanted += extent.nbytes
        current.leased += _leased(extent)
    # The largest first: a big request begun last would be alone at the end.
    requests.sort(key=lambda request: request.start - request.stop)
    return requests


def _joins(request: Request, extent: Extent, options: TransferOptions) -> bool:
    gap = extent.start - request.stop
    if extent.key != request.key or extent.etag != request.etag or gap < 0 or gap > options.coalesce_gap_bytes:
        return False
    if (extent.deliver_there is not None) != request.on_device:
        return False
    span = extent.stop - request.start
    if span > options.part_bytes or request.leased + gap + _leased(extent) > options.lease_bytes:
        return False
    return gap <= options.free_gap_bytes or span <= options.max_overread * (request.wanted + extent.nbytes)


def _is_direct(extent: Extent) -> bool:
    return extent.direct is not None and len(extent.direct) >= SMALL_EXTENT_BYTES


def _leased(extent: Extent) -> int:
    return extent.nbytes - (len(extent.direct) if extent.direct is not None and _is_direct(extent) else 0)


def fetch_one(reads: Reads, request: Request, options: TransferOptions, pool: BufferPool, meter: Meter) -> None:
    """Run one request on the current thread: its bytes are received, verified and delivered."""
    with pool.lease(request.leased) as lease:
        buffers, pieces = _lay_out(request, lease)

        def attempt() -> None:
            reads.read_into(request.key, request.start, buffers, if_match=request.etag)
            for extent, views in zip(request.extents, pieces, strict=True):
                _verify(reads.url, extent, views)

        retry_transient(attempt, attempts=options.read_attempts)
        _hand_over(request, pieces)
    meter.add(request.stop - request.start)


class Assembly:
    """A request whose bytes come in any order, and not all of them from the store.

    Bytes are either received into the memory that `direct` or `place` names, or copied by `put`; `arrived` counts all.
    One thread fills an assembly, and any thread may finish it once it is whole.

    Args:
        url: of the store, for messages.
        take, give: where memory of our own comes from, and where it goes once the assembly is finished.
    """

    def __init__(
        self,
        url: str,
        request: Request,
        take: Callable[[int], memoryview] = lambda nbytes: memoryview(bytearray(nbytes)),
        give: Callable[[memoryview], None] = lambda view: None,
    ) -> None:
        self.request = request
        self._url = url
        self._take = take
        self._give = give
        self._lease = memoryview(b"")
        self._missing = request.stop - request.start
        self._buffers: list[tuple[int, memoryview]] = []
        self._pieces: list[list[memoryview]] = []
        direct = [extent for extent in request.extents if _is_direct(extent)]
        self._direct = [(extent.direct_start, extent.direct) for extent in direct if extent.direct is not None]
        self._direct_starts = [start for start, _ in self._direct]

    @property
    def leased(self) -> int:
        """Bytes of memory of our own that the assembly holds now."""
        return self.request.leased if self._buffers else 0

    def direct(self, start: int, stop: int) -> memoryview | None:
        """The caller's memory that bytes `[start, stop)` of the object belong into, if all of them do."""
        index = bisect.bisect_right(self._direct_starts, start) - 1
        if index < 0:
            return None
        origin, view = self._direct[index]
        return view[start - origin : stop - origin] if stop - origin <= len(view) else None

    def place(self, start: int, stop: int) -> memoryview | None:
        """Where bytes `[start, stop)` of the object belong, if that is one stretch: the caller's memory or our own."""
        origin, buffer = self._buffers[self._buffer_of(start)]
        return buffer[start - origin : stop - origin] if stop - origin <= len(buffer) else None

    def put(self, start: int, data: memoryview) -> None:
        """Copy the object's bytes from `start` on to where they belong."""
        index = self._buffer_of(start)
        while len(data):
            origin, buffer = self._buffers[index]
            room = buffer[start - origin : start - origin + len(data)]
            room[:] = data[: len(room)]
            start, data, index = start + len(room), data[len(room) :], index + 1

    def arrived(self, nbytes: int) -> bool:
        """Count bytes that are where they belong. True once none is missing."""
        self._missing -= nbytes
        assert self._missing >= 0
        return self._missing == 0

    def finish(self) -> None:
        """Verify and deliver every extent, and let go of the memory. Raises CorruptDataError."""
        if not self._buffers:
            self._open()
        for extent, views in zip(self.request.extents, self._pieces, strict=True):
            _verify(self._url, extent, views)
        _hand_over(self.request, self._pieces)
        self._buffers, self._pieces = [], []
        lease, self._lease = self._lease, memoryview(b"")
        self._give(lease)

    def _buffer_of(self, start: int) -> int:
        if not self._buffers:
            self._open()
        return bisect.bisect_right(self._buffers, start, key=lambda entry: entry[0]) - 1

    def _open(self) -> None:
        self._lease = self._take(self.request.leased)
        views, self._pieces = _lay_out(self.request, self._lease)
        position = self.request.start
        for view in views:
            self._buffers.append((position, view))
            position += len(view)


def _hand_over(request: Request, pieces: Sequence[Sequence[memoryview]]) -> None:
    for extent, views in zip(request.extents, pieces, strict=True):
        if _is_direct(extent):
            extent.deliver(None)
        elif extent.direct is not None:
            offset = extent.direct_start - extent.start
            extent.direct[:] = views[0][offset : offset + len(extent.direct)]
            extent.deliver(None)
        else:
            extent.deliver(views[0])


def _lay_out(request: Request, lease: memoryview) -> tuple[list[memoryview], list[list[memoryview]]]:
    """Buffers that receive the request from first byte to last, and for each extent the views that hold it."""
    buffers: list[memoryview] = []
    pieces: list[list[memoryview]] = []
    run_start = used = 0

    def take(nbytes: int) -> memoryview:
        nonlocal used
        view = lease[used : used + nbytes]
        used += nbytes
        return view

    def flush() -> None:
        # What was leased since the last direct buffer lies together, so it is received by one read.
        nonlocal run_start
        if used > run_start:
            buffers.append(lease[run_start:used])
        run_start = used

    position = request.start
    for extent in request.extents:
        take(extent.start - position)
        if _is_direct(extent) and extent.direct is not None:
            head = take(extent.direct_start - extent.start)
            flush()
            buffers.append(extent.direct)
            tail = take(extent.stop - extent.direct_start - len(extent.direct))
            pieces.append([head, extent.direct, tail])
        else:
            pieces.append([take(extent.nbytes)])
        position = extent.stop
    flush()
    return buffers, pieces


def _verify(url: str, extent: Extent, views: Sequence[memoryview]) -> None:
    if extent.part_of is not None:
        check_part(url, extent, extent.part_of, _crc_of(views))
    stretches = _cut(views, [block.nbytes for block in extent.blocks])
    position = extent.start
    for block, stretch in zip(extent.blocks, stretches, strict=True):
        check_block(url, extent, position, block, _crc_of(stretch))
        position += block.nbytes


def _crc_of(views: Iterable[memoryview]) -> int:
    crc = 0
    for view in views:
        crc = crc32c(view, crc)
    return crc


def check_block(url: str, extent: Extent, start: int, block: Block, found: int) -> None:
    """Raises CorruptDataError if `found` is not the CRC32C that the block from byte `start` of the object on has."""
    if found != block.crc32c:
        raise CorruptDataError(
            f"Checksum mismatch in {extent.label or 'data'}: bytes {start}-{start + block.nbytes - 1} have "
            f"CRC32C {found:08x}, and {block.crc32c:08x} was written",
            url=url,
            key=extent.key,
        )


def check_part(url: str, extent: Extent, whole: Whole, found: int) -> None:
    """Raises CorruptDataError if this extent, whose CRC32C is `found`, completes its item and that differs."""
    total = whole.found(extent.start, extent.nbytes, found)
    if total is not None and total != whole.crc32c:
        raise CorruptDataError(
            f"Checksum mismatch in {extent.label or 'data'}: its {whole.nbytes} bytes have CRC32C {total:08x}, and "
            f"{whole.crc32c:08x} was written",
            url=url,
            key=extent.key,
        )


def _cut(views: Sequence[memoryview], sizes: Sequence[int]) -> Iterator[list[memoryview]]:
    """The same bytes as `views`, cut into stretches of the given sizes."""
    index = offset = 0
    for size in sizes:
        stretch = []
        while size:
            take = min(size, len(views[index]) - offset)
            if take:
                stretch.append(views[index][offset : offset + take])
            size -= take
            offset += take
            if offset == len(views[index]):
                index, offset = index + 1, 0
        yield stretch
