"""Entries of DCP's metadata, from plain tuples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a chunk."""


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))


def tensor_entry(
    shape: Sequence[int], boxes: Iterable[Box], dtype: torch.dtype = torch.float32, **properties: Any
) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype, **properties), torch.Size(shape), [chunk_of(box) for box in boxes]
    )
