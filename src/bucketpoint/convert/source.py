"""The source of a conversion, in any format: DCP's description of a state, and the position of each item's bytes.

The readers (`from_...`) parse the formats. The reader of byte ranges pins an object to its version at the first
request, and caches blocks for small reads.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shlex
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from bucketpoint.dcp.planning.nested_state import IntKeys, integer_like
from bucketpoint.errors import CorruptDataError, MismatchError, ObjectNotFoundError, PreconditionFailedError
from bucketpoint.format.catalog_keys import OPTIM, group_of
from bucketpoint.format.item_names import escaped, matching
from bucketpoint.retention.rows import FULL, WEIGHTS
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.pieces import BlockCache, RangeFile, for_each

BLOCK_BYTES = 256 << 10
"""Size of a cached block. Headers, directories and small items lie close together, so a block saves requests."""

_MOST_BLOCKS = 64
_CACHE_SHARE = 8


class SourceBytes:
    """Reader of objects of one store, safe to use from several threads.

    Args:
        options: limits of the transfer; cached blocks take up to an eighth of `max_inflight_bytes`.
    """

    def __init__(self, store: Store, options: TransferOptions) -> None:
        self.store = store
        self.options = options
        self._pinned = store.capabilities.pinned_reads
        most = max(min(_MOST_BLOCKS, options.max_inflight_bytes // _CACHE_SHARE // BLOCK_BYTES), 1)
        self._lock = threading.Lock()
        self._infos: dict[str, ObjectInfo] = {}
        self.cache = BlockCache(self._fetch, block_nbytes=BLOCK_BYTES, most=most)

    def look(self, key: str) -> ObjectInfo:
        """Return an object's size and ETag as of the first call for this key. Raises ObjectNotFoundError."""
        info = self._infos.get(key)
        if info is None:
            info = self._head(key)
            with self._lock:
                info = self._infos.setdefault(key, info)
        return info

    def keys(self) -> list[str]:
        """Return the keys for which `look` has found an object."""
        return list(self._infos)

    def has(self, key: str) -> bool:
        try:
            self.look(key)
        except ObjectNotFoundError:
            return False
        return True

    def fingerprint(self, data: bytes = b"") -> str:
        """Return a digest of `data` and of the objects in `keys`, which changes if any of them is replaced.

        Without ETags a replacement cannot be detected, so the digest is random.
        """
        digest = hashlib.sha256(self.store.identity.encode())
        digest.update(hashlib.sha256(data).digest())
        for key, info in sorted(self._infos.items()):
            digest.update(f"\n{key}\n{info.size} {info.etag}".encode())
            digest.update(os.urandom(16) if info.etag is None else b"")
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Check that all objects are as at the first `look`, unless reads are pinned to that version.

        Raises:
            CorruptDataError: an object was replaced or deleted.
        """
        if not self._pinned:
            for_each(self._infos, self._compare, self.options)

    def _compare(self, key: str) -> None:
        known = self._infos[key]
        try:
            now = self._head(key)
        except ObjectNotFoundError:
            raise self._changed(key, "the object was deleted") from None
        if (now.size, now.etag) != (known.size, known.etag):
            raise self._changed(key, "the object was replaced")

    def read(self, key: str, start: int, out: memoryview) -> None:
        """Read the bytes `[start, start + len(out))` of an object into `out`.

        Raises:
            CorruptDataError: the object is too short, or was deleted or replaced since the first `look`.
        """
        if len(out) >= BLOCK_BYTES:
            self._fetch(key, start, out)
            return
        size = self.look(key).size
        if start + len(out) > size:
            raise CorruptDataError(
                f"an object has {size} bytes, but byte {start + len(out) - 1} is needed", url=self.store.url, key=key
            )
        self.cache.read(key, start, out, size=size)

    def take(self, key: str, start: int, nbytes: int) -> memoryview:
        """Read `nbytes` bytes from `start` on into new memory."""
        view = memoryview(bytearray(nbytes))
        self.read(key, start, view)
        return view

    def file(self, key: str, start: int, stop: int) -> RangeFile:
        """Return the bytes `[start, stop)` of an object as a file."""
        return RangeFile(self.read, key, start, stop)

    def _fetch(self, key: str, start: int, out: memoryview) -> None:
        etag = self.look(key).etag if self._pinned else None
        try:
            retry_transient(
                lambda: self.store.read_into(key, start, [out], if_match=etag), attempts=self.options.read_attempts
            )
        except (ObjectNotFoundError, PreconditionFailedError) as error:
            raise self._changed(key, error.message) from error

    def _head(self, key: str) -> ObjectInfo:
        return retry_transient(lambda: self.store.head(key), attempts=self.options.read_attempts)

    def _changed(self, key: str, reason: str) -> CorruptDataError:
        return CorruptDataError(
            f"the source changed during the conversion: {reason}",
            url=self.store.url,
            key=key,
            remedy="Convert again when no other process writes to the source",
        )


BUCKETPOINT = "bucketpoint"
DCP = "dcp"
TORCH = "torch"
SAFETENSORS = "safetensors"

FORMATS = (BUCKETPOINT, DCP, TORCH, SAFETENSORS)
TARGETS = (BUCKETPOINT, TORCH, SAFETENSORS)
"""`dcp` is not a target, because torch's own readers read checkpoints of bucketpoint."""

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Checksum:
    """A checksum. `kind` is `"crc32c"`, or `"crc32"` as in zip archives."""

    kind: str
    value: int


@dataclass(frozen=True, eq=False)
class Stretch:
    """Bytes of an item within one object: a tensor's elements in C order, or a torch.save archive.

    Attributes:
        checksum: checksum of all the bytes, if their writer recorded one.
        opaque: True for a tensor (sparse, quantised, subclass) that is stored as a torch.save archive, not as raw
            elements. Only DCP formats can hold such a tensor.
    """

    key: str
    start: int
    nbytes: int
    checksum: Checksum | None = None
    opaque: bool = False

    @property
    def place(self) -> tuple[str, int]:
        """Sort key that orders payloads by their position in the source."""
        return self.key, self.start


@dataclass(frozen=True)
class Decoded:
    """A tensor that has to be decoded whole, because its elements are not stored in C order or not as raw values.

    Attributes:
        nbytes: bytes of the elements.
        place: key of the object, and offset of the stored tensor in it.
    """

    nbytes: int
    decode: Callable[[], torch.Tensor]
    place: tuple[str, int]
    opaque = False


@dataclass(frozen=True)
class Held:
    """Bytes in memory of an item that is not a tensor and was serialized again."""

    data: bytes = field(repr=False)
    opaque = False
    place = ("", 0)

    @property
    def nbytes(self) -> int:
        return len(self.data)


Payload = Stretch | Decoded | Held


@dataclass(frozen=True)
class Source:
    """A checkpoint to be converted.

    Attributes:
        format: one of `FORMATS`.
        metadata: DCP's metadata, without storage data.
        payloads: payload of every chunk of a tensor and of every other item.
        fingerprint: digest of the keys, sizes and ETags of the source's objects.
        recorded_kind, metrics: kind and metrics of the source's record, if it has one.
        excluded: keys that the caller leaves out; metadata and payloads lack them.
        folder: prefix of the source's folder; None for a single file.
        int_keys: dictionaries with integer keys, if the source records them; in the metadata every key is text.
    """

    format: str
    url: str
    bytes: SourceBytes
    metadata: Metadata = field(repr=False)
    payloads: Mapping[MetadataIndex, Payload] = field(repr=False)
    fingerprint: str
    recorded_kind: str = FULL
    metrics: Mapping[str, float] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()
    folder: str | None = None
    int_keys: Sequence[IntKeys] = ()

    @property
    def kind(self) -> str:
        """Kind of the target in a run: `weights` for a full checkpoint of which the optimizer is left out."""
        optim = any(group_of(fqn) == OPTIM for fqn in self.metadata.state_dict_metadata)
        gone = any(group_of(fqn) == OPTIM for fqn in self.excluded)
        return WEIGHTS if gone and not optim and self.recorded_kind == FULL else self.recorded_kind

    def text_keys(self, target_format: str) -> list[str]:
        """Return the dictionaries whose keys are text in the target, but may be integers in the source."""
        if target_format == SAFETENSORS or self.format not in (BUCKETPOINT, DCP):
            return []
        found = integer_like(self.metadata) - {path for path, _ in self.int_keys}
        return sorted(".".join(map(str, path)) or "the state itself" for path in found)


def excluded_keys(patterns: str | Iterable[str], names: Collection[str], *, url: str) -> frozenset[str]:
    """Return the keys that a conversion leaves out.

    Raises:
        MismatchError: a pattern matches no key, or nothing is left to convert.
    """
    found = frozenset(matching(patterns, names, url=url))
    if found and len(found) == len(names):
        raise MismatchError(
            "--exclude leaves out every key of the source",
            url=url,
            remedy="Exclude fewer keys",
        )
    return found


def exclude_option(key: str) -> str:
    """Return the option that leaves one key out, quoted for a shell, to be named in a remedy."""
    return f"--exclude {shlex.quote(escaped(key))}"


def without(metadata: Metadata, gone: frozenset[str]) -> Metadata:
    """Return DCP's metadata without the keys in `gone`."""
    if not gone:
        return metadata
    left = copy.copy(metadata)
    left.state_dict_metadata = {fqn: entry for fqn, entry in metadata.state_dict_metadata.items() if fqn not in gone}
    if isinstance(metadata.planner_data, Mapping):
        left.planner_data = {fqn: path for fqn, path in metadata.planner_data.items() if fqn not in gone}
    if metadata.storage_data is not None:
        left.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn not in gone}
    return left


def describe(
    state: Mapping[str, Any],
) -> tuple[Metadata, dict[MetadataIndex, torch.Tensor], dict[MetadataIndex, Any]]:
    """Describe a state as DCP's default planner does. Tensors may be on the `meta` device.

    Returns:
        The metadata of a save of the state by one rank, and the state's tensors and other values, by their items.

    Raises:
        MismatchError: two keys of the state are equal after it is flattened.
    """
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(dict(state), is_coordinator=True)
        (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    except ValueError as error:
        raise MismatchError(f"DCP cannot save this state: {error}") from None
    tensors: dict[MetadataIndex, torch.Tensor] = {}
    objects: dict[MetadataIndex, Any] = {}
    for item in plan.items:
        value = planner.state_dict[item.index.fqn]
        if item.type is WriteItemType.BYTE_IO:
            objects[item.index] = value
        elif isinstance(value, torch.Tensor):
            tensors[item.index] = value
    return metadata, tensors, objects
