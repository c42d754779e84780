"""Checks of the content of `.metadata`, in DCP's or the plain classes; bucketpoint's facts in it, and the record."""

from __future__ import annotations

import contextlib
import gc
import math
import pickle
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from awscrt.checksums import crc32c

from bucketpoint.errors import CheckpointDeletedError, MetadataError, NewerFormatError, UnsafeDataError
from bucketpoint.format.keys import parse_data_path
from bucketpoint.format.metadata.coverage import is_tensor, uncovered
from bucketpoint.format.pickles.machine import MOST_BYTES, Machine
from bucketpoint.format.pickles.metadata_vocabulary import MetadataVocabulary, trailer
from bucketpoint.format.pickles.vocabulary import ObjectionError, RefusedError, UnreadableError
from bucketpoint.format.record import CommitRecord, parse_marker

_FREE_VALUES = 1 << 16


class RepetitionError(ValueError):
    """Raised if containers occur in too many places to visit all of them."""


def nested_values(root: Any, parts: Callable[[Any], Collection[Any] | None]) -> Iterator[tuple[Any, int]]:
    """Yield the root and all values in it with their depth. A value that occurs twice is yielded twice.

    The number of visits is limited: if 40 lists each hold the next list twice, the last one occurs 2^40 times.

    Args:
        parts: returns the parts of a container, and None for any other value. Called after the value was yielded.

    Raises:
        RepetitionError: the limit is exceeded.
    """
    known: set[int] = set()
    visited, most = 0, _FREE_VALUES
    waiting = [(root, 0)]
    while waiting:
        value, depth = waiting.pop()
        visited += 1
        yield value, depth
        inner = parts(value)
        if inner is None:
            continue
        if id(value) not in known:
            known.add(id(value))
            most += 2 * len(inner)
        if visited > most:
            raise RepetitionError
        waiting += [(part, depth + 1) for part in inner]


FORMAT_VERSION = 1
"""Version of bucketpoint's part of the metadata. Increased only if older readers must refuse it, not for additions."""

MAX_METADATA_BYTES = MOST_BYTES >> 4
"""Limit on the size of a `.metadata` object, far above any real one."""

FILES, SAFETENSORS = "files", "safetensors"
"""Name and value that mark metadata made from the headers of safetensors files, without a `.metadata`."""

QUANTIZATION = "quantization"
"""Name of the fact that lists the quantized tensors in such metadata."""

_EXTRA = "bucketpoint"
_MAX_DIMS = 64
_MAX_NBYTES = 1 << 62
_MAX_SECONDS = 1e12  # the limit of commit records
_MAX_WORD = 64
_MAX_BITS = 1024
_MAX_DEPTH = 8
_NOT_METADATA = "The object was not written as a DCP checkpoint, or is damaged; load another checkpoint"


def extra(metadata: Any) -> dict[str, Any]:
    """Return the checked facts that bucketpoint wrote beside DCP's fields; empty for other writers' metadata.

    Raises:
        MetadataError: the facts are malformed; NewerFormatError if a newer bucketpoint has written them.
    """
    facts = vars(metadata).get(_EXTRA)
    if facts is None:
        return {}
    if type(facts) is not dict:
        raise not_metadata(f"its bucketpoint part is a {type(facts).__name__}", None)
    require_plain(facts, "its bucketpoint part")
    version = facts.get("format")
    if type(version) is not int:
        raise not_metadata(f"its bucketpoint format is {version!r}"[:200], None)
    if version > FORMAT_VERSION:
        raise NewerFormatError(f"The metadata has bucketpoint's format {version!r}", remedy="Upgrade bucketpoint")
    objects = facts.get("objects", {})
    if type(objects) is not dict or not all(map(_is_object_fact, objects.values())):
        raise not_metadata("its table of objects is malformed", None)
    gone = facts.get("thinned_paths", [])
    for name in ("created", "seconds"):
        value = facts.get(name)
        # NaN and the infinities, which a pickle may hold, fail this comparison.
        if value is not None and not (type(value) in (int, float) and 0 <= value < _MAX_SECONDS):
            raise not_metadata(f"its {name!r} is not a valid number of seconds", None)
    if type(gone) is not list or not all(type(path) is str for path in gone):
        raise not_metadata("its list of thinned paths is malformed", None)
    if any(len(str(facts.get(name))) > _MAX_WORD for name in ("token", "kind")):
        raise not_metadata("its token or kind is too long", None)
    return facts


def token_of(metadata: Any) -> str | None:
    """Return the token of the save that wrote the metadata; None for other writers. Other facts are not checked."""
    facts = vars(metadata).get(_EXTRA)
    token = facts.get("token") if type(facts) is dict else None
    return token if type(token) is str else None


def record_of(metadata: Any, data: bytes, *, metadata_etag: str | None) -> CommitRecord:
    """Make the record of a committed checkpoint from decoded metadata and its bytes `data`."""
    facts = extra(metadata)
    items = metadata.storage_data or {}
    sizes = {path: fact["size"] for path, fact in facts.get("objects", {}).items()}
    if not sizes:
        # Other writers record no sizes of objects, so add up the items.
        for info in items.values():
            sizes[info.relative_path] = sizes.get(info.relative_path, 0) + info.length
    covers = next(uncovered(metadata, facts), None) is None
    return make_record(metadata, facts, data, sizes, items=len(items), metadata_etag=metadata_etag, covers=covers)


def make_record(
    metadata: Any,
    facts: dict[str, Any],
    data: bytes,
    sizes: dict[str, int],
    *,
    items: int,
    metadata_etag: str | None,
    covers: bool | None,
) -> CommitRecord:
    """Make the record of a committed checkpoint from metadata whose objects and items are already counted.

    Args:
        metadata: with or without storage data.
        data: bytes of the metadata as committed.
        sizes: bytes of each object, by path.
        items: number of items.
    """
    groups: dict[str, int] = {}
    for path, size in sizes.items():
        named = parse_data_path(path)
        if named is not None:
            groups[named[2]] = groups.get(named[2], 0) + size
    return CommitRecord(
        token=_typed(facts, "token", str),
        created=_typed(facts, "created", float, int),
        seconds=_typed(facts, "seconds", float, int),
        bytes=sum(sizes.values()),
        objects=len(sizes),
        items=items,
        tensors=sum(map(is_tensor, metadata.state_dict_metadata.values())),
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
        covers=covers,
    )


def _metrics(facts: dict[str, Any]) -> dict[str, float]:
    metrics = _typed(facts, "metrics", dict) or {}
    # A larger int may not fit a float.
    if not all(type(value) is float or (type(value) is int and abs(value) < _MAX_NBYTES) for value in metrics.values()):
        raise not_metadata("its bucketpoint part has metrics that are not numbers", None)
    return {name: float(value) for name, value in metrics.items()}


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Suspend garbage collection while up to a million objects are made: collections would take ten times as long."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interpreted(data: bytes, vocabulary: MetadataVocabulary, url: str | None, most: int = MOST_BYTES) -> Any:
    """Interpret a metadata pickle, make objects of the vocabulary's classes and check them.

    Args:
        most: limit on the memory of the objects, in bytes.

    Raises:
        UnsafeDataError, MetadataError, CheckpointDeletedError: as `decode_metadata`.
    """
    check_whole(data, url)
    try:
        with without_gc():
            metadata = Machine(data, vocabulary, most=most).run()
    except (ObjectionError, UnreadableError) as error:
        raise not_metadata(str(error), url) from None
    except RefusedError as error:
        raise UnsafeDataError(f"The metadata names {error}", url=url) from None
    if type(metadata) is not vocabulary.kinds["Metadata"]:
        raise not_metadata(f"it holds a {type(metadata).__name__}", url)
    try:
        _check(metadata, vocabulary.kinds, len(data))
    except (AttributeError, TypeError) as error:
        raise not_metadata(str(error), url) from None
    return metadata


def check_whole(data: bytes, url: str | None) -> None:
    """Compare a metadata object with its trailer. Objects of other writers, and of 0.1 and 0.2, end with the pickle.

    Raises:
        CheckpointDeletedError: a deletion has replaced the metadata by a deletion marker.
        MetadataError: the object is damaged.
    """
    marker = parse_marker(data)
    if marker is not None:
        raise CheckpointDeletedError(marker.text, url=url)
    pickled = memoryview(data)[: -len(trailer(0))]
    if not data.endswith(pickle.STOP) and not data.endswith(trailer(zlib.crc32(pickled))):
        raise not_metadata("it differs from the checksum at its end", url)


def not_metadata(reason: str, url: str | None) -> MetadataError:
    return MetadataError(
        f"The metadata object is not readable as DCP metadata: {reason[:300]}", url=url, remedy=_NOT_METADATA
    )


def _check(metadata: Any, kinds: Mapping[str, Any], nbytes: int) -> None:
    """Check all types that readers rely on. The numbers of an item are checked later, by `read_item`."""
    if type(metadata.state_dict_metadata) is not dict:
        raise TypeError("it has no state_dict_metadata")
    chunks = 0
    for fqn, entry in metadata.state_dict_metadata.items():
        if type(fqn) is not str:
            raise TypeError("a key of its state_dict_metadata is not a string")
        if type(entry) is kinds["TensorStorageMetadata"]:
            chunks += len(entry.chunks)
            if chunks > nbytes:
                # A real chunk takes some bytes, but in a hostile pickle many tensors may share a long list of chunks.
                raise TypeError(f"its tensors have {chunks} chunks or more, which is more than it has bytes")
            _check_tensor(fqn, entry, kinds)
        elif type(entry) is not kinds["BytesStorageMetadata"]:
            raise TypeError(f"{fqn} is a {type(entry).__name__}")
    items = metadata.storage_data
    if items is None:
        return
    if not isinstance(items, dict):
        raise TypeError("its storage_data is not a dictionary")
    for index, info in items.items():
        if type(index) is not kinds["MetadataIndex"] or type(info) is not kinds["_StorageInfo"]:
            raise TypeError("its storage_data has other entries than MetadataIndex: _StorageInfo")
        if type(index.fqn) is not str or type(info.relative_path) is not str or type(info.length) is not int:
            raise TypeError("an entry of its storage_data has fields of wrong types")
    if metadata.storage_meta is not None and type(metadata.storage_meta) is not kinds["StorageMeta"]:
        raise TypeError("its storage_meta is not a StorageMeta")


def _check_tensor(fqn: str, entry: Any, kinds: Mapping[str, Any]) -> None:
    if type(entry.properties) is not kinds["TensorProperties"]:
        raise TypeError(f"{fqn} has no tensor properties")
    _check_size(fqn, entry.size, entry.properties.dtype.itemsize)
    dims, volume = len(entry.size), 0
    for chunk in entry.chunks:
        if type(chunk) is not kinds["ChunkStorageMetadata"]:
            raise TypeError(f"{fqn} has a chunk that is a {type(chunk).__name__}")
        if len(chunk.sizes) != dims or len(chunk.offsets) != dims:
            raise TypeError(f"a chunk of {fqn} has another number of dimensions than the tensor")
        for size, offset, whole in zip(chunk.sizes, chunk.offsets, entry.size, strict=True):
            if size < 0 or offset < 0 or offset + size > whole:
                raise TypeError(f"a chunk of {fqn} does not lie within the tensor")
        volume += math.prod(chunk.sizes)
    # Chunks that overlap would be read and copied again and again. No writer makes them: DCP refuses such a plan.
    if volume > math.prod(entry.size):
        raise TypeError(f"the chunks of {fqn} have more elements than the tensor")


def _check_size(fqn: str, size: Any, itemsize: int) -> None:
    if (
        not isinstance(size, (tuple, list))
        or len(size) > _MAX_DIMS
        or not all(type(n) is int and 0 <= n < _MAX_NBYTES for n in size)
    ):
        raise TypeError(f"the shape of {fqn} is malformed")
    if math.prod(size) * itemsize >= _MAX_NBYTES:
        raise TypeError(f"{fqn} claims {math.prod(size)} elements")


def _is_object_fact(fact: Any) -> bool:
    return (
        type(fact) is dict
        and type(fact.get("size")) is int
        and 0 <= fact["size"] < _MAX_NBYTES
        and (fact.get("etag") is None or type(fact["etag"]) is str)
    )


def require_plain(value: Any, what: str) -> None:
    """Raise MetadataError for values other than text, numbers, booleans, None, and lists and dictionaries of these."""
    try:
        for content, depth in nested_values(value, _parts):
            _require_plain_value(content, depth, what)
    except RepetitionError:
        raise not_metadata(f"{what} contains the same lists too often", None) from None


def _parts(value: Any) -> Collection[Any] | None:
    if type(value) is dict:
        return value.values()
    return value if type(value) in (list, tuple) else None


def _require_plain_value(content: Any, depth: int, what: str) -> None:
    kind = type(content)
    if kind in (dict, list, tuple) and depth < _MAX_DEPTH:
        odd = [name for name in content if type(name) is not str] if kind is dict else []
        if odd:
            raise not_metadata(f"{what} has a key that is a {type(odd[0]).__name__}", None)
    elif content is not None and kind not in (str, int, float, bool):
        raise not_metadata(f"{what} has a {kind.__name__}", None)
    elif kind is int and content.bit_length() > _MAX_BITS:
        raise not_metadata(f"{what} has a number of {content.bit_length()} bits", None)


def _typed(facts: dict[str, Any], name: str, *kinds: type) -> Any:
    value = facts.get(name)
    if value is not None and type(value) not in kinds:
        raise not_metadata(f"its bucketpoint part has a wrong {name}", None)
    return value
