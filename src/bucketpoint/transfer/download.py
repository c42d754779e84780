"""Downloads of byte ranges (extents). Neighbours share a request, and are received in place or in leased memory."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from bucketpoint.errors import BucketpointError, CorruptDataError, at_key
from bucketpoint.stores.base import crc_of
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer.checksum import CrcAccumulator
from bucketpoint.transfer.options import TransferOptions

SMALL_EXTENT_BYTES = 64 << 10
"""Extents with less `direct` memory are received in a leased buffer and copied: a socket read each would cost more."""


@dataclass(frozen=True)
class Block:
    """The expected CRC32C of the next `nbytes` of an extent."""

    nbytes: int
    crc32c: int


class Whole(CrcAccumulator):
    """The expected CRC32C of several extents together, which may arrive in any order, from any thread."""

    def __init__(self, nbytes: int, crc32c: int) -> None:
        super().__init__(nbytes)
        self.crc32c = crc32c


@dataclass(frozen=True)
class Extent:
    """Bytes `[start, stop)` of the object at `key`, with their checksums and their destination.

    Attributes:
        blocks: expected checksums of consecutive blocks, from the extent's first byte on; empty for none.
        check: for an extent without blocks, a function that raises CorruptDataError if the extent's bytes are damaged.
        part_of: for an extent without blocks, the common checksum of several extents, this one included. A mismatch is
            raised for the extent that arrives last.
        direct: memory of the caller for the object's bytes from offset `direct_start` on. The extent's bytes outside
            `direct` are received only to verify the blocks at its borders.
        deliver: called on a worker thread once the bytes are verified: with the extent's bytes, or with None if
            `direct` is given. The view is valid only during the call.
        label: the state-dict key, for messages.
        etag: ETag that the object must have.
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
    part_of: Whole | None = None
    check: Callable[[memoryview], object] | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def in_place(self) -> memoryview | None:
        """`direct` if it is large enough to be filled without a copy, else None."""
        return self.direct if self.direct is not None and len(self.direct) >= SMALL_EXTENT_BYTES else None

    @property
    def leased(self) -> int:
        """Number of bytes that are received in leased memory."""
        return self.nbytes - len(self.in_place or b"")


@dataclass
class Request:
    """One ranged read: extents of one object in order, with gaps between them.

    Attributes:
        wanted: number of bytes of the extents, without the gaps.
        leased: bytes of leased memory that the request needs, gaps included.
    """

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
    def nbytes(self) -> int:
        return self.stop - self.start


def plan_requests(extents: Iterable[Extent], options: TransferOptions) -> list[Request]:
    """Sort extents by object and offset, and join neighbours into requests.

    Neighbours are joined if `is_worth_reading` accepts the gap, the request is no larger than a part, and its leased
    memory fits one connection's share of the budget.
    """
    requests: list[Request] = []
    current: Request | None = None
    for extent in sorted(extents, key=attrgetter("key", "start", "stop")):
        if current is None or not _joins(current, extent, options):
            current = Request(extent.key, extent.etag)
            requests.append(current)
        elif current.extents:
            current.leased += extent.start - current.stop
        current.extents.append(extent)
        current.wanted += extent.nbytes
        current.leased += extent.leased
    # Largest first: a large request that starts last would run alone at the end.
    requests.sort(key=lambda request: request.start - request.stop)
    return requests


def _joins(request: Request, extent: Extent, options: TransferOptions) -> bool:
    gap = extent.start - request.stop
    if extent.key != request.key or extent.etag != request.etag or gap < 0:
        return False
    span = extent.stop - request.start
    if span > options.part_bytes or request.leased + gap + extent.leased > options.lease_bytes:
        return False
    return is_worth_reading(gap, span, request.wanted + extent.nbytes, options)


def is_worth_reading(gap: int, span: int, wanted: int, options: TransferOptions) -> bool:
    """Return True if reading a gap is cheaper than a second request.

    The joint request fetches `span` bytes, of which `wanted` are needed. The ratio is limited, except for tiny gaps.
    """
    if gap > options.coalesce_gap_bytes:
        return False
    return gap <= options.free_gap_bytes or span <= options.max_overread * wanted


def deliver(
    url: str,
    request: Request,
    lease: memoryview,
    read: Callable[[list[memoryview]], None],
    options: TransferOptions,
    verified: Callable[[list[memoryview]], None],
) -> None:
    """Receive, verify and deliver the bytes of a request.

    Args:
        lease: at least as much leased memory as the request needs.
        read: function that fills the buffers with the request's bytes. Called again after transient failures or damage.
        verified: called with the verified buffers before the bytes are delivered.
    """
    buffers, pieces = _lay_out(request, lease)

    def attempt() -> None:
        read(buffers)
        for extent, views in zip(request.extents, pieces, strict=True):
            _verify(url, extent, views)

    retry_transient(attempt, attempts=options.read_attempts)
    verified(buffers)
    _hand_over(request, pieces)


class Assembly:
    """A request whose bytes arrive in any order, from the store or from other ranks.

    Bytes are received into the memory that `direct` or `place` returns, or are copied by `put`; `arrived` counts all of
    them. One thread fills an assembly, and any thread may finish it once all bytes have arrived.

    Args:
        take: function that allocates memory for the bytes that are not received in the caller's memory.
        give: function that frees this memory once the assembly is finished.
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
        self._missing = request.nbytes
        self._buffers: list[tuple[int, memoryview]] = []
        self._pieces: list[list[memoryview]] = []
        self._direct = [(extent.direct_start, extent.in_place) for extent in request.extents if extent.in_place]
        self._direct_starts = [start for start, _ in self._direct]

    @property
    def leased(self) -> int:
        """Bytes of memory from `take` that the assembly currently holds."""
        return self.request.leased if self._buffers else 0

    def direct(self, start: int, stop: int) -> memoryview | None:
        """Return the caller's memory for bytes `[start, stop)` of the object; None unless it receives all of them."""
        index = bisect.bisect_right(self._direct_starts, start) - 1
        if index < 0:
            return None
        origin, view = self._direct[index]
        return view[start - origin : stop - origin] if stop - origin <= len(view) else None

    def place(self, start: int, stop: int) -> memoryview | None:
        """Return the memory for bytes `[start, stop)`, from the caller or `take`; None if it is not contiguous."""
        direct = self.direct(start, stop)
        if direct is not None:
            # Returned before `_buffer_of` allocates leased memory, which the request may not need.
            return direct
        origin, buffer = self._buffers[self._buffer_of(start)]
        return buffer[start - origin : stop - origin] if stop - origin <= len(buffer) else None

    def put(self, start: int, data: memoryview) -> None:
        """Copy bytes of the object, from offset `start` on, to their destination."""
        index = self._buffer_of(start)
        while len(data):
            origin, buffer = self._buffers[index]
            room = buffer[start - origin : start - origin + len(data)]
            room[:] = data[: len(room)]
            start, data, index = start + len(room), data[len(room) :], index + 1

    def arrived(self, nbytes: int) -> bool:
        """Count bytes that have reached their destination. Return True once all have."""
        self._missing -= nbytes
        assert self._missing >= 0
        return self._missing == 0

    def finish(self) -> None:
        """Verify and deliver every extent, and free the memory. Raises CorruptDataError on a mismatch."""
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
        starts = itertools.accumulate(map(len, views), initial=self.request.start)
        self._buffers.extend(zip(starts, views, strict=False))


def _hand_over(request: Request, pieces: Sequence[Sequence[memoryview]]) -> None:
    """Deliver every extent of a verified request."""
    for extent, views in zip(request.extents, pieces, strict=True):
        try:
            if extent.direct is not None and extent.in_place is None:
                offset = extent.direct_start - extent.start
                extent.direct[:] = views[0][offset : offset + len(extent.direct)]
            extent.deliver(views[0] if extent.direct is None else None)
        except BucketpointError:
            raise
        except Exception as error:
            if not extent.label:
                raise
            raise at_key(error, extent.label, "loaded") from error


def _lay_out(request: Request, lease: memoryview) -> tuple[list[memoryview], list[list[memoryview]]]:
    """Return the buffers that receive the request's bytes in order, and the views of each extent's bytes."""
    buffers: list[memoryview] = []
    pieces: list[list[memoryview]] = []
    run_start = used = 0

    def take(nbytes: int) -> memoryview:
        nonlocal used
        view = lease[used : used + nbytes]
        used += nbytes
        return view

    def flush() -> None:
        # The leased memory after the last direct buffer is contiguous, so it becomes one buffer.
        nonlocal run_start
        if used > run_start:
            buffers.append(lease[run_start:used])
        run_start = used

    position = request.start
    for extent in request.extents:
        take(extent.start - position)
        if (memory := extent.in_place) is not None:
            head = take(extent.direct_start - extent.start)
            flush()
            buffers.append(memory)
            pieces.append([head, memory, take(extent.stop - extent.direct_start - len(memory))])
        else:
            pieces.append([take(extent.nbytes)])
        position = extent.stop
    flush()
    return buffers, pieces


def _verify(url: str, extent: Extent, views: Sequence[memoryview]) -> None:
    whole = extent.part_of
    if whole is not None and whole.add(extent.start, extent.nbytes, crc_of(views, None)):
        _compare(url, extent, f"its {whole.nbytes} bytes", whole.total(), whole.crc32c)
    if extent.check is not None:
        extent.check(views[0])
    stretches = cut(views, [block.nbytes for block in extent.blocks])
    position = extent.start
    for block, stretch in zip(extent.blocks, stretches, strict=True):
        _compare(url, extent, f"bytes {position}-{position + block.nbytes - 1}", crc_of(stretch, None), block.crc32c)
        position += block.nbytes


def _compare(url: str, extent: Extent, part: str, crc: int, written: int) -> None:
    if crc != written:
        raise CorruptDataError(
            f"Checksum mismatch in {extent.label or 'data'}: {part} have CRC32C {crc:08x}, expected {written:08x}",
            url=url,
            key=extent.key,
        )


def cut(views: Sequence[memoryview], sizes: Sequence[int]) -> Iterator[list[memoryview]]:
    """Yield the bytes of `views`, cut into stretches of the given sizes."""
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
