"""What the names in a `.metadata` pickle mean while it is read: empty instances, and values. No I/O.

Which names may be there at all is `allow_list.py`'s.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections import OrderedDict
from collections.abc import Callable
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

from bucketpoint.format.allow_list import DTYPE_NAMES, METADATA_GLOBALS

_HAS_STRIDES = "strides" in {one.name for one in dataclasses.fields(TensorProperties)}


class Properties:
    """Stands for TensorProperties while unpickling: torch before 2.15 cannot take the six fields that 2.15 writes."""

    def __setstate__(self, state: Any) -> None:
        dtype, layout, requires_grad, memory_format, pin_memory, *later = state
        if type(dtype) is not torch.dtype or type(layout) is not torch.layout:
            raise TypeError("tensor properties without a dtype and a layout")
        real = object.__new__(TensorProperties)
        known: tuple[Any, ...] = (dtype, layout, bool(requires_grad), memory_format, bool(pin_memory))
        if _HAS_STRIDES and later and isinstance(later[0], tuple):
            known += (later[0],)
        real.__setstate__(known)  # type: ignore[no-untyped-call]
        self.real = real


class ForeignPath(os.PathLike[str]):
    """Stands for the path class of multi-storage-client, which looks for its own configuration when it is unpickled."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or type(state.get("_path")) is not str:
            raise TypeError("a path without a text")
        self._text: str = state["_path"]

    def __fspath__(self) -> str:
        return self._text


def stand_ins() -> dict[tuple[str, str], Any]:
    """What the names of the allow-list mean during one load.

    A pickle can set attributes on anything that it can name, so none of these outlives the load, except built-in
    objects, on which nothing can be set.
    """
    dcp, files = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
    encoding = _stand_in("_MEM_FORMAT_ENCODING", lambda value: _MEM_FORMAT_ENCODING(value))

    def enum_member(kind: Any, name: Any) -> Any:
        if kind is not encoding:
            raise TypeError("getattr of something else than a memory format")
        return _MEM_FORMAT_ENCODING[name]

    table: dict[tuple[str, str], Any] = {
        (dcp, "TensorProperties"): type("TensorProperties", (Properties,), {}),
        (dcp, "_MEM_FORMAT_ENCODING"): encoding,
        ("builtins", "getattr"): enum_member,
        # The same in pickles of protocol 2.
        ("__builtin__", "getattr"): enum_member,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided, **_layouts()}.__getitem__,
        ("collections", "OrderedDict"): OrderedDict,
        ("multistorageclient.pathlib", "MultiStoragePath"): type("MultiStoragePath", (ForeignPath,), {}),
    }
    plain = (Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, StorageMeta)
    for kind in plain:
        table[dcp, kind.__name__] = _empty(kind)
    table[files, "_StorageInfo"] = _empty(_StorageInfo)
    table[files, "_StoragePrefix"] = _empty(_StoragePrefix)
    for name in DTYPE_NAMES:
        if isinstance(dtype := getattr(torch, name, None), torch.dtype):
            table["torch", name] = dtype
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "PurePosixPath"):
            table[module, name] = _stand_in(name, _posix_path)
        for name in ("WindowsPath", "PureWindowsPath"):
            table[module, name] = _stand_in(name, lambda *parts: pathlib.PureWindowsPath(*parts))
    # The list decides. A name that this torch does not have is refused like any other.
    return {name: value for name, value in table.items() if name in METADATA_GLOBALS}


def _stand_in(name: str, make: Callable[..., Any]) -> type:
    """A type for one load whose instances are made by `make`, and are not its instances at all."""
    return type(name, (), {"__new__": lambda cls, *arguments: make(*arguments)})


def _empty(kind: type) -> type:
    new = object.__new__
    return type(kind.__name__, (), {"__new__": lambda cls: new(kind)})


def _layouts() -> dict[str, torch.layout]:
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def _posix_path(*parts: str) -> pathlib.PurePath:
    return pathlib.PosixPath(*parts) if os.name == "posix" else pathlib.PurePosixPath(*parts)
