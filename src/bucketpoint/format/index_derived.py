"""What an index need not say, as it follows from its other columns: worked out alike by who writes and who reads it."""

from __future__ import annotations

import torch

from bucketpoint.format.int_columns import CPU, Segments

BYTES_ENTRY = 0
"""The kind of entries that are no tensors."""


def payload_sizes(
    sizes: torch.Tensor, kinds: torch.Tensor, dims: torch.Tensor, entries: Segments, itemsizes: torch.Tensor
) -> torch.Tensor:
    """Bytes of each item's elements; -1 for what is no tensor."""
    counts, owner = entries.counts, entries.owner
    nbytes = torch.where(kinds == BYTES_ENTRY, -1, itemsizes).index_select(0, owner)
    first = torch.cumsum(counts * dims, 0) - counts * dims
    first -= torch.cumsum(counts, 0) - counts
    for axis in range(int(dims.max()) if len(dims) else 0):
        has = torch.nonzero((dims > axis).index_select(0, owner)).reshape(-1)
        places = (first + axis * counts).index_select(0, owner.index_select(0, has)).add_(has)
        nbytes[has] *= sizes.index_select(0, places)
    return nbytes


def count_blocks(blocks: torch.Tensor, payloads: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """How many block checksums each item has: none where the size of its blocks is -1."""
    covered = torch.where(payloads < 0, lengths, payloads)
    return torch.where(blocks > 0, (covered + blocks - 1) // blocks.clamp(min=1), 0)


def gaps(objects: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Bytes between an item and the one before it in the same object, in the order of the slots."""
    order = torch.argsort(objects, stable=True)
    ends = torch.roll((offsets + lengths)[order], 1)
    mine = objects[order]
    ends[(mine != torch.roll(mine, 1)) | (torch.arange(len(mine), device=CPU) == 0)] = 0
    return torch.empty_like(offsets).scatter_(0, order, offsets[order] - ends)


def table_places(
    objects: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, nbytes: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where tables of checksums lie in their objects: behind the last item, one after the other in the order of slots.

    Args:
        nbytes: of each slot's table.
        order: sorts the slots by object.

    Returns:
        Where each slot's begins among the tables of its object, and for each object where the first of them does.
    """
    ends = torch.zeros(int(objects.max()) + 1 if len(objects) else 0, dtype=torch.int64, device=CPU)
    ends.scatter_reduce_(0, objects.long(), offsets + lengths, "amax")
    mine, sizes = objects[order], nbytes[order]
    before = sizes.cumsum(0)
    before -= sizes
    firsts = torch.zeros_like(ends)
    heads = torch.nonzero(mine != torch.roll(mine, 1)).reshape(-1)
    firsts[mine[heads].long()] = before[heads]
    before -= firsts[mine.long()]
    return torch.empty_like(before).scatter_(0, order, before), ends


def size_guess(kind: int, offsets: torch.Tensor, shapes: torch.Tensor, axes: Segments) -> torch.Tensor | int:
    """What sizes are told relative to: nothing, or what is left until the next chunk begins."""
    if kind == 0:
        return 0
    until, present = torch.roll(offsets, -1).long(), axes.counts > 0
    until[(torch.cumsum(axes.counts, 0) - 1)[present]] = shapes[present]
    until -= offsets
    return until
