"""Tensors seen as bytes: views without a copy where there is one, copies of a stretch where there is not."""

from __future__ import annotations

import ctypes

import torch


def is_viewable(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in host memory in C order, so that the bytes can be sent or received as they are."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and _is_plain(tensor)
    )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a viewable tensor of any shape and dtype, as a writable byte view of `nbytes` bytes.

    The caller keeps the tensor alive for as long as the view is used: the view does not.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def copy_stretch(tensor: torch.Tensor, start: int, out: memoryview) -> None:
    """Copy bytes `[start, start + len(out))` of the tensor's elements in C order into `out`.

    Any device and any strides. Only the rows that hold the stretch are gathered, so that memory is bounded by the
    stretch and not by the tensor.
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
    # A clone and not `contiguous()`, which leaves a single element with the strides that it has.
    rows = source[first:last].resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    offset = start - first * row
    target.copy_(rows.reshape(-1).view(torch.uint8)[offset : offset + len(out)])


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
