"""Descriptions of values to compare them by: the same for bucketpoint's and for the independent reader's. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def described(value: Any) -> Any:
    """Describe a value in JSON's terms: a tensor by dtype, shape and SHA-256 of its elements, all else by its text.

    A tensor is one of torch's, or the independent reader's pair of dtype and array.
    """
    if type(value) is tuple and len(value) == 2 and isinstance(value[1], np.ndarray):
        dtype, array = value
        return {"tensor": [dtype, list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]}
    if hasattr(value, "untyped_storage"):
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _digest(value)]}
    if isinstance(value, Mapping):
        return {type(value).__name__: [[described(key), described(part)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [described(part) for part in value]}
    return repr(value)


def _digest(tensor: Any) -> str:
    import torch

    dense = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return hashlib.sha256(bytes(dense.reshape(-1).view(torch.uint8).numpy())).hexdigest()
