"""Balance of duplicates over ranks: everything is written once, by a rank that holds it, about as much by each."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from bucketpoint.dcp.planning.columnar.plan_items import PlanItems
from bucketpoint.dcp.planning.global_plan import plan_globally, unpack_tables
from dcp.planning.planner_scenarios import planned_bytes

pytestmark = pytest.mark.contract

Items = list[WriteItem]


def tensor_item(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> WriteItem:
    size, offsets = torch.Size(shape), torch.Size([0] * len(shape))
    data = TensorWriteData(ChunkStorageMetadata(offsets, size), TensorProperties(dtype=dtype), size)
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.TENSOR, tensor_data=data)


def object_item(name: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)


def balanced(held: Sequence[Items], nodes: Sequence[object] | None = None) -> list[Items]:
    """Return the items that each rank writes."""
    plans = [SavePlan(pickle.loads(pickle.dumps(PlanItems.packed(items)))) for items in held]
    plan = plan_globally(plans, unpack_tables(plans), range(len(held)) if nodes is None else nodes)
    assert (plan.assignment is not None) == any(held)
    return [list(items) for items in plan.lists()]


def totals(written: list[Items]) -> list[int]:
    return [sum(map(planned_bytes, items)) for items in written]


def rows_written(written: list[Items]) -> dict[str, list[int]]:
    """For each tensor, how often each of its rows is written."""
    counts: dict[str, list[int]] = {}
    for item in [item for items in written for item in items]:
        data = item.tensor_data
        if data is None or not data.size or not data.size[0]:
            counts.setdefault(item.index.fqn, [0])[0] += 1
            continue
        rows = counts.setdefault(item.index.fqn, [0] * data.size[0])
        for row in range(data.chunk.offsets[0], data.chunk.offsets[0] + data.chunk.sizes[0]):
            rows[row] += 1
    return counts


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
def test_ranks_write_the_same_within_five_percent(sharded: bool) -> None:
    model = llama(8, 1024)
    written = balanced([[shard(item, rank % 4) for item in model] if sharded else model for rank in range(8)])
    assert max(totals(written)) <= 1.05 * sum(totals(written)) / 8


def test_counts_first_what_a_rank_must_write_anyway() -> None:
    alone = tensor_item("alone", (1_000_000,))
    shared = [tensor_item(f"shared{number}", (1_000, 100)) for number in range(10)]
    assert {item.index.fqn for item in balanced([[alone, *shared], shared])[0]} == {"alone"}


def test_ranks_of_one_node_share_its_card() -> None:
    shared = [tensor_item(f"shared{number}", (64, 1024)) for number in range(120)]
    written = totals(balanced([shared] * 4, nodes=["a", "a", "a", "b"]))
    assert abs(sum(written[:3]) - written[3]) / written[3] < 0.02


def test_a_rank_that_holds_nothing_writes_nothing() -> None:
    assert totals(balanced([[tensor_item("w", (8, 8))], []])) == [256, 0]


@given(
    tensors=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3000), max_size=2).map(tuple),
            st.sets(st.integers(0, 5), min_size=1),
            st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
        ),
        max_size=20,
    ),
    objects=st.lists(st.sets(st.integers(0, 5), min_size=1), max_size=4),
)
def test_everything_is_written_once_by_a_rank_that_holds_it(
    tensors: list[tuple[tuple[int, ...], set[int], torch.dtype]], objects: list[set[int]]
) -> None:
    held: dict[int, Items] = defaultdict(list)
    holders: dict[str, set[int]] = {}
    for number, (shape, ranks, dtype) in enumerate(tensors):
        holders[f"t{number}"] = ranks
        for rank in ranks:
            held[rank].append(tensor_item(f"t{number}", shape, dtype))
    for number, ranks in enumerate(objects):
        holders[f"o{number}"] = ranks
        for rank in ranks:
            held[rank].append(object_item(f"o{number}"))
    asked = [held[rank] for rank in range(6)]

    written = balanced(asked)

    assert rows_written(written).keys() == holders.keys()
    for name, counts in rows_written(written).items():
        assert set(counts) == {1}, name
    for rank, items in enumerate(written):
        assert all(rank in holders[item.index.fqn] for item in items)
    assert balanced(asked) == written
