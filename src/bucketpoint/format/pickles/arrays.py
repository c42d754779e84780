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
        raise ObjectionError("a numpy.dtype with fields, or of a kind that is not read")
    # A state always follows. It has the byte order, the length of text, and the unit of time.
    return Shell(_build_dtype, np.dtype(text))


def _build_dtype(machine: Machine, shell: Shell, state: Any) -> Any:
    dtype = shell.value
    _, order, subarray, names, fields, itemsize, _, _, *more = state
    if subarray is not None or names is not None or fields is not None or order not in ("<", ">", "|", "="):
        raise ObjectionError("a numpy.dtype with fields")
    if dtype.kind in "SU":
        width = dtype.str[1]
        unit = 4 if width == "U" else 1
        if type(itemsize) is not int or not 0 <= itemsize < 1 << 31 or itemsize % unit:
            raise unfit("a numpy.dtype")
        dtype = np.dtype(f"{width}{itemsize // unit}")
    if dtype.kind in "mM" and more:
        unit, count, *_ = more[0][1]
        if type(unit) is not bytes or unit not in _TIMES or type(count) is not int or not 0 < count < 1 << 31:
            raise unfit("a numpy.dtype")
        dtype = np.dtype(dtype.kind + "8" + ("" if unit == b"generic" else f"[{count}{unit.decode()}]"))
    return dtype.newbyteorder(order) if dtype.kind != "O" and order in "<>" else dtype


def _of(value: Any) -> Any:
    if not isinstance(value, np.dtype):
        raise unfit("an array dtype")
    return value


def _numel(shape: Any) -> int:
    if type(shape) is not tuple or len(shape) > _MAX_DIMS:
        raise unfit("an array shape")
    if any(type(size) is not int or not 0 <= size < _MAX_NUMBER for size in shape):
        raise unfit("an array shape")
    return math.prod(shape)


def _laid(machine: Machine, raw: Any, dtype: Any, shape: Any, order: str, *, copy: bool) -> Any:
    count = _numel(shape)
    if dtype.hasobject or type(raw) not in (bytes, bytearray, str) or count * dtype.itemsize != len(raw):
        raise ObjectionError("an array whose bytes do not fit its shape and dtype")
    # Pay even without a copy: an array that shares its bytes is still written in full each time it is pickled.
    machine.pay(len(raw))
    raw = raw.encode("latin-1") if type(raw) is str else raw
    if not raw:
        return np.empty(shape, dtype)
    array = np.frombuffer(raw, dtype).reshape(shape, order=order)  # type: ignore[call-overload]
    return array.copy(order) if copy else array


@VALUES.function("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")
def _scalar(machine: Machine, dtype: Any, raw: Any) -> Any:
    return _laid(machine, raw, _of(dtype), (), "C", copy=True)[()]


@VALUES.function("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
def _reconstruct(machine: Machine, kind: Any, shape: Any, code: Any) -> Shell:
    if kind is not np.ndarray or shape != (0,):
        raise unfit("a call of numpy.core.multiarray._reconstruct")
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
        raise unfit("an array order")
    return _laid(machine, raw, _of(dtype), shape, order, copy=False)


# Random generators


@VALUES.function("numpy.random._pickle.__bit_generator_ctor")
def _bit_generator(machine: Machine, kind: Any) -> Any:
    generator = _BIT_GENERATORS.get(kind) if type(kind) is str else kind
    if not any(generator is known for known in _BIT_GENERATORS.values()):
        raise unfit("a random generator")
    machine.pay(_GENERATOR_BYTES)
    made: Any = generator
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


_BITS_128 = (1 << 128) - 1
_BUFFERED = {"has_uint32": 1, "uinteger": (1 << 32) - 1}
_PCG64 = {"state": {"state": _BITS_128, "inc": _BITS_128}, **_BUFFERED}
_STATES: dict[str, dict[str, Any]] = {
    "MT19937": {"state": {"key": (624, "u4"), "pos": 624}},
    "Philox": {"state": {"counter": (4, "u8"), "key": (2, "u8")}, "buffer": (4, "u8"), "buffer_pos": 4, **_BUFFERED},
    "SFC64": {"state": {"state": (4, "u8")}, **_BUFFERED},
    "PCG64": _PCG64,
    "PCG64DXSM": _PCG64,
}
"""Parts of the generators' states: length and type of an array, or the largest number."""


def _checked(name: str, state: Any) -> dict[str, Any]:
    """Check the state of a bit generator and make it anew: numpy indexes memory with values in it."""
    if type(state) is not dict or state.get("bit_generator") != name:
        raise unfit("a state of a random generator")
    return {"bit_generator": name, **_checked_parts(state, _STATES[name])}


def _checked_parts(state: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, want in wanted.items():
        value = state.get(name) if type(state) is dict else None
        if type(want) is dict:
            found[name] = _checked_parts(value, want)
        elif type(want) is tuple:
            if type(value) is not np.ndarray or value.shape != want[:1] or value.dtype.kind not in "ui":
                raise unfit("a state of a random generator")
            found[name] = value.astype(want[1])
        elif type(value) is int and 0 <= value <= want:
            found[name] = value
        else:
            raise unfit("a state of a random generator")
    return found


@VALUES.changes(*_BIT_GENERATORS.values())
def _set_bits(machine: Machine, target: Any, state: Any) -> Any:
    seed = None
    if type(state) is tuple:
        state, seed = state
    machine.pay(_GENERATOR_BYTES)
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
    target.set_state({**bits, **_checked_parts(state, {"has_gauss": 1}), "gauss": gauss})
    return target
