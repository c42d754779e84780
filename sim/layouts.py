"""Llama-like training states of many ranks, as DCP sees them: names and chunks of the real number, with few bytes each.

What a coordinator spends depends on how many items there are and what they are called, not on how large they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

COLUMNS = 4


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer by the number of its layers, and the billions of its parameters."""

    name: str
    layers: int
    billions: float

    def parameters(self) -> Iterator[str]:
        yield "tok_embeddings.weight"
        for layer in range(self.layers):
            for part in ("attention.wq", "attention.wk", "attention.wv", "attention.wo"):
                yield f"layers.{layer}.{part}.weight"
            for part in ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "attention_norm", "ffn_norm"):
                yield f"layers.{layer}.{part}.weight"
        yield "norm.weight"
        yield "output.weight"

    @property
    def items(self) -> int:
        """Items of one rank: weight, two moments and the step of each parameter."""
        return 4 * (9 * self.layers + 3)


MODELS = (Model("8B", 32, 8.0), Model("70B", 80, 70.6), Model("405B", 126, 405.9))


@dataclass(frozen=True)
class Layout:
    """FSDP over all ranks, or, where `replicas` is more than 1, over each replica's (HSDP)."""

    model: Model
    ranks: int
    replicas: int = 1

    @property
    def shards(self) -> int:
        return self.ranks // self.replicas

    @property
    def gathered(self) -> int:
        """Items that all ranks' plans have together."""
        return self.model.items * self.ranks

    @property
    def kept(self) -> int:
        """Items that remain once duplicates are gone: a chunk of each shard, and the steps once."""
        return self.model.items * 3 // 4 * self.shards + self.model.items // 4


class Row(torch.Tensor):
    """One row of a tensor of `shards` rows: what DCP calls a checkpointable, without a device mesh behind it."""

    offset: torch.Size
    whole: torch.Size

    @staticmethod
    def of(row: int, shards: int, dtype: torch.dtype) -> Row:
        made = torch.full((1, COLUMNS), row, dtype=dtype).as_subclass(Row)
        made.offset, made.whole = torch.Size((row, 0)), torch.Size((shards, COLUMNS))
        return made

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        chunk = ChunkStorageMetadata(self.offset, torch.Size((1, COLUMNS)))
        properties = TensorProperties(dtype=self.dtype)
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.whole)
        return [WriteItem(MetadataIndex(fqn, self.offset), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self.offset, torch.Size((1, COLUMNS)))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def state_of(layout: Layout, rank: int) -> dict[str, Any]:
    """The state dict of one rank."""
    row, shards = rank % layout.shards, layout.shards
    weight, moment = Row.of(row, shards, torch.bfloat16), Row.of(row, shards, torch.float32)
    step = torch.tensor(100.0)
    state: dict[str, Any] = {}
    for name in layout.model.parameters():
        state[f"model.{name}"] = weight
        state[f"optim.state.{name}.exp_avg"] = moment
        state[f"optim.state.{name}.exp_avg_sq"] = moment
        state[f"optim.state.{name}.step"] = step
    return state
