"""Steps of the interpreter for the rare opcodes; the frequent ones are in `Machine`."""

from __future__ import annotations

import codecs
import pickletools
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bucketpoint.format.pickles.vocabulary import MalformedPickleError

if TYPE_CHECKING:
    from bucketpoint.format.pickles.machine import Machine


Step = Callable[["Machine"], Any]


def _instance(machine: Machine) -> None:
    found = machine.find_lines()
    machine.push(machine.call(found, tuple(machine.to_mark())))


def _obj(machine: Machine) -> None:
    called = machine.to_mark()
    machine.push(machine.call(called[0], tuple(called[1:])))


def _newobj_ex(machine: Machine) -> None:
    named, arguments, function = machine.pop(), machine.pop(), machine.pop()
    if type(named) is not dict or named:
        machine.push(machine.refuse("<a call with named arguments>"))
    else:
        machine.push(machine.call(function, arguments, new=True))


def _duplicate(machine: Machine) -> None:
    value = machine.pop()
    machine.push(value)
    machine.push(value)


def _set_item(machine: Machine) -> None:
    value, key = machine.pop(), machine.pop()
    target = machine.pop()
    machine.push(target)
    machine.set_items(target, [key, value])


def _on_top(method: str, *, single: bool = False) -> Step:
    def step(machine: Machine) -> None:
        items = [machine.pop()] if single else machine.to_mark()
        target = machine.pop()
        machine.push(target)
        getattr(machine, method)(target, items)

    return step


def _tuple3(machine: Machine) -> None:
    third, second, first = machine.pop(), machine.pop(), machine.pop()
    machine.push((first, second, third))


def _dict_to_mark(machine: Machine) -> None:
    items = machine.to_mark()
    made: dict[Any, Any] = {}
    machine.set_items(made, items)
    machine.push(made)


def _sized(width: int, made: Callable[[Machine, bytes], Any]) -> Step:
    return lambda machine: made(machine, machine.take(machine.number(width)))


def _long(width: int) -> Step:
    return _sized(width, lambda m, raw: m.push(int.from_bytes(raw, "little", signed=True)))


def _float_line(machine: Machine) -> None:
    try:
        machine.push(float(machine.line()))
    except ValueError:
        raise MalformedPickleError("it has a number that is none") from None


def _int_line(machine: Machine) -> None:
    raw = machine.line()
    machine.push({b"00": False, b"01": True}[raw] if raw in (b"00", b"01") else machine.decimal(raw))


def _string_line(machine: Machine) -> None:
    raw = machine.line().strip()
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        raise MalformedPickleError("it has text that is none")
    try:
        unescaped: Any = codecs.escape_decode(raw[1:-1])
    except ValueError:
        raise MalformedPickleError("it has text that is none") from None
    machine.text(unescaped[0])


_BY_NAME: dict[str, Step] = {
    "PROTO": lambda m: m.take(1),
    "FRAME": lambda m: m.take(8),
    "POP": lambda m: m.discard(),
    "POP_MARK": lambda m: m.to_mark(),
    "DUP": _duplicate,
    "PUT": lambda m: m.memoize(m.decimal(m.line())),
    "BINPUT": lambda m: m.memoize(m.number(1)),
    "LONG_BINPUT": lambda m: m.memoize(m.number(4)),
    "GET": lambda m: m.push(m.recall(m.decimal(m.line()))),
    "NONE": lambda m: m.push(None),
    "NEWTRUE": lambda m: m.push(True),
    "NEWFALSE": lambda m: m.push(False),
    "INT": _int_line,
    "LONG": lambda m: m.push(m.decimal(m.line().removesuffix(b"L"))),
    "LONG1": _long(1),
    "LONG4": _long(4),
    "FLOAT": _float_line,
    "BINFLOAT": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    "STRING": _string_line,
    "BINSTRING": _sized(4, lambda m, raw: m.text(raw)),
    "SHORT_BINSTRING": _sized(1, lambda m, raw: m.text(raw)),
    "UNICODE": lambda m: m.text(m.line(), "raw-unicode-escape"),
    "BINUNICODE": _sized(4, lambda m, raw: m.text(raw)),
    "BINUNICODE8": _sized(8, lambda m, raw: m.text(raw)),
    "SHORT_BINBYTES": _sized(1, lambda m, raw: m.push(raw)),
    "BINBYTES": _sized(4, lambda m, raw: m.push(raw)),
    "BINBYTES8": _sized(8, lambda m, raw: m.push(raw)),
    "BYTEARRAY8": _sized(8, lambda m, raw: m.push(bytearray(raw))),
    "EMPTY_LIST": lambda m: m.push([]),
    "EMPTY_SET": lambda m: m.push(set()),
    "LIST": lambda m: m.push(m.to_mark()),
    "DICT": _dict_to_mark,
    "TUPLE": lambda m: m.push(tuple(m.to_mark())),
    "TUPLE3": _tuple3,
    "FROZENSET": lambda m: m.push(m.frozen(m.to_mark())),
    "APPEND": _on_top("append", single=True),
    "APPENDS": _on_top("append"),
    "ADDITEMS": _on_top("add"),
    "SETITEM": _set_item,
    "GLOBAL": lambda m: m.push(m.find_lines()),
    "STACK_GLOBAL": lambda m: m.find_stacked(),
    "INST": _instance,
    "OBJ": _obj,
    "NEWOBJ_EX": _newobj_ex,
    "EXT1": lambda m: m.extension(1),
    "EXT2": lambda m: m.extension(2),
    "EXT4": lambda m: m.extension(4),
    "PERSID": lambda m: m.persistent(m.line().decode("ascii", "replace")),
    "BINPERSID": lambda m: m.persistent(m.pop()),
}

STEPS: dict[int, Step] = {
    ord(opcode.code): _BY_NAME[opcode.name] for opcode in pickletools.opcodes if opcode.name in _BY_NAME
}
