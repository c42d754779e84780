"""Reader of the target's bytes just before they are sent: of one payload, or of a whole tensor from its chunks.

The bytes are also compared with the source's checksums. Buffers are leased within a budget. A range of a tensor's bytes
is divided into boxes, along the tensor's chunks. The bytes of an element are the innermost dimension, so that a range
may begin within an element. Each box is one contiguous range of the tensor, and its overlap with a chunk is one
contiguous range of the chunk.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.checkpoint.open import REMEDY
from bucketpoint.convert.source import Decoded, Held, Payload, Source, SourceBytes, Stretch, exclude_option
from bucketpoint.errors import CorruptDataError, MismatchError
from bucketpoint.format.metadata.coverage import uncovered
from bucketpoint.format.tensor_bytes import copy_stretch
from bucketpoint.transfer import BufferPool, Segment
from bucketpoint.transfer.checksum import CrcAccumulator


@dataclass(frozen=True)
class Box:
    """A box: offset and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.sizes)

    def within(self, other: Box) -> Box:
        """Return the same box with offsets relative to `other`, a box that contains it."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)


def cut(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the bytes `[start, stop)` of a tensor in C order, as boxes. `shape` ends with the bytes of an element."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
        return
    row = prod(shape[1:])
    low, high = -(-start // row), stop // row
    if low > high:
        yield from _in_row(shape, high, start - high * row, stop - high * row)
        return
    if start < low * row:
        yield from _in_row(shape, low - 1, start - (low - 1) * row, row)
    if low < high:
        yield Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))
    if stop > high * row:
        yield from _in_row(shape, high, 0, stop - high * row)


def _in_row(shape: Sequence[int], number: int, start: int, stop: int) -> Iterator[Box]:
    for box in cut(shape[1:], start, stop):
        yield Box((number, *box.offsets), (1, *box.sizes))


def shared(box: Box, other: Box) -> Box | None:
    """Return the overlap of two boxes, or None."""
    offsets, sizes = [], []
    for low, size, other_low, other_size in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True):
        start, stop = max(low, other_low), min(low + size, other_low + other_size)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes))


def stretch_start(shape: Sequence[int], box: Box) -> int:
    """Return the offset of a box's first byte in a tensor or chunk of this shape, in C order."""
    start = 0
    for size, offset in zip(shape, box.offsets, strict=True):
        start = start * size + offset
    return start


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


@dataclass(frozen=True)
class WholeTensor:
    """A tensor and its chunks. The last dimension of a chunk's box is the bytes of an element."""

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, Payload], ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def segment(self, filling: Filling) -> Segment:
        """Return the whole tensor as a segment of an object to be written."""
        return filling.whole(self.shape, self.dtype.itemsize, self.chunks)


def whole_tensors(source: Source, without: Collection[str] = ()) -> list[WholeTensor]:
    """Return the tensors of a source, sorted by their positions in the source.

    Raises:
        MismatchError: a tensor is not covered by its chunks, or not stored as plain elements.
    """
    faults = dict(uncovered(source.metadata, {}))
    tensors = [
        _whole(source, fqn, entry, faults.get(fqn))
        for fqn, entry in source.metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and fqn not in without
    ]
    return sorted(tensors, key=lambda tensor: min(payload.place for _, payload in tensor.chunks))


def _whole(source: Source, fqn: str, entry: TensorStorageMetadata, fault: str | None) -> WholeTensor:
    itemsize, shape = entry.properties.dtype.itemsize, tuple(entry.size)
    chunks = []
    for chunk in entry.chunks:
        payload = source.payloads[MetadataIndex(fqn, chunk.offsets)]
        if payload.opaque:
            raise MismatchError(
                "The tensor cannot be converted, because it is sparse, quantised or of a tensor subclass",
                key=fqn,
                remedy=f"Leave it out with {exclude_option(fqn)}, or convert to bucketpoint, which keeps it",
            )
        chunks.append((Box((*chunk.offsets, 0), (*chunk.sizes, itemsize)), payload))
    if not chunks or fault is not None:
        raise MismatchError(
            f"The tensor {fault or 'has no chunk'}, so it can be converted only to bucketpoint",
            key=fqn,
            remedy=f"Leave it out with {exclude_option(fqn)}, or convert to bucketpoint",
        )
    return WholeTensor(fqn, entry.properties.dtype, shape, tuple(chunks))
