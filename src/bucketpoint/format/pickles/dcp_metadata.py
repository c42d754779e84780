"""Names in a `.metadata` pickle: DCP's dataclasses and what is in them."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections import OrderedDict
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

from bucketpoint.format.allow_list import METADATA_GLOBALS
from bucketpoint.format.pickles import plain, tensors
from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.vocabulary import Function, Make, ObjectionError, Vocabulary

_DCP, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_BEFORE_TORCH_2_2 = "torch.distributed._shard.sharded_tensor.metadata"
_HAS_STRIDES = "strides" in {one.name for one in dataclasses.fields(TensorProperties)}
_DATACLASSES = (
    *(Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, StorageMeta),
    *(_StorageInfo, _StoragePrefix),
)
_FIELD_BYTES = 16

_PROPERTIES = Function(f"{_DCP}.TensorProperties")
_ENCODING = Function(f"{_DCP}._MEM_FORMAT_ENCODING")
_GETATTR = Function("builtins.getattr")
_FOREIGN_PATH = Function("multistorageclient.pathlib.MultiStoragePath")


class ForeignPath(os.PathLike[str]):
    """Stands for the path class of multi-storage-client, which looks for its own configuration when it is unpickled."""

    _text: str

    def __fspath__(self) -> str:
        return self._text


@functools.cache
def vocabulary() -> Vocabulary:
    """Names of a `.metadata` pickle."""
    kinds = {kind: Function(f"{kind.__module__}.{kind.__name__}") for kind in _DATACLASSES}
    names: dict[tuple[str, str], Any] = {
        **{key: value for key, value in (plain.names() | tensors.names()).items() if key in METADATA_GLOBALS},
        **{((_FILES if kind.__name__.startswith("_") else _DCP), kind.__name__): kinds[kind] for kind in kinds},
        **{(module, "TensorProperties"): _PROPERTIES for module in (_DCP, _BEFORE_TORCH_2_2)},
        **{(module, "getattr"): _GETATTR for module in ("builtins", "__builtin__")},
        (_DCP, "_MEM_FORMAT_ENCODING"): _ENCODING,
        (_BEFORE_TORCH_2_2, "MEM_FORMAT_ENCODING"): _ENCODING,
        ("multistorageclient.pathlib", "MultiStoragePath"): _FOREIGN_PATH,
    }
    made: dict[Any, Make] = {
        **{kinds[kind]: _empty(kind) for kind in kinds},
        _PROPERTIES: _empty(TensorProperties),
        _FOREIGN_PATH: _empty(ForeignPath),
        _ENCODING: _member,
        _GETATTR: _named_member,
    }
    checked = plain.makers() | tensors.makers()
    made |= {called: make for called, make in checked.items() if any(called is value for value in names.values())}
    return Vocabulary(
        names,
        {id(called): make for called, make in made.items()},
        {
            **dict.fromkeys(_DATACLASSES, _set_fields),
            TensorProperties: _set_properties,
            ForeignPath: _set_path,
            OrderedDict: plain.set_attributes,
        },
        {MetadataIndex: _hashed, torch.Size: tuple, pathlib.PurePosixPath: lambda key: ()},
    )


def _empty(kind: type) -> Make:
    def make(machine: Machine, arguments: Any) -> Any:
        if arguments:
            raise ObjectionError(f"a call of {kind.__name__} with arguments")
        return object.__new__(kind)

    return make


def _set_fields(machine: Machine, target: Any, state: Any) -> Any:
    if type(state) is not dict:
        raise ObjectionError(f"a state of {type(target).__name__} that is none")
    machine.pay(_FIELD_BYTES * len(state))
    # Most of them are frozen, and none has a state of its own.
    target.__dict__.update(state)
    return target


def _set_properties(machine: Machine, target: Any, state: Any) -> Any:
    # torch before 2.15 cannot take the six fields that 2.15 writes.
    dtype, layout, requires_grad, memory_format, pin_memory, *later = state
    if type(dtype) is not torch.dtype or type(layout) is not torch.layout:
        raise ObjectionError("tensor properties without a dtype and a layout")
    known: tuple[Any, ...] = (dtype, layout, bool(requires_grad), memory_format, bool(pin_memory))
    if _HAS_STRIDES and later and isinstance(later[0], tuple):
        known += (later[0],)
    target.__setstate__(known)
    return target


def _set_path(machine: Machine, target: ForeignPath, state: Any) -> ForeignPath:
    if type(state) is not dict or type(state.get("_path")) is not str:
        raise ObjectionError("a path without a text")
    target._text = state["_path"]
    return target


def _member(machine: Machine, arguments: Any) -> Any:
    (value,) = arguments
    return _MEM_FORMAT_ENCODING(value)


def _named_member(machine: Machine, arguments: Any) -> Any:
    # Python 3.11.0 to 3.11.3 pickle a member of an enumeration in this way.
    kind, name = arguments
    if kind is not _ENCODING:
        raise ObjectionError("getattr of something else than a memory format")
    return _MEM_FORMAT_ENCODING[name]


def _hashed(key: Any) -> tuple[Any, ...]:
    return key.fqn, key.offset, key.index
