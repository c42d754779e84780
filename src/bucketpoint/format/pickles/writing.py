"""Items read safely, encoded again for `torch.load` and planners' unpicklers."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from bucketpoint.format.pickles.items import Item
from bucketpoint.format.pickles.vocabulary import Deferred, Function, ObjectionError, Registered, Shell

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
        plain = isinstance(value, torch.Tensor) and not value.__dict__
        if not plain and not isinstance(value, (torch.storage.TypedStorage, torch.UntypedStorage)):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return self._numbers[id(value)]


class _Kept(pickle.Unpickler):
    kept: list[Any]

    def persistent_load(self, pid: Any, /) -> Any:
        return self.kept[pid]
