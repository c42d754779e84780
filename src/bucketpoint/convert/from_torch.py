"""Reader of a file of torch.save: tensors are streamed from their positions, other values are serialized again.

The reader of archives finds the positions of the storages, and rebuilds the objects without tensor data. The pickle is
interpreted and never executed, except with `trusted`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.checkpoint.open import REMEDY
from bucketpoint.checkpoint.safetensors_folder import HEAD_BYTES, explain
from bucketpoint.convert.source import (
    TORCH,
    Checksum,
    Decoded,
    Held,
    Payload,
    Source,
    SourceBytes,
    Stretch,
    describe,
    exclude_option,
    excluded_keys,
    without,
)
from bucketpoint.dcp.planning.nested_state import int_keys_of
from bucketpoint.errors import BucketpointError, CorruptDataError, MetadataError, MismatchError, UnsafeDataError
from bucketpoint.format.metadata.facts import RepetitionError, nested_values
from bucketpoint.format.pickles.items import DAMAGED, LOCAL_HEADER, MAGIC, interpreter, settled
from bucketpoint.format.pickles.vocabulary import ObjectionError, RefusedError, UnreadableError
from bucketpoint.transfer.pieces import for_each

MAX_LOADED_BYTES = 64 << 20
"""Limit on the bytes of tensors inside of tuples and other objects (never weights), which are held in memory."""

_MOST_DEPTH = 200

MAX_EXPANDED_BYTES = 256 << 20
"""Limit on the written size of a tensor that repeats elements (`expand`): a few bytes could become any number."""

_FEW = 8
# Package of DTensor's classes. Their instances would require process groups, which do not exist here.
_DISTRIBUTED = "torch.distributed"


def read_torch(
    source: SourceBytes, key: str, url: str, *, exclude: str | Iterable[str] = (), trusted: bool = False
) -> Source:
    """Plan the reading of a file of torch.save. Of tensors, only those inside of tuples and other objects are read.

    Raises:
        MetadataError: the file is not an archive, or is damaged.
        UnsafeDataError: the pickle names something outside the allow-list.
        MismatchError: the file does not contain a dictionary, or contains tensors that are not plain.
    """
    archive = open_archive(source, key, 0, source.look(key).size)
    if archive is None:
        not_ours = MetadataError(
            "The file is not an archive of torch.save",
            url=url,
            remedy="If the file is older than torch 1.6, load it with torch.load and save it again",
        )
        head = bytes(source.take(key, 0, min(HEAD_BYTES, source.look(key).size)))
        raise explain(head, source.store.url, key, not_ours)
    skeleton = Skeleton(archive, trusted=trusted)
    metadata, tensors, objects = describe(_as_state(skeleton.root, url))
    excluded = excluded_keys(exclude, metadata.state_dict_metadata, url=url)
    loaded = _storages_in([value for index, value in objects.items() if index.fqn not in excluded], skeleton)
    if loaded:
        nbytes = sum(archive.storages[name].nbytes for name in loaded)
        if nbytes > MAX_LOADED_BYTES:
            raise MismatchError(
                f"{nbytes} bytes of tensors are inside tuples and objects, which DCP does not search",
                url=url,
                remedy="Put the tensors into dictionaries or lists",
            )
        skeleton = Skeleton(archive, loaded=loaded, trusted=trusted)
        metadata, tensors, objects = describe(_as_state(skeleton.root, url))
    payloads: dict[MetadataIndex, Payload] = {
        index: skeleton.payload(tensor, index.fqn) for index, tensor in tensors.items() if index.fqn not in excluded
    }
    payloads.update((index, Held(_saved(value))) for index, value in objects.items() if index.fqn not in excluded)
    return Source(
        TORCH,
        url,
        source,
        without(metadata, excluded),
        payloads,
        source.fingerprint(),
        excluded=excluded,
        int_keys=int_keys_of(skeleton.root),
    )


def _parts(value: Any) -> Collection[Any] | None:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else None


def _as_state(root: Any, url: str) -> dict[str, Any]:
    if not isinstance(root, Mapping):
        raise MismatchError(
            f"The file holds a {type(root).__name__}, but a checkpoint must be a dictionary",
            url=url,
            remedy="Save it in a dictionary: torch.save({'model': ...}, path)",
        )
    # DCP would find too many values in dictionaries and lists that nest very deeply, or that repeat each other.
    try:
        fits = all(depth <= _MOST_DEPTH or _parts(value) is None for value, depth in nested_values(root, _parts))
    except RepetitionError:
        fits = False
    if not fits:
        raise MismatchError(
            "The file holds dictionaries or lists that nest very deeply, or that occur in very many places", url=url
        )
    return dict(root)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _storages_in(values: Iterable[Any], skeleton: Skeleton) -> set[str]:
    """Return the keys of the storages of tensors inside of `values`."""
    finder = _Finder(skeleton)
    for value in values:
        finder.dump(value)
    return finder.storages


class _Finder(pickle.Pickler):
    """Pickler that is run only to find tensors inside of values; the output is discarded."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
        self._skeleton = skeleton
        self.storages: set[str] = set()

    def reducer_override(self, value: Any, /) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        key = self._skeleton.storage_of(value)
        if key is not None:
            self.storages.add(key)
        return int, ()


# Archives


@dataclass(frozen=True)
class ArchiveRecord:
    """A record of an archive: offset of its first byte in the object, length, and CRC32 if the archive has any."""

    start: int
    nbytes: int
    crc32: int | None


@dataclass(frozen=True)
class Archive:
    """Result of `open_archive`: the pickle, and the storages by their keys."""

    source: SourceBytes = field(repr=False)
    key: str
    pickle: bytes = field(repr=False)
    storages: dict[str, ArchiveRecord] = field(repr=False)


def open_archive(source: SourceBytes, key: str, start: int, stop: int) -> Archive | None:
    """Open the archive in bytes `[start, stop)` of an object; None if the bytes do not begin like an archive.

    Raises:
        MetadataError: the archive is malformed, or was not written by torch.save.
        CorruptDataError: the pickle has another CRC32 than at save.
    """
    if stop - start < len(MAGIC) or bytes(source.take(key, start, len(MAGIC))) != MAGIC:
        return None
    try:
        with zipfile.ZipFile(source.file(key, start, stop)) as archive:
            entries = archive.infolist()
    except DAMAGED as error:
        raise _malformed(source, key, f"its directory cannot be read: {error}") from None
    # After `set_crc32_options(False)`, torch writes 0 as every CRC32. A single 0 may be damage, so it is checked.
    has_crc = any(entry.CRC for entry in entries)
    wanted: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        _, _, name = entry.filename.partition("/")
        if name in ("data.pkl", "byteorder", "constants.pkl") or name.startswith("data/"):
            wanted[name] = entry
    if "constants.pkl" in wanted or "data.pkl" not in wanted:
        raise _malformed(source, key, "it was not written by torch.save")
    records: dict[str, ArchiveRecord] = {}

    def locate(name: str) -> None:
        entry = wanted[name]
        at = start + entry.header_offset
        if entry.compress_type != zipfile.ZIP_STORED or at < start or at + LOCAL_HEADER.size > stop:
            raise _malformed(source, key, f"its record {name} is not stored as torch.save stores it")
        head = LOCAL_HEADER.unpack(source.take(key, at, LOCAL_HEADER.size))
        first = at + LOCAL_HEADER.size + head[-2] + head[-1]
        if head[0] != MAGIC or first + entry.file_size > stop:
            raise _malformed(source, key, f"its record {name} does not lie within the archive")
        records[name] = ArchiveRecord(first, entry.file_size, entry.CRC if has_crc else None)

    if len(wanted) > _FEW:
        for_each(wanted, locate, source.options)
    else:
        for name in wanted:
            locate(name)
    if "byteorder" in records and _content(source, key, records["byteorder"]) != b"little":
        raise _malformed(source, key, "it is big-endian")
    body = _content(source, key, records["data.pkl"])
    storages = {name[len("data/") :]: record for name, record in records.items() if name.startswith("data/")}
    return Archive(source, key, body, storages)


def _content(source: SourceBytes, key: str, record: ArchiveRecord) -> bytes:
    body = source.file(key, record.start, record.start + record.nbytes).read()
    if record.crc32 is not None and zlib.crc32(body) != record.crc32:
        raise CorruptDataError(
            f"{record.nbytes} bytes of an archive, from byte {record.start} on, have a different CRC32 than at save",
            url=source.store.url,
            key=key,
            remedy=REMEDY,
        )
    return body


def _malformed(source: SourceBytes, key: str, reason: str) -> MetadataError:
    return MetadataError(f"The archive of torch.save cannot be converted: {reason}", url=source.store.url, key=key)


class Skeleton:
    """The objects of an archive. Tensors are on the `meta` device, except for those over the storages in `loaded`.

    Args:
        loaded: keys of storages whose bytes are read.
        trusted: unpickle whatever the pickle names.

    Raises:
        UnsafeDataError: the pickle names something outside the allow-list.
        MismatchError: the archive holds DTensors, which are shards of one process.
        MetadataError: the pickle is damaged.
    """

    def __init__(self, archive: Archive, *, loaded: Collection[str] = (), trusted: bool = False) -> None:
        self.archive = archive
        self._loaded = loaded
        self._keys: dict[int, str] = {}
        self._kept: dict[str, torch.UntypedStorage] = {}
        self.root: Any = self._unpickled() if trusted else self._interpreted()

    def _unpickled(self) -> Any:
        try:
            return _Unpickler(self.archive.pickle, self._storage).load()
        except BucketpointError:
            raise
        except Exception as error:  # noqa: BLE001 - damaged pickles make the unpickler raise nearly everything
            raise self._malformed(f"{type(error).__name__}: {error}"[:300]) from None

    def _interpreted(self) -> Any:
        body, key = self.archive.pickle, self.archive.key
        try:
            machine = interpreter(
                body, paid=len(body), storage=lambda name, nbytes, location: self._storage(name), distributed=False
            )
            return settled(machine.run())
        except (ObjectionError, UnreadableError) as error:
            raise self._malformed(str(error)) from None
        except RefusedError as error:
            if str(error).startswith(f"{_DISTRIBUTED}."):
                raise MismatchError(
                    "The file holds DTensors, of which it has only the shards of one process",
                    key=key,
                    remedy="Save with torch.distributed.checkpoint, or save the results of full_tensor()",
                ) from None
            raise UnsafeDataError(f"The pickle names {error}", key=key) from None

    def _malformed(self, reason: str) -> MetadataError:
        return _malformed(self.archive.source, self.archive.key, reason)

    def storage_of(self, tensor: torch.Tensor) -> str | None:
        """Return the key of the storage in which a tensor of the skeleton lies, or None."""
        return self._keys.get(tensor.untyped_storage()._cdata)

    def payload(self, tensor: torch.Tensor, name: str) -> Stretch | Decoded:
        """Return the position of a skeleton tensor's elements.

        Raises:
            MismatchError: the tensor has no plain elements: it is sparse, quantised, or of a subclass.
            MetadataError: the tensor does not lie within its storage.
        """
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise _unfit(name, f"a {type(tensor).__name__} of layout {tensor.layout}")
        if tensor.is_quantized or tensor.is_nested:
            raise _unfit(name, "a quantised or nested tensor")
        key = self.storage_of(tensor)
        record = None if key is None else self.archive.storages.get(key)
        if record is None:
            raise self._malformed(f"it has no bytes for {name}")
        itemsize, nbytes = tensor.dtype.itemsize, prod(tensor.shape) * tensor.dtype.itemsize
        # A tensor without elements may begin beyond its storage, so its offset is not used.
        first = int(tensor.storage_offset()) * itemsize if nbytes else 0
        span = 0
        if nbytes:
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            span = (1 + sum((size - 1) * step for size, step in steps)) * itemsize
        if first + span > record.nbytes:
            raise self._malformed(f"{name} does not lie within its storage")
        start = record.start + first
        if nbytes > max(record.nbytes, MAX_EXPANDED_BYTES):
            raise _unfit(name, f"an expanded tensor of {nbytes} bytes over a storage of {record.nbytes}")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return Decoded(nbytes, lambda: self._decode(tensor, start, span), (self.archive.key, start))
        known = record.crc32 if (first, nbytes) == (0, record.nbytes) else None
        checksum = None if known is None else Checksum("crc32", known)
        return Stretch(self.archive.key, start, nbytes, checksum)

    def _decode(self, tensor: torch.Tensor, start: int, span: int) -> torch.Tensor:
        if not span:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        raw = self.archive.source.take(self.archive.key, start, span)
        flat = torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype)
        decoded = flat.as_strided(tuple(tensor.shape), tuple(tensor.stride()))
        decoded = decoded.conj() if tensor.is_conj() else decoded
        return torch._neg_view(decoded) if tensor.is_neg() else decoded

    def _storage(self, key: str) -> torch.UntypedStorage:
        storage = self._kept.get(key)
        if storage is None:
            record = self.archive.storages.get(key)
            if record is None:
                raise self._malformed(f"it has no storage {key[:100]!r}")
            if key in self._loaded:
                # At least one byte: frombuffer refuses an empty buffer.
                raw = bytearray(_content(self.archive.source, self.archive.key, record) or 1)
                storage = torch.frombuffer(raw, dtype=torch.uint8)[: record.nbytes].clone().untyped_storage()
            else:
                storage = torch.UntypedStorage(record.nbytes, device="meta")  # type: ignore[no-untyped-call]
            self._kept[key] = storage
            self._keys[storage._cdata] = key
        return storage


def _unfit(name: str, what: str) -> MismatchError:
    return MismatchError(
        f"The tensor cannot be converted, because it is {what}",
        key=name,
        remedy=f"Save the tensor as a plain, dense tensor, or leave it out with {exclude_option(name)}",
    )


class _Unpickler(pickle.Unpickler):
    """Unpickler for a trusted pickle, which resolves persistent ids to storages of the archive."""

    def __init__(self, body: bytes, storage: Callable[[str], torch.UntypedStorage]) -> None:
        # torch.load's own encoding, for text pickled by Python 2.
        super().__init__(io.BytesIO(body), encoding="utf-8")
        self._storage = storage

    def persistent_load(self, pid: Any, /) -> Any:
        if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage" or type(pid[2]) is not str:
            raise MetadataError("The pickle has a persistent reference that torch.save does not write")
        # The class of a typed storage has a dtype; that of an untyped storage has none.
        dtype = pid[1]._dtype if issubclass(pid[1], torch.storage._LegacyStorage) else torch.uint8
        storage = self._storage(pid[2])
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=storage, dtype=dtype, _internal=True
        )
