"""A saved chunk, and an item that is read from it: the place and the layout of its elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import ReadItem

from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.torch_zip import ProbedFrame


@dataclass(frozen=True)
class SavedChunk:
    """A saved chunk whose raw elements can be reached: their start in the object, and their layout."""

    payload_start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""
    storage_offset: int = 0

    @property
    def in_c_order(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.storage_offset == 0


@dataclass(frozen=True)
class PlannedItem:
    """A read item with its metadata, and the tensor into which it is read (None for bytes)."""

    read: ReadItem
    info: ItemInfo
    key: str
    target: torch.Tensor | None


def chunk_of_probe(item: PlannedItem, probe: ProbedFrame) -> SavedChunk:
    """Return the chunk that a probe of a foreign frame found."""
    return SavedChunk(
        item.info.offset + probe.payload_offset,
        probe.payload_nbytes,
        probe.dtype,
        tuple(probe.shape),
        tuple(probe.stride),
        probe.storage_offset,
    )


def tensor_over(view: memoryview, span: int, chunk: SavedChunk, lengths: Sequence[int]) -> torch.Tensor:
    """Return the elements of a slice, as a tensor of `lengths` over the bytes that span the slice."""
    raw = torch.frombuffer(view, dtype=torch.uint8, count=span)
    if raw.data_ptr() % chunk.dtype.itemsize:
        raw = raw.clone()
    flat = raw.view(chunk.dtype)
    return flat.as_strided(tuple(lengths), chunk.strides)
