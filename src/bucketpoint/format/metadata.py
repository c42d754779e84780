"""The `.metadata` pickle: written so that every torch from 2.9 on reads it, read by an interpreter."""

from __future__ import annotations

import contextlib
import copyreg
import gc
import io
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from awscrt.checksums import crc32c
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketpoint.errors import CheckpointDeletedError, MetadataError, UnsafeDataError
from bucketpoint.format.deletion_marker import parse_marker
from bucketpoint.format.index_ref import INDEX_ATTRIBUTE, IndexRef
from bucketpoint.format.index_view import as_stock
from bucketpoint.format.keys import parse_data_path
from bucketpoint.format.pickles import dcp_metadata
from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.vocabulary import MalformedPickleError, OverspentError
from bucketpoint.format.record import CommitRecord
from bucketpoint.version import __version__

FORMAT_VERSION = 1
"""Of what bucketpoint adds to the metadata. Raised when a reader has to know; additions alone do not raise it."""

PICKLE_PROTOCOL = 4  # what every supported Python reads, and the least that has memoized frames

_EXTRA = "bucketpoint"
_MAX_DIMS = 64
_MAX_NBYTES = 1 << 62
_MAX_SECONDS = 1e12  # as commit records have it
_MAX_WORD = 64
_NOT_METADATA = "Whoever wrote this did not write a DCP checkpoint, or the object is damaged; name another checkpoint"


def encode_metadata(metadata: Metadata, *, bucketpoint: dict[str, Any], index: IndexRef | None = None) -> bytes:
    """The bytes to commit: the stock pickle, with `bucketpoint` as one more attribute that stock readers ignore.

    Args:
        bucketpoint: plain values only, that is str, int, float, bool, None, lists and dicts of them. `format` and
            `writer` are added.
        index: the index that says the same; that of other metadata is never taken over.
    """
    attributes = {name: as_stock(value) for name, value in vars(metadata).items() if name != INDEX_ATTRIBUTE}
    named = {} if index is None else {INDEX_ATTRIBUTE: index.text}
    whole = object.__new__(Metadata)
    vars(whole).update({**named, **attributes, **extension(bucketpoint)})
    return pickled(whole)


def extension(bucketpoint: dict[str, Any]) -> dict[str, Any]:
    """The attribute that `encode_metadata` adds."""
    facts = {"format": FORMAT_VERSION, "writer": __version__, **bucketpoint}
    _require_plain(facts, "the bucketpoint facts", None)
    return {_EXTRA: facts}


def pickled(whole: Metadata) -> bytes:
    """The pickle of metadata, which takes its attributes as they are but for what other versions would not read."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=PICKLE_PROTOCOL)
    sharing = _Sharing(whole.state_dict_metadata)
    if type(whole.planner_data) is dict:
        whole.planner_data = {sharing.share(name): value for name, value in whole.planner_data.items()}
    pickler.dispatch_table = {**copyreg.dispatch_table, **sharing.reducers()}
    with without_gc():
        pickler.dump(whole)
    return stream.getvalue()


class _Sharing:
    """Reduces DCP's dataclasses so that equal names, paths and sizes are one object, which pickles once.

    They come from many ranks and are equal rather than identical; at 100,000 chunks they are most of the pickle.
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
        # A Size equals a plain tuple of the same numbers and must not become one.
        kind = type(value)
        if kind is not str and kind is not torch.Size:
            return value
        return self._seen.setdefault((kind, value), value)

    def _dataclass(self, value: Any) -> Any:
        # Fields that are None have None as their class's default, and stay out as `_StorageInfo` itself does it.
        state = {name: self.share(content) for name, content in vars(value).items() if content is not None}
        return copyreg.__newobj__, (type(value),), state  # type: ignore[attr-defined]

    @staticmethod
    def _properties(value: TensorProperties) -> Any:
        # torch 2.15 pickles a sixth field, the strides, at which 2.14 and older fail. All read five.
        return copyreg.__newobj__, (TensorProperties,), value.__getstate__()[:5]  # type: ignore[attr-defined, no-untyped-call]

    @staticmethod
    def _storage_meta(value: StorageMeta) -> Any:
        state = dict(vars(value))
        if isinstance(state.get("checkpoint_id"), os.PathLike):
            # The class of a path is not the same in each Python, nor on each system.
            state["checkpoint_id"] = os.fspath(state["checkpoint_id"])
        return copyreg.__newobj__, (StorageMeta,), state  # type: ignore[attr-defined]


def decode_metadata(data: bytes, *, trusted: bool = False, url: str | None = None) -> Metadata:
    """The metadata in a `.metadata` object that anybody wrote with any torch from 2.9 to 2.15.

    Args:
        trusted: unpickle it, whatever it names, for metadata with classes of the user's own planner.

    Raises:
        UnsafeDataError: the pickle names something that DCP metadata never has. Nothing of it was run.
        MetadataError: it is not DCP metadata.
        CheckpointDeletedError: a deletion has replaced it by its marker.
    """
    marker = parse_marker(data)
    if marker is not None:
        raise CheckpointDeletedError(marker.text, url=url)
    with without_gc():
        metadata = _unpickle_trusted(data, url) if trusted else _interpreted(bytes(data), url)
    if not isinstance(metadata, Metadata):
        raise _not_metadata(f"it holds a {type(metadata).__name__}", url)
    if trusted:
        return metadata
    try:
        _check(metadata, url)
    except (AttributeError, TypeError) as error:
        raise _not_metadata(str(error), url) from None
    return metadata


def extra(metadata: Metadata) -> dict[str, Any]:
    """What bucketpoint wrote beside DCP's own fields, checked; empty for the metadata of other writers.

    Raises:
        MetadataError: it is there and malformed.
    """
    facts = vars(metadata).get(_EXTRA)
    if facts is None:
        return {}
    if type(facts) is not dict:
        raise _not_metadata(f"its bucketpoint part is a {type(facts).__name__}", None)
    _require_plain(facts, "its bucketpoint part", None)
    version = facts.get("format")
    if type(version) is not int or version > FORMAT_VERSION:
        raise MetadataError(f"The metadata has bucketpoint's format {version!r}", remedy="Upgrade bucketpoint")
    objects = facts.get("objects", {})
    if type(objects) is not dict or not all(map(_is_object_fact, objects.values())):
        raise _not_metadata("its table of objects is malformed", None)
    created, gone = facts.get("created"), facts.get("thinned_paths", [])
    # NaN and the infinities, which a pickle may hold, fail the comparison.
    if created is not None and not (type(created) in (int, float) and 0 <= created < _MAX_SECONDS):
        raise _not_metadata("the time of its commit is none", None)
    if type(gone) is not list or not all(type(path) is str for path in gone):
        raise _not_metadata("the list of what was thinned is malformed", None)
    if any(len(str(facts.get(name))) > _MAX_WORD for name in ("token", "kind")):
        raise _not_metadata("its token or kind is too long", None)
    return facts


def record_from_metadata(data: bytes, *, metadata_etag: str | None = None) -> CommitRecord:
    """The record of a committed checkpoint, made of nothing but the bytes of its `.metadata`.

    Raises:
        UnsafeDataError, MetadataError: as `decode_metadata`.
    """
    return record_of(decode_metadata(data), data, metadata_etag=metadata_etag)


def record_of(metadata: Metadata, data: bytes, *, metadata_etag: str | None) -> CommitRecord:
    """The same, where `data` has been decoded."""
    facts = extra(metadata)
    items = metadata.storage_data or {}
    sizes = {path: fact["size"] for path, fact in facts.get("objects", {}).items()}
    if not sizes:
        # Of another writer: all that is known of an object is what its items cover.
        for info in items.values():
            sizes[info.relative_path] = sizes.get(info.relative_path, 0) + info.length
    return make_record(metadata, facts, data, sizes, items=len(items), metadata_etag=metadata_etag)


def make_record(
    metadata: Metadata,
    facts: dict[str, Any],
    data: bytes,
    sizes: dict[str, int],
    *,
    items: int,
    metadata_etag: str | None,
) -> CommitRecord:
    """The same record, where what it counts is known.

    Args:
        metadata: with or without storage data.
        data: its bytes as they are committed.
        sizes: of all objects, in bytes.
        items: how many of them lie in the objects.
    """
    groups: dict[str, int] = {}
    for path, size in sizes.items():
        named = parse_data_path(path)
        if named is not None:
            groups[named[2]] = groups.get(named[2], 0) + size
    return CommitRecord(
        token=_typed(facts, "token", str),
        created=_typed(facts, "created", float, int),
        bytes=sum(sizes.values()),
        objects=len(sizes),
        items=items,
        tensors=sum(isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()),
        world_size=_typed(facts, "world_size", int),
        torch=_typed(facts, "torch", str),
        bucketpoint=_typed(facts, "writer", str),
        metadata_etag=metadata_etag,
        metadata_crc32c=int(crc32c(data)),
        groups=dict(sorted(groups.items())),
        step=_typed(facts, "step", int),
        kind=_typed(facts, "kind", str) or CommitRecord.kind,
        metrics=_metrics(facts),
        git_sha=_typed(facts, "git_sha", str),
        config_hash=_typed(facts, "config_hash", str),
    )


def _metrics(facts: dict[str, Any]) -> dict[str, float]:
    metrics = _typed(facts, "metrics", dict) or {}
    # A larger int may not fit a float.
    if not all(type(value) is float or (type(value) is int and abs(value) < _MAX_NBYTES) for value in metrics.values()):
        raise _not_metadata("its bucketpoint part has metrics that are no numbers", None)
    return {name: float(value) for name, value in metrics.items()}


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """A million objects are made and none is garbage: the collections that it would set off take ten times as long."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _unpickle_trusted(data: bytes, url: str | None) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise _not_metadata(f"{type(error).__name__}: {error}", url) from error


def _interpreted(data: bytes, url: str | None) -> Any:
    machine, reason, found = Machine(data, dcp_metadata.vocabulary()), None, None
    try:
        found = machine.run()
    except OverspentError:
        reason = "it asks for more work than its length pays for"
    except MalformedPickleError as error:
        reason = str(error)
    names = [name for name in machine.refused if not name.startswith("<")]
    if names:
        raise UnsafeDataError(f"The metadata names {', '.join(names)}", url=url)
    reason = next(iter((*machine.refused, *machine.faults)), reason)
    if reason is not None:
        raise _not_metadata(reason, url)
    return found


def _not_metadata(reason: str, url: str | None) -> MetadataError:
    return MetadataError(
        f"The metadata object is not readable as DCP metadata: {reason[:300]}", url=url, remedy=_NOT_METADATA
    )


def _check(metadata: Metadata, url: str | None) -> None:
    """Whatever reading relies on has the type that it should have. Reading checks an item's own numbers later."""
    if type(metadata.state_dict_metadata) is not dict:
        raise TypeError("it has no state_dict_metadata")
    for fqn, entry in metadata.state_dict_metadata.items():
        if type(fqn) is not str:
            raise TypeError("a key of the state is no string")
        if type(entry) is TensorStorageMetadata:
            _check_tensor(fqn, entry, url)
        elif type(entry) is not BytesStorageMetadata:
            raise TypeError(f"{fqn} is a {type(entry).__name__}")
    items = metadata.storage_data
    if items is None:
        return
    if not isinstance(items, dict):
        raise TypeError("its storage_data is no dictionary")
    for index, info in items.items():
        if type(index) is not MetadataIndex or type(info) is not _StorageInfo:
            raise TypeError("its storage_data has other entries than MetadataIndex: _StorageInfo")
        if type(index.fqn) is not str or type(info.relative_path) is not str or type(info.length) is not int:
            raise TypeError("an entry of its storage_data has fields of wrong types")
    if metadata.storage_meta is not None and type(metadata.storage_meta) is not StorageMeta:
        raise TypeError("its storage_meta is no StorageMeta")


def _check_tensor(fqn: str, entry: TensorStorageMetadata, url: str | None) -> None:
    if type(entry.properties) is not TensorProperties:
        raise TypeError(f"{fqn} has no tensor properties")
    _check_size(fqn, entry.size, entry.properties.dtype.itemsize)
    dims = len(entry.size)
    for chunk in entry.chunks:
        if type(chunk) is not ChunkStorageMetadata:
            raise TypeError(f"{fqn} has a chunk that is a {type(chunk).__name__}")
        if len(chunk.sizes) != dims or len(chunk.offsets) != dims:
            raise TypeError(f"{fqn} has a chunk of other dimensions")
        for size, offset, whole in zip(chunk.sizes, chunk.offsets, entry.size, strict=True):
            if size < 0 or offset < 0 or offset + size > whole:
                raise TypeError(f"{fqn} has a chunk outside the tensor")


def _check_size(fqn: str, size: Any, itemsize: int) -> None:
    if not isinstance(size, (tuple, list)) or len(size) > _MAX_DIMS or not all(type(n) is int and n >= 0 for n in size):
        raise TypeError(f"{fqn} has no shape")
    if math.prod(size) * itemsize >= _MAX_NBYTES:
        raise TypeError(f"{fqn} claims {math.prod(size)} elements")


def _is_object_fact(fact: Any) -> bool:
    return (
        type(fact) is dict
        and type(fact.get("size")) is int
        and 0 <= fact["size"] < _MAX_NBYTES
        and (fact.get("etag") is None or type(fact["etag"]) is str)
    )


def _require_plain(value: Any, what: str, url: str | None, depth: int = 8) -> None:
    kind = type(value)
    if kind is dict and depth:
        for name, content in value.items():
            if type(name) is not str:
                raise _not_metadata(f"{what} has a key that is a {type(name).__name__}", url)
            _require_plain(content, what, url, depth - 1)
    elif kind in (list, tuple) and depth:
        for content in value:
            _require_plain(content, what, url, depth - 1)
    elif value is not None and kind not in (str, int, float, bool):
        raise _not_metadata(f"{what} has a {kind.__name__}", url)


def _typed(facts: dict[str, Any], name: str, *kinds: type) -> Any:
    value = facts.get(name)
    if value is not None and type(value) not in kinds:
        raise _not_metadata(f"its bucketpoint part has a wrong {name}", None)
    return value
