"""Columns that an index omits: its writer and its reader compute them from other columns with the same code."""

from __future__ import annotations

import torch

from bucketpoint.format.index.int_columns import CPU, Segments

BYTES_ENTRY = 0
"""Kind of the entries that are not tensors."""

MOST_DIMS = 4
"""Limit on the average dimensions of a chunk in a large index. A decoder takes 25 bytes for each dimension."""

_FREE_DIMS = 1 << 18


def fits(dims: torch.Tensor, counts: torch.Tensor) -> bool:
    """Return True if the chunks have few enough dimensions, so that decoding needs little memory per item."""
    # In floats, because sums of hostile integers could overflow.
    return float((dims.double() * counts).sum()) <= MOST_DIMS * float(counts.sum()) + _FREE_DIMS


def payload_sizes(
    sizes: torch.Tensor, kinds: torch.Tensor, dims: torch.Tensor, entries: Segments, itemsizes: torch.Tensor
) -> torch.Tensor:
    """Return the size of each item's elements in bytes; -1 for items that are not tensors."""
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
    """Return the number of block checksums of each item: 0 if the item's block size is -1."""
    covered = torch.where(payloads < 0, lengths, payloads)
    return torch.where(blocks > 0, (covered + blocks - 1) // blocks.clamp(min=1), 0)


def gaps(objects: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return, slot by slot, the bytes between an item and the preceding item in the same object."""
    order = torch.argsort(objects, stable=True)
    ends = torch.roll((offsets + lengths)[order], 1)
    mine = objects[order]
    ends[(mine != torch.roll(mine, 1)) | (torch.arange(len(mine), device=CPU) == 0)] = 0
    return torch.empty_like(offsets).scatter_(0, order, offsets[order] - ends)


def table_places(
    objects: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, nbytes: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expected positions of the tables of checksums: after an object's last item, in the order of slots.

    Args:
        nbytes: size of each slot's table.
        order: slots sorted by object.

    Returns:
        Start of each slot's table, relative to the object's first table; and start of each object's first table.
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
    """Return the guess that a writer subtracts from sizes: 0, or the distance to the start of the next chunk."""
    if kind == 0:
        return 0
    until, present = torch.roll(offsets, -1).long(), axes.counts > 0
    until[(torch.cumsum(axes.counts, 0) - 1)[present]] = shapes[present]
    until -= offsets
    return until
