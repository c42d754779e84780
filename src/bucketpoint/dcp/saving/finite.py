"""Counts of values that are NaN or infinite, for `check_finite=True`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.distributed.checkpoint import SavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.pieces import for_each

_PIECE_ELEMENTS = 1 << 18
"""Elements that are looked at in one step: they and the temporary arrays stay in the caches of a core."""

_DEVICE_PIECE_ELEMENTS = 1 << 26
"""The same on a GPU, where each step costs a launch. The temporary tensors take 128 MiB."""

_EXPONENTS: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    torch.float64: (torch.int64, 0x7FF << 52, 0x7FF << 52),
    torch.float32: (torch.int32, 0x7F800000, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80, 0x7F80),
    torch.float16: (torch.int16, 0x7C00, 0x7C00),
    torch.float8_e5m2: (torch.uint8, 0x7C, 0x7C),
    # The following have no infinities, and one or two patterns for NaN (OCP 8-bit Floating Point Specification, 5.3).
    torch.float8_e4m3fn: (torch.uint8, 0x7F, 0x7F),
    torch.float8_e4m3fnuz: (torch.uint8, 0xFF, 0x80),
    torch.float8_e5m2fnuz: (torch.uint8, 0xFF, 0x80),
}
"""By dtype: the integer of its size, a mask, and what remains of a value under the mask if it is not finite."""


def count_nonfinite_items(
    items: Sequence[WriteItem], planner: SavePlanner, options: TransferOptions
) -> dict[MetadataIndex, int]:
    """Count the values that are NaN or infinite in each floating or complex tensor. Items without any are left out."""
    found: dict[MetadataIndex, int] = {}

    def look(item: WriteItem) -> None:
        data = planner.resolve_data(item)
        count = count_nonfinite(data.detach()) if isinstance(data, torch.Tensor) else 0
        if count:
            found[item.index] = count

    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    for_each(tensors, look, options)
    return found


def count_nonfinite(tensor: torch.Tensor) -> int:
    """Count the values of a tensor of any shape and dtype that are NaN or infinite.

    Complex values count once for each of their two parts. The tensor is read in pieces, and never copied whole.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.layout != torch.strided or tensor.dtype not in _EXPONENTS:
        return 0
    if tensor.device.type != "cpu":
        pieces = _pieces(tensor, _DEVICE_PIECE_ELEMENTS)
        return sum(int(torch.isfinite(piece.float()).logical_not_().sum()) for piece in pieces)
    integer, mask, value = _EXPONENTS[tensor.dtype]
    count = 0
    # With numpy: torch would use all cores of the trainer.
    for piece in _pieces(tensor, _PIECE_ELEMENTS):
        bits = piece.contiguous().view(integer).numpy()
        count += int(np.count_nonzero((bits & bits.dtype.type(mask)) == value))
    return count


def _pieces(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Yield views of all elements, each of at most `most` elements."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(most)  # type: ignore[no-untyped-call]
        return
    row = tensor.numel() // len(tensor)
    if row > most:
        for each in tensor:
            yield from _pieces(each, most)
    else:
        yield from tensor.split(most // row)  # type: ignore[no-untyped-call]
