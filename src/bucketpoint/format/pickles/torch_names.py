"""Names of torch's data types and storage classes in pickles."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DTYPE_NAMES = (
    *("bfloat16", "bool", "complex32", "complex64", "complex128", "bcomplex32", "float16", "float32", "float64"),
    *("float4_e2m1fn_x2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
)

STORAGE_TYPE_NAMES: Mapping[str, str] = MappingProxyType({
    f"{name}Storage": dtype
    for name, dtype in {
        "BFloat16": "bfloat16", "Half": "float16", "Float": "float32", "Double": "float64",
        "ComplexFloat": "complex64", "ComplexDouble": "complex128", "Bool": "bool", "Byte": "uint8",
        "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "QInt8": "qint8", "QInt32": "qint32",
        "QUInt8": "quint8", "QUInt4x2": "quint4x2", "QUInt2x4": "quint2x4",
    }.items()
})  # fmt: skip
"""Data types by the names of their storage classes in pickles."""
