"""Checkpoints whose tensors were saved in chunks, as by many ranks, without any ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from kit.metadata import chunk_of


class GridPlanner(dcp.DefaultSavePlanner):
    """Cuts each tensor into a grid: `cuts` pieces along each of its first dimensions, the last ones shorter."""

    def __init__(self, *cuts: int) -> None:
        super().__init__()
        self.cuts = cuts

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            value = self.state_dict[item.index.fqn]
            items += self._pieces(item.index.fqn, value) if isinstance(value, torch.Tensor) else [item]
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type != WriteItemType.SHARD:
            return super().resolve_data(write_item)
        data = write_item.tensor_data
        assert data is not None
        value = self.state_dict[write_item.index.fqn]
        for axis, (offset, size) in enumerate(zip(data.chunk.offsets, data.chunk.sizes, strict=True)):
            value = value.narrow(axis, offset, size)
        return value.detach().clone(memory_format=torch.contiguous_format)

    def _pieces(self, fqn: str, value: torch.Tensor) -> list[WriteItem]:
        cuts = itertools.chain(self.cuts, itertools.repeat(1))
        axes = []
        for size, count in zip(value.shape, cuts, strict=False):
            step = max(-(-size // count), 1)
            axes.append([(start, min(step, size - start)) for start in range(0, size, step)] or [(0, 0)])
        made = []
        for box in itertools.product(*axes):
            chunk = chunk_of(([offset for offset, _ in box], [size for _, size in box]))
            data = TensorWriteData(chunk, TensorProperties(dtype=value.dtype), value.size())
            made.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return made
