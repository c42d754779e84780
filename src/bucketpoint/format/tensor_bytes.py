"""Byte access to tensors: views without a copy if the layout allows, copies of a range of bytes otherwise."""

from __future__ import annotations

import ctypes

import torch


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
