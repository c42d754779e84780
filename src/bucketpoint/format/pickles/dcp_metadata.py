"""DCP's own classes and torch's values, as the vocabulary of a `.metadata` pickle."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketpoint.format.pickles import tensors
from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.metadata_vocabulary import MetadataVocabulary
from bucketpoint.format.pickles.vocabulary import ObjectionError

_HAS_STRIDES = "strides" in {one.name for one in dataclasses.fields(TensorProperties)}
_KINDS = (
    *(Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, StorageMeta),
    *(TensorProperties, _StorageInfo, _StoragePrefix),
)


@functools.cache
def vocabulary() -> MetadataVocabulary:
    """Return the vocabulary of a `.metadata` pickle, with the classes of the installed torch."""
    kinds = {kind.__name__: kind for kind in _KINDS}
    return MetadataVocabulary(kinds, _set_properties, _MEM_FORMAT_ENCODING, tensors.VALUES)


def _set_properties(machine: Machine, target: Any, state: Any) -> Any:
    # torch 2.15 writes a sixth field, the strides. Drop it for older versions, whose `__setstate__` takes five.
    dtype, layout, requires_grad, memory_format, pin_memory, *later = state
    if type(dtype) is not torch.dtype or type(layout) is not torch.layout:
        raise ObjectionError("tensor properties without a dtype and a layout")
    known: tuple[Any, ...] = (dtype, layout, bool(requires_grad), memory_format, bool(pin_memory))
    if _HAS_STRIDES and later and isinstance(later[0], tuple):
        known += (later[0],)
    target.__setstate__(known)
    return target
