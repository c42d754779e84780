"""Makers of numpy's arrays, scalars, data types and random generators from pickled values, once those are checked.

numpy never gets the pickle's state as it is: an array would trust the shape in it, a generator the position.
"""

from __future__ import annotations

import importlib.util
import math
import re
from typing import Any

from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.vocabulary import Change, Function, Make, ObjectionError, Shell, unfit

_DTYPE = re.compile(r"[<>=|]?(?:[biufcSUmM]\d{0,9}|[?U]|O8?|b1|bool|u?int\d+|float\d+|complex\d+)")
_TIMES = {b"Y", b"M", b"W", b"D", b"h", b"m", b"s", b"ms", b"us", b"ns", b"ps", b"fs", b"as", b"generic"}
_MAX_DIMS, _MAX_DTYPE = 64, 16
_MAX_NUMBER = 1 << 62
_GENERATOR_BYTES = 2500
_MAX_ENTROPY_BITS, _MAX_SEQUENCE = 4096, 64
_RANDOM = {"_mt19937": ("MT19937",), "_pcg64": ("PCG64", "PCG64DXSM"), "_philox": ("Philox",), "_sfc64": ("SFC64",)}

_RECONSTRUCT = Function("numpy._core.multiarray._reconstruct")
_SCALAR = Function("numpy._core.multiarray.scalar")
_FROMBUFFER = Function("numpy._core.numeric._frombuffer")
_GENERATOR = Function("numpy.random._pickle.__generator_ctor")
_BIT_GENERATOR = Function("numpy.random._pickle.__bit_generator_ctor")
_RANDOM_STATE = Function("numpy.random._pickle.__randomstate_ctor")
_SEED_SEQUENCE = Function("numpy.random.bit_generator.__pyx_unpickle_SeedSequence")


def available() -> bool:
    """Return True if numpy is installed."""
    return importlib.util.find_spec("numpy") is not None


def _dtype(machine: Machine, arguments: Any) -> Shell:
    import numpy as np

    text = arguments[0]
    if (
        type(text) is not str
        or len(text) > _MAX_DTYPE
        or not _DTYPE.fullmatch(text)
        or any(type(flag) not in (bool, int) for flag in arguments[1:])
    ):
        raise ObjectionError("numpy.dtype of fields, or of an object of a size")
    # A state always follows. It has the byte order, the length of text, and the unit of time.
    return Shell(_build_dtype, np.dtype(text))


def _build_dtype(machine: Machine, shell: Shell, state: Any) -> Any:
    import numpy as np

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
        if unit not in _TIMES or type(count) is not int or not 0 < count < 1 << 31:
            raise unfit("a numpy.dtype")
        found = np.dtype(found.kind + "8" + ("" if unit == b"generic" else f"[{count}{unit.decode()}]"))
    return found.newbyteorder(order) if found.kind != "O" and order in "<>" else found


def _of(value: Any) -> Any:
    import numpy as np

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
    import numpy as np

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


def _scalar(machine: Machine, arguments: Any) -> Any:
    dtype, raw = arguments
    found = _laid(machine, raw, _of(dtype), (), "C", copy=True)
    return found[()]


def _reconstruct(machine: Machine, arguments: Any) -> Shell:
    import numpy as np

    kind, shape, _ = arguments
    if kind is not np.ndarray or shape != (0,):
        raise ObjectionError("numpy.core.multiarray._reconstruct of a shape")
    return Shell(_build_array)


def _build_array(machine: Machine, shell: Shell, state: Any) -> Any:
    import numpy as np

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


def _frombuffer(machine: Machine, arguments: Any) -> Any:
    raw, dtype, shape, order, *_ = arguments
    if order not in ("C", "F") or len(arguments) > 4:
        raise unfit("an array of an order")
    return _laid(machine, raw, _of(dtype), shape, order, copy=False)


# Random generators


def _bit_generator(machine: Machine, arguments: Any) -> Any:
    (kind,) = arguments
    kinds = _bit_generators()
    found = kinds.get(kind) if type(kind) is str else kind
    if not any(found is one for one in kinds.values()):
        raise unfit("a random generator")
    machine.pay(_GENERATOR_BYTES)
    made: Any = found
    return made(0)


def _bit_generators() -> dict[str, Any]:
    import numpy as np

    return {name: getattr(np.random, name) for names in _RANDOM.values() for name in names}


def _over_bits(name: str) -> Make:
    def make(machine: Machine, arguments: Any) -> Any:
        import numpy as np

        bits = arguments[0]
        if type(bits) is str:
            bits = _bit_generator(machine, (bits,))
        if type(bits) not in _bit_generators().values():
            raise unfit("a random generator")
        machine.pay(_GENERATOR_BYTES)
        return getattr(np.random, name)(bits)

    return make


def _seed_sequence(machine: Machine, arguments: Any) -> Shell:
    import numpy as np

    if arguments[0] is not np.random.SeedSequence:
        raise unfit("a random seed")
    return Shell(_build_seed)


def _build_seed(machine: Machine, shell: Shell, state: Any) -> Any:
    import numpy as np

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
    import numpy as np

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


def _set_bits(machine: Machine, target: Any, state: Any) -> Any:
    import numpy as np

    seed = None
    if type(state) is tuple:
        state, seed = state
    if type(seed) is np.random.SeedSequence:
        # Only the constructor takes a seed.
        target.__init__(seed)
    target.state = _checked(type(target).__name__, state)
    return target


def _set_generator(machine: Machine, target: Any, state: Any) -> Any:
    if state is not None:
        target.bit_generator.state = _checked(type(target.bit_generator).__name__, state)
    return target


def _set_random_state(machine: Machine, target: Any, state: Any) -> Any:
    bits = _checked("MT19937", {"bit_generator": state.get("bit_generator"), "state": state.get("state")})
    gauss = state.get("gauss")
    if type(gauss) is not float:
        raise unfit("a state of a random generator")
    target.set_state({**bits, "has_gauss": _whole(state.get("has_gauss"), 1), "gauss": gauss})
    return target


def names() -> dict[tuple[str, str], Any]:
    """Return the meaning of numpy's names, under the modules of numpy 1 and 2."""
    import numpy as np

    found: dict[tuple[str, str], Any] = {("numpy", "dtype"): np.dtype, ("numpy", "ndarray"): np.ndarray}
    for core in ("numpy.core", "numpy._core"):
        found[f"{core}.multiarray", "_reconstruct"] = _RECONSTRUCT
        found[f"{core}.multiarray", "scalar"] = _SCALAR
        found[f"{core}.numeric", "_frombuffer"] = _FROMBUFFER
    found["numpy.random._pickle", "__generator_ctor"] = _GENERATOR
    found["numpy.random._pickle", "__bit_generator_ctor"] = _BIT_GENERATOR
    found["numpy.random._pickle", "__randomstate_ctor"] = _RANDOM_STATE
    found["numpy.random.bit_generator", "SeedSequence"] = np.random.SeedSequence
    found["numpy.random.bit_generator", "__pyx_unpickle_SeedSequence"] = _SEED_SEQUENCE
    for module, kinds in _RANDOM.items():
        for name in kinds:
            found[f"numpy.random.{module}", name] = getattr(np.random, name)
    return found


def makers() -> dict[Any, Make]:
    """Return the checked calls, by the called object."""
    import numpy as np

    return {
        np.dtype: _dtype,
        _SCALAR: _scalar,
        _RECONSTRUCT: _reconstruct,
        _FROMBUFFER: _frombuffer,
        _BIT_GENERATOR: _bit_generator,
        _GENERATOR: _over_bits("Generator"),
        _RANDOM_STATE: _over_bits("RandomState"),
        _SEED_SEQUENCE: _seed_sequence,
    }


def changers() -> dict[type, Change]:
    """Return the checked state changes, by the type of the object to change."""
    import numpy as np

    found: dict[type, Change] = dict.fromkeys(_bit_generators().values(), _set_bits)
    found[np.random.Generator] = _set_generator
    found[np.random.RandomState] = _set_random_state
    return found


def parts() -> dict[type, Any]:
    """Return the hashed parts of dictionary keys by type: scalars have none."""
    import numpy as np

    kinds = {np.dtype(code).type for code in "?bhilqBHILQefdgFDGmMSU"}
    return dict.fromkeys(kinds, lambda key: ())
