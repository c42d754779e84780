"""Encoder and decoder of the header of a safetensors file.

A file is the length of the header (8 bytes, little-endian), the header in JSON, and the tensors' bytes without gaps.
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from bucketpoint.errors import MetadataError, MismatchError

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""

LENGTH_BYTES = 8

_ALIGNMENT = 8
_METADATA = "__metadata__"
_HALF = re.compile("[\ud800-\udfff]")
_MAX_DIMS = 64
_MAX_NBYTES = 1 << 62

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file. `start` is the offset of its bytes from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def writable(dtype: torch.dtype) -> bool:
    """Return True if safetensors has a name for this dtype."""
    return dtype in _NAMES


def nameable(name: str) -> bool:
    """Return True if a tensor may have this name: valid Unicode, and not the header's reserved key."""
    return name != _METADATA and _HALF.search(name) is None


def encode_header(entries: Sequence[TensorEntry], noted: Mapping[str, str] | None = None) -> bytes:
    """Encode the length and the header, padded to a multiple of 8 bytes so that the tensors are aligned.

    Args:
        noted: further entries of the header's `__metadata__`.

    Raises:
        MismatchError: the header would exceed `MAX_HEADER_BYTES`.
    """
    content: dict[str, Any] = {
        # transformers requires "format", the framework of the tensors.
        _METADATA: {"format": "pt", **(noted or {})},
        **{
            entry.name: {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [entry.start, entry.start + entry.nbytes],
            }
            for entry in entries
        },
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise MismatchError(
            f"A file with {len(entries)} tensors has a header of {len(text)} bytes, which is more than readers accept",
            remedy="Choose a smaller --max-shard-size",
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_nbytes(head: bytes, size: int, *, key: str) -> int:
    """Return the length of the header of a file of `size` bytes; `head` is its first 8 bytes.

    Raises:
        MetadataError: the header would be longer than the file or than `MAX_HEADER_BYTES`, or shorter than `{}`.
    """
    nbytes = int.from_bytes(head, "little")
    if len(head) != LENGTH_BYTES or not 2 <= nbytes <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise _malformed(f"its header claims {nbytes} bytes, but the file has {size}", key)
    return nbytes


def decode_header(text: bytes, data_nbytes: int, *, key: str) -> list[TensorEntry]:
    """Return the tensors of a file, sorted by position.

    Args:
        text: the header in JSON.
        data_nbytes: bytes of the file after the header.

    Raises:
        MetadataError: the header is malformed, or the tensors do not fill the file without gaps.
    """
    content = decode_json(text, key=key)
    content.pop(_METADATA, None)
    entries = [_entry(name, fields, key) for name, fields in content.items()]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    position = 0
    for entry in entries:
        if entry.start != position:
            raise _malformed(f"{entry.name[:200]} does not begin where the tensor before it ends", key)
        position += entry.nbytes
    if position != data_nbytes:
        raise _malformed(f"its tensors have {position} bytes, but its data has {data_nbytes}", key)
    return entries


def decode_json(text: bytes, *, key: str) -> dict[str, Any]:
    """Decode a JSON object without repeated names. Raises MetadataError for any other text."""
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"its header is not JSON: {str(error)[:200]}", key) from None
    if type(content) is not dict:
        raise _malformed("its header is not a JSON object", key)
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("its header has a name twice")
    if any(_HALF.search(text) for pair in pairs for text in pair if type(text) is str):
        raise ValueError("its header has half a surrogate pair")
    return content


def _entry(name: str, fields: Any, key: str) -> TensorEntry:
    if type(fields) is not dict:
        raise _malformed(f"{name[:200]} is not described as a tensor", key)
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if type(dtype) is not str or dtype not in _DTYPES:
        raise _malformed(f"{name[:200]} has the dtype {str(dtype)[:50]}, which is not supported", key)
    if not _are_counts(shape) or len(shape) > _MAX_DIMS or not _are_counts(offsets) or len(offsets) != 2:
        raise _malformed(f"{name[:200]} has no shape or no offsets", key)
    entry = TensorEntry(name, _DTYPES[dtype], tuple(shape), offsets[0])
    # Strides are products of sizes, so even an empty tensor can have strides that overflow.
    if math.prod(max(size, 1) for size in shape) >= _MAX_NBYTES or entry.nbytes != offsets[1] - offsets[0]:
        raise _malformed(f"{name[:200]} has a number of bytes that does not fit its shape", key)
    return entry


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return type(value) is list and all(type(number) is int and 0 <= number < _MAX_NBYTES for number in value)


def _malformed(reason: str, key: str) -> MetadataError:
    remedy = "Download the file again, or save the model again"
    return MetadataError(f"The safetensors file is malformed: {reason}", key=key, remedy=remedy)
