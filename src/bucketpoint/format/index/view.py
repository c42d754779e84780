"""Metadata read from an index: mappings that make DCP's objects anew on each access, to save memory."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from bucketpoint.errors import MetadataError
from bucketpoint.format.index.decode import Index


def decode_index(data: bytes, *, url: str | None = None) -> Metadata:
    """Decode an index to metadata equal to the decoded `.metadata`. Its mappings are read-only.

    Raises:
        MetadataError: the data is not an index, or contradicts itself.
    """
    try:
        index = Index(bytes(data))
        if index.overlaps:
            # A load would read and copy the same elements again and again.
            raise MetadataError("The index has a tensor whose chunks have more elements than the tensor")
        return _metadata(index)
    except MetadataError as error:
        error.url = url
        raise
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, RecursionError, OverflowError, zlib.error,
            struct.error, AttributeError) as error:  # fmt: skip
        # Errors that json, zlib and torch raise for damaged bytes.
        raise MetadataError(f"The index is damaged: {type(error).__name__}: {str(error)[:300]}", url=url) from None


class Chunks(Sequence[ChunkStorageMetadata]):
    """Chunks of a tensor, in a sequence equal to DCP's list, which is made on first access."""

    def __init__(self, source: Index, number: int) -> None:
        self.source = source
        self.number = number

    @cached_property
    def _list(self) -> list[ChunkStorageMetadata]:
        offsets, sizes = (zip(*boxes.tolist(), strict=True) for boxes in self.source.boxes(self.number))
        if not self.source.dims[self.number]:
            return [ChunkStorageMetadata(torch.Size(()), torch.Size(())) for _ in range(len(self))]
        return [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
            for offset, size in zip(offsets, sizes, strict=True)
        ]

    @overload
    def __getitem__(self, place: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, place: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, place: Any) -> Any:
        return self._list[place]

    def __len__(self) -> int:
        return self.source.counts[self.number]

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        return iter(self._list)

    def __eq__(self, other: object) -> bool:
        return self._list == (other._list if isinstance(other, Chunks) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._list)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self._list,)

    def sizes_at(self, offset: Sequence[int], hint: int | None) -> tuple[int, ...] | None:
        """Return the shape of the chunk that begins at `offset`, or None, without making the list."""
        slot = self.source.find(self.number, offset, hint)
        return None if slot is None else self.source.box(self.number, slot)[1]


class _View(Mapping[Any, Any]):
    """Mapping over an index, equal to a dictionary of the same content."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.index,)

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == (dict(other.items()) if isinstance(other, Mapping) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)}>"


class Entries(_View):
    """`Metadata.state_dict_metadata`, over an index."""

    def __getitem__(self, fqn: Any) -> Any:
        number = self.index.numbers[fqn]
        properties = self.index.properties(number)
        if properties is None:
            return BytesStorageMetadata()
        chunks: Any = Chunks(self.index, number)
        return TensorStorageMetadata(properties, self.index.shape(number), chunks)

    def cut_tensors(self) -> Iterator[tuple[str, torch.Size, list[tuple[Any, Any]]]]:
        """Yield name, shape and chunks, as (offsets, sizes), of each tensor that is not one whole chunk."""
        for number in self.index.cut():
            offsets, sizes = (boxes.t().tolist() for boxes in self.index.boxes(number))
            yield self.index.names[number], self.index.shape(number), list(zip(offsets, sizes, strict=True))

    def __contains__(self, fqn: object) -> bool:
        return fqn in self.index.numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.names)

    def __len__(self) -> int:
        return len(self.index.names)


class Items(_View):
    """`Metadata.storage_data`, over an index."""

    def __getitem__(self, index: Any) -> _StorageInfo:
        slot = self.index.slot(index)
        if slot is None:
            raise KeyError(index)
        return self.index.info(slot)

    def __iter__(self) -> Iterator[MetadataIndex]:
        return self.index.indices()

    def __len__(self) -> int:
        return sum(self.index.counts)


class Mappings(_View):
    """`Metadata.planner_data`, over an index. It is decoded on first access."""

    def __getitem__(self, fqn: Any) -> tuple[Any, ...]:
        return self.index.mappings[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.mappings)

    def __len__(self) -> int:
        return len(self.index.mappings)


def as_stock(value: Any) -> Any:
    """Convert a mapping over an index to a dictionary of DCP's objects; return any other value unchanged."""
    if not isinstance(value, _View):
        return value
    plain = dict(value.items())
    for entry in plain.values():
        if isinstance(entry, TensorStorageMetadata):
            entry.chunks = list(entry.chunks)
    return plain


def _metadata(index: Index) -> Metadata:
    metadata = object.__new__(Metadata)
    told = index.facts()
    facts, meta = dict(told["bucketpoint"]), told["storage_meta"]
    if told["table"]:
        known = [each for each in told["objects"] if len(each) == 3]
        facts["objects"] = {path: {"size": size, "etag": etag} for path, size, etag in known}
    vars(metadata).update(
        state_dict_metadata=Entries(index),
        planner_data=None if not index.has_mappings else Mappings(index),
        storage_data=Items(index),
        storage_meta=None if meta is None else StorageMeta(*meta),
        bucketpoint=facts,
    )
    for version in told["version"]:
        metadata.version = version
    return metadata


class ChunkShapes:
    """Lookup of the shapes of saved chunks by DCP's index."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self._known: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}

    def of(self, index: MetadataIndex) -> tuple[int, ...] | None:
        entry = self.metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        offset = tuple(index.offset) if index.offset is not None else (0,) * len(entry.size)
        saved: Any = entry.chunks
        if isinstance(saved, Chunks):
            return saved.sizes_at(offset, index.index)
        chunks = self._known.get(index.fqn)
        if chunks is None:
            chunks = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in saved}
            self._known[index.fqn] = chunks
        return chunks.get(offset)
