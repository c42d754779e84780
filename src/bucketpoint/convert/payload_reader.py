"""Reader of the target's bytes just before they are sent: of one payload, or of a whole tensor from its chunks.

The bytes are also compared with the source's checksums. Buffers are leased within a budget. The bytes that a chunk has
of a range of a tensor are one range of the chunk, which is divided into boxes where its place in the tensor is not
contiguous. The bytes of an element are the innermost dimension, so that a range may begin within an element.
"""

from __future__ import annotations

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
from bucketpoint.format.tensor_bytes import Box, contiguous_strides, copy_stretch
from bucketpoint.transfer import BufferPool, Segment
from bucketpoint.transfer.checksum import CrcAccumulator


def cut(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, ...]]:
    """Divide the bytes `[start, stop)` of a chunk in C order into boxes, and yield the sizes of each, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (stop - start,)
        return
    row = prod(shape[1:])
    low, high = -(-start // row), stop // row
    if low > high:
        yield from _in_row(shape, start - high * row, stop - high * row)
        return
    if start < low * row:
        yield from _in_row(shape, start - (low - 1) * row, row)
    if low < high:
        yield (high - low, *shape[1:])
    if stop > high * row:
        yield from _in_row(shape, 0, stop - high * row)


def _in_row(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, ...]]:
    for sizes in cut(shape[1:], start, stop):
        yield (1, *sizes)


def _bytes_before(strides: Sequence[int], chunk: Box, at: int) -> int:
    """Return the number of bytes of a chunk before byte `at` of its tensor, in C order."""
    before = 0
    for stride, offset, size, step in zip(strides, *chunk, contiguous_strides(chunk[1]), strict=True):
        index, at = divmod(at, stride)
        before += min(max(index - offset, 0), size) * step
        if not offset <= index < offset + size:
            break
    return before


def _position(strides: Sequence[int], chunk: Box, number: int) -> int:
    """Return the offset in the tensor of byte `number` of a chunk, in C order."""
    position = 0
    for stride, offset, step in zip(strides, chunk[0], contiguous_strides(chunk[1]), strict=True):
        index, number = divmod(number, step)
        position += (offset + index) * stride
    return position


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

    def whole(self, tensor: WholeTensor) -> Segment:
        """Return a whole tensor in C order as a segment."""
        chunks = tensor.chunks
        if len(chunks) == 1:
            return self.segment(chunks[0][1])
        strides = contiguous_strides((*tensor.shape, tensor.dtype.itemsize))
        return Segment(tensor.nbytes, fill=lambda start, out: self._gather(strides, chunks, start, out))

    def fill(self, payload: Payload, start: int, out: memoryview) -> None:
        """Read the bytes `[start, start + len(out))` of a payload into `out`."""
        if isinstance(payload, Stretch):
            self._source.read(payload.key, payload.start + start, out)
            self._compare(payload, start, out)
        elif isinstance(payload, Decoded):
            copy_stretch(self._tensor(payload), start, out)
        else:
            out[:] = payload.data[start : start + len(out)]

    def _gather(
        self, strides: Sequence[int], chunks: Sequence[tuple[Box, Payload]], start: int, out: memoryview
    ) -> None:
        """Fill `out` with a tensor's bytes from `start` on. The needed bytes of each chunk are one range of it."""
        stop, target = start + len(out), torch.frombuffer(out, dtype=torch.uint8)
        for chunk, payload in chunks:
            low, rows = chunk[0][0], chunk[1][0]
            if not payload.nbytes or low * strides[0] >= stop or (low + rows) * strides[0] <= start:
                continue
            first, last = (_bytes_before(strides, chunk, at) for at in (start, stop))
            if first == last:
                continue
            begin, end = (_position(strides, chunk, number) - start for number in (first, last - 1))
            if end - begin == last - 1 - first:
                self.fill(payload, first, out[begin : end + 1])
                continue
            with self.pool.lease(last - first) as lease:
                self.fill(payload, first, lease)
                done = 0
                for sizes in cut(chunk[1], first, last):
                    part = torch.frombuffer(lease, dtype=torch.uint8, offset=done, count=prod(sizes)).view(sizes)
                    place = _position(strides, chunk, first + done) - start
                    target.as_strided(sizes, strides, place).copy_(part)
                    done += part.numel()

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
        return prod(self.shape) * self.dtype.itemsize


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
        chunks.append((((*chunk.offsets, 0), (*chunk.sizes, itemsize)), payload))
    if not chunks or fault is not None:
        raise MismatchError(
            f"The tensor {fault or 'has no chunk'}, so it can be converted only to bucketpoint",
            key=fqn,
            remedy=f"Leave it out with {exclude_option(fqn)}, or convert to bucketpoint",
        )
    return WholeTensor(fqn, entry.properties.dtype, shape, tuple(chunks))
