"""Encoder of `.metadata` pickles that every torch from 2.9 on reads, and decoder to DCP's classes."""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import io
import os
import pickle
import zlib
from collections.abc import Callable, Iterable
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

from bucketpoint.format.index.ref import INDEX_ATTRIBUTE, IndexRef
from bucketpoint.format.index.view import as_stock
from bucketpoint.format.metadata.facts import (
    _EXTRA,
    FORMAT_VERSION,
    check_whole,
    interpreted,
    not_metadata,
    require_plain,
    without_gc,
)
from bucketpoint.format.pickles import tensors
from bucketpoint.format.pickles.machine import MOST_BYTES, Machine
from bucketpoint.format.pickles.metadata_vocabulary import PROTOCOL, MetadataVocabulary, trailer
from bucketpoint.format.pickles.vocabulary import ObjectionError
from bucketpoint.version import __version__


def encode_metadata(metadata: Metadata, *, bucketpoint: dict[str, Any], index: IndexRef | None = None) -> bytes:
    """Encode the bytes to commit: the stock pickle, with `bucketpoint` as one more attribute that stock readers ignore.

    Args:
        bucketpoint: plain values only, that is str, int, float, bool, None, lists and dicts of them. `format` and
            `writer` are added.
        index: reference to the index of this metadata. A reference in `metadata` itself is dropped.
    """
    attributes = {name: as_stock(value) for name, value in vars(metadata).items() if name != INDEX_ATTRIBUTE}
    named = {} if index is None else {INDEX_ATTRIBUTE: index.text}
    whole = object.__new__(Metadata)
    vars(whole).update({**named, **attributes, **extension(bucketpoint)})
    return pickled(whole)


def extension(bucketpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the attribute that `encode_metadata` adds."""
    facts = {"format": FORMAT_VERSION, "writer": __version__, **bucketpoint}
    require_plain(facts, "the bucketpoint facts")
    return {_EXTRA: facts}


def pickled(whole: Metadata) -> bytes:
    """Pickle metadata with all its attributes, except fields that other torch versions cannot read."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=PROTOCOL)
    sharing = _Sharing(whole.state_dict_metadata)
    if type(whole.planner_data) is dict:
        whole.planner_data = {sharing.share(name): value for name, value in whole.planner_data.items()}
    pickler.dispatch_table = {**copyreg.dispatch_table, **sharing.reducers()}
    with without_gc():
        pickler.dump(whole)
    stream.write(trailer(zlib.crc32(stream.getbuffer())))
    return stream.getvalue()


class _Sharing:
    """Reducers for DCP's dataclasses that replace equal names, paths and sizes by one object, which is pickled once.

    Equal values from different ranks are different objects; with 100,000 chunks they would be most of the pickle.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._seen: dict[Any, Any] = {(str, name): name for name in names}

    def reducers(self) -> dict[type, Callable[[Any], Any]]:
        return {
            TensorProperties: self._properties,
            MetadataIndex: self._dataclass,
            ChunkStorageMetadata: self._dataclass,
            _StorageInfo: self._dataclass,
            StorageMeta: self._storage_meta,
        }

    def share(self, value: Any) -> Any:
        # A Size equals a plain tuple of the same numbers but must not be replaced by one.
        kind = type(value)
        if kind is not str and kind is not torch.Size:
            return value
        return self._seen.setdefault((kind, value), value)

    def _dataclass(self, value: Any) -> Any:
        # Fields that are None are left out, as in `_StorageInfo`'s own pickles: None is the class's default.
        state = {name: self.share(content) for name, content in vars(value).items() if content is not None}
        return copyreg.__newobj__, (type(value),), state  # type: ignore[attr-defined]

    @staticmethod
    def _properties(value: TensorProperties) -> Any:
        # torch 2.15 pickles a sixth field, the strides, on which 2.14 and older fail. Every version reads five fields.
        return copyreg.__newobj__, (TensorProperties,), value.__getstate__()[:5]  # type: ignore[attr-defined, no-untyped-call]

    @staticmethod
    def _storage_meta(value: StorageMeta) -> Any:
        state = dict(vars(value))
        if isinstance(state.get("checkpoint_id"), os.PathLike):
            # The class of a path differs between Python versions and systems, so store text.
            state["checkpoint_id"] = os.fspath(state["checkpoint_id"])
        return copyreg.__newobj__, (StorageMeta,), state  # type: ignore[attr-defined]


def decode_metadata(data: bytes, *, trusted: bool = False, url: str | None = None, most: int = MOST_BYTES) -> Metadata:
    """Decode an untrusted `.metadata` object, written with any torch from 2.9 to 2.15.

    Args:
        trusted: unpickle whatever the pickle names. Needed for metadata with classes of a user's planner.
        most: limit on the memory of untrusted metadata, in bytes.

    Raises:
        UnsafeDataError: the pickle names something that DCP metadata never contains. Nothing in it was executed.
        MetadataError: the object is not DCP metadata.
        CheckpointDeletedError: a deletion has replaced the metadata by a deletion marker.
    """
    if not trusted:
        found: Metadata = interpreted(bytes(data), vocabulary(), url, most)
        return found
    check_whole(data, url)
    try:
        with without_gc():
            metadata = pickle.loads(data)
    except Exception as error:
        raise not_metadata(f"{type(error).__name__}: {error}", url) from error
    if not isinstance(metadata, Metadata):
        raise not_metadata(f"it holds a {type(metadata).__name__}", url)
    return metadata


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
