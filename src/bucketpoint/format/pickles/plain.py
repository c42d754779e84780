"""Makers of Python's own values: checks of calls and states, and the values made."""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import io
import os
import pathlib
import re
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

from bucketpoint.format.pickles.machine import MAX_DIGITS, Machine
from bucketpoint.format.pickles.vocabulary import Change, Function, Make, ObjectionError, Registered, Shell

_SCALARS = (bool, int, float)
_FRACTION = re.compile(r"-?\d{1,4000}(/\d{1,4000})?")
_MAX_BITS = 16_384  # of a fraction's numbers: the time to find a common divisor grows with the square
_LISTS = (list, tuple, deque)
_SETS = (set, frozenset)
_PATHS = "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"
_BUILTINS = (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
_FACTORIES = (*_BUILTINS, Counter, OrderedDict, deque)

_ENCODE = Function("_codecs.encode")


def _unfit(name: str) -> ObjectionError:
    return ObjectionError(f"a call of {name} with what it is never given")


def _number(kind: type) -> Make:
    def make(machine: Machine, arguments: Any) -> Any:
        if len(arguments) > 1 or any(type(value) not in _SCALARS for value in arguments):
            raise _unfit(f"builtins.{kind.__name__}")
        return kind(*arguments)

    return make


def _complex(machine: Machine, arguments: Any) -> complex:
    if len(arguments) > 2 or any(type(value) not in _SCALARS for value in arguments):
        raise _unfit("builtins.complex")
    return complex(*arguments)


def _text(machine: Machine, arguments: Any) -> str:
    if len(arguments) > 1 or any(type(value) is not str for value in arguments):
        raise _unfit("builtins.str")
    return "".join(arguments)


def _encode(machine: Machine, arguments: Any) -> bytes:
    # Protocol 2, the default of torch.save, encodes bytes in this way.
    if len(arguments) != 2 or type(arguments[0]) is not str or arguments[1] not in ("latin1", "latin-1"):
        raise _unfit("_codecs.encode")
    machine.pay(len(arguments[0]))
    return arguments[0].encode("latin-1")


def _buffer(kind: Any) -> Make:
    def make(machine: Machine, arguments: Any) -> Any:
        if not arguments:
            return kind()
        value, *encoding = arguments
        sound = type(value) in (bytes, bytearray) and not encoding
        if not sound and not (type(value) is str and encoding in (["latin-1"], ["latin1"])):
            raise ObjectionError(f"builtins.{kind.__name__} of a size")
        machine.pay(len(value))
        return kind(value.encode("latin-1") if encoding else value)

    return make


def _listed(kind: Any) -> Make:
    def make(machine: Machine, arguments: Any) -> Any:
        if len(arguments) > 1 or any(type(value) not in _LISTS + _SETS for value in arguments):
            raise ObjectionError(f"builtins.{kind.__name__} of what is computed")
        for value in arguments:
            machine.pay_for(value)
        return kind(*arguments)

    return make


def _set(kind: Any) -> Make:
    def make(machine: Machine, arguments: Any) -> Any:
        if len(arguments) > 1 or any(type(value) not in _LISTS + _SETS for value in arguments):
            raise ObjectionError(f"builtins.{kind.__name__} of what is computed")
        made: set[Any] = set()
        for value in arguments:
            machine.pay_for(value, hashed=True)
            machine.fill(made, value)
        return kind(made) if kind is frozenset else made

    return make


def _mapping(kind: Any) -> Make:
    def make(machine: Machine, arguments: Any) -> Any:
        made = kind()
        if len(arguments) > 1:
            raise _unfit(kind.__name__)
        for given in arguments:
            if isinstance(given, (dict, list, tuple, deque)):
                machine.pay_for(given, hashed=True)
            if type(given) is dict:
                pairs: Any = given.items()
            elif type(given) in _LISTS and all(type(pair) in (tuple, list) and len(pair) == 2 for pair in given):
                pairs = given
            else:
                raise _unfit(kind.__name__)
            machine.set_items(made, [part for pair in pairs for part in pair])
        return made

    return make


def _defaultdict(machine: Machine, arguments: Any) -> Any:
    factory = arguments[0] if arguments else None
    known = factory is None or any(factory is kind for kind in _FACTORIES)
    if type(factory) is Registered:
        factory, known = factory.value, True
    if len(arguments) > 1 or not known:
        raise ObjectionError("a default that is computed")
    return defaultdict(factory)


def _deque(machine: Machine, arguments: Any) -> Any:
    given, most = (*arguments, (), None)[:2] if len(arguments) < 2 else arguments
    if type(given) not in _LISTS or not (most is None or type(most) is int):
        raise _unfit("collections.deque")
    machine.pay_for(given)
    return deque(given, most)


def _range(kind: Any) -> Make:
    def make(machine: Machine, arguments: Any) -> Any:
        kinds = (int,) if kind is range else (int, float, str, type(None))
        if any(type(value) not in kinds for value in arguments):
            raise _unfit(f"builtins.{kind.__name__}")
        return kind(*arguments)

    return make


def _space(kind: Any) -> Make:
    def make(machine: Machine, arguments: Any) -> Any:
        if arguments:
            raise _unfit(kind.__name__)
        return kind()

    return make


def set_attributes(machine: Machine, target: Any, state: Any) -> Any:
    """Give an object plain attributes. Dunder names are refused."""
    if type(state) is tuple and len(state) == 2 and state[1] is None:
        state = state[0]
    if state is None:
        return target
    if type(state) is not dict or any(type(name) is not str or name.startswith("__") for name in state):
        raise ObjectionError(f"a state of {type(target).__name__} that is none")
    machine.pay_for(state, hashed=True)
    vars(target).update(state)
    return target


def _raw(value: Any, nbytes: int) -> bytes:
    if type(value) is str and len(value) == nbytes:
        value = value.encode("latin-1")
    if type(value) is not bytes or len(value) != nbytes:
        raise ObjectionError("a time that is none")
    return value


def _plain_ints(arguments: Any) -> bool:
    return all(type(value) is int for value in arguments)


def _date(machine: Machine, arguments: Any) -> Any:
    if len(arguments) == 3 and _plain_ints(arguments):
        return datetime.date(*arguments)
    (packed,) = arguments
    raw = _raw(packed, 4)
    return datetime.date(raw[0] << 8 | raw[1], raw[2], raw[3])


def _zone_in(arguments: Any) -> Any:
    zone = arguments[1] if len(arguments) > 1 else None
    if len(arguments) > 2 or not (zone is None or type(zone) is datetime.timezone):
        raise ObjectionError("a time zone that is computed")
    return zone


def _datetime(machine: Machine, arguments: Any) -> Any:
    if len(arguments) >= 3 and _plain_ints(arguments):
        return datetime.datetime(*arguments)  # noqa: DTZ001 - as it was saved
    zone, raw = _zone_in(arguments), _raw(arguments[0], 10)
    # The first bit of the month is the fold.
    year, month, (day, hour, minute, second) = raw[0] << 8 | raw[1], raw[2] & 0x7F, raw[3:7]
    micro = int.from_bytes(raw[7:], "big")
    return datetime.datetime(year, month, day, hour, minute, second, micro, zone, fold=raw[2] >> 7)


def _time(machine: Machine, arguments: Any) -> Any:
    zone, raw = _zone_in(arguments), _raw(arguments[0], 6)
    return datetime.time(raw[0] & 0x7F, raw[1], raw[2], int.from_bytes(raw[3:], "big"), zone, fold=raw[0] >> 7)


def _timedelta(machine: Machine, arguments: Any) -> Any:
    if len(arguments) > 3 or not _plain_ints(arguments):
        raise _unfit("datetime.timedelta")
    return datetime.timedelta(*arguments)


def _timezone(machine: Machine, arguments: Any) -> Any:
    if type(arguments[0]) is not datetime.timedelta or any(type(name) is not str for name in arguments[1:]):
        raise _unfit("datetime.timezone")
    return datetime.timezone(*arguments)


def _decimal(machine: Machine, arguments: Any) -> Any:
    (text,) = arguments
    if type(text) is not str or len(text) > MAX_DIGITS:
        raise _unfit("decimal.Decimal")
    machine.pay(len(text))
    return decimal.Decimal(text)


def _fraction(machine: Machine, arguments: Any) -> Any:
    if len(arguments) == 1 and type(arguments[0]) is str:
        # No exponents: with one, a few characters could become a number of any size.
        if not _FRACTION.fullmatch(arguments[0]):
            raise ObjectionError("fractions.Fraction of a power")
        arguments = tuple(map(int, arguments[0].split("/")))
    if not _plain_ints(arguments) or any(value.bit_length() > _MAX_BITS for value in arguments):
        raise _unfit("fractions.Fraction")
    machine.pay(2 * sum(value.bit_length() for value in arguments))
    return fractions.Fraction(*arguments)


def _empty_uuid(machine: Machine, arguments: Any) -> Shell:
    if arguments:
        raise _unfit("uuid.UUID")
    return Shell(_build_uuid)


def _safe_uuid(machine: Machine, arguments: Any) -> Any:
    return uuid.SafeUUID(*arguments)


def _build_uuid(machine: Machine, shell: Shell, state: Any) -> Any:
    known = {name: state[name] for name in ("int", "is_safe") if name in state}
    if type(known.get("int")) is not int or type(known.get("is_safe", uuid.SafeUUID.unknown)) is not uuid.SafeUUID:
        raise ObjectionError("an identifier that is none")
    return uuid.UUID(**known)


def _path(name: str) -> Make:
    windows = "Windows" in name
    kind: Any = getattr(pathlib, name)
    if windows == (os.name == "posix"):
        # Concrete paths of the other system cannot be made here, so pure ones stand for them.
        kind = {"PosixPath": pathlib.PurePosixPath, "WindowsPath": pathlib.PureWindowsPath}.get(name, kind)

    def make(machine: Machine, arguments: Any) -> Any:
        if any(type(part) is not str for part in arguments):
            raise _unfit(f"pathlib.{name}")
        machine.pay(sum(map(len, arguments)))
        return kind(*arguments)

    return make


def _change_bytes_io(machine: Machine, target: io.BytesIO, state: Any) -> io.BytesIO:
    value, position, attributes = state
    if type(value) is not bytes or type(position) is not int or not 0 <= position <= len(value) or attributes:
        raise ObjectionError("a state of io.BytesIO that is none")
    machine.pay(len(value))
    target.write(value)
    target.seek(position)
    return target


def names() -> dict[tuple[str, str], Any]:
    """Return the meaning of the names of Python's own modules."""
    found: dict[tuple[str, str], Any] = {("builtins", kind.__name__): kind for kind in (*_BUILTINS, range, slice)}
    found["builtins", "Ellipsis"], found["builtins", "NotImplemented"] = Ellipsis, NotImplemented
    found |= {("collections", kind.__name__): kind for kind in (Counter, OrderedDict, defaultdict, deque)}
    found["_codecs", "encode"] = _ENCODE
    found["types", "SimpleNamespace"] = types.SimpleNamespace
    found["argparse", "Namespace"] = argparse.Namespace
    found["_io", "BytesIO"] = found["io", "BytesIO"] = io.BytesIO
    found |= {
        ("datetime", name): getattr(datetime, name) for name in ["date", "datetime", "time", "timedelta", "timezone"]
    }
    found["decimal", "Decimal"] = decimal.Decimal
    found["fractions", "Fraction"] = fractions.Fraction
    found["uuid", "UUID"], found["uuid", "SafeUUID"] = uuid.UUID, uuid.SafeUUID
    for module in ("pathlib", "pathlib._local"):
        for name in _PATHS.split():
            found[module, name] = getattr(pathlib, name)
    return found


def makers() -> dict[Any, Make]:
    """Return the checked calls, by the called object."""
    return {
        **{kind: _number(kind) for kind in (bool, int, float)},
        **{kind: _buffer(kind) for kind in (bytes, bytearray)},
        **{kind: _listed(kind) for kind in (list, tuple)},
        **{kind: _set(kind) for kind in (set, frozenset)},
        **{kind: _mapping(kind) for kind in (dict, OrderedDict, Counter)},
        **{kind: _range(kind) for kind in (range, slice)},
        **{kind: _space(kind) for kind in (types.SimpleNamespace, argparse.Namespace, io.BytesIO)},
        **{getattr(pathlib, name): _path(name) for name in _PATHS.split()},
        complex: _complex,
        str: _text,
        _ENCODE: _encode,
        defaultdict: _defaultdict,
        deque: _deque,
        datetime.date: _date,
        datetime.datetime: _datetime,
        datetime.time: _time,
        datetime.timedelta: _timedelta,
        datetime.timezone: _timezone,
        decimal.Decimal: _decimal,
        fractions.Fraction: _fraction,
        uuid.UUID: _empty_uuid,
        uuid.SafeUUID: _safe_uuid,
    }


def changers() -> dict[type, Change]:
    """Return the checked state changes, by the type of the object to change."""
    found: dict[type, Change] = dict.fromkeys(
        (OrderedDict, Counter, types.SimpleNamespace, argparse.Namespace), set_attributes
    )
    found[io.BytesIO] = _change_bytes_io
    return found


_KEYS = (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, uuid.UUID)


def parts() -> dict[type, Any]:
    """Return the hashed parts of dictionary keys, by type."""
    paths = {type(getattr(pathlib, name)()) for name in ("Path", "PurePosixPath", "PureWindowsPath")}
    found: dict[type, Any] = dict.fromkeys((*_KEYS, uuid.SafeUUID, type(NotImplemented)), lambda key: ())
    found |= dict.fromkeys(paths, lambda key: (str(key),))
    found[decimal.Decimal] = lambda key: key.as_tuple().digits
    found[fractions.Fraction] = lambda key: (key.numerator, key.denominator)
    return found
