"""Reader of the target's bytes just before they are sent: of one payload, or of a whole tensor from its chunks.

The bytes are also compared with the source's checksums. Buffers are leased within a budget.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import torch

from bucketpoint.checkpoint.objects import REMEDY
from bucketpoint.convert.nd_boxes import Box, cut, shared, stretch_start
from bucketpoint.convert.source import Decoded, Held, Payload, Stretch
from bucketpoint.convert.source_reader import SourceBytes
from bucketpoint.errors import CorruptDataError
from bucketpoint.format.tensor_bytes import copy_stretch
from bucketpoint.transfer import BufferPool, Segment
from bucketpoint.transfer.checksum import CrcAccumulator


class Filling:
    """Reader of the bytes of a conversion, safe to use from several threads.

    Args:
        lease_bytes: limit on the buffers for chunks whose bytes have to be rearranged.
    """

    def __init__(self, source: SourceBytes, lease_bytes: int) -> None:
        self.pool = BufferPool(lease_bytes)
        self.checked_bytes = 0
        """Bytes of stretches that were read whole and matched the checksum that their writer recorded."""
        self._source = source
        self._lock = threading.Lock()
        self._seen: dict[Stretch, CrcAccumulator] = {}
        self._decoding = threading.Lock()
        self._decoded: tuple[Decoded, torch.Tensor] | None = None

    def segment(self, payload: Payload) -> Segment:
        """Return a payload as a segment of an object to be written."""
        if isinstance(payload, Held):
            return Segment(payload.nbytes, memoryview(payload.data))
        return Segment(payload.nbytes, fill=lambda start, out: self.fill(payload, start, out))

    def whole(self, shape: Sequence[int], itemsize: int, chunks: Sequence[tuple[Box, Payload]]) -> Segment:
        """Return a whole tensor in C order as a segment. The last dimension of a chunk's box is an element's bytes."""
        if len(chunks) == 1:
            return self.segment(chunks[0][1])
        counted, ordered = (*shape, itemsize), sorted(chunks, key=lambda chunk: chunk[0].offsets)
        if all(tuple(box.sizes[1:]) == counted[1:] for box, _ in ordered):
            return Segment(prod(counted), fill=lambda start, out: self._chain(ordered, start, out))
        return Segment(prod(counted), fill=lambda start, out: self._gather(counted, ordered, start, out))

    def fill(self, payload: Payload, start: int, out: memoryview) -> None:
        """Read the bytes `[start, start + len(out))` of a payload into `out`."""
        if isinstance(payload, Stretch):
            self._source.read(payload.key, payload.start + start, out)
            self._compare(payload, start, out)
        elif isinstance(payload, Decoded):
            copy_stretch(self._tensor(payload), start, out)
        else:
            out[:] = payload.data[start : start + len(out)]

    def _chain(self, chunks: Sequence[tuple[Box, Payload]], start: int, out: memoryview) -> None:
        """Fill `out` from chunks of whole rows, whose bytes follow each other."""
        for place, payload in chunks:
            first = place.offsets[0] * prod(place.sizes[1:])
            low, high = max(first, start), min(first + payload.nbytes, start + len(out))
            if low < high:
                self.fill(payload, low - first, out[low - start : high - start])

    def _gather(self, shape: Sequence[int], chunks: Sequence[tuple[Box, Payload]], start: int, out: memoryview) -> None:
        done = 0
        for box in cut(shape, start, start + len(out)):
            view = out[done : done + box.nbytes]
            done += box.nbytes
            low, high = box.offsets[0], box.offsets[0] + box.sizes[0]
            for place, payload in chunks:
                if place.offsets[0] >= high:
                    break
                if place.offsets[0] + place.sizes[0] > low:
                    common = shared(box, place)
                    if common is not None:
                        self._put(box, view, place, payload, common)

    def _put(self, box: Box, view: memoryview, place: Box, payload: Payload, common: Box) -> None:
        """Read the overlap `common` of a box and a chunk, and copy it to its place in `view`, the bytes of the box."""
        start = stretch_start(place.sizes, common.within(place))
        target = torch.frombuffer(view, dtype=torch.uint8).view(box.sizes)
        inside = common.within(box)
        for axis, (offset, size) in enumerate(zip(inside.offsets, inside.sizes, strict=True)):
            target = target.narrow(axis, offset, size)
        if target.is_contiguous():
            at = stretch_start(box.sizes, inside)
            self.fill(payload, start, view[at : at + common.nbytes])
            return
        with self.pool.lease(common.nbytes) as lease:
            self.fill(payload, start, lease)
            target.copy_(torch.frombuffer(lease, dtype=torch.uint8).view(common.sizes))

    def _tensor(self, payload: Decoded) -> torch.Tensor:
        # Only one decoded tensor for all threads, because each may be as large as the largest of the checkpoint.
        with self._decoding:
            if self._decoded is None or self._decoded[0] is not payload:
                self._decoded = None
                self._decoded = payload, payload.decode()
            return self._decoded[1]

    def _compare(self, stretch: Stretch, start: int, view: memoryview) -> None:
        checksum = stretch.checksum
        if checksum is None:
            return
        with self._lock:
            seen = self._seen.setdefault(stretch, CrcAccumulator(stretch.nbytes, checksum.kind))
        if not seen.take(start, view):
            return
        with self._lock:
            if self._seen.pop(stretch, None) is seen:
                self.checked_bytes += stretch.nbytes
        if seen.total() != checksum.value:
            raise CorruptDataError(
                f"The checkpoint is damaged: {stretch.nbytes} bytes of an object, from byte "
                f"{stretch.start} on, have a different {checksum.kind.upper()} than at save",
                url=self._source.store.url,
                key=stretch.key,
                remedy=REMEDY,
            )
