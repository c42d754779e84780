"""Makers of numpy's arrays, scalars, data types and random generators from pickled values, once those are checked.

numpy never gets the pickle's state as it is: an array would trust the shape in it, a generator the position.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.vocabulary import ObjectionError, Shell, Vocabulary, unfit, whole

_DTYPE = re.compile(r"[<>=|]?(?:[biufcSUmM]\d{0,9}|[?U]|O8?|b1|bool|u?int\d+|float\d+|complex\d+)")
_TIMES = {b"Y", b"M", b"W", b"D", b"h", b"m", b"s", b"ms", b"us", b"ns", b"ps", b"fs", b"as", b"generic"}
_MAX_DIMS, _MAX_DTYPE = 64, 16
_MAX_NUMBER = 1 << 62
_GENERATOR_BYTES = 2500
_MAX_ENTROPY_BITS, _MAX_SEQUENCE = 4096, 64
_RANDOM = {"_mt19937": ("MT19937",), "_pcg64": ("PCG64", "PCG64DXSM"), "_philox": ("Philox",), "_sfc64": ("SFC64",)}

VALUES = Vocabulary()
"""numpy's names, under the modules of numpy 1 and 2."""

_BIT_GENERATORS: dict[str, Any] = {}
for _module, _kinds in _RANDOM.items():
    for _name in _kinds:
        _BIT_GENERATORS[_name] = getattr(np.random, _name)
        VALUES.add(_BIT_GENERATORS[_name], names=[f"numpy.random.{_module}.{_name}"])
VALUES.add(np.ndarray)
VALUES.add(np.random.SeedSequence, names=["numpy.random.bit_generator.SeedSequence"])
VALUES.parts |= dict.fromkeys({np.dtype(code).type for code in "?bhilqBHILQefdgFDGmMSU"}, whole)


@VALUES.makes(np.dtype)
def _dtype(machine: Machine, text: Any, *flags: Any) -> Shell:
    if (
        type(text) is not str
        or len(text) > _MAX_DTYPE
        or not _DTYPE.fullmatch(text)
        or any(type(flag) not in (bool, int) for flag in flags)
    ):
        raise ObjectionError("numpy.dtype of fields, or of an object of a size")
    # A state always follows. It has the byte order, the length of text, and the unit of time.
    return Shell(_build_dtype, np.dtype(text))


def _build_dtype(machine: Machine, shell: Shell, state: Any) -> Any:
    found = shell.value
    _, order, subarray, names, fields, itemsize, _, _, *more = state
    if subarray is not None or names is not None or fields is not None or order not in ("<", ">", "|", "="):
        raise ObjectionError("numpy.dtype of fields")
    if found.kind in "SU":
        width = found.str[1]
        unit = 4 if width == "U" else 1
        if type(itemsize) is not int or not 0 <= itemsize < 1 << 31 or itemsize % unit:
            raise unfit("a numpy.dtype")
        found = np.dtype(f"{width}{itemsize // unit}")
    if found.kind in "mM" and more:
        unit, count, *_ = more[0][1]
        if type(unit) is not bytes or unit not in _TIMES or type(count) is not int or not 0 < count < 1 << 31:
            raise unfit("a numpy.dtype")
        found = np.dtype(found.kind + "8" + ("" if unit == b"generic" else f"[{count}{unit.decode()}]"))
    return found.newbyteorder(order) if found.kind != "O" and order in "<>" else found


def _of(value: Any) -> Any:
    if not isinstance(value, np.dtype):
        raise unfit("an array of a type")
    return value


def _numel(shape: Any) -> int:
    if type(shape) is not tuple or len(shape) > _MAX_DIMS:
        raise unfit("an array of a shape")
    if any(type(size) is not int or not 0 <= size < _MAX_NUMBER for size in shape):
        raise unfit("an array of a shape")
    return math.prod(shape)


def _laid(machine: Machine, raw: Any, dtype: Any, shape: Any, order: str, *, copy: bool) -> Any:
    count = _numel(shape)
    if dtype.hasobject or type(raw) not in (bytes, bytearray, str) or count * dtype.itemsize != len(raw):
        raise unfit("an array of other bytes than its shape has")
    # Pay even without a copy: an array that shares its bytes is still written in full each time it is pickled.
    machine.pay(len(raw))
    raw = raw.encode("latin-1") if type(raw) is str else raw
    if not raw:
        return np.empty(shape, dtype)
    made = np.frombuffer(raw, dtype).reshape(shape, order=order)  # type: ignore[call-overload]
    return made.copy(order) if copy else made


@VALUES.function("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")
def _scalar(machine: Machine, dtype: Any, raw: Any) -> Any:
    return _laid(machine, raw, _of(dtype), (), "C", copy=True)[()]


@VALUES.function("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
def _reconstruct(machine: Machine, kind: Any, shape: Any, code: Any) -> Shell:
    if kind is not np.ndarray or shape != (0,):
        raise ObjectionError("numpy.core.multiarray._reconstruct of a shape")
    return Shell(_build_array)


def _build_array(machine: Machine, shell: Shell, state: Any) -> Any:
    _, shape, of, fortran, raw = state
    dtype, order = _of(of), "F" if fortran else "C"
    if not dtype.hasobject:
        return _laid(machine, raw, dtype, shape, order, copy=True)
    if type(raw) is not list or dtype.kind != "O" or len(raw) != _numel(shape):
        raise unfit("an array of objects")
    machine.pay_for(raw)
    flat = np.empty(len(raw), object)
    for place, value in enumerate(raw):
        flat[place] = value
    return flat.reshape(shape, order=order)  # type: ignore[call-overload]


@VALUES.function("numpy._core.numeric._frombuffer", "numpy.core.numeric._frombuffer")
def _frombuffer(machine: Machine, raw: Any, dtype: Any, shape: Any, order: Any) -> Any:
    if order not in ("C", "F"):
        raise unfit("an array of an order")
    return _laid(machine, raw, _of(dtype), shape, order, copy=False)


# Random generators


@VALUES.function("numpy.random._pickle.__bit_generator_ctor")
def _bit_generator(machine: Machine, kind: Any) -> Any:
    found = _BIT_GENERATORS.get(kind) if type(kind) is str else kind
    if not any(found is known for known in _BIT_GENERATORS.values()):
        raise unfit("a random generator")
    machine.pay(_GENERATOR_BYTES)
    made: Any = found
    return made(0)


def _over_bits(kind: Any, name: str) -> None:
    @VALUES.function(name)
    def make(machine: Machine, bits: Any, *_: Any) -> Any:
        if type(bits) is str:
            bits = _bit_generator(machine, bits)
        if type(bits) not in _BIT_GENERATORS.values():
            raise unfit("a random generator")
        machine.pay(_GENERATOR_BYTES)
        return kind(bits)


_over_bits(np.random.Generator, "numpy.random._pickle.__generator_ctor")
_over_bits(np.random.RandomState, "numpy.random._pickle.__randomstate_ctor")


@VALUES.function("numpy.random.bit_generator.__pyx_unpickle_SeedSequence")
def _seed_sequence(machine: Machine, kind: Any, *_: Any) -> Shell:
    if kind is not np.random.SeedSequence:
        raise unfit("a random seed")
    return Shell(_build_seed)


def _build_seed(machine: Machine, shell: Shell, state: Any) -> Any:
    entropy, spawned, _, pool_size, spawn_key, *_ = state
    numbers = entropy[: _MAX_SEQUENCE + 1] if type(entropy) in (list, tuple) else [] if entropy is None else [entropy]
    sound = len(numbers) <= _MAX_SEQUENCE and type(spawn_key) is tuple and len(spawn_key) <= _MAX_SEQUENCE
    if not sound or type(spawned) is not int or type(pool_size) is not int or not 4 <= pool_size <= _MAX_SEQUENCE:
        raise unfit("a random seed")
    if any(type(n) is not int or not 0 <= n.bit_length() <= _MAX_ENTROPY_BITS for n in (*numbers, *spawn_key, spawned)):
        raise unfit("a random seed")
    machine.pay(_GENERATOR_BYTES)
    return np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=spawned)


def _words(value: Any, count: int, kind: str) -> Any:
    if type(value) is not np.ndarray or value.shape != (count,) or value.dtype.kind not in "ui":
        raise unfit("a state of a random generator")
    return value.astype(kind)


def _whole(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise unfit("a state of a random generator")
    return value


def _checked(name: str, state: Any) -> dict[str, Any]:
    """Check the state of a bit generator and make it anew: numpy indexes memory with values in it."""
    if type(state) is not dict or type(state.get("state")) is not dict or state.get("bit_generator") != name:
        raise unfit("a state of a random generator")
    inner = state["state"]
    found: dict[str, Any] = {"bit_generator": name}
    if name == "MT19937":
        found["state"] = {"key": _words(inner["key"], 624, "u4"), "pos": _whole(inner["pos"], 624)}
        return found
    if name == "Philox":
        found["state"] = {"counter": _words(inner["counter"], 4, "u8"), "key": _words(inner["key"], 2, "u8")}
        found |= {"buffer": _words(state["buffer"], 4, "u8"), "buffer_pos": _whole(state["buffer_pos"], 4)}
    elif name == "SFC64":
        found["state"] = {"state": _words(inner["state"], 4, "u8")}
    else:
        found["state"] = {part: _whole(inner[part], (1 << 128) - 1) for part in ("state", "inc")}
    found |= {"has_uint32": _whole(state["has_uint32"], 1), "uinteger": _whole(state["uinteger"], (1 << 32) - 1)}
    return found


@VALUES.changes(*_BIT_GENERATORS.values())
def _set_bits(machine: Machine, target: Any, state: Any) -> Any:
    seed = None
    if type(state) is tuple:
        state, seed = state
    if type(seed) is np.random.SeedSequence:
        # Only the constructor takes a seed.
        target.__init__(seed)
    target.state = _checked(type(target).__name__, state)
    return target


@VALUES.changes(np.random.Generator)
def _set_generator(machine: Machine, target: Any, state: Any) -> Any:
    if state is not None:
        target.bit_generator.state = _checked(type(target.bit_generator).__name__, state)
    return target


@VALUES.changes(np.random.RandomState)
def _set_random_state(machine: Machine, target: Any, state: Any) -> Any:
    bits = _checked("MT19937", {"bit_generator": state.get("bit_generator"), "state": state.get("state")})
    gauss = state.get("gauss")
    if type(gauss) is not float:
        raise unfit("a state of a random generator")
    target.set_state({**bits, "has_gauss": _whole(state.get("has_gauss"), 1), "gauss": gauss})
    return target
