"""Plans over columns: what DCP's functions make of the same items, to the last item and its hint."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from bucketpoint.dcp.planning.agreement import agree_on_tensors, merged_mappings
from bucketpoint.dcp.planning.global_plan import GlobalPlan, _validate, plan_globally, unpack_tables
from bucketpoint.dcp.planning.items import (
    AssignedItems,
    PlanItems,
    items_of,
    pack_items,
    pack_mappings,
    packed_items,
)
from bucketpoint.errors import BucketpointError
from kit.metadata import chunk_of

pytestmark = pytest.mark.contract

Shape = tuple[int, ...]


def chunk_item(
    name: str,
    whole: Shape,
    offsets: Shape,
    sizes: Shape,
    *,
    kind: WriteItemType = WriteItemType.SHARD,
    dtype: torch.dtype = torch.float32,
    hint: int | None = None,
) -> WriteItem:
    data = TensorWriteData(chunk_of((offsets, sizes)), TensorProperties(dtype=dtype), torch.Size(whole))
    return WriteItem(MetadataIndex(name, torch.Size(offsets), hint), kind, tensor_data=data)


def whole_item(name: str, whole: Shape, dtype: torch.dtype = torch.float32) -> WriteItem:
    return chunk_item(name, whole, (0,) * len(whole), whole, kind=WriteItemType.TENSOR, dtype=dtype)


def bytes_item(name: str) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def pieces(length: int, count: int) -> list[tuple[int, int]]:
    """Offset and size of each, as a DTensor is sharded: the last ones are smaller, or empty at the end."""
    size = -(-length // count)
    return [(min(at * size, length), max(0, min(size, length - at * size))) for at in range(count)]


def apart(held: Sequence[list[WriteItem]]) -> list[str]:
    """A third of the names: ranks are taken to hold different tensors under them."""
    return sorted({item.index.fqn for items in held for item in items})[::3]


def by_dcp(held: Sequence[list[WriteItem]]) -> tuple[list[SavePlan], Metadata]:
    """What DCP's own functions make of the items, with those in `apart` from the first rank that has them."""
    agree_on_tensors([SavePlan(items) for items in held])
    first: dict[MetadataIndex, int] = {}
    for rank, items in enumerate(held):
        for item in items:
            first.setdefault(item.index, rank)
    names = apart(held)
    kept = [
        SavePlan([item for item in items if item.index.fqn not in names or first[item.index] == rank])
        for rank, items in enumerate(held)
    ]
    plans, metadata = create_default_global_save_plan(dedup_save_plans(kept))
    _validate(plans, metadata)
    return plans, metadata


def arrived(held: Sequence[list[WriteItem]]) -> list[SavePlan]:
    return [pickle.loads(pickle.dumps(SavePlan(PlanItems(items, pack_items(items))))) for items in held]  # type: ignore[arg-type]


def planned(held: Sequence[list[WriteItem]], nodes: Sequence[object]) -> GlobalPlan:
    asked = arrived(held)
    return plan_globally(asked, unpack_tables(asked), nodes, apart(held))


def by_columns(held: Sequence[list[WriteItem]], nodes: Sequence[object]) -> tuple[list[list[WriteItem]], GlobalPlan]:
    """What each rank makes of what it is sent, and the plan."""
    plan = planned(held, nodes)
    final = []
    for mine, sent in zip(held, plan.lists(), strict=True):
        crossed: Any = pickle.loads(pickle.dumps(sent))
        if isinstance(crossed, PlanItems):
            assert isinstance(crossed.columns, AssignedItems)
            crossed = items_of(crossed.columns.encoded, mine)
            assert crossed == list(sent)
        final.append(crossed)
    return final, plan


def assert_same(held: Sequence[list[WriteItem]], nodes: Sequence[object], *, columns: bool | None) -> None:
    """Compare with what DCP's functions make of the same items: of all, or of those that each rank was assigned."""
    try:
        plans, metadata = by_dcp(held)
    except BucketpointError as error:
        # Of several chunks that overlap either names two, as the columns deal parts of them.
        text, chunks, _ = str(error).partition("ChunkStorageMetadata")
        with pytest.raises(BucketpointError, match=f"^{re.escape(text)}{'' if chunks else '$'}"):
            by_columns(held, nodes)
        return
    final, found = by_columns(held, nodes)
    if columns is not None:
        assert (found.assignment is not None) == columns
    if found.assignment is not None:
        assert_written_by_holders(held, final)
        plans, metadata = create_default_global_save_plan([SavePlan(items) for items in final])
        _validate(plans, metadata)
        index = found.assignment.index
        every = [item for plan in plans for item in plan.items]
        assert index.names == [item.index.fqn for item in every]
        assert index.offsets == [item.index.offset for item in every]
        assert index.hints == [-1 if item.index.index is None else item.index.index for item in every]
    assert [[(item, item.index.index) for item in mine] for mine in final] == [
        [(item, item.index.index) for item in plan.items] for plan in plans
    ]
    assert list(found.metadata.state_dict_metadata.items()) == list(metadata.state_dict_metadata.items())


def assert_written_by_holders(held: Sequence[list[WriteItem]], final: Sequence[list[WriteItem]]) -> None:
    """Each chunk that ranks hold is written once, by ranks that hold it, in rows; of `apart` whole, by the first."""
    names = apart(held)
    first: dict[MetadataIndex, int] = {}
    missing: dict[MetadataIndex, list[range]] = {}
    for rank, items in enumerate(held):
        for item in items:
            first.setdefault(item.index, rank)
            missing[item.index] = [_rows(item)]
    for rank, items in enumerate(final):
        for item in items:
            rows = _rows(item)
            whole = next(
                own.index
                for own in held[rank]
                if own.index.fqn == item.index.fqn
                and (own.index.offset or ())[1:] == (item.index.offset or ())[1:]
                and (
                    own.index == item.index or (rows and _rows(own).start <= rows.start < rows.stop <= _rows(own).stop)
                )
            )
            missing[whole].append(rows)
            if whole.fqn in names:
                assert (whole, rank) == (item.index, first[whole])
    for own, *parts in missing.values():
        parts.sort(key=lambda rows: rows.start)
        assert [own.start, *[rows.stop for rows in parts]] == [*[rows.start for rows in parts], own.stop]
        assert parts


def _rows(item: WriteItem) -> range:
    chunk = item.tensor_data.chunk if item.tensor_data is not None else None
    if chunk is None or not chunk.sizes:
        return range(1)
    return range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])


RANKS = 6
sizes = st.integers(0, 9) | st.sampled_from([1, 64, 3000, 1 << 33])
tensors = st.tuples(
    # Larger ones are cut into millions of slices, each an object to DCP's side of the comparison.
    st.lists(sizes, max_size=3).map(tuple).filter(lambda whole: math.prod(whole) <= 1 << 33),
    st.sampled_from(["replicated", "rows", "columns", "grid", "hybrid", "several", "alone"]),
    st.sets(st.integers(0, RANKS - 1), min_size=1),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)


def hold(held: list[list[WriteItem]], name: str, tensor: Any) -> None:
    """Give a tensor to the ranks that hold it, each its chunks."""
    whole, layout, ranks, dtype = tensor
    if layout == "bytes" or not whole or layout in ("replicated", "alone"):
        for rank in sorted(ranks)[: 1 if layout == "alone" else None]:
            held[rank].append(whole_item(name, whole, dtype))
        return
    if len(whole) == 1 and layout in ("columns", "grid"):
        layout = "rows"
    rest, tail = (0,) * (len(whole) - 1), whole[1:]
    boxes = {
        kind: [((row, *rest), (height, *tail)) for row, height in pieces(whole[0], count)] * times
        for kind, count, times in (("rows", RANKS, 1), ("hybrid", 3, 2), ("several", 2 * RANKS, 1))
    }
    if len(whole) > 1:
        boxes["columns"] = [((0, at, *rest[1:]), (whole[0], width, *tail[1:])) for at, width in pieces(whole[1], RANKS)]
        boxes["grid"] = [
            ((row, at, *rest[1:]), (height, width, *tail[1:]))
            for row, height in pieces(whole[0], 2)
            for at, width in pieces(whole[1], 3)
        ]
    for number, (offsets, extent) in enumerate(boxes[layout]):
        seen = [item for item in held[number % RANKS] if item.index == MetadataIndex(name, offsets)]
        if not seen:
            hint = number if layout == "several" else None
            held[number % RANKS].append(chunk_item(name, whole, offsets, extent, dtype=dtype, hint=hint))


@given(st.lists(tensors, max_size=8), st.lists(st.sets(st.integers(0, RANKS - 1), min_size=1), max_size=3), st.data())
@settings(max_examples=100, deadline=None)
def test_deals_columns_as_items(drawn: list[Any], values: list[set[int]], data: st.DataObject) -> None:
    held: list[list[WriteItem]] = [[] for _ in range(RANKS)]
    for number, tensor in enumerate(drawn):
        hold(held, f"{'model' if number % 2 else 'optim'}.t{number}", tensor)
    for number, ranks in enumerate(values):
        for rank in ranks:
            held[rank].append(bytes_item(f"o{number}"))
    held = [data.draw(st.permutations(mine)) if data.draw(st.booleans()) else mine for mine in held]
    nodes = [data.draw(st.integers(0, 2)) for _ in range(RANKS)]
    assert_same(held, nodes, columns=None)


broken = st.sampled_from(["gap", "overlap", "outside", "sizes", "dtypes", "shapes", "kinds", "twice", "negative"])


@given(tensors.filter(lambda tensor: bool(tensor[0])), broken, st.integers(0, RANKS - 1), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_judges_what_does_not_fit_together_as_dcp_does(tensor: Any, fault: str, rank: int, which: int) -> None:
    held: list[list[WriteItem]] = [[whole_item("before", (3, 4))] for _ in range(RANKS)]
    hold(held, "t", tensor)
    mine = [at for at, item in enumerate(held[rank]) if item.index.fqn == "t"]
    if not mine:
        return
    at = mine[which % len(mine)]
    item = held[rank][at]
    data = item.tensor_data
    offsets, extent = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    changed = {
        "overlap": ((max(0, offsets[0] - 1), *offsets[1:]), (extent[0] + 1, *extent[1:])),
        "outside": ((offsets[0] + 1, *offsets[1:]), extent),
        "sizes": (offsets, (extent[0] + 1, *extent[1:])),
        "negative": ((-1, *offsets[1:]), extent),
    }
    if fault == "gap":
        del held[rank][at]
    elif fault == "twice":
        held[rank].append(item)
    elif fault == "dtypes":
        other = dataclasses.replace(data, properties=TensorProperties(dtype=torch.float64))
        held[rank][at] = dataclasses.replace(item, tensor_data=other)
    elif fault == "shapes":
        held[rank][at] = dataclasses.replace(item, tensor_data=dataclasses.replace(data, size=torch.Size((1,))))
    elif fault == "kinds":
        held[rank][at] = dataclasses.replace(item, type=WriteItemType.SHARD)
    else:
        held[rank][at] = chunk_item("t", tuple(data.size), *changed[fault], dtype=data.properties.dtype)
    try:
        by_dcp(held)
    except (AssertionError, IndexError) as error:
        # What DCP itself stumbles over.
        with pytest.raises(type(error)):
            by_columns(held, range(RANKS))
        return
    except BucketpointError:
        pass
    assert_same(held, range(RANKS), columns=None)


@pytest.mark.parametrize("layout", ["replicated", "rows", "columns", "grid", "hybrid", "several", "alone"])
@pytest.mark.parametrize("whole", [(3000, 300), (5, 4), (7, 3, 2)])
def test_deals_regular_states_over_columns(layout: str, whole: Shape) -> None:
    held: list[list[WriteItem]] = [[bytes_item("note")] for _ in range(RANKS)]
    # Of uneven shards several may be empty, at one offset and in one tensor.
    hold(held, "model.t", (whole, layout, set(range(RANKS)), torch.float32))
    hold(held, "model.s", ((), "replicated", {1, 4}, torch.float32))
    assert_same(held, list("aabbcc"), columns=True)


def test_plans_and_reads_an_assignment_on_no_default_device_of_a_script() -> None:
    one = [whole_item("w", (1,))]
    held: list[list[WriteItem]] = [[] for _ in range(RANKS)]
    hold(held, "model.t", ((3000, 300), "hybrid", {0}, torch.float32))
    with torch.device("meta"):
        sent = pickle.loads(pickle.dumps(planned([one] * 2, range(2)).lists()))
        assert sorted(len(items_of(items.columns.encoded, one)) for items in sent) == [0, 1]
        assert_same(held, range(RANKS), columns=True)


def test_checks_chunks_side_by_side_in_another_order_one_by_one() -> None:
    # Columns of different heights: no neighbours prove that nothing overlaps, and nothing does.
    boxes = [((0, 0), (2, 2)), ((2, 0), (4, 2)), ((0, 2), (5, 2)), ((5, 2), (1, 2))]
    held = [[chunk_item("t", (6, 4), *box)] for box in boxes]
    assert_same(held, range(4), columns=True)
    held[3] = [chunk_item("t", (6, 4), (4, 2), (1, 2))]
    # Newer versions of DCP name the tensor in the error, older ones in a log record.
    with pytest.raises(BucketpointError, match=r"key:t has overlapping chunks|see the log of DCP for the tensor"):
        by_columns(held, range(4))


def test_plans_all_though_one_rank_sends_unusual_items_as_they_are() -> None:
    held = [[whole_item("w", (30, 3))] for _ in range(2)]
    held[1].append(dataclasses.replace(whole_item("own", (2,)), index=MetadataIndex("own")))
    assert [type(plan.items) for plan in arrived(held)] == [PlanItems, list]
    assert_same(held, range(2), columns=False)


def test_shows_items_as_a_list_to_whoever_looks_and_sends_altered_ones_as_they_are() -> None:
    items = [whole_item("w", (30, 3)), bytes_item("b"), chunk_item("s", (4, 4), (2, 0), (2, 4), hint=3)]
    crossed: Any = arrived([items])[0].items
    assert packed_items(crossed) is not None
    assert list(crossed) == items
    assert [item.index.index for item in crossed] == [None, None, 3]
    assert packed_items(crossed) is not None
    crossed.append(bytes_item("more"))
    assert packed_items(crossed) is None
    assert pickle.loads(pickle.dumps(crossed)) == [*items, bytes_item("more")]
    assert [*crossed[:2], *crossed.copy()] == [*items[:2], *items, bytes_item("more")]
    items = [whole_item("w", (30, 3))]
    local = PlanItems(items, pack_items(items))
    local[0] = whole_item("other", (2,))
    assert pickle.loads(pickle.dumps(local)) == [whole_item("other", (2,))]


def test_distinguishes_an_answer_that_nobody_put_together_from_an_empty_list() -> None:
    crossed = pickle.loads(pickle.dumps(planned([[whole_item("w", (30, 3))]] * 2, range(2)).lists()[0]))
    for look in (len, list, bool):
        with pytest.raises(BucketpointError, match="finish_plan"):
            look(crossed)


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=5, unique=True), min_size=1, max_size=5))
def test_merges_mappings_of_all_ranks_as_dcp_does(drawn: list[list[str]]) -> None:
    from collections import ChainMap

    mappings = [{name: ("top" if name in "abc" else name, name) for name in names} for names in drawn]
    crossed = [pickle.loads(pickle.dumps(pack_mappings(each))) for each in mappings]
    plans = [SavePlan([], planner_data=SimpleNamespace(mappings=each, int_keys=())) for each in crossed]
    assert list(merged_mappings(plans, Metadata({})).items()) == list(dict(ChainMap(*mappings)).items())


# -- the balance ------------------------------------------------------------------------------------------------------


def planned_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def totals(held: Sequence[list[WriteItem]], nodes: Sequence[object]) -> list[int]:
    """The bytes that each rank writes."""
    asked = arrived(held)
    plan = plan_globally(asked, unpack_tables(asked), nodes)
    assert plan.assignment is not None
    return [sum(map(planned_bytes, items)) for items in plan.lists()]


@pytest.mark.parametrize("layout", ["replicated", "rows"])
def test_writes_the_same_on_each_rank_within_five_percent(layout: str) -> None:
    held: list[list[WriteItem]] = [[] for _ in range(RANKS)]
    shapes = {"embed": (32_000, 1024), "head": (32_000, 1024)}
    for layer in range(8):
        shapes |= {f"{layer}.{name}": (1024, 1024) for name in "qkvo"}
        shapes |= {f"{layer}.{name}": (2816, 1024) for name in ("up", "gate", "down")}
        shapes |= {f"{layer}.norm{number}": (1024,) for number in (1, 2)}
    for name, whole in shapes.items():
        hold(held, name, (whole, layout, set(range(RANKS)), torch.float32))
    # Two replicas of each shard.
    written = totals(held * 2, range(2 * RANKS))
    assert max(written) <= 1.05 * sum(written) / len(written)


def test_counts_first_what_a_rank_must_write_anyway_and_shares_the_card_of_a_node() -> None:
    shared = [whole_item(f"shared{number}", (1_000, 100)) for number in range(10)]
    assert totals([[whole_item("alone", (1_000_000,)), *shared], shared], range(2)) == [4_000_000, 4_000_000]
    shared = [whole_item(f"shared{number}", (64, 1024)) for number in range(120)]
    written = totals([shared] * 4, "aaab")
    assert abs(sum(written[:3]) - written[3]) / written[3] < 0.02
