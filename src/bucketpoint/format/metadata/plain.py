"""Reader of the `.metadata` pickle without torch, for tools that only inspect it. Its classes mirror DCP's."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from bucketpoint.format.metadata.facts import interpreted, record_of
from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.metadata_vocabulary import MetadataVocabulary
from bucketpoint.format.pickles.vocabulary import DTYPE_NAMES, ObjectionError, Vocabulary, unfit
from bucketpoint.format.record import CommitRecord

_MAX_DIMS = 64
_MAX_NAME = 64
_BYTES = {"bfloat16": 2, "complex32": 4, "bcomplex32": 4, "bits16": 2, "qint32": 4}
_NUMBERED = re.compile(r"(complex|float|int|uint)(16|32|64|128)")


@dataclass(frozen=True)
class Dtype:
    """Name of a data type."""

    name: str

    @property
    def itemsize(self) -> int:
        numbered = _NUMBERED.fullmatch(self.name)
        # All other dtypes take one byte.
        return _BYTES.get(self.name, int(numbered[2]) // 8 if numbered else 1)

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class LayoutName:
    """Name of a layout."""

    name: str


class Size(tuple[int, ...]):
    """The shape of a tensor or chunk."""

    __slots__ = ()


class MemoryFormat(enum.Enum):
    """Numbers of the memory formats in pickles."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


@dataclass(frozen=True)
class MetadataIndex:
    """Index of an item. Comparisons ignore `index`, as in DCP's class."""

    fqn: str
    offset: Any = None
    index: Any = field(default=None, compare=False)


_FIELDS: Mapping[str, str] = {
    "Metadata": "state_dict_metadata planner_data storage_data storage_meta",
    "TensorStorageMetadata": "properties size chunks",
    "BytesStorageMetadata": "",
    "ChunkStorageMetadata": "offsets sizes",
    "StorageMeta": "checkpoint_id save_id load_id modules",
    "TensorProperties": "dtype layout requires_grad memory_format pin_memory",
    "_StorageInfo": "relative_path offset length transform_descriptors",
    "_StoragePrefix": "prefix",
}


def read_metadata(data: bytes, *, url: str | None = None) -> Any:
    """Interpret an untrusted `.metadata` object with the plain classes.

    Raises:
        UnsafeDataError, MetadataError, CheckpointDeletedError: as `decode_metadata`.
    """
    return interpreted(bytes(data), vocabulary(), url)


def read_record(data: bytes, *, metadata_etag: str | None = None) -> CommitRecord:
    """Make the record of a committed checkpoint from the bytes of its `.metadata` alone.

    Raises:
        UnsafeDataError, MetadataError, CheckpointDeletedError: as `decode_metadata`.
    """
    return record_of(read_metadata(data), data, metadata_etag=metadata_etag)


@functools.cache
def vocabulary() -> MetadataVocabulary:
    """Return the vocabulary of a `.metadata` pickle, with the plain classes."""
    kinds: dict[str, type] = {"MetadataIndex": MetadataIndex}
    for kind, fields in _FIELDS.items():
        # As in DCP's classes, fields that a pickle leaves out are None.
        kinds[kind] = make_dataclass(kind, [(name, Any, None) for name in fields.split()], eq=False)
    values = Vocabulary()
    for name in DTYPE_NAMES:
        values.add(Dtype(name), names=[f"torch.{name}"])
    values.add(Size, _size, ["torch.Size"])
    values.parts[Size] = tuple
    values.function("torch.serialization._get_layout")(_layout)
    return MetadataVocabulary(kinds, _set_properties, MemoryFormat, values)


def _set_properties(machine: Machine, target: Any, state: Any) -> Any:
    dtype, layout, requires_grad, memory_format, pin_memory, *_ = state
    if type(dtype) is not Dtype or type(layout) is not LayoutName:
        raise ObjectionError("tensor properties without a dtype and a layout")
    target.dtype, target.layout, target.memory_format = dtype, layout, memory_format
    target.requires_grad, target.pin_memory = bool(requires_grad), bool(pin_memory)
    return target


def _size(machine: Machine, numbers: Any) -> Size:
    if not isinstance(numbers, (tuple, list)) or len(numbers) > _MAX_DIMS or any(type(n) is not int for n in numbers):
        raise unfit("a shape")
    return Size(numbers)


def _layout(machine: Machine, name: Any) -> LayoutName:
    if type(name) is not str or len(name) > _MAX_NAME:
        raise unfit("a layout")
    return LayoutName(name)
