"""Chunks of a larger tensor, in one local tensor or in a separate tensor for each chunk.

Tensors with the attributes of torch 2.15's `CheckpointableTensor` are described by DCP's protocol
`__create_chunk_list__`, which every version of DCP supports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from bucketpoint.errors import BucketpointError
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
        fault = self.fault()
        if fault is not None:
            # DCP's planner expects a ValueError.
            raise ValueError(fault)
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
