"""Division of a range of a tensor's bytes into boxes, and of boxes along the tensor's chunks.

The bytes of an element are the innermost dimension, so that a range may begin within an element. Each box is one
contiguous range of the tensor, and its overlap with a chunk is one contiguous range of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


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
