"""Chunks of a larger tensor, in one local tensor or one for each chunk, and their overlaps with the saved chunks.

Tensors with the attributes of torch 2.15's `CheckpointableTensor` are described by DCP's protocol
`__create_chunk_list__`, which every version of DCP supports. DCP's planner makes the same read items for the overlaps,
but one tensor at a time, and with a Python object per saved chunk, instead of from the columns of an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from bucketpoint.errors import BucketpointError
from bucketpoint.format.index.int_columns import CPU, Segments
from bucketpoint.format.index.view import Chunks, Entries
from bucketpoint.staging.flatten import SHARD_OF_A_WHOLE


@dataclass(frozen=True)
class LocalChunks:
    """Chunks of one saved tensor, in one local tensor or in a separate tensor for each chunk.

    Each chunk has a size in `sizes`, is at `local_offsets` in its local tensor, and at `global_offsets` in the whole
    tensor of `shape`.
    """

    tensors: torch.Tensor | Sequence[torch.Tensor]
    shape: tuple[int, ...]
    global_offsets: Sequence[Sequence[int]]
    local_offsets: Sequence[Sequence[int]]
    sizes: Sequence[Sequence[int]]

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor, which DCP compares with the saved one."""
        return torch.Size(self.shape)

    def fault(self) -> str | None:
        """Return an error text if offsets and sizes contradict each other or the shapes; otherwise None."""
        counts = {len(self.global_offsets), len(self.local_offsets), len(self.sizes)}
        if len(counts) != 1:
            return "has global_offsets, local_offsets and local_sizes of different lengths"
        boxes = zip(self.global_offsets, self.local_offsets, self.sizes, strict=True)
        for number, (there, here, size) in enumerate(boxes):
            for name, offsets, bounds in (
                ("global_shape", there, self.shape),
                ("its tensor's", here, tuple(self._tensor(number).shape)),
            ):
                if not len(offsets) == len(size) == len(bounds) or any(
                    at < 0 or extent < 0 or at + extent > bound
                    for at, extent, bound in zip(offsets, size, bounds, strict=True)
                ):
                    box = f"{list(size)} at {list(offsets)}"
                    return f"has a chunk {number} of {box}, which does not lie within {name} {list(bounds)}"
        return None

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(size))
            for offsets, size in zip(self.global_offsets, self.sizes, strict=True)
        ]

    def find(self, index: MetadataIndex) -> torch.Tensor:
        """Return a view of the chunk at `index.offset`; raise BucketpointError if there is none."""
        offset = tuple(index.offset) if index.offset is not None else (0,) * len(self.shape)
        # Try the hint first: replicas of a chunk within one tensor have the same offset, and only the hint differs.
        hinted = [index.index] if index.index is not None and index.index < len(self.sizes) else []
        for number in (*hinted, *range(len(self.sizes))):
            if tuple(self.global_offsets[number]) == offset:
                view = self._tensor(number)
                for axis, (at, size) in enumerate(zip(self.local_offsets[number], self.sizes[number], strict=True)):
                    view = view.narrow(axis, at, size)
                return view
        raise BucketpointError(f"There is no chunk at {list(offset)} in the tensor to load into", key=index.fqn)

    def _tensor(self, number: int) -> torch.Tensor:
        return self.tensors if isinstance(self.tensors, torch.Tensor) else self.tensors[number]


def chunks_in(value: Any) -> LocalChunks | None:
    """Return the chunks of a tensor that has the attributes of `CheckpointableTensor`; None for any other value."""
    if isinstance(value, LocalChunks):
        return value
    if not isinstance(value, torch.Tensor):
        return None
    attributes: list[Any] = [getattr(value, name, None) for name in SHARD_OF_A_WHOLE]
    if any(attribute is None for attribute in attributes):
        return None
    shape, *offsets_and_sizes = attributes
    return LocalChunks(value, tuple(shape), *offsets_and_sizes)


_PAIRS_AT_ONCE = 1 << 20
"""Number of pairs of a local and a saved chunk that are compared in one step: about 50 MB of memory."""

_MANY = 64
"""Number of local chunks of a tensor above which DCP's algorithm is faster, despite an object per saved chunk."""


@dataclass(frozen=True)
class WantedChunks:
    """A tensor to load into: the local chunks, and the saved chunks."""

    fqn: str
    saved: Chunks
    local: Sequence[ChunkStorageMetadata]


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
