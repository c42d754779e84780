"""Search for the raw payload in the first bytes of an untrusted torch.save frame. Nothing is ever executed.

Only the common case is understood: one dense tensor (or Parameter) over one storage in a stored zip. For anything else
the answer is None, and the reader fetches the whole item and leaves it to torch.load.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bucketpoint.format.pickles.allow_list import STORAGE_TYPE_NAMES

PROBE_BYTES = 4096
"""First bytes of a frame that suffice to probe it. The headers of torch.save take about 700 for any tensor."""

STORAGE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, dtype): name for name, dtype in STORAGE_TYPE_NAMES.items() if not dtype.startswith("q")
}
"""The dtypes that pickle by the name of a typed storage, without the quantised ones, which have no frame. Newer dtypes
pickle as an untyped storage and the dtype's name."""

_DTYPE_OF_STORAGE = {name: dtype for dtype, name in STORAGE_NAMES.items()}

_MAX_DIMS = 64  # far above what torch kernels take; bounds the work on hostile input
_MAX_NUMBER = 1 << 62
_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = struct.Struct("<4s3I")
_DESCRIPTOR64 = struct.Struct("<4sI2Q")
_ENCRYPTED = 0x1
_SIZES_FOLLOW = 0x8
_ZIP32_LIMIT = 0xFFFFFFFF


@dataclass(frozen=True)
class ProbedFrame:
    """Position of a frame's payload, and layout of the tensor in it. Stride and storage offset count elements."""

    payload_offset: int
    payload_nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


def probe_frame(head: bytes | bytearray | memoryview) -> ProbedFrame | None:
    """Locate the payload by the first bytes of a frame. None if the frame is not of the simple kind.

    A frame without a byteorder record before its payload is taken as little-endian, which is what torch.load assumes.

    Args:
        head: the first `PROBE_BYTES` of the frame, or all of a shorter one. Further bytes are ignored.
    """
    try:
        return _probe(bytes(memoryview(head)[:PROBE_BYTES]))
    except _NotSimpleError:
        return None


class _NotSimpleError(Exception):
    """Raised if the bytes are not a frame, or a frame that needs torch.load."""


@dataclass(frozen=True)
class _Global:
    module: str
    name: str


@dataclass(frozen=True)
class _Storage:
    kind: str
    key: str
    numel: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


class _Mark:
    """The pickle machine's MARK."""


class _NoHooks:
    """An empty OrderedDict: the only kind that a plain tensor's pickle makes."""


def _probe(head: bytes) -> ProbedFrame | None:
    tensor: _Tensor | None = None
    archive = ""
    position = 0
    while True:
        entry = _local_entry(head, position)
        folder, _, name = entry.name.partition("/")
        archive = archive or folder
        if folder != archive:
            return None
        if tensor is not None and name == f"data/{tensor.storage.key}":
            return _located(tensor, entry)
        body = head[entry.start : entry.end(head)]
        if name == "data.pkl":
            tensor = _Walk(body).run()
        elif (name == "byteorder" and body != b"little") or name.startswith("data/"):
            return None
        position = entry.next(head)


def _located(tensor: _Tensor, entry: _Entry) -> ProbedFrame | None:
    itemsize = 1 if tensor.storage.kind == "UntypedStorage" else tensor.dtype.itemsize
    nbytes = tensor.storage.numel * itemsize
    if entry.nbytes is not None and entry.nbytes != nbytes:
        return None
    if 0 not in tensor.shape:
        last = tensor.storage_offset + sum(
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True)
        )
        if (last + 1) * tensor.dtype.itemsize > nbytes:
            return None
    return ProbedFrame(entry.start, nbytes, tensor.dtype, tensor.shape, tensor.stride, tensor.storage_offset)


@dataclass(frozen=True)
class _Entry:
    """A local file header: start of the record's bytes, and their number if the header states it."""

    name: str
    start: int
    nbytes: int | None

    def end(self, head: bytes) -> int:
        if self.nbytes is None:
            return self._descriptor(head)[0]
        if self.start + self.nbytes > len(head):
            raise _NotSimpleError
        return self.start + self.nbytes

    def next(self, head: bytes) -> int:
        return self.end(head) if self.nbytes is not None else self._descriptor(head)[1]

    def _descriptor(self, head: bytes) -> tuple[int, int]:
        """Return the end of a record whose size only its trailing descriptor states, and the end of that descriptor."""
        position = head.find(b"PK\x07\x08", self.start)
        while position >= 0:
            for layout in (_DESCRIPTOR, _DESCRIPTOR64):
                if position + layout.size <= len(head):
                    _, _, packed, plain = layout.unpack_from(head, position)
                    if packed == plain == position - self.start:
                        return position, position + layout.size
            position = head.find(b"PK\x07\x08", position + 1)
        raise _NotSimpleError


def _local_entry(head: bytes, position: int) -> _Entry:
    if position + _LOCAL.size > len(head):
        raise _NotSimpleError
    signature, _, flags, method, _, _, _, packed, plain, name_size, extra_size = _LOCAL.unpack_from(head, position)
    name_at = position + _LOCAL.size
    if signature != b"PK\x03\x04" or method != 0 or flags & _ENCRYPTED or name_at + name_size > len(head):
        raise _NotSimpleError
    name = _decode(head[name_at : name_at + name_size])
    start = name_at + name_size + extra_size
    if flags & _SIZES_FOLLOW:
        return _Entry(name, start, None)
    if packed == plain == _ZIP32_LIMIT:
        return _Entry(name, start, _zip64_nbytes(head, name_at + name_size, extra_size))
    if packed != plain:
        raise _NotSimpleError
    return _Entry(name, start, plain)


def _zip64_nbytes(head: bytes, position: int, extra_size: int) -> int:
    end = min(position + extra_size, len(head))
    while position + 4 <= end:
        kind, size = struct.unpack_from("<2H", head, position)
        if kind == 1 and size >= 16 and position + 20 <= end:
            return int(struct.unpack_from("<Q", head, position + 4)[0])
        position += 4 + size
    raise _NotSimpleError


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _NotSimpleError from None


class _Walk:
    """A pickle machine for the few opcodes in a plain tensor's data.pkl. Names stay names; nothing is imported."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> _Tensor:
        while True:
            code = self._take(1)
            if code == b".":
                result = self._pop()
                if not isinstance(result, _Tensor) or self._stack:
                    raise _NotSimpleError
                return result
            step = _STEPS.get(code)
            if step is None:
                raise _NotSimpleError
            step(self)

    def _take(self, size: int) -> bytes:
        if size < 0 or self._at + size > len(self._body):
            raise _NotSimpleError
        taken = self._body[self._at : self._at + size]
        self._at += size
        return taken

    def _number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "little", signed=signed)

    def _line(self) -> str:
        end = self._body.find(b"\n", self._at)
        if end < 0:
            raise _NotSimpleError
        line = self._take(end - self._at)
        self._at += 1
        return _decode(line)

    def _pop(self) -> Any:
        if not self._stack:
            raise _NotSimpleError
        return self._stack.pop()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _remember(self, index: int) -> None:
        if not self._stack:
            raise _NotSimpleError
        self._memo[index] = self._stack[-1]

    def _recall(self, index: int) -> None:
        if index not in self._memo:
            raise _NotSimpleError
        self._push(self._memo[index])

    def _tuple(self, size: int) -> None:
        items = [self._pop() for _ in range(size)]
        self._push(tuple(reversed(items)))

    def _marked_tuple(self) -> None:
        items = []
        while not isinstance(item := self._pop(), _Mark):
            items.append(item)
        self._push(tuple(reversed(items)))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise _NotSimpleError
        self._push(_Global(module, name))

    def _persistent(self) -> None:
        match self._pop():
            case ("storage", _Global(module="torch" | "torch.storage", name=kind), str(key), str(), int(numel)):
                self._push(_Storage(kind, key, _checked(numel)))
            case _:
                raise _NotSimpleError

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        match function, arguments:
            case _Global("collections", "OrderedDict"), ():
                self._push(_NoHooks())
            case _Global("torch._utils", "_rebuild_parameter"), (_Tensor() as tensor, bool(), _NoHooks()):
                self._push(tensor)
            case (
                _Global("torch._utils", "_rebuild_tensor_v2"),
                (_Storage() as storage, int(offset), tuple(shape), tuple(stride), bool(), _NoHooks(), *metadata),
            ):
                self._push(_rebuilt(storage, _DTYPE_OF_STORAGE.get(storage.kind), offset, shape, stride, metadata))
            case (
                _Global("torch._utils", "_rebuild_tensor_v3"),
                (
                    _Storage(kind="UntypedStorage") as storage,
                    int(offset),
                    tuple(shape),
                    tuple(stride),
                    bool(),
                    _NoHooks(),
                    _Global("torch", name),
                    *metadata,
                ),
            ):
                self._push(_rebuilt(storage, _dtype(name), offset, shape, stride, metadata))
            case _:
                raise _NotSimpleError


def _rebuilt(
    storage: _Storage,
    dtype: torch.dtype | None,
    offset: int,
    shape: tuple[Any, ...],
    stride: tuple[Any, ...],
    metadata: list[Any],
) -> _Tensor:
    # The metadata argument holds conj and neg bits: the stored bytes of such a tensor are not its values.
    if dtype is None or any(value is not None for value in metadata) or not len(shape) == len(stride) <= _MAX_DIMS:
        raise _NotSimpleError
    return _Tensor(storage, dtype, tuple(map(_checked, shape)), tuple(map(_checked, stride)), _checked(offset))


def _dtype(name: str) -> torch.dtype | None:
    value = vars(torch).get(name)
    return value if isinstance(value, torch.dtype) and not name.startswith(("qint", "quint")) else None


def _checked(number: Any) -> int:
    if type(number) is not int or not 0 <= number < _MAX_NUMBER:
        raise _NotSimpleError
    return number


_STEPS: dict[bytes, Callable[[_Walk], None]] = {
    b"\x80": lambda walk: None if 2 <= walk._number(1) <= 5 else _refuse(),  # PROTO
    b"\x95": lambda walk: None if walk._take(8) else _refuse(),  # FRAME
    b"c": lambda walk: walk._push(_Global(walk._line(), walk._line())),  # GLOBAL
    b"\x93": _Walk._stack_global,
    b"q": lambda walk: walk._remember(walk._number(1)),  # BINPUT
    b"r": lambda walk: walk._remember(walk._number(4)),  # LONG_BINPUT
    b"\x94": lambda walk: walk._remember(len(walk._memo)),  # MEMOIZE
    b"h": lambda walk: walk._recall(walk._number(1)),  # BINGET
    b"j": lambda walk: walk._recall(walk._number(4)),  # LONG_BINGET
    b"X": lambda walk: walk._push(_decode(walk._take(walk._number(4)))),  # BINUNICODE
    b"\x8c": lambda walk: walk._push(_decode(walk._take(walk._number(1)))),  # SHORT_BINUNICODE
    b"K": lambda walk: walk._push(walk._number(1)),  # BININT1
    b"M": lambda walk: walk._push(walk._number(2)),  # BININT2
    b"J": lambda walk: walk._push(walk._number(4, signed=True)),  # BININT
    b"\x8a": lambda walk: walk._push(walk._number(walk._number(1), signed=True)),  # LONG1
    b"(": lambda walk: walk._push(_Mark()),  # MARK
    b"t": _Walk._marked_tuple,
    b")": lambda walk: walk._push(()),  # EMPTY_TUPLE
    b"\x85": lambda walk: walk._tuple(1),
    b"\x86": lambda walk: walk._tuple(2),
    b"\x87": lambda walk: walk._tuple(3),
    b"\x88": lambda walk: walk._push(True),  # NEWTRUE
    b"\x89": lambda walk: walk._push(False),  # NEWFALSE
    b"N": lambda walk: walk._push(None),  # NONE
    b"Q": _Walk._persistent,  # BINPERSID
    b"R": _Walk._reduce,  # REDUCE
}


def _refuse() -> None:
    raise _NotSimpleError
