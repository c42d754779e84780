"""Byte access to tensors: views without a copy if the layout allows, copies of a range, and positions of slices."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from bucketpoint.errors import BucketpointError

ADDRESSED_DEVICES = frozenset({"cpu", "cuda", "xpu"})
"""Device types whose `data_ptr()` is an address."""


def refuse_freed(tensor: torch.Tensor, key: str | None = None, kind: type[BucketpointError] = BucketpointError) -> None:
    """Raise an error of class `kind` if the storage of a plain strided tensor is too small for its elements.

    FSDP1 frees storages with `resize_(0)`. Access to such a tensor ends the process or the context of its device.
    """
    count = tensor.numel()
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not count or not plain or tensor.is_nested or tensor.device.type not in ADDRESSED_DEVICES:
        return
    if not tensor.is_contiguous():
        count = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    end = (tensor.storage_offset() + count) * tensor.element_size()
    if end > tensor.untyped_storage().nbytes() or not tensor.data_ptr():
        raise kind(
            f"A {tensor.dtype} tensor of shape {tuple(tensor.shape)} has no memory: its storage was freed or shrunk",
            key=key,
            remedy="Get the state of FSDP from its state_dict functions, or leave this tensor out",
        )


def is_viewable(tensor: torch.Tensor) -> bool:
    """Return True if the elements lie in host memory in C order, so that they can be sent or received in place."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of the bytes of a viewable tensor.

    The caller must keep the tensor alive while it uses the view: the view holds no reference to the tensor.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def copy_stretch(tensor: torch.Tensor, start: int, out: memoryview) -> None:
    """Copy bytes `[start, start + len(out))` of the tensor's elements in C order into `out`.

    The tensor may be on any device and have any strides. Only the rows that overlap the range are gathered: memory use
    is bounded by the range, not by the tensor.
    """
    target = torch.frombuffer(out, dtype=torch.uint8)
    source = tensor.detach()
    while source.dim() and source.shape[0] == 1:
        source = source[0]
    if source.is_contiguous() and not source.is_conj() and not source.is_neg():
        target.copy_(source.reshape(-1).view(torch.uint8)[start : start + len(out)])
        return
    row = source[0].numel() * source.element_size()
    first, last = start // row, -(-(start + len(out)) // row)
    # `clone`, because `contiguous()` leaves a single-element tensor with its odd strides.
    rows = source[first:last].resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    offset = start - first * row
    target.copy_(rows.reshape(-1).view(torch.uint8)[offset : offset + len(out)])


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths of a slice of a chunk."""


@dataclass(frozen=True)
class Runs:
    """Contiguous byte runs of a slice: of equal length, at regular distances, in the slice's row-major order.

    One instance can represent a column slice of a million rows.

    Attributes:
        start: offset of the first run, which is also the lowest.
        run_nbytes: length of each run; 0 for an empty slice.
        outer: (count, stride in bytes) of each dimension over which the runs repeat, outermost first.
    """

    start: int
    run_nbytes: int
    outer: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        return prod(count for count, _ in self.outer) if self.run_nbytes else 0

    @property
    def nbytes(self) -> int:
        return self.count * self.run_nbytes

    @property
    def end(self) -> int:
        """End of the highest run."""
        if not self.run_nbytes:
            return self.start
        return self.start + sum((count - 1) * stride for count, stride in self.outer) + self.run_nbytes

    @property
    def span(self) -> int:
        """Length of the range that covers every run."""
        return self.end - self.start

    def coalesced(self, max_gap: int) -> Runs:
        """Return fewer and longer runs that cover these: gaps of at most `max_gap` bytes are included."""
        run, outer = self.run_nbytes, list(self.outer)
        while run and outer and outer[-1][1] - run <= max_gap:
            count, stride = outer.pop()
            run = (count - 1) * stride + run
        return Runs(self.start, run, tuple(outer))


def slice_runs(
    shape: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    itemsize: int,
    strides: Sequence[int] | None = None,
    storage_offset: int = 0,
) -> Runs:
    """Return the byte runs of a slice of a tensor, in the slice's row-major order.

    Args:
        shape: shape of the whole tensor.
        offsets, lengths: offset and length of the slice in each dimension.
        strides: strides of the tensor in elements, none negative; C-contiguous if None.
        storage_offset: offset of the tensor's first element within the payload, in elements.

    Raises:
        ValueError: the slice does not lie within the shape.
    """
    steps = contiguous_strides(shape) if strides is None else tuple(strides)
    if not len(shape) == len(offsets) == len(lengths) == len(steps):
        raise ValueError(f"slice {tuple(offsets)}+{tuple(lengths)} and shape {tuple(shape)} differ in dimensions")
    for size, offset, length, step in zip(shape, offsets, lengths, steps, strict=True):
        if offset < 0 or length < 0 or step < 0 or offset + length > size:
            raise ValueError(f"slice {tuple(offsets)}+{tuple(lengths)} is not within shape {tuple(shape)}")
    first = storage_offset + sum(offset * step for offset, step in zip(offsets, steps, strict=True))
    if 0 in lengths:
        return Runs(first * itemsize, 0)
    run = itemsize
    outer: list[tuple[int, int]] = []
    for length, step in zip(reversed(lengths), reversed(steps), strict=True):
        stride = step * itemsize
        if length == 1:
            continue
        if not outer and stride == run:
            run *= length
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0] * length, outer[-1][1])
        else:
            outer.append((length, stride))
    return Runs(first * itemsize, run, tuple(reversed(outer)))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides in elements that torch gives a contiguous tensor of this shape."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def blocks_of(box: Box, block: Sequence[int]) -> Box:
    """Return the box, counted in blocks, of the blocks that a box of elements overlaps."""
    spans = [(at // step, -(-(at + size) // step)) for at, size, step in zip(*box, block, strict=True)]
    return tuple(first for first, _ in spans), tuple(stop - first for first, stop in spans)
