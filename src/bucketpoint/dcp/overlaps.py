"""Which saved chunks a local one overlaps, by arithmetic over the columns of an index: no object for any other chunk.

The same read items that DCP's planner makes, for all tensors at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from bucketpoint.format.index_view import Chunks, Entries
from bucketpoint.format.int_columns import CPU, Segments

_PAIRS_AT_ONCE = 1 << 20
"""Pairs of a local and a saved chunk that are compared in one go: some 50 MB of memory."""

_MANY = 64
"""Local chunks of one tensor from which on DCP's sweep, which makes objects, beats comparing each with all."""


@dataclass(frozen=True)
class Wanted:
    """A tensor to load into: its chunks here, and those that were saved of it."""

    fqn: str
    saved: Chunks
    local: Sequence[ChunkStorageMetadata]

    def size(self) -> torch.Size:
        """What DCP compares with the shape of the saved tensor."""
        return self.saved.source.shape(self.saved.number)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """For DCP's planner, which is to plan nothing of it."""
        return []


@dataclass(frozen=True)
class _Row:
    """One local chunk."""

    wanted: Wanted
    number: int
    low: tuple[int, ...]
    high: tuple[int, ...]


def read_items(wanted: Sequence[Wanted]) -> dict[str, list[ReadItem]]:
    """The reads that fill the local chunks, by key; all tensors are of one checkpoint."""
    found: dict[str, list[ReadItem]] = {each.fqn: [] for each in wanted}
    batches: dict[int, list[_Row]] = {}
    for each in wanted:
        if len(each.local) > _MANY:
            entry = Entries(each.saved.source)[each.fqn]
            found[each.fqn] += create_read_items_for_chunk_list(each.fqn, entry, list(each.local))
            continue
        for number, chunk in enumerate(each.local):
            low = tuple(chunk.offsets)
            high = tuple([at + size for at, size in zip(low, chunk.sizes, strict=True)])
            batches.setdefault(len(low), []).append(_Row(each, number, low, high))
    for dims, rows in batches.items():
        batch: list[_Row] = []
        pairs = 0
        for row in rows:
            pairs += len(row.wanted.saved)
            if batch and pairs > _PAIRS_AT_ONCE:
                _compare(dims, batch, found)
                batch, pairs = [], len(row.wanted.saved)
            batch.append(row)
        _compare(dims, batch, found)
    return found


def _compare(dims: int, rows: Sequence[_Row], found: dict[str, list[ReadItem]]) -> None:
    """Add the read items of local chunks with so many dimensions."""
    index = rows[0].wanted.saved.source
    numbers = [row.wanted.saved.number for row in rows]
    counts, first = _column([index.counts[number] for number in numbers]), [index.first_box[at] for at in numbers]
    pairs = Segments.of(counts)
    owner, place = pairs.owner, pairs.place
    boxes = _column(first)[owner] + place
    step = counts[owner]
    overlap = torch.ones(len(owner), dtype=torch.bool, device=CPU)
    for axis in range(dims):
        low, high = _column([row.low[axis] for row in rows])[owner], _column([row.high[axis] for row in rows])[owner]
        at = boxes + axis * step
        offsets = index.offsets[at]
        overlap &= (offsets < high) & (offsets + index.sizes[at].long() > low)
    hits = torch.nonzero(overlap).reshape(-1)
    at = boxes[hits].unsqueeze(1) + step[hits].unsqueeze(1) * torch.arange(dims, device=CPU)
    columns = owner[hits], place[hits], index.offsets[at].long(), index.sizes[at].long()
    for number, chunk, begins, extent in zip(*(column.tolist() for column in columns), strict=True):
        row = rows[number]
        found[row.wanted.fqn].append(_read_item(row, chunk, begins, extent))


def _read_item(row: _Row, chunk: int, begins: Sequence[int], extent: Sequence[int]) -> ReadItem:
    starts = [max(low, begin) for low, begin in zip(row.low, begins, strict=True)]
    stops = [min(high, begin + size) for high, begin, size in zip(row.high, begins, extent, strict=True)]
    fqn = row.wanted.fqn
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(fqn, row.low, row.number),
        dest_offsets=torch.Size([start - low for start, low in zip(starts, row.low, strict=True)]),
        storage_index=MetadataIndex(fqn, begins, chunk),
        storage_offsets=torch.Size([start - begin for start, begin in zip(starts, begins, strict=True)]),
        lengths=torch.Size([stop - start for start, stop in zip(starts, stops, strict=True)]),
    )


def _column(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=CPU)
