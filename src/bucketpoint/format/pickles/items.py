"""Reader of untrusted items: files of torch.save, and bare pickles."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bucketpoint.format.pickles import archive, arrays, plain, tensors
from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.vocabulary import (
    ObjectionError,
    RefusedError,
    Registered,
    UnreadableError,
    Vocabulary,
)

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
        deferred: True if `values` contain a `Deferred` call.
    """

    values: list[Any]
    saved: bool
    locations: dict[int, str]
    deferred: bool


def read_item(data: bytes) -> Item:
    """Interpret an item: torch.save's output since torch 1.6, or bare pickles of protocol 2 or later.

    Tensors are on the CPU. Calls of functions that the user registered with `torch.serialization.add_safe_globals` are
    deferred.

    Raises:
        RefusedError: the item names something outside the allow-list, or contains a construct that no writer makes.
        UnreadableError: the data has neither format, so loading it would execute nothing.
    """
    return _read_zip(data) if data[: len(archive.MAGIC)] == archive.MAGIC else _read_stream(data)


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
    places = archive.records(data)
    if "constants.pkl" in places:
        raise RefusedError("torch.jit.load")
    if "data.pkl" not in places:
        raise UnreadableError("the archive has no data.pkl")
    if "byteorder" in places and data[slice(*places["byteorder"])] != b"little":
        raise ObjectionError("a big-endian archive")
    storages = _Storages(data, {name[5:]: place for name, place in places.items() if name.startswith("data/")})
    machine = interpreter(data[slice(*places["data.pkl"])], paid=len(data), storage=storages)
    return Item([machine.run()], True, storages.locations, machine.deferred)


def _read_stream(data: bytes) -> Item:
    values: list[Any] = []
    position, deferred = 0, False
    while position < len(data) or not values:
        machine = interpreter(data, paid=len(data) - position, position=position)
        try:
            value = machine.run()
        except UnreadableError as error:
            if values or machine.named:
                raise ObjectionError(f"a malformed pickle: {error}") from None
            raise
        position, deferred = machine.position, deferred or machine.deferred
        if len(values) == _MAX_PICKLES:
            raise ObjectionError(f"more than {_MAX_PICKLES} pickles in one item")
        # Compare the type first: `==` of an array or tensor compares its elements, and the result has no truth value.
        if not values and type(value) is int and value == _MAGIC_BEFORE_TORCH_1_6:
            raise ObjectionError("a file of torch.save before torch 1.6: save it again with torch 1.6 or later")
        values.append(value)
    return Item(values, False, {}, deferred)
