"""Saved chunks that can be read in part, and dequantization of elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.slicing import Box, Runs, blocks_of, contiguous_strides, slice_runs

_PIECE = 1 << 16
"""Elements that are computed in one step, so that a step needs little memory in addition to the bytes in flight."""

# https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, 5.3.3
_FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@dataclass(frozen=True)
class SavedChunk:
    """A saved chunk whose raw elements can be read: their start in the object, and their layout."""

    payload_start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""
    storage_offset: int = 0

    @classmethod
    def of(cls, info: ItemInfo, dtype: torch.dtype, shape: tuple[int, ...]) -> SavedChunk | None:
        """Return the chunk of an item's raw elements; None if the metadata does not contain their location."""
        if info.payload_offset is None or info.payload_nbytes is None or info.transform_descriptors:
            return None
        _, stored = cls.stored(((0,) * len(shape), shape))
        if math.prod(stored) * dtype.itemsize != info.payload_nbytes:
            return None
        start = info.offset + info.payload_offset
        return cls(start, info.payload_nbytes, dtype, shape, contiguous_strides(stored))

    @staticmethod
    def stored(box: Box) -> Box:
        """Return a box of the chunk in units of stored elements, rounded outwards."""
        return box

    @property
    def in_c_order(self) -> bool:
        steps = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return self.storage_offset == 0 and all(size == 1 or stride == step for size, stride, step in steps)

    def runs(self, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Runs:
        itemsize, origin = self.dtype.itemsize, self.storage_offset
        box = self.stored((offsets, lengths))
        return slice_runs(self.shape, *box, itemsize, strides=self.strides, storage_offset=origin)

    def fill(self, target: torch.Tensor, raw: torch.Tensor, box: Box) -> None:
        """Fill a tensor with the elements of a box from the bytes in `raw`."""
        if raw.data_ptr() % self.dtype.itemsize:
            raw = raw.clone()
        target.copy_(raw.view(self.dtype).as_strided(box[1], self.strides))


class Fp4Chunk(SavedChunk):
    """A saved chunk of 4-bit floats. A byte holds two neighbours in the last dimension, whose size is even."""

    @staticmethod
    def stored(box: Box) -> Box:
        return blocks_of(box, (*(1,) * (len(box[0]) - 1), 2))

    def fill(self, target: torch.Tensor, raw: torch.Tensor, box: Box) -> None:
        _unpack_fp4(target, raw.as_strided(self.stored(box)[1], self.strides), odd=box[0][-1] % 2)


def multiply(target: torch.Tensor, scales: torch.Tensor, offsets: Sequence[int], block: Sequence[int]) -> None:
    """Multiply the elements of a box, at `offsets` in the tensor, by the scales of their blocks, rounding once."""
    scales = scales.float()
    for at, part in _pieces(target, tuple(offsets)):
        factors = scales
        # Expand the last dimension first, because later copies of whole rows are cheap.
        for axis in reversed(range(part.dim())):
            start, size, step = at[axis], part.shape[axis], block[axis]
            first, stop = start // step, -(-(start + size) // step)
            factors = factors.narrow(axis, first - offsets[axis] // step, stop - first)
            if step > 1:
                factors = factors.repeat_interleave(step, axis).narrow(axis, start - first * step, size)
        part.mul_(factors.to(part.device))


def _unpack_fp4(target: torch.Tensor, packed: torch.Tensor, odd: int) -> None:
    """Fill a tensor with 4-bit floats, two in a byte, the first in the low bits. `odd`: 1 to skip the first float."""
    # One lookup of 8 bytes returns both values of a byte.
    pairs = [[low, high] for high in _FP4 for low in _FP4]
    table = torch.tensor(pairs, dtype=torch.float32, device="cpu").view(torch.int64).flatten()
    for at, part in _pieces(target, (*(0,) * (target.dim() - 1), odd)):
        box = blocks_of((at, tuple(part.shape)), (*(1,) * (part.dim() - 1), 2))
        some = packed[tuple(slice(start, start + size) for start, size in zip(*box, strict=True))]
        values = table.index_select(0, some.flatten().int()).reshape(some.shape).view(torch.float32)
        part.copy_(values.narrow(-1, at[-1] % 2, part.shape[-1]))


def _pieces(tensor: torch.Tensor, offsets: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Cut a tensor that begins at `offsets` into pieces; yield the offsets of each piece, and the piece."""
    if tensor.numel() <= _PIECE:
        yield offsets, tensor
        return
    axis = max(range(tensor.dim()), key=lambda axis: tensor.shape[axis])
    half = tensor.shape[axis] // 2
    after = (*offsets[:axis], offsets[axis] + half, *offsets[axis + 1 :])
    yield from _pieces(tensor.narrow(axis, 0, half), offsets)
    yield from _pieces(tensor.narrow(axis, half, tensor.shape[axis] - half), after)
