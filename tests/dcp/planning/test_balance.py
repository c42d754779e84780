"""Which replica writes what: everything once, by a rank that holds it, and about as much on every rank."""

from __future__ import annotations

from collections import defaultdict

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from bucketpoint.dcp.planning.balance import balanced, item_bytes


def tensor_item(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> WriteItem:
    size = torch.Size(shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=size)
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=size)
    return WriteItem(index=MetadataIndex(name), type=WriteItemType.TENSOR, tensor_data=data)


def object_item(name: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)


def totals(plans: list[SavePlan]) -> list[int]:
    return [sum(item_bytes(item) for item in plan.items) for plan in plans]


def rows_written(plans: list[SavePlan]) -> dict[str, list[int]]:
    """For each tensor, how often each of its rows is written."""
    counts: dict[str, list[int]] = {}
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                counts.setdefault(item.index.fqn, [0])[0] += 1
                continue
            rows = counts.setdefault(item.index.fqn, [0] * max(1, data.size[0] if data.size else 1))
            first = data.chunk.offsets[0] if data.size else 0
            for row in range(first, first + (data.chunk.sizes[0] if data.size else 1)):
                rows[row] += 1
            if data.size and not data.size[0]:
                rows[0] += 1
    return counts


def llama(layers: int, width: int) -> list[WriteItem]:
    items = [tensor_item("embed", (32_000, width)), tensor_item("head", (32_000, width))]
    for layer in range(layers):
        items += [tensor_item(f"{layer}.{name}", (width, width)) for name in "qkvo"]
        items += [tensor_item(f"{layer}.{name}", (width * 11 // 4, width)) for name in ("up", "gate", "down")]
        items += [tensor_item(f"{layer}.norm{number}", (width,)) for number in (1, 2)]
    return items


def test_eight_replicas_of_a_model_write_the_same_within_five_percent() -> None:
    plans = balanced([SavePlan(llama(8, 1024))] * 8)
    assert max(totals(plans)) <= 1.05 * sum(totals(plans)) / 8


def test_two_replicas_of_four_shards_write_the_same_within_five_percent() -> None:
    def shard(item: WriteItem, number: int) -> WriteItem:
        data = item.tensor_data
        assert data is not None
        rows = -(-data.size[0] // 4)
        first = min(rows * number, data.size[0])
        offsets = torch.Size([first, *data.chunk.offsets[1:]])
        sizes = torch.Size([min(rows, data.size[0] - first), *data.chunk.sizes[1:]])
        part = TensorWriteData(ChunkStorageMetadata(offsets, sizes), data.properties, data.size)
        return WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=part)

    plans = balanced([SavePlan([shard(item, rank % 4) for item in llama(8, 1024)]) for rank in range(8)])
    assert max(totals(plans)) <= 1.05 * sum(totals(plans)) / 8


def test_what_a_rank_must_write_anyway_counts_first() -> None:
    alone = tensor_item("alone", (1_000_000,))
    shared = [tensor_item(f"shared{number}", (1_000, 100)) for number in range(10)]
    plans = balanced([SavePlan([alone, *shared]), SavePlan(shared)])
    assert {item.index.fqn for item in plans[0].items} == {"alone"}


def test_ranks_of_one_node_share_its_card() -> None:
    shared = [tensor_item(f"shared{number}", (64, 1024)) for number in range(120)]
    plans = balanced([SavePlan(shared)] * 4, nodes=["a", "a", "a", "b"])
    first, second = sum(totals(plans)[:3]), totals(plans)[3]
    assert abs(first - second) / first < 0.02


def test_a_rank_that_holds_nothing_writes_nothing() -> None:
    plans = balanced([SavePlan([tensor_item("w", (8, 8))]), SavePlan([])])
    assert totals(plans) == [256, 0]


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
    held: dict[int, list[WriteItem]] = defaultdict(list)
    holders: dict[str, set[int]] = {}
    for number, (shape, ranks, dtype) in enumerate(tensors):
        holders[f"t{number}"] = ranks
        for rank in ranks:
            held[rank].append(tensor_item(f"t{number}", shape, dtype))
    for number, ranks in enumerate(objects):
        holders[f"o{number}"] = ranks
        for rank in ranks:
            held[rank].append(object_item(f"o{number}"))
    asked = [SavePlan(held[rank]) for rank in range(6)]

    plans = balanced(asked)

    assert rows_written(plans).keys() == holders.keys()
    for name, counts in rows_written(plans).items():
        assert set(counts) == {1}, name
    for rank, plan in enumerate(plans):
        assert all(rank in holders[item.index.fqn] for item in plan.items)
    assert balanced(asked) == plans
