"""Whole tensors of a source, for target formats without chunks."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.convert.nd_boxes import Box
from bucketpoint.convert.payload_reader import Filling
from bucketpoint.convert.source import Payload, Source, exclude_option
from bucketpoint.errors import MismatchError
from bucketpoint.format.metadata.coverage import uncovered
from bucketpoint.transfer import Segment


@dataclass(frozen=True)
class WholeTensor:
    """A tensor and its chunks. The last dimension of a chunk's box is the bytes of an element."""

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, Payload], ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def segment(self, filling: Filling) -> Segment:
        """Return the whole tensor as a segment of an object to be written."""
        return filling.whole(self.shape, self.dtype.itemsize, self.chunks)


def whole_tensors(source: Source, without: Collection[str] = ()) -> list[WholeTensor]:
    """Return the tensors of a source, sorted by their positions in the source.

    Raises:
        MismatchError: a tensor is not covered by its chunks, or not stored as plain elements.
    """
    faults = dict(uncovered(source.metadata, {}))
    tensors = [
        _whole(source, fqn, entry, faults.get(fqn))
        for fqn, entry in source.metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and fqn not in without
    ]
    return sorted(tensors, key=lambda tensor: min(payload.place for _, payload in tensor.chunks))


def _whole(source: Source, fqn: str, entry: TensorStorageMetadata, fault: str | None) -> WholeTensor:
    itemsize, shape = entry.properties.dtype.itemsize, tuple(entry.size)
    chunks = []
    for chunk in entry.chunks:
        payload = source.payloads[MetadataIndex(fqn, chunk.offsets)]
        if payload.opaque:
            raise MismatchError(
                "The tensor cannot be converted, because it is sparse, quantised or of a tensor subclass",
                key=fqn,
                remedy=f"Leave it out with {exclude_option(fqn)}, or convert to bucketpoint, which keeps it",
            )
        chunks.append((Box((*chunk.offsets, 0), (*chunk.sizes, itemsize)), payload))
    if not chunks or fault is not None:
        raise MismatchError(
            f"The tensor {fault or 'has no chunk'}, so it can be converted only to bucketpoint",
            key=fqn,
            remedy=f"Leave it out with {exclude_option(fqn)}, or convert to bucketpoint",
        )
    return WholeTensor(fqn, entry.properties.dtype, shape, tuple(chunks))
