"""A pickle machine that runs a pickle on symbols instead of objects, to learn which names it would use, and how.

It follows the machine of CPython's `pickle` opcode by opcode, but all it keeps on its stack are names, text, numbers,
tuples of them and marks: what it takes to see which calls would allocate memory that the pickle has not paid for.
"""

from __future__ import annotations

import _compat_pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class MalformedPickleError(ValueError):
    """The bytes are not a pickle, or not one that is read here."""


@dataclass(frozen=True)
class Survey:
    """What a pickle would do.

    Attributes:
        refused: names outside the allow-list and constructs in angle brackets, in order, maybe repeated.
        named: whether it names anything at all.
        end: where it ends, or None if it breaks off or is malformed.
    """

    refused: tuple[str, ...]
    named: bool
    end: int | None


def survey(data: bytes, position: int, allowed: frozenset[tuple[str, str]]) -> Survey:
    """Run the pickle at `position` of `data` on symbols."""
    machine = _Machine(data, position, allowed)
    try:
        machine.run()
    except MalformedPickleError:
        return Survey(tuple(machine.refused), machine.named, None)
    return Survey(tuple(machine.refused), machine.named, machine.position)


@dataclass(frozen=True)
class _Name:
    text: str


class _Symbol:
    """Stands for any object; text and names are the only ones that matter further on."""


@dataclass(frozen=True)
class _Result:
    """What a call of a name would return."""

    name: str


_OBJECT = _Symbol()
_MARK = _Symbol()
_BYTES = _Symbol()

_BUFFERS = frozenset({"builtins.bytes", "builtins.bytearray", "__builtin__.bytes", "__builtin__.bytearray"})
_RECONSTRUCT = frozenset({"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"})
# Pickles name these, and never call them: called, they allocate whatever number they are given.
_NEVER_CALLED = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "numpy.ndarray"})


def _objection(name: str, arguments: Any) -> str | None:
    """Why a call of an allowed name is refused: what writers never do with it, and costs any amount of memory."""
    known = arguments if isinstance(arguments, tuple) else None
    # However long a range is, it takes no bytes of the pickle until something is made of its numbers.
    if known is None or any(part == _Result("builtins.range") for part in known):
        made = isinstance(arguments, _Symbol) and name not in _BUFFERS
        return None if made else f"<{name} of what is computed>"
    if name in _BUFFERS:
        literal = all(part is _BYTES or isinstance(part, str) or part == _Result("_codecs.encode") for part in known)
        return None if literal else f"<{name} of a size>"
    if name in _NEVER_CALLED or (name.startswith("torch.") and name.endswith("Storage")):
        return f"<a call of {name}>" if known else None
    if name in _RECONSTRUCT:
        return None if len(known) == 3 and known[1] == (0,) else f"<{name} of a shape>"
    if name == "torch._tensor._rebuild_from_type_v2":
        # It calls its first argument with the third.
        inner = known[0] if known else None
        sound = isinstance(inner, _Name) and inner.text.startswith("torch._utils._rebuild_")
        return None if sound else f"<{name} of another function>"
    if name == "fractions.Fraction":
        # Ten to the power of whatever a text says.
        return (
            None if not any(isinstance(part, str) and "e" in part.lower() for part in known) else f"<{name} of a power>"
        )
    return None


class _Machine:
    def __init__(self, data: bytes, position: int, allowed: frozenset[tuple[str, str]]) -> None:
        self.data = data
        self.position = position
        self.refused: list[str] = []
        self.named = False
        self._allowed = allowed
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> None:
        while True:
            if self.position >= len(self.data):
                raise MalformedPickleError("it breaks off")
            code = self.data[self.position]
            self.position += 1
            if code == 0x2E:  # STOP
                self._pop()
                return
            step = _STEPS.get(code)
            if step is None:
                raise MalformedPickleError(f"unknown opcode 0x{code:02x}")
            step(self)

    # Arguments

    def take(self, size: int) -> bytes:
        if self.position + size > len(self.data):
            raise MalformedPickleError("it breaks off")
        taken = self.data[self.position : self.position + size]
        self.position += size
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise MalformedPickleError("it breaks off")
        taken = self.data[self.position : end]
        self.position = end + 1
        return taken

    def decimal(self) -> int:
        try:
            return int(self.line())
        except ValueError:
            raise MalformedPickleError("a memo number is no number") from None

    # Stack

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise MalformedPickleError("its stack underflows")
        return self._stack.pop()

    def pop_mark(self) -> list[Any]:
        items: list[Any] = []
        while self._stack:
            value = self._stack.pop()
            if value is _MARK:
                return items[::-1]
            items.append(value)
        raise MalformedPickleError("a mark is missing")

    def replace(self, below: int, to_mark: bool, pushed: int) -> None:
        """The stack effect of an opcode that makes plain objects of plain objects."""
        if to_mark:
            self.pop_mark()
        for _ in range(below):
            self._pop()
        self._stack.extend([_OBJECT] * pushed)

    def pop(self) -> None:
        if not self._stack:
            raise MalformedPickleError("its stack underflows")
        self._stack.pop()

    def duplicate(self) -> None:
        value = self._pop()
        self._stack += [value, value]

    def remember(self, index: int) -> None:
        value = self._pop()
        if index > len(self.data):
            # CPython's memo is an array: it would be allocated up to this number.
            self.refused.append(f"<memo number {index}>")
            raise MalformedPickleError("it numbers more objects than it can hold")
        self._memo[index] = value
        self.push(value)

    def memoize(self) -> None:
        self.remember(len(self._memo))

    def recall(self, index: int) -> None:
        if index not in self._memo:
            raise MalformedPickleError("it refers to an object that it has not numbered")
        self.push(self._memo[index])

    # What can do harm

    def find(self, module: str, name: str) -> _Name:
        self.named = True
        # Protocols below 3 carry Python 2's names, which the real machine translates in this way.
        renamed = _compat_pickle.NAME_MAPPING.get((module, name))
        if renamed is None:
            renamed = (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        if (module, name) not in self._allowed and renamed not in self._allowed:
            self.refused.append(f"{renamed[0]}.{renamed[1]}")
        return _Name(f"{renamed[0]}.{renamed[1]}")

    def global_lines(self) -> _Name:
        # A file that ends inside the name still makes the real machine import it, hence no call of `line` here.
        module, _, rest = self.data[self.position :].partition(b"\n")
        name, ended, _ = rest.partition(b"\n")
        self.position += len(module) + 1 + len(name) + 1
        found = self.find(module.decode("utf-8", "replace"), name.decode("utf-8", "replace"))
        if not ended:
            self.refused.append(found.text)
            raise MalformedPickleError("it breaks off")
        return found

    def stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if isinstance(name, str) and isinstance(module, str):
            self.push(self.find(module, name))
        else:
            self.named = True
            self.refused.append("<a name that is computed>")
            self.push(_OBJECT)

    def extension(self, size: int) -> None:
        self.named = True
        self.refused.append(f"<copyreg extension {self.number(size)}>")
        self.push(_OBJECT)

    def call(self, function: Any, arguments: Any) -> None:
        """A name may be called; a name that is refused is listed already. Only hostile pickles call anything else."""
        if not isinstance(function, _Name):
            self.refused.append("<a call of something that has no name>")
            self.push(_OBJECT)
            return
        objection = _objection(function.text, arguments)
        if objection is not None:
            self.refused.append(objection)
        self.push(_Result(function.text))

    def reduce(self, arguments: int) -> None:
        given = [self._pop() for _ in range(arguments)]
        self.call(self._pop(), given[-1])

    def instance(self) -> None:
        found = self.global_lines()
        self.call(found, tuple(self.pop_mark()))

    def tuple_of(self, count: int) -> None:
        self.push(tuple([self._pop() for _ in range(count)][::-1]))

    def tuple_to_mark(self) -> None:
        self.push(tuple(self.pop_mark()))

    def bytes_of(self, width: int) -> None:
        self.take(self.number(width))
        self.push(_BYTES)

    def integer(self, size: int) -> None:
        self.push(int.from_bytes(self.take(size), "little", signed=size == 4))

    def obj(self) -> None:
        items = self.pop_mark()
        if not items:
            raise MalformedPickleError("its stack underflows")
        self.call(items[0], tuple(items[1:]))

    def change(self, to_mark: bool, values: int) -> None:
        """BUILD, APPEND and the like change the object below their values, which must not be a class or a function."""
        if to_mark:
            self.pop_mark()
        for _ in range(values):
            self._pop()
        target = self._pop()
        if isinstance(target, _Name):
            self.refused.append(f"<a change of {target.text}>")
        self.push(target)


_Step = Callable[[_Machine], Any]


def _text(data: bytes, encoding: str) -> Any:
    try:
        return data.decode(encoding, "surrogatepass" if encoding == "utf-8" else "strict")
    except UnicodeDecodeError:
        return _OBJECT


def _argument(opcode: pickletools.OpcodeInfo) -> _Step:
    """Skip an opcode's argument."""
    size = opcode.arg.n if opcode.arg is not None else 0
    if size == pickletools.UP_TO_NEWLINE:
        return _Machine.line
    if size >= 0:
        return lambda machine: machine.take(size)
    width = {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }[size]
    return lambda machine: machine.take(machine.number(width))


def _plain(opcode: pickletools.OpcodeInfo) -> _Step:
    """The step of an opcode that only makes plain objects, from pickletools' own description of its stack effect."""
    skip = _argument(opcode)
    to_mark = pickletools.markobject in opcode.stack_before
    below = opcode.stack_before.index(pickletools.markobject) if to_mark else len(opcode.stack_before)
    pushed = len(opcode.stack_after)

    def step(machine: _Machine) -> None:
        skip(machine)
        machine.replace(below, to_mark, pushed)

    return step


_SPECIAL: dict[str, _Step] = {
    "MARK": lambda m: m.push(_MARK),
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "DUP": _Machine.duplicate,
    "PUT": lambda m: m.remember(m.decimal()),
    "BINPUT": lambda m: m.remember(m.number(1)),
    "LONG_BINPUT": lambda m: m.remember(m.number(4)),
    "MEMOIZE": _Machine.memoize,
    "GET": lambda m: m.recall(m.decimal()),
    "BINGET": lambda m: m.recall(m.number(1)),
    "LONG_BINGET": lambda m: m.recall(m.number(4)),
    "STRING": lambda m: m.push(_text(m.line().strip()[1:-1], "latin-1")),
    "BINSTRING": lambda m: m.push(_text(m.take(m.number(4)), "latin-1")),
    "SHORT_BINSTRING": lambda m: m.push(_text(m.take(m.number(1)), "latin-1")),
    "UNICODE": lambda m: m.push(_text(m.line(), "raw-unicode-escape")),
    "SHORT_BINUNICODE": lambda m: m.push(_text(m.take(m.number(1)), "utf-8")),
    "BINUNICODE": lambda m: m.push(_text(m.take(m.number(4)), "utf-8")),
    "BINUNICODE8": lambda m: m.push(_text(m.take(m.number(8)), "utf-8")),
    "SHORT_BINBYTES": lambda m: m.bytes_of(1),
    "BINBYTES": lambda m: m.bytes_of(4),
    "BINBYTES8": lambda m: m.bytes_of(8),
    "BYTEARRAY8": lambda m: m.bytes_of(8),
    "BININT": lambda m: m.integer(4),
    "BININT1": lambda m: m.integer(1),
    "BININT2": lambda m: m.integer(2),
    "EMPTY_TUPLE": lambda m: m.tuple_of(0),
    "TUPLE1": lambda m: m.tuple_of(1),
    "TUPLE2": lambda m: m.tuple_of(2),
    "TUPLE3": lambda m: m.tuple_of(3),
    "TUPLE": _Machine.tuple_to_mark,
    "GLOBAL": lambda m: m.push(m.global_lines()),
    "STACK_GLOBAL": _Machine.stack_global,
    "INST": _Machine.instance,
    "OBJ": _Machine.obj,
    "EXT1": lambda m: m.extension(1),
    "EXT2": lambda m: m.extension(2),
    "EXT4": lambda m: m.extension(4),
    "REDUCE": lambda m: m.reduce(1),
    "NEWOBJ": lambda m: m.reduce(1),
    "NEWOBJ_EX": lambda m: m.reduce(2),
    "BUILD": lambda m: m.change(False, 1),
    "APPEND": lambda m: m.change(False, 1),
    "APPENDS": lambda m: m.change(True, 0),
    "SETITEM": lambda m: m.change(False, 2),
    "SETITEMS": lambda m: m.change(True, 0),
    "ADDITEMS": lambda m: m.change(True, 0),
}

_STEPS: dict[int, _Step] = {
    ord(opcode.code): _SPECIAL.get(opcode.name) or _plain(opcode)
    for opcode in pickletools.opcodes
    if opcode.name != "STOP"
}
