"""Cutting a stretch of a tensor's bytes into boxes, and boxes along the chunks of the tensor. Pure arithmetic.

Bytes are the innermost dimension, so that a stretch may begin within an element. In this way every box is one stretch
of the tensor, and what it shares with a chunk is one stretch of that chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """Where it begins, and how far it reaches, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.sizes)

    def within(self, other: Box) -> Box:
        """The same, counted from the beginning of a box that it lies in."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)


def cut(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Bytes `[start, stop)` of a tensor in C order, as boxes one after another.

    Args:
        shape: its last dimension counts bytes.
    """
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


def shared(one: Box, other: Box) -> Box | None:
    """What two boxes have in common."""
    offsets, sizes = [], []
    for low, size, other_low, other_size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True):
        start, stop = max(low, other_low), min(low + size, other_low + other_size)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes))


def stretch_start(shape: Sequence[int], box: Box) -> int:
    """The first byte of a box in a tensor or chunk of this shape, in C order."""
    start = 0
    for size, offset in zip(shape, box.offsets, strict=True):
        start = start * size + offset
    return start


def covers(shape: Sequence[int], chunks: Sequence[Box]) -> bool:
    """Whether chunks that lie within the tensor fill it, each byte once. `shape` and chunks count alike.

    By volume, and by no two overlapping: compared are those only whose first dimensions meet.
    """
    if sum(chunk.nbytes for chunk in chunks) != prod(shape):
        return False
    waiting: list[Box] = []
    for chunk in sorted((chunk for chunk in chunks if chunk.nbytes), key=lambda chunk: chunk.offsets):
        waiting = [one for one in waiting if one.offsets[0] + one.sizes[0] > chunk.offsets[0]]
        if any(shared(one, chunk) for one in waiting):
            return False
        waiting.append(chunk)
    return True
