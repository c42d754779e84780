"""States to save in tests, and targets to load them into."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit pattern but NaN's trouble: raw bytes, seen as the dtype (bool stays 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    bits = [side.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for side in (left, right)]
    return torch.equal(*bits)


def varied() -> dict[str, Any]:
    """Every kind of tensor that a training state holds, nested, with plain objects between."""
    base = filled((64, 48), torch.float32, seed=1)
    state: dict[str, Any] = {
        "app": {
            "model": {
                **{f"dtype_{str(dtype)[6:]}": filled((7, 5), dtype, seed=3) for dtype in DTYPES},
                "zero_dim": torch.tensor(2.5),
                "empty": torch.empty(0, 3),
                "transposed": base.t(),
                "strided": base[::2, ::3],
                "channels_last": filled((2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last),
                "alias": base,
                "same_alias": base,
                "view": base[5:9],
                "conjugated": filled((6,), torch.complex64, seed=4).conj(),
                "large": filled((1024, 3000), torch.float32, seed=5),
            },
            "optim": {
                "state": {"large": {"exp_avg": filled((1024, 3000), torch.float32, seed=6), "step": torch.tensor(3)}}
            },
        },
        "step": 17,
        "name": "run é 中",
        "lists": [1, 2.5, None, (torch.arange(5), "x")],
        "queue": deque([1, 2]),
        "ordered": OrderedDict(a=1, b=torch.ones(3)),
        "rng": torch.get_rng_state(),
    }
    return state


def blank(value: Any) -> Any:
    """The same structure with other content, to load into."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.resolve_conj()) if value.numel() else value.clone()
    if isinstance(value, dict):
        return type(value)((key, blank(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(blank(item) for item in value)
    return None if not isinstance(value, deque) else deque()


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: leaf for key, item in value.items() for name, leaf in flat(item, f"{path}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {name: leaf for at, item in enumerate(value) for name, leaf in flat(item, f"{path}.{at}").items()}
    return {path: value}


def same(one: Any, other: Any) -> bool:
    """Equal, with the same containers and the same classes of keys, in any order."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        keys = {(type(key), key) for key in one} == {(type(key), key) for key in other}
        return type(other) is dict and keys and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return type(other) is list and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def assert_same(loaded: Any, saved: Any) -> None:
    left, right = flat(loaded), flat(saved)
    assert left.keys() == right.keys()
    for name in right:
        if isinstance(right[name], torch.Tensor):
            assert same_bits(left[name], right[name].resolve_conj()), name
        else:
            assert left[name] == right[name], name


def assert_loads(state: dict[str, Any], reader: Any, url: str | None = None) -> None:
    """Load a checkpoint into a state with other content, in this process alone, and compare."""
    target = blank(state)
    dcp.load(target, checkpoint_id=url, storage_reader=reader, no_dist=True)
    assert_same(target, state)
