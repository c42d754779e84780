"""A saved chunk, and an item that is read of it: where its elements lie and how. No planning and no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import ReadItem

from bucketpoint.format.frames import ProbedFrame
from bucketpoint.format.item_info import ItemInfo


@dataclass(frozen=True)
class SavedChunk:
    """A saved chunk whose raw elements can be reached: where they begin in the object, and how they are laid out."""

    payload_start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
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
    """A read item with what the metadata says about it and the tensor it goes to (None for bytes)."""

    read: ReadItem
    info: ItemInfo
    key: str
    target: torch.Tensor | None


def chunk_of_probe(item: PlannedItem, probe: ProbedFrame) -> SavedChunk:
    """The chunk that a probe of a foreign frame found."""
    return SavedChunk(
        item.info.offset + probe.payload_offset,
        probe.payload_nbytes,
        probe.dtype,
        tuple(probe.shape),
        tuple(probe.stride),
        probe.storage_offset,
    )


def tensor_over(view: memoryview, span: int, chunk: SavedChunk, lengths: Sequence[int]) -> torch.Tensor:
    """The elements of a slice, as a tensor of `lengths` over the bytes that span it."""
    return elements_of(torch.frombuffer(view, dtype=torch.uint8, count=span), chunk, lengths)


def elements_of(raw: torch.Tensor, chunk: SavedChunk, lengths: Sequence[int]) -> torch.Tensor:
    """`tensor_over`, over a uint8 tensor on any device that holds exactly the bytes that span the slice."""
    if raw.data_ptr() % chunk.dtype.itemsize:
        raw = raw.clone()
    flat = raw.view(chunk.dtype)
    return flat.as_strided(tuple(lengths), chunk.strides)
