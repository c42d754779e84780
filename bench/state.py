"""The training state that is saved and loaded: a transformer's bf16 weights and two fp32 moments. Tensors only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

SEED = 20240229


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer. The default has 99,952,128 parameters: 999.5 MB with both moments."""

    hidden: int = 768
    ffn: int = 2304
    layers: int = 8
    vocab: int = 50257

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "embed.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            name = f"layers.{layer}"
            yield f"{name}.attn_norm.weight", (self.hidden,)
            yield f"{name}.attn.qkv.weight", (3 * self.hidden, self.hidden)
            yield f"{name}.attn.out.weight", (self.hidden, self.hidden)
            yield f"{name}.mlp_norm.weight", (self.hidden,)
            yield f"{name}.mlp.gate.weight", (self.ffn, self.hidden)
            yield f"{name}.mlp.up.weight", (self.ffn, self.hidden)
            yield f"{name}.mlp.down.weight", (self.hidden, self.ffn)
        yield "norm.weight", (self.hidden,)


TINY = Shape(hidden=64, ffn=128, layers=1, vocab=97)
"""For the warm-up of a contender's imports, client and connections."""


def training_state(shape: Shape, *, seed: int = SEED) -> dict[str, Any]:
    """A state with reproducible contents."""
    generator = torch.Generator().manual_seed(seed)

    def make(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype).uniform_(-1, 1, generator=generator)

    return _state(shape, make)


def blank_state(shape: Shape) -> dict[str, Any]:
    """The same structure to load into, with every page already touched."""
    return _state(shape, lambda size, dtype: torch.zeros(size, dtype=dtype).fill_(0.5))


def _state(shape: Shape, make: Any) -> dict[str, Any]:
    model = {name: make(size, torch.bfloat16) for name, size in shape.parameters()}
    moments = {
        name: {"exp_avg": make(size, torch.float32), "exp_avg_sq": make(size, torch.float32)}
        for name, size in shape.parameters()
    }
    return {"model": model, "optim": {"state": moments}}


def equal_tensors(count: int, total_bytes: int, device: str = "cpu") -> dict[str, Any]:
    """`count` fp32 tensors of one size, a third of them called weights and the rest moments, every page touched."""
    size = total_bytes // count // 4
    tensors = [torch.empty(size, dtype=torch.float32, device=device).fill_(index) for index in range(count)]
    weights = count // 3
    return {
        "model": {f"layers.{index}.weight": tensor for index, tensor in enumerate(tensors[:weights])},
        "optim": {"state": {f"layers.{index}.moment": tensor for index, tensor in enumerate(tensors[weights:])}},
    }


def quarter_of(tensor: torch.Tensor, dim: int, part: int = 1, parts: int = 4) -> tuple[int, int]:
    """Offset and length of one of `parts` shards along `dim`, cut as FSDP2 cuts (1-D tensors along dimension 0)."""
    size = tensor.shape[min(dim, tensor.ndim - 1)]
    length = -(-size // parts)
    start = min(part * length, size)
    return start, min(length, size - start)


def quarter_state(shape: Shape, dim: int) -> dict[str, Any]:
    """What rank 1 of 4 holds: DTensors sharded along `dim`, over a process group that only pretends to have peers."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    mesh = init_device_mesh("cpu", (4,))

    def make(size: tuple[int, ...], dtype: torch.dtype) -> DTensor:
        whole = torch.empty(size, dtype=dtype, device="meta")
        axis = min(dim, len(size) - 1)
        _, length = quarter_of(whole, dim)
        local = torch.zeros([length if at == axis else n for at, n in enumerate(size)], dtype=dtype).fill_(0.5)
        return DTensor.from_local(local, mesh, [Shard(axis)], run_check=False, shape=whole.shape, stride=whole.stride())

    return _state(shape, make)


def leaves(state: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def nbytes(state: dict[str, Any]) -> int:
    """Bytes that this process holds of the state."""
    return sum(local_tensor(value).nbytes for _, value in leaves(state))


def differences(expected: dict[str, Any], loaded: dict[str, Any], dim: int | None) -> list[str]:
    """Names of the tensors that were not loaded as they were saved."""
    wanted = dict(leaves(expected))
    wrong = []
    for name, value in leaves(loaded):
        whole = wanted[name]
        if dim is not None:
            start, length = quarter_of(whole, dim)
            whole = whole.narrow(min(dim, whole.ndim - 1), start, length)
        if not torch.equal(whole, local_tensor(value)):
            wrong.append(name)
    return wrong
