"""Storages for the tensors of leaves: values that are pickled as one, such as tuples of tensors and tensor subclasses.

A pickle of a tensor holds its whole storage. All staged tensors lie in one, so each tensor of a leaf gets a storage
that covers its own bytes of the staging memory and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def set_apart(copies: list[torch.Tensor], leaves: Iterable[Sequence[int]], memory: torch.Tensor) -> None:
    """Replace the tensors of leaves by tensors over the same bytes, with separate storages.

    Tensors of one leaf that overlap share a storage, as long as that is smaller than copies of them.

    Args:
        copies: tensors over the staging memory.
        leaves: for each leaf, the indices of its tensors in `copies`.
        memory: the staging memory, as bytes.
    """
    for leaf in leaves:
        members: list[tuple[int, int]] = []
        start = end = 0
        for index in sorted(leaf, key=lambda index: copies[index].data_ptr()):
            copied = copies[index]
            if not copied.nbytes:
                # Another dtype at the address of a tensor that has bytes would be refused by the pickler.
                copies[index] = torch.empty_strided(copied.shape, copied.stride(), dtype=copied.dtype, device="cpu")
                continue
            address = copied.data_ptr()
            if address >= end:
                _share(copies, members, start, end, memory)
                members, start, end = [], address, address
            members.append((index, address))
            end = max(end, address + _reach(copied))
        _share(copies, members, start, end, memory)


def _share(
    copies: list[torch.Tensor], members: Sequence[tuple[int, int]], start: int, end: int, memory: torch.Tensor
) -> None:
    if not members:
        return
    offset = start - memory.data_ptr()
    # Through NumPy: a slice of a tensor has the storage of the whole.
    shared = torch.from_numpy(memory.numpy()[offset : offset + end - start])
    dtype = copies[members[0][0]].dtype
    gaps = end - start > sum(copies[index].nbytes for index, _ in members)
    for index, address in members:
        copied = copies[index]
        if gaps or copied.dtype != dtype:
            # The pickler refuses two dtypes at one address. As bytes, because torch cannot copy all dtypes of one byte.
            bits = copied.view(torch.uint8) if copied.element_size() == 1 else copied
            copies[index] = bits.clone().view(copied.dtype)
        else:
            # Not as a view of `shared`, whose length need not be a multiple of the dtype's.
            offset = (address - start) // dtype.itemsize
            own = torch.empty(0, dtype=dtype, device="cpu")
            copies[index] = own.set_(shared.untyped_storage(), offset, copied.shape, copied.stride())


def _reach(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first element of a tensor to the end of its last."""
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
