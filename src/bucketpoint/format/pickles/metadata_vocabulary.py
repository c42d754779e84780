"""Vocabulary of a `.metadata` pickle (DCP's dataclasses, or plain classes in their place), and parts of its opcodes."""

from __future__ import annotations

import enum
import io
import os
import pickle
import zlib
from collections.abc import Mapping
from typing import Any

from bucketpoint.format.pickles import plain
from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.vocabulary import DTYPE_NAMES, Change, ObjectionError, Vocabulary, name_of, unfit

_DCP, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_BEFORE_TORCH_2_2 = "torch.distributed._shard.sharded_tensor.metadata"
_PROPERTIES = "TensorProperties"
_FIELD_BYTES = 16
_MAX_NAME = 64

_VALUES = {
    ("collections", "OrderedDict"),  # a flatten mapping may be ordered
    *(("torch", name) for name in (*DTYPE_NAMES, "Size")),
    ("torch.serialization", "_get_layout"),
    # A checkpoint_id may be a path.
    *((f"pathlib{private}", f"{kind}Path") for private in ("", "._local") for kind in ("Posix", "PurePosix")),
    *((f"pathlib{private}", f"{kind}Path") for private in ("", "._local") for kind in ("Windows", "PureWindows")),
}
"""Allowed names besides those of DCP's classes."""


class ForeignPath(os.PathLike[str]):
    """Stand-in for multi-storage-client's path class, which searches for a configuration when it is unpickled."""

    _text: str

    def __fspath__(self) -> str:
        return self._text


class MetadataVocabulary(Vocabulary):
    """The vocabulary of a `.metadata` pickle.

    Args:
        kinds: classes of the objects that are made for DCP's dataclasses, by the dataclasses' names.
        set_properties: function that sets the state of a `TensorProperties`.
        encoding: enumeration of memory formats.
        values: vocabulary of torch's data types, layouts and sizes.
    """

    def __init__(
        self, kinds: Mapping[str, type], set_properties: Change, encoding: type[enum.Enum], values: Vocabulary
    ) -> None:
        super().__init__(plain.VALUES, values)
        self.kinds = kinds
        self.names = {name: value for name, value in self.names.items() if name in _VALUES}
        for name, kind in kinds.items():
            module = _FILES if name.startswith("_") else _DCP
            known = [f"{module}.{name}"] + [f"{_BEFORE_TORCH_2_2}.{name}"] * (name == _PROPERTIES)
            self.function(*known)(_empty(kind))
            self.changers[kind] = _set_fields
        self.changers[kinds[_PROPERTIES]] = set_properties
        self.parts[kinds["MetadataIndex"]] = lambda key: (key.fqn, key.offset, key.index)
        self.function("multistorageclient.pathlib.MultiStoragePath")(_empty(ForeignPath))
        self.changers[ForeignPath] = _set_path

        @self.function(f"{_DCP}._MEM_FORMAT_ENCODING", f"{_BEFORE_TORCH_2_2}.MEM_FORMAT_ENCODING")
        def member(machine: Machine, value: Any) -> Any:
            if type(value) is not int:
                raise unfit("a memory format")
            return encoding(value)

        known_encoding = self.names[_DCP, "_MEM_FORMAT_ENCODING"]

        @self.function("builtins.getattr", "__builtin__.getattr")
        def named_member(machine: Machine, kind: Any, name: Any) -> Any:
            # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as a getattr. Any other getattr is refused.
            if kind is not known_encoding or type(name) is not str or len(name) > _MAX_NAME:
                raise ObjectionError("a getattr of something else than a memory format")
            return encoding[name]


def _empty(kind: type) -> Any:
    def make(machine: Machine, *arguments: Any) -> Any:
        if arguments:
            raise ObjectionError(f"a call of {kind.__name__} with arguments")
        return object.__new__(kind)

    return make


def _set_fields(machine: Machine, target: Any, state: Any) -> Any:
    if type(state) is not dict:
        raise unfit(f"a state of {name_of(type(target))}")
    machine.pay(_FIELD_BYTES * len(state))
    # Most of these classes are frozen, so setattr would fail; none has a `__setstate__`.
    target.__dict__.update(state)
    return target


def _set_path(machine: Machine, target: ForeignPath, state: Any) -> ForeignPath:
    if type(state) is not dict or type(state.get("_path")) is not str:
        raise ObjectionError("a path that has no text")
    target._text = state["_path"]
    return target


# Parts of pickles of protocol 4, from which other pickles are assembled

PROTOCOL = 4
"""Lowest pickle protocol with frames and MEMOIZE. Every supported Python reads it."""

PROTO = pickle.PROTO + bytes([PROTOCOL])


def framed(body: bytes | bytearray) -> bytes:
    """Return the pickle of these opcodes, which end with STOP, and its trailer."""
    head = PROTO + pickle.FRAME + len(body).to_bytes(8, "little")
    return b"".join((head, body, trailer(zlib.crc32(body, zlib.crc32(head)))))


def trailer(crc: int) -> bytes:
    """Return the bytes that follow a metadata pickle with this CRC32. Unpicklers ignore them, and no pickle ends so.

    With a CRC32C here, all metadata would have the same CRC32C, which records and stores compare.
    """
    return crc.to_bytes(4, "little") + b"BPC1"


def unframed(data: bytes) -> bytes | None:
    """Return the opcodes of a pickle without PROTO and STOP; None if some of them are outside of frames."""
    if not data.startswith(PROTO):
        return None
    position, parts = len(PROTO), []
    while data[position : position + 1] == pickle.FRAME:
        size = int.from_bytes(data[position + 1 : position + 9], "little")
        parts.append(data[position + 9 : position + 9 + size])
        position += 9 + size
    return b"".join(parts).removesuffix(pickle.STOP) if position == len(data) else None


def unshared(value: Any) -> bytes:
    """Pickle `value` without memo entries, so that its opcodes can follow those of a pickle that has memo entries."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=PROTOCOL)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()


def recall(number: int) -> bytes:
    """Return the opcode that pushes a memo entry."""
    return pickle.BINGET + bytes((number,)) if number < 256 else pickle.LONG_BINGET + number.to_bytes(4, "little")


def text_header(size: int) -> bytes:
    """Return the opcode and the length that precede a text of `size` bytes."""
    if size < 256:
        return pickle.SHORT_BINUNICODE + bytes((size,))
    return pickle.BINUNICODE + size.to_bytes(4, "little")
