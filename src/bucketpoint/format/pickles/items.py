"""Reader of untrusted items: files of torch.save, whose zip archives are checked, and bare pickles.

Items that were read safely are encoded again for `torch.load` and planners' unpicklers.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from bucketpoint.format.pickles import arrays, plain, tensors
from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.vocabulary import (
    Deferred,
    Function,
    ObjectionError,
    RefusedError,
    Registered,
    Shell,
    UnreadableError,
    Vocabulary,
)

MAGIC = b"PK\x03\x04"  # torch.load recognises an archive by these bytes
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_END, _END_BYTES = b"PK\x05\x06", 22
_LOCATOR, _LOCATOR_BYTES, _END64_BYTES = b"PK\x06\x07", 20, 56
_PIECE = 1 << 20
DAMAGED = (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError, EOFError)
"""Exceptions that `zipfile` raises for a damaged directory."""

_MAGIC_BEFORE_TORCH_1_6 = 0x1950A86A20F9469CFC6C
_MAX_PICKLES = 5
_DTENSOR = {
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed._mesh_layout": "_FlatLayout _MeshLayout",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta ShardOrderEntry",
    "torch.distributed.tensor.placement_types": "Partial Replicate Shard _StridedShard",
}


@dataclass(frozen=True)
class Item:
    """The values of an item.

    Attributes:
        values: the value of each pickle in the item; a file of torch.save has one.
        saved: True for a file of torch.save, False for bare pickles.
        locations: name of the device of each storage in `values`, by the storage's `_cdata`.
    """

    values: list[Any]
    saved: bool
    locations: dict[int, str]


def read_item(data: bytes) -> Item:
    """Interpret an item: torch.save's output since torch 1.6, or bare pickles of protocol 2 or later.

    Tensors are on the CPU. Calls of functions that the user registered with `torch.serialization.add_safe_globals` are
    deferred.

    Raises:
        RefusedError: the item names something outside the allow-list, or contains a construct that no writer makes.
        UnreadableError: the data has neither format, so loading it would execute nothing.
    """
    return _read_zip(data) if data[: len(MAGIC)] == MAGIC else _read_stream(data)


def vocabulary(*, distributed: bool = True) -> Vocabulary:
    """Return the vocabulary of items with the names that the user has registered; `distributed` adds DTensor names."""
    found = Vocabulary(_known(distributed))
    for item in torch.serialization.get_safe_globals():
        value, full = item if isinstance(item, tuple) else (item, f"{item.__module__}.{item.__qualname__}")
        module, _, name = full.rpartition(".")
        if distributed or (module, name) not in _dtensor_names():
            found.names.setdefault((module, name), Registered(value, called=True))
    return found


@functools.cache
def _known(distributed: bool = True) -> Vocabulary:
    found = Vocabulary(plain.VALUES, tensors.VALUES, arrays.VALUES)
    if distributed:
        found.names |= _dtensor_names()
    return found


@functools.cache
def _dtensor_names() -> dict[tuple[str, str], Any]:
    found = {}
    for module, names in _DTENSOR.items():
        try:
            imported = importlib.import_module(module)
        except ImportError:
            continue  # a module of another version of torch
        for name in names.split():
            if hasattr(imported, name):
                found[module, name] = Registered(getattr(imported, name), called=False)
    return found


# Reading


def interpreter(
    data: bytes,
    *,
    paid: int,
    position: int = 0,
    storage: Callable[[str, int, str], torch.UntypedStorage] | None = None,
    distributed: bool = True,
) -> Machine:
    """Return the interpreter of one pickle of an item.

    Args:
        paid: length of the item that contains the pickle, by which time and memory are limited.
        storage: function that returns a storage by key, length in bytes and name of the device.
        distributed: allow DTensors.
    """
    persistent = storage and functools.partial(tensors.storage, find=storage)
    return Machine(data, vocabulary(distributed=distributed), position=position, paid=paid, persistent=persistent)


class _Storages:
    """Storages of one item, copied from its bytes when the pickle first refers to them."""

    def __init__(self, data: bytes, places: dict[str, tuple[int, int]]) -> None:
        self._data, self._places = data, places
        self._made: dict[str, torch.UntypedStorage] = {}
        self.locations: dict[int, str] = {}
        self._left = len(data)

    def __call__(self, key: str, nbytes: int, location: str) -> torch.UntypedStorage:
        storage = self._made.get(key)
        if storage is None:
            if location == "meta":
                storage = torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]
            else:
                storage = self._copied(key)
            if storage.nbytes() != nbytes:
                # torch.load refuses this too.
                raise UnreadableError("a storage has another length than the pickle states")
            self._made[key] = storage
            self.locations[storage._cdata] = location
        if storage.nbytes() < nbytes:
            raise UnreadableError("a storage has fewer bytes than the pickle states")
        return storage

    def _copied(self, key: str) -> torch.UntypedStorage:
        start, stop = self._places.get(key, (-1, -1))
        # Records may overlap, so copies are limited to the length of the data in total.
        self._left -= stop - start
        if start < 0 or self._left < 0:
            raise UnreadableError(f"the file has no storage {key[:100]!r}")
        if start == stop:
            return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        raw = bytearray(memoryview(self._data)[start:stop])
        return torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()


def _read_zip(data: bytes) -> Item:
    places = records(data)
    if "constants.pkl" in places:
        raise RefusedError("torch.jit.load")
    if "data.pkl" not in places:
        raise UnreadableError("the archive has no data.pkl")
    if "byteorder" in places and data[slice(*places["byteorder"])] != b"little":
        raise ObjectionError("a big-endian archive")
    storages = _Storages(data, {name[5:]: place for name, place in places.items() if name.startswith("data/")})
    machine = interpreter(data[slice(*places["data.pkl"])], paid=len(data), storage=storages)
    return Item([machine.run()], True, storages.locations)


def _read_stream(data: bytes) -> Item:
    values: list[Any] = []
    position = 0
    while position < len(data) or not values:
        machine = interpreter(data, paid=len(data) - position, position=position)
        try:
            value = machine.run()
        except UnreadableError as error:
            if values or machine.named:
                raise ObjectionError(f"a malformed pickle: {error}") from None
            raise
        position = machine.position
        if len(values) == _MAX_PICKLES:
            raise ObjectionError(f"more than {_MAX_PICKLES} pickles in one item")
        # Compare the type first: `==` of an array or tensor compares its elements, and the result has no truth value.
        if not values and type(value) is int and value == _MAGIC_BEFORE_TORCH_1_6:
            raise ObjectionError("a file of torch.save before torch 1.6: save it again with torch 1.6 or later")
        values.append(value)
    return Item(values, False, {})


# Zip archives


def records(data: bytes) -> dict[str, tuple[int, int]]:
    """Return start and stop of each record of an archive, by the record's name without the folder.

    Raises:
        ObjectionError: a record is compressed, which torch never does, and which could expand to any size; or two zip
            readers may find different records, so that torch may load records that were not checked.
        UnreadableError: the directory of the archive is malformed.
    """
    found = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if archive.start_dir != _stated_directory(data) or not _told_apart(archive.infolist()):
                raise ObjectionError("an archive in which another reader may find other records")
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(data):
                    raise ObjectionError("a compressed archive")
                head = LOCAL_HEADER.unpack_from(data, entry.header_offset)
                start = entry.header_offset + LOCAL_HEADER.size + head[-2] + head[-1]
                stop = start + entry.file_size
                if head[0] != MAGIC or stop > len(data):
                    raise UnreadableError("a record does not lie within the archive")
                found[entry.filename.partition("/")[2]] = start, stop
    except DAMAGED as error:
        raise UnreadableError(f"the directory of the archive cannot be read: {error}") from None
    return found


def _stated_directory(data: bytes) -> int:
    """Return the position of the central directory that the end record states, at which torch reads the directory.

    `zipfile` reads it directly before the end record instead.
    """
    end = data.rfind(_END, 0, len(data) - _END_BYTES + len(_END))
    (start,) = struct.unpack_from("<I", data, end + 16)
    locator = end - _LOCATOR_BYTES
    if locator >= 0 and data.startswith(_LOCATOR, locator):
        (end64,) = struct.unpack_from("<Q", data, locator + 8)
        if end64 != locator - _END64_BYTES:
            return -1
        (start,) = struct.unpack_from("<Q", data, end64 + 48)
    return int(start)


def _told_apart(entries: Sequence[zipfile.ZipInfo]) -> bool:
    """Return True if all records are in one folder, with different names. torch ignores the case of a name."""
    names = {entry.filename.lower() for entry in entries}
    folders = {entry.filename.partition("/")[0] for entry in entries}
    raw = all(entry.orig_filename == entry.filename for entry in entries)
    return raw and len(names) == len(entries) and len(folders) == 1


def may_be_archive(data: bytes) -> bool:
    """Return True if a zip reader could find the pickle of a torch.save file in these bytes."""
    return data[: len(MAGIC)] == MAGIC and b"data.pkl" in data


def check_archive(file: BinaryIO) -> str | None:
    """Compare every record of a file with its CRC32. Reads 1 MiB at a time, and unpickles nothing.

    After `torch.serialization.set_crc32_options(False)`, torch writes 0 as the CRC32 of every record.

    Returns:
        Description of the damage, or an empty text; None if the file is not an archive, or has no checksums.
    """
    if file.read(len(MAGIC)) != MAGIC:
        return None
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            # A single zero may be damage, so only an archive of zeros has no checksums.
            if not any(entry.CRC for entry in entries):
                return None
            for entry in entries:
                with archive.open(entry) as content:
                    while content.read(_PIECE):
                        pass
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, ValueError, RuntimeError) as error:
        # zipfile raises BadZipFile for a wrong checksum, and any of these errors for damaged headers.
        return str(error) or type(error).__name__
    return ""


# Writing

_PROTOCOL, _SAVED_PROTOCOL = 4, 2  # 2 is that of torch.save, which torch's restricted unpickler reads


def rewritten(item: Item) -> bytes:
    """Encode a checked item as bytes from which any unpickler makes the same values and nothing else.

    Raises:
        ObjectionError: a value cannot be written, because it nests too deeply or contains a function.
    """
    try:
        if not item.saved:
            return b"".join(_Pickler({}).dumped(value) for value in item.values)
        return _archive(item.values[0], item.locations)
    except RecursionError:
        raise ObjectionError("values that nest too deeply") from None


def settled(value: Any) -> Any:
    """Execute the deferred calls in a value, and return the value. Tensors in it stay the same objects.

    Raises:
        ObjectionError: the value nests too deeply, or a call fails.
    """
    kept: list[Any] = []
    try:
        data = _Keeping(kept).dumped(value)
    except RecursionError:
        raise ObjectionError("values that nest too deeply") from None
    unpickler = _Kept(io.BytesIO(data))
    unpickler.kept = kept
    try:
        return unpickler.load()
    except MemoryError:
        raise
    except Exception as error:
        raise ObjectionError(f"a call that raises {type(error).__name__}: {error}") from error


def _archive(value: Any, locations: dict[int, str]) -> bytes:
    pickler = _Pickler(locations, _SAVED_PROTOCOL)
    body = pickler.dumped(value)
    stream = io.BytesIO()
    writer: Any = torch._C.PyTorchFileWriter(stream)
    writer.write_record("data.pkl", body, len(body))
    writer.write_record("byteorder", b"little", len(b"little"))
    for storage, key in pickler.storages:
        if storage.device.type != "meta":
            writer.write_record(f"data/{key}", storage, storage.nbytes())
    writer.write_end_of_file()
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Pickler that writes values as torch.save does, and each `Deferred` as its call."""

    def __init__(self, locations: dict[int, str], protocol: int = _PROTOCOL) -> None:
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol)
        self._locations = locations
        self._keys: dict[int, str] = {}
        self.storages: list[tuple[torch.UntypedStorage, str]] = []

    def dumped(self, value: Any) -> bytes:
        self.dump(value)
        return self._stream.getvalue()

    def persistent_id(self, value: Any, /) -> Any:
        if not isinstance(value, (torch.storage.TypedStorage, torch.UntypedStorage)):
            return None
        typed: Any = value
        if isinstance(value, torch.UntypedStorage):
            untyped, kind, count = value, torch.UntypedStorage, value.nbytes()
        else:
            untyped, kind, count = typed._untyped_storage, getattr(torch, typed._pickle_storage_type()), typed._size()
        address = untyped._cdata
        if address not in self._keys:
            self._keys[address] = str(len(self._keys))
            self.storages.append((untyped, self._keys[address]))
        return "storage", kind, self._keys[address], self._locations.get(address, "cpu"), count

    def reducer_override(self, value: Any, /) -> Any:
        if isinstance(value, Deferred):
            new, arguments = value.function, value.arguments
            made: Any = (_new, (new, *arguments)) if value.new else (new, arguments)
            return *made, value.change[0] if value.change else None, iter(value.items), iter(value.pairs)
        if isinstance(value, (Function, Registered, Shell)):
            raise ObjectionError(f"{getattr(value, '__name__', type(value).__name__.lower())} as a value")
        return NotImplemented


def _new(kind: Any, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


class _Keeping(_Pickler):
    """Pickler that puts tensors and storages in a list, so that `_Kept` returns the same objects."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__({})
        self._kept = kept
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any, /) -> Any:
        bare = isinstance(value, torch.Tensor) and not value.__dict__
        if not bare and not isinstance(value, (torch.storage.TypedStorage, torch.UntypedStorage)):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return self._numbers[id(value)]


class _Kept(pickle.Unpickler):
    kept: list[Any]

    def persistent_load(self, pid: Any, /) -> Any:
        return self.kept[pid]
