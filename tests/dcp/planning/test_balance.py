"""Balance of duplicates over ranks: everything is written once, by a rank that holds it, about as much by each."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from bucketpoint.dcp.planning.global_plan import plan_globally, unpack_tables
from bucketpoint.dcp.planning.items import PlanItems
from dcp.planning.planner_scenarios import planned_bytes

pytestmark = pytest.mark.contract

Items = list[WriteItem]


def tensor_item(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> WriteItem:
    size, offsets = torch.Size(shape), torch.Size([0] * len(shape))
    data = TensorWriteData(ChunkStorageMetadata(offsets, size), TensorProperties(dtype=dtype), size)
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.TENSOR, tensor_data=data)


def balanced(held: Sequence[Items], nodes: Sequence[object] | None = None) -> list[Items]:
    """Return the items that each rank writes."""
    plans = [SavePlan(pickle.loads(pickle.dumps(PlanItems.packed(items)))) for items in held]
    plan = plan_globally(plans, unpack_tables(plans), range(len(held)) if nodes is None else nodes)
    assert (plan.assignment is not None) == any(held)
    return [list(items) for items in plan.lists()]


def totals(written: list[Items]) -> list[int]:
    return [sum(map(planned_bytes, items)) for items in written]


def llama(layers: int, width: int) -> Items:
    items = [tensor_item("embed", (32_000, width)), tensor_item("head", (32_000, width))]
    for layer in range(layers):
        items += [tensor_item(f"{layer}.{name}", (width, width)) for name in "qkvo"]
        items += [tensor_item(f"{layer}.{name}", (width * 11 // 4, width)) for name in ("up", "gate", "down")]
        items += [tensor_item(f"{layer}.norm{number}", (width,)) for number in (1, 2)]
    return items


def shard(item: WriteItem, number: int) -> WriteItem:
    data = item.tensor_data
    assert data is not None
    rows = -(-data.size[0] // 4)
    first = min(rows * number, data.size[0])
    offsets = torch.Size([first, *data.chunk.offsets[1:]])
    sizes = torch.Size([min(rows, data.size[0] - first), *data.chunk.sizes[1:]])
    part = TensorWriteData(ChunkStorageMetadata(offsets, sizes), data.properties, data.size)
    return WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=part)


@pytest.mark.parametrize("sharded", [False, True])
def test_writes_the_same_on_each_rank_within_five_percent(sharded: bool) -> None:
    model = llama(8, 1024)
    written = balanced([[shard(item, rank % 4) for item in model] if sharded else model for rank in range(8)])
    assert max(totals(written)) <= 1.05 * sum(totals(written)) / 8


def test_counts_first_what_a_rank_must_write_anyway() -> None:
    alone = tensor_item("alone", (1_000_000,))
    shared = [tensor_item(f"shared{number}", (1_000, 100)) for number in range(10)]
    assert {item.index.fqn for item in balanced([[alone, *shared], shared])[0]} == {"alone"}


def test_shares_the_card_of_a_node_among_its_ranks() -> None:
    shared = [tensor_item(f"shared{number}", (64, 1024)) for number in range(120)]
    written = totals(balanced([shared] * 4, nodes=["a", "a", "a", "b"]))
    assert abs(sum(written[:3]) - written[3]) / written[3] < 0.02


def test_writes_nothing_on_a_rank_that_holds_nothing() -> None:
    assert totals(balanced([[tensor_item("w", (8, 8))], []])) == [256, 0]
