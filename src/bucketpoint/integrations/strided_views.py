"""Geometry of strided views: the box of a saved tensor that a view covers, and overlaps of views in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from bucketpoint.integrations.boxes import SavedBox


def box_of(key: str, whole: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> SavedBox | None:
    """Return the box of the saved tensor `key` that a view covers, with the target's axes in the saved order.

    None if the view is no box: it repeats elements, leaves some out, or ends within a row. `source` is the view of
    `whole`, a contiguous tensor of the saved shape; `target` is the tensor to read into, of the view's shape.
    """
    shape, steps, left = whole.shape, whole.stride(), int(source.storage_offset())
    offsets = []
    for step in steps:
        at, left = divmod(left, step)
        offsets.append(at)
    lengths, strides = [1] * len(shape), [1] * len(shape)
    axes = [axis for axis in reversed(range(len(shape))) if shape[axis] > 1]
    for size, step, stride in _joined_axes(source, target):
        below = [axis for axis in axes if steps[axis] >= step]
        if not below or steps[below[0]] != step:
            return None
        for axis in below:
            if size == 1:
                break
            fits = offsets[axis] + size <= shape[axis]
            part = size if fits else shape[axis]
            if lengths[axis] != 1 or (not fits and (offsets[axis] or size % part)):
                return None
            lengths[axis], strides[axis] = part, stride
            size, stride = size // part, stride * part
        if size > 1:
            return None
    return SavedBox(key, tuple(offsets), target.as_strided(lengths, strides, target.storage_offset()))


def is_plain_view(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return True if the elements of a view are elements of the whole tensor, with unchanged values."""
    same = view.untyped_storage()._cdata == whole.untyped_storage()._cdata
    inside = int(view.storage_offset()) + _reach(view) <= whole.numel() or not view.numel()
    return same and inside and view.dtype == whole.dtype and not view.is_conj() and not view.is_neg()


def _joined_axes(source: torch.Tensor, target: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return size, source stride and target stride of each axis, the largest source stride first.

    Axes that form one axis in both tensors are joined.
    """
    rows = zip(source.shape, source.stride(), target.stride(), strict=True)
    joined: list[tuple[int, int, int]] = []
    for size, step, stride in sorted((row for row in rows if row[0] != 1), key=lambda row: -row[1]):
        if joined and joined[-1][1:] == (step * size, stride * size):
            joined[-1] = (joined[-1][0] * size, step, stride)
        else:
            joined.append((size, step, stride))
    return joined


# -- memory ------------------------------------------------------------------------------------------------------------

_CELL = 2 << 20
"""Bytes in a cell of addresses of `Regions`: a large tensor has few cells, and a cell has few small tensors."""


class Regions:
    """Values by region of memory. Regions are found by address, because two storages may share memory."""

    def __init__(self) -> None:
        self._cells: dict[tuple[torch.device, int], list[tuple[int, int, Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._cells)

    def add(self, tensor: torch.Tensor, value: Any, *, whole: bool = False) -> None:
        """Add a value for the memory that a tensor spans; with `whole`, for the whole storage."""
        start, stop = _ends(tensor, whole)
        for cell in range(start // _CELL, -(-stop // _CELL)):
            self._cells.setdefault((tensor.device, cell), []).append((start, stop, value))

    def find(self, tensor: torch.Tensor, *, whole: bool = False) -> Iterator[Any]:
        """Yield the values of regions that overlap the tensor's, some of them several times."""
        start, stop = _ends(tensor, whole)
        for cell in range(start // _CELL, -(-stop // _CELL)):
            for low, high, value in self._cells.get((tensor.device, cell), ()):
                if low < stop and start < high:
                    yield value

    def clear(self) -> None:
        self._cells.clear()


def _ends(tensor: torch.Tensor, whole: bool) -> tuple[int, int]:
    if whole:
        memory = tensor.untyped_storage()
        return memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    return _span(tensor) if tensor.numel() else (0, 0)


# -- copies that overlap ----------------------------------------------------------------------------------------------


def in_rounds(boxes: Sequence[SavedBox]) -> list[list[SavedBox]]:
    """Group boxes, given in the order of their copies, into successive loads: no two boxes of a load overlap.

    Of two boxes that overlap, the later one is in a later load, or replaces the earlier one if the targets are the
    same. The last group may be empty.
    """
    targets = [box.target for box in boxes]
    later: dict[int, list[int]] = {}
    hidden: set[int] = set()
    spans = []
    for number, target in enumerate(targets):
        spans.append((str(target.device), *_span(target), number))
    active: list[tuple[str, int, int, int]] = []
    for span in sorted(spans):
        active = [other for other in active if other[0] == span[0] and other[2] > span[1]]
        for other in active:
            first, second = sorted((other[3], span[3]))
            if _same(targets[first], targets[second]):
                hidden.add(first)
            elif overlap(targets[first], targets[second]):
                later.setdefault(first, []).append(second)
        active.append(span)
    rounds: dict[int, list[SavedBox]] = {0: []}
    depth = [0] * len(targets)
    for number in reversed(range(len(targets))):
        depth[number] = max((depth[other] + 1 for other in later.get(number, ())), default=0)
        if number not in hidden:
            rounds.setdefault(depth[number], []).append(boxes[number])
    return [rounds[depth] for depth in sorted(rounds, reverse=True)]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    views = [(view.data_ptr(), view.dtype, view.shape, view.stride()) for view in (one, other)]
    return views[0] == views[1]


def _span(view: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a view that is not empty, and of the byte after its last."""
    return view.data_ptr(), view.data_ptr() + _reach(view) * view.element_size()


def _reach(view: torch.Tensor) -> int:
    """Return the number of elements of memory from the first to the last of a view that is not empty."""
    return sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) + 1


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return False if two views of one memory share no byte. True may be wrong for irregular strides."""
    if not one.numel() or not other.numel():
        return False
    (start, stop), (low, high) = _span(one), _span(other)
    if stop <= low or high <= start:
        return False
    itemsize = one.element_size()
    # Axes along which the address changes. Along an expanded axis, of stride 0, it does not.
    axes = [
        [(step, size) for size, step in zip(view.shape, view.stride(), strict=True) if size > 1 and step]
        for view in (one, other)
    ]
    sizes = [dict(rows) for rows in axes]
    steps = sorted({1, *sizes[0], *sizes[1]}, reverse=True)
    nested = not any(step % below for step, below in pairwise(steps))
    if other.element_size() != itemsize or not nested:
        return True
    # In a grid with these steps every address is a cell, and a view is a box unless it extends past the end of a row.
    begin = min(one.data_ptr(), other.data_ptr())
    boxes = []
    for view, rows, size in zip((one, other), axes, sizes, strict=True):
        at, odd = divmod(view.data_ptr() - begin, itemsize)
        if odd or len(size) != len(rows):
            return True
        box = []
        for place, step in enumerate(steps):
            low, at = divmod(at, step)
            box.append((low, low + size.get(step, 1)))
            if place and box[-1][1] * step > steps[place - 1]:
                return True
        boxes.append(box)
    return all(low < stop and start < high for (low, high), (start, stop) in zip(*boxes, strict=True))
