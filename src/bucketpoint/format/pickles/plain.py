"""Vocabulary of Python's own types, with checks of the calls and states that make their instances."""

from __future__ import annotations

import argparse
import datetime
import io
import os
import pathlib
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.vocabulary import Registered, Vocabulary, name_of, only, unfit, whole

_SCALARS = (bool, int, float)
_LISTS = (list, tuple, deque)
_SETS = (set, frozenset)
_FACTORIES = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple),
    *(Counter, OrderedDict, deque),
)

VALUES = Vocabulary()
"""Containers, numbers, text, times and paths. None of them can execute code, import modules or read files."""


def _typed(kind: Any, *allowed: type, most: int = 4096, names: tuple[str, ...] = (), made: Any = None) -> None:
    """Add a class, called with at most `most` arguments of the allowed types. `made`, if given, makes the object."""

    def make(machine: Machine, *arguments: Any) -> Any:
        if len(arguments) > most or any(type(value) not in allowed for value in arguments):
            raise unfit(f"a call of {name_of(kind)}")
        machine.pay(sum(len(value) for value in arguments if type(value) is str))
        machine.pay(sum(value.bit_length() >> 6 for value in arguments if type(value) is int))
        return (made or kind)(*arguments)

    VALUES.add(kind, make, names)


_kind: Any
for _kind in (bool, int, float):
    _typed(_kind, *_SCALARS, most=1)
_typed(complex, *_SCALARS, most=2)
_typed(str, str, most=1)
_typed(range, int)
_typed(slice, int, float, str, type(None))
_typed(datetime.timedelta, int, most=3)
_typed(types.SimpleNamespace, most=0)
_typed(argparse.Namespace, most=0)
_typed(io.BytesIO, most=0, names=("_io.BytesIO", "io.BytesIO"))
VALUES.add(Ellipsis, names=["builtins.Ellipsis"])

# Concrete paths of another operating system cannot be made, so pure paths replace them.
_FOREIGN = {"WindowsPath": pathlib.PureWindowsPath} if os.name == "posix" else {"PosixPath": pathlib.PurePosixPath}
for _name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"):
    # Python 3.13 pickles paths under the name of their private module.
    _names = (f"pathlib.{_name}", f"pathlib._local.{_name}")
    _typed(getattr(pathlib, _name), str, names=_names, made=_FOREIGN.get(_name))


@VALUES.function("_codecs.encode")
def _encode(machine: Machine, text: Any, encoding: Any) -> bytes:
    # Protocol 2, the default of torch.save, encodes bytes in this way.
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise unfit("a call of _codecs.encode")
    machine.pay(len(text))
    return text.encode("latin-1")


def _buffer(kind: Any) -> None:
    def make(machine: Machine, value: Any = b"", *encoding: Any) -> Any:
        sound = type(value) in (bytes, bytearray) and not encoding
        if not sound and not (type(value) is str and encoding in (("latin-1",), ("latin1",))):
            raise unfit(f"a call of {name_of(kind)}")
        machine.pay(len(value))
        return kind(value.encode("latin-1") if encoding else value)

    VALUES.add(kind, make)


def _collection(kind: Any) -> None:
    def make(machine: Machine, given: Any = ()) -> Any:
        if type(given) not in _LISTS + _SETS:
            raise unfit(f"a call of {name_of(kind)}")
        machine.pay_for(given, hashed=kind in _SETS)
        return kind(machine.fill(set(), given) if kind in _SETS else given)

    VALUES.add(kind, make)


def _mapping(kind: Any) -> None:
    def make(machine: Machine, given: Any = ()) -> Any:
        if type(given) not in (dict, *_LISTS):
            raise unfit(f"a call of {name_of(kind)}")
        machine.pay_for(given, hashed=True)
        pairs = given.items() if type(given) is dict else given
        if any(type(pair) not in (tuple, list) or len(pair) != 2 for pair in pairs):
            raise unfit(f"a call of {name_of(kind)}")
        value = kind()
        machine.set_items(value, [part for pair in pairs for part in pair])
        return value

    VALUES.add(kind, make)


for _kind in (bytes, bytearray):
    _buffer(_kind)
for _kind in (list, tuple, *_SETS):
    _collection(_kind)
for _kind in (dict, OrderedDict, Counter):
    _mapping(_kind)


@VALUES.makes(defaultdict)
def _defaultdict(machine: Machine, factory: Any = None) -> Any:
    if type(factory) is Registered:
        factory = factory.value
    elif factory is not None and not any(factory is kind for kind in _FACTORIES):
        raise unfit("a default")
    return defaultdict(factory)


@VALUES.makes(deque)
def _deque(machine: Machine, given: Any = (), most: Any = None) -> Any:
    if type(given) not in _LISTS or not (most is None or type(most) is int):
        raise unfit("a call of collections.deque")
    machine.pay_for(given)
    return deque(given, most)


@VALUES.changes(OrderedDict, Counter, types.SimpleNamespace, argparse.Namespace)
def set_attributes(machine: Machine, target: Any, state: Any) -> Any:
    """Set attributes of an object. Dunder names are refused, as are names that would hide a method."""
    if type(state) is tuple and len(state) == 2 and not state[1]:
        state = state[0]
    if not state:
        return target
    kind = type(target)
    if type(state) is not dict or any(
        type(name) is not str or name.startswith("__") or hasattr(kind, name) for name in state
    ):
        raise unfit(f"a state of {name_of(kind)}")
    machine.pay_for(state, hashed=True)
    vars(target).update(state)
    return target


@VALUES.changes(io.BytesIO)
def _change_bytes_io(machine: Machine, target: io.BytesIO, state: Any) -> io.BytesIO:
    value, position, attributes = state
    if type(value) is not bytes or type(position) is not int or not 0 <= position <= len(value) or attributes:
        raise unfit("a state of io.BytesIO")
    machine.pay(len(value))
    target.write(value)
    target.seek(position)
    return target


# Times


def _packed(value: Any, nbytes: int) -> bytes:
    if type(value) is str and len(value) == nbytes:
        value = value.encode("latin-1")
    if type(value) is not bytes or len(value) != nbytes:
        raise unfit("a time")
    return value


def _ints(arguments: tuple[Any, ...]) -> bool:
    return all(type(value) is int for value in arguments)


_zone = only("a time zone", datetime.timezone, type(None))


@VALUES.makes(datetime.date)
def _date(machine: Machine, *arguments: Any) -> Any:
    if len(arguments) == 3 and _ints(arguments):
        return datetime.date(*arguments)
    (packed,) = arguments
    raw = _packed(packed, 4)
    return datetime.date(raw[0] << 8 | raw[1], raw[2], raw[3])


@VALUES.makes(datetime.datetime)
def _datetime(machine: Machine, *arguments: Any) -> Any:
    if len(arguments) >= 3 and _ints(arguments):
        return datetime.datetime(*arguments)  # noqa: DTZ001 - as it was saved
    packed, zone = (*arguments, None) if len(arguments) == 1 else arguments
    raw = _packed(packed, 10)
    # The first bit of the month's byte is `fold`.
    year, month, (day, hour, minute, second) = raw[0] << 8 | raw[1], raw[2] & 0x7F, raw[3:7]
    micro = int.from_bytes(raw[7:], "big")
    return datetime.datetime(year, month, day, hour, minute, second, micro, _zone(zone), fold=raw[2] >> 7)


@VALUES.makes(datetime.time)
def _time(machine: Machine, packed: Any, zone: Any = None) -> Any:
    raw = _packed(packed, 6)
    return datetime.time(raw[0] & 0x7F, raw[1], raw[2], int.from_bytes(raw[3:], "big"), _zone(zone), fold=raw[0] >> 7)


@VALUES.makes(datetime.timezone)
def _timezone(machine: Machine, offset: Any, *name: Any) -> Any:
    if type(offset) is not datetime.timedelta or any(type(text) is not str for text in name):
        raise unfit("a call of datetime.timezone")
    return datetime.timezone(offset, *name)


VALUES.parts |= dict.fromkeys(
    (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone), whole
)
for _kind in {type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath}:
    VALUES.parts[_kind] = lambda key: (str(key),)
VALUES.parts[range] = lambda key: (key.start, key.stop, key.step)
