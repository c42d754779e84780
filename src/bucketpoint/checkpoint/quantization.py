"""Weights in 8 or 4 bits with a scale for each block of elements, as config.json of Hugging Face declares them.

Layouts: `fp8` of DeepSeek, float8_e4m3fn in blocks such as 128x128; `mxfp4` of GPT-OSS, 4-bit floats in groups of 32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bucketpoint.errors import MetadataError
from bucketpoint.format.safetensors_header import TensorEntry

FP8, MXFP4 = "fp8", "mxfp4"

_REMEDY = "Download config.json and the files again, or pass dequantize=False to the reader for what is stored"

_BLOCKS, _SCALES, _SCALE_INV = "_blocks", "_scales", "_scale_inv"
_SCALE_DTYPES = {FP8: (torch.float32, torch.bfloat16), MXFP4: (torch.uint8, torch.float8_e8m0fnu)}
_GROUP_BYTES = 16
_MAX_BLOCK = 1 << 30


@dataclass(frozen=True)
class Quantization:
    """The quantized tensors of a folder.

    Attributes:
        block: sizes of a block in the last dimensions; in all other dimensions the size is 1.
        scales: names of the scales, by the name of their quantized tensor.
    """

    method: str
    block: Sequence[int]
    scales: Mapping[str, str]

    @classmethod
    def of(cls, fact: Any) -> Quantization:
        """Return the quantization in a fact of untrusted metadata. Raises MetadataError."""
        if type(fact) is dict and fact.keys() == {"method", "block", "scales"}:
            scales, known = fact["scales"], fact["method"] in (FP8, MXFP4)
            if known and _is_block(fact["block"]) and type(scales) is dict and {*map(type, scales.values())} <= {str}:
                return cls(**fact)
        raise MetadataError("The metadata has a malformed description of quantized tensors")

    def block_in(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of a block in all dimensions of a tensor."""
        if len(shape) < len(self.block):
            raise MetadataError("The metadata has a quantized tensor with fewer dimensions than its blocks")
        return (1,) * (len(shape) - len(self.block)) + tuple(self.block)

    def shape_of(self, entry: TensorEntry) -> tuple[int, ...]:
        """Return the shape of a quantized tensor in elements."""
        return entry.shape if self.method == FP8 else (*entry.shape[:-2], 2 * math.prod(entry.shape[-2:]))

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor of `shape`, which is in elements."""
        return tuple(-(-size // step) for size, step in zip(shape, self.block_in(shape), strict=True))

    def scales_dtype(self, itemsize: int) -> torch.dtype:
        """Return the dtype of the scales from the size of one scale. Scales of `mxfp4` are exponents of 2."""
        if self.method == MXFP4:
            return torch.float8_e8m0fnu
        return torch.bfloat16 if itemsize == torch.bfloat16.itemsize else torch.float32


def may_be_quantized(entry: TensorEntry) -> bool:
    """Return True if config.json may declare the tensor as quantized, or as scales."""
    return _is_fp8(entry) or entry.name.endswith(_SCALE_INV) or _is_fp4(entry)


def declared(config: Any, entries: Mapping[str, TensorEntry], *, key: str) -> Quantization | None:
    """Return the tensors that `quantization_config` declares as quantized; None for an unknown method.

    Raises:
        MetadataError: a tensor has no scales, or scales of a wrong shape or dtype.
    """
    config = config if type(config) is dict else {}
    method, block = config.get("quant_method"), config.get("weight_block_size")
    if method == FP8 and block is not None:
        if not _is_block(block) or len(block) != 2:
            text = f"weight_block_size in config.json is no pair of sizes: {str(block)[:50]}"
            raise MetadataError(text, key=key, remedy=_REMEDY)
        scales = {name: name + _SCALE_INV for name in entries}
        # A tensor with scales must be FP8. Other dtypes are refused below.
        names = {name: scales[name] for name, entry in entries.items() if _is_fp8(entry) or scales[name] in entries}
    elif method == MXFP4:
        block = [2 * _GROUP_BYTES]
        names = {name: name.removesuffix(_BLOCKS) + _SCALES for name, entry in entries.items() if _is_fp4(entry)}
    else:
        return None
    quantization = Quantization(method, block, names)
    for name, own in names.items():
        if fault := _fault(quantization, entries[name], own, entries.get(own)):
            raise MetadataError(f"config.json declares {method}, but {fault}", key=name[:200], remedy=_REMEDY)
    return quantization


def _fault(quantization: Quantization, entry: TensorEntry, name: str, scales: TensorEntry | None) -> str | None:
    fp8, dtypes = quantization.method == FP8, _SCALE_DTYPES[quantization.method]
    if scales is None:
        return f"the files lack the scales {name[:200]}"
    if fp8 and not _is_fp8(entry):
        return f"this tensor with scales is {entry.dtype}"
    if len(entry.shape) < 2 or not (fp8 or entry.shape[-1] == _GROUP_BYTES):
        return f"this tensor has the shape {list(entry.shape)}"
    shape = quantization.scales_shape(quantization.shape_of(entry))
    if scales.shape != shape:
        return f"the scales {name[:200]} have the shape {list(scales.shape)} instead of {list(shape)}"
    return None if scales.dtype in dtypes else f"the scales {name[:200]} are {scales.dtype} instead of {dtypes[0]}"


def _is_fp8(entry: TensorEntry) -> bool:
    return entry.dtype is torch.float8_e4m3fn


def _is_fp4(entry: TensorEntry) -> bool:
    return entry.dtype is torch.uint8 and entry.name.endswith(_BLOCKS)


def _is_block(block: Any) -> bool:
    return type(block) is list and len(block) > 0 and all(type(size) is int and 0 < size < _MAX_BLOCK for size in block)
