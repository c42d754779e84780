"""Functions that make numpy's arrays, scalars and data types from pickled values, after checks.

numpy gets no unchecked state of a pickle, because an array would trust the shape in the state.
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

VALUES = Vocabulary()
"""Vocabulary of numpy, with the module names of numpy 1 and 2."""

VALUES.add(np.ndarray)
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
    # A state always follows, with the byte order, the length of text, and the unit of time.
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
    # Charged even without a copy: an array that shares its bytes with others is written in full at each pickling.
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
