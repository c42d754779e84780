"""Read items for the overlaps of local and saved chunks, computed from the columns of an index.

DCP's planner makes the same read items, but one tensor at a time, and with an object for each saved chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from bucketpoint.format.index.int_columns import CPU, Segments
from bucketpoint.format.index.view import Chunks, Entries

_PAIRS_AT_ONCE = 1 << 20
"""Number of pairs of a local and a saved chunk that are compared in one step: about 50 MB of memory."""

_MANY = 64
"""Local chunks of one tensor above which DCP's algorithm is faster, although it makes objects for saved chunks."""


@dataclass(frozen=True)
class WantedChunks:
    """A tensor to load into: the local chunks, and the saved chunks."""

    fqn: str
    saved: Chunks
    local: Sequence[ChunkStorageMetadata]

    def size(self) -> torch.Size:
        """Return the shape that DCP compares with that of the saved tensor."""
        return self.saved.source.shape(self.saved.number)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return an empty list, so that DCP's planner leaves the tensor to this module."""
        return []


@dataclass(frozen=True)
class _Row:
    """One local chunk, as a box from `low` to `high`."""

    wanted: WantedChunks
    number: int
    low: tuple[int, ...]
    high: tuple[int, ...]


def read_items(wanted: Sequence[WantedChunks]) -> dict[str, list[ReadItem]]:
    """Return by key the read items that fill the local chunks. All tensors must be of one checkpoint."""
    items: dict[str, list[ReadItem]] = {each.fqn: [] for each in wanted}
    batches: dict[int, list[_Row]] = {}
    for each in wanted:
        if len(each.local) > _MANY:
            entry = Entries(each.saved.source)[each.fqn]
            items[each.fqn] += create_read_items_for_chunk_list(each.fqn, entry, list(each.local))
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
                _compare(dims, batch, items)
                batch, pairs = [], len(row.wanted.saved)
            batch.append(row)
        _compare(dims, batch, items)
    return items


def _compare(dims: int, rows: Sequence[_Row], items: dict[str, list[ReadItem]]) -> None:
    """Add the read items of local chunks that all have `dims` dimensions."""
    index = rows[0].wanted.saved.source
    numbers = [row.wanted.saved.number for row in rows]
    counts = _column([index.counts[number] for number in numbers])
    pairs = Segments.of(counts)
    owner, place, step = pairs.owner, pairs.place, counts[pairs.owner]
    boxes = _column([index.first_box[number] for number in numbers])[owner] + place
    lows, highs = (_column([getattr(row, name) for row in rows]).reshape(len(rows), dims) for name in ("low", "high"))
    overlap = torch.ones(len(owner), dtype=torch.bool, device=CPU)
    for axis in range(dims):
        at = boxes + axis * step
        offsets = index.offsets[at]
        overlap &= (offsets < highs[:, axis][owner]) & (offsets + index.sizes[at].long() > lows[:, axis][owner])
    hits = torch.nonzero(overlap).reshape(-1)
    owner, place = owner[hits], place[hits]
    at = boxes[hits].unsqueeze(1) + step[hits].unsqueeze(1) * torch.arange(dims, device=CPU)
    begins, low = index.offsets[at].long(), lows[owner]
    starts = torch.maximum(begins, low)
    lengths = torch.minimum(begins + index.sizes[at].long(), highs[owner]) - starts
    columns = [column.tolist() for column in (owner, place, begins, starts - low, starts - begins, lengths)]
    for number, chunk, offset, there, here, extent in zip(*columns, strict=True):
        row = rows[number]
        fqn = row.wanted.fqn
        items[fqn].append(
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(fqn, row.low, row.number),
                dest_offsets=torch.Size(there),
                storage_index=MetadataIndex(fqn, offset, chunk),
                storage_offsets=torch.Size(here),
                lengths=torch.Size(extent),
            )
        )


def _column(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=CPU)
