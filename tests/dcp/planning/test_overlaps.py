"""What is read of chunks that an index describes: the items that DCP's own planner makes, and no object for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import Shard

import bucketpoint.dcp.planning.local_chunks as overlaps
from bucketpoint import LoadPlanner, MismatchError
from bucketpoint.dcp.planning.local_chunks import WantedChunks, read_items
from bucketpoint.format.index.encode import encode_index
from bucketpoint.format.index.view import Chunks, Entries, decode_index
from bucketpoint.format.metadata.codec import extension
from bucketpoint.format.storage_info import make_storage_info
from dcp.reshard_job import OnMesh, as_rank, held
from format.index.test_index import rows, tensors
from kit.metadata import chunk_of, tensor_entry

pytestmark = pytest.mark.contract

Box = tuple[tuple[int, ...], tuple[int, ...]]


def saved(layouts: dict[str, tuple[tuple[int, ...], list[Box]]]) -> tuple[Metadata, Metadata]:
    """Metadata of tensors with these chunks: DCP's own, and as it comes out of an index."""
    entries, items = {}, {}
    for fqn, (shape, boxes) in layouts.items():
        entries[fqn] = tensor_entry(shape, boxes)
        for number, each in enumerate(entries[fqn].chunks):
            items[MetadataIndex(fqn, each.offsets, number)] = make_storage_info("x", 0, 9, crc32c=1)
    metadata = Metadata(entries, {fqn: (fqn,) for fqn in entries}, items)
    encoded = encode_index(metadata, bucketpoint=extension({})["bucketpoint"])
    assert encoded is not None
    return metadata, decode_index(encoded)


def told(items: list[ReadItem]) -> list[Any]:
    # The order of the items of one chunk is DCP's own business, and is not the same in each version.
    return sorted(
        (item.dest_index.index, item.storage_index.index, item.dest_index.fqn, item.dest_index.offset,
         item.storage_index.offset, item.dest_offsets, item.storage_offsets, item.lengths, item.type.value)
        for item in items
    )  # fmt: skip


@st.composite
def cases(draw: Any) -> tuple[dict[str, Any], dict[str, list[Box]]]:
    layouts, local = {}, {}
    for number in range(draw(st.integers(1, 4))):
        shape, boxes = draw(tensors())
        if not boxes:
            continue
        layouts[f"t{number}"] = shape, boxes
        local[f"t{number}"] = []
        for _ in range(draw(st.integers(0, 3))):
            offset = tuple(draw(st.integers(0, size)) for size in shape)
            size = tuple(draw(st.integers(0, whole - at)) for whole, at in zip(shape, offset, strict=True))
            local[f"t{number}"].append((offset, size))
    return layouts, local


@given(cases(), st.sampled_from([1, 5, 1 << 20]), st.sampled_from([0, 64]))
def test_makes_the_items_of_dcps_own_planner(case: tuple[Any, Any], pairs: int, many: int) -> None:
    layouts, local = case
    if not layouts:
        return
    stock, indexed = saved(layouts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlaps, "_PAIRS_AT_ONCE", pairs)
        patch.setattr(overlaps, "_MANY", many)
        wanted = [
            WantedChunks(fqn, indexed.state_dict_metadata[fqn].chunks, [chunk_of(box) for box in boxes])
            for fqn, boxes in local.items()
        ]
        found = read_items(wanted)
    for fqn, boxes in local.items():
        entry = stock.state_dict_metadata[fqn]
        assert told(found[fqn]) == told(create_read_items_for_chunk_list(fqn, entry, [chunk_of(box) for box in boxes]))


def two() -> tuple[Metadata, Metadata]:
    return saved({"a": rows([4] * 50, 3), "b": rows([3, 1, 9], 2), "c": ((), [((), ())])})


def plan(planner: DefaultLoadPlanner, metadata: Metadata, state: dict[str, Any]) -> list[ReadItem]:
    planner.set_up_planner(state, metadata, True)
    items: list[ReadItem] = planner.create_local_plan().items
    return items


def state(**changed: Any) -> dict[str, Any]:
    return {"a": torch.zeros(200, 3), "b": torch.zeros(13, 2), "c": torch.zeros(()), **changed}


def test_plans_as_dcp_does_without_an_object_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, indexed = two()
    expected = plan(DefaultLoadPlanner(), stock, state())
    assert told(plan(DefaultLoadPlanner(), indexed, state())) == told(expected)

    def made(self: Chunks) -> Any:
        raise AssertionError("chunks were made")

    monkeypatch.setattr(Chunks, "_list", property(made))
    planner, target = LoadPlanner(), state()
    items = plan(planner, indexed, target)
    assert told(items) == told(expected)
    assert [item.dest_index.fqn for item in items] == ["a"] * 50 + ["b"] * 3 + ["c"]
    assert type(target["a"]) is torch.Tensor
    assert planner.state_dict["a"] is target["a"]
    assert planner.resolve_tensor(items[1]).data_ptr() == target["a"][4:].data_ptr()


def test_plans_no_reads_of_a_tensor_whose_mesh_lacks_this_rank() -> None:
    with as_rank(0, 2):
        elsewhere, _ = held(OnMesh((1,), (1,), (Shard(0),)), torch.zeros(13, 2), 0, torch.clone)
        for metadata in two():
            items = plan(LoadPlanner(), metadata, state(b=elsewhere))
            assert {item.dest_index.fqn for item in items} == {"a", "c"}


@pytest.mark.parametrize(
    ("hole", "target"),
    [
        (False, state(a=torch.zeros(200, 4), b=torch.zeros(3), c=5)),
        (True, state(absent=torch.zeros(3), b=torch.zeros(5))),
    ],
    ids=["shapes", "all"],
)
def test_tells_what_does_not_fit_in_the_same_words(hole: bool, target: dict[str, Any]) -> None:
    chunks = rows([4] * 50, 3)[1]
    layouts = {"a": ((200, 3), chunks[:20] + chunks[21:] if hole else chunks), "b": rows([3, 1, 9], 2), "c": ((), [((), ())])}  # fmt: skip # noqa: E501
    said = []
    for metadata in saved(layouts):
        with pytest.raises(MismatchError) as caught:
            plan(LoadPlanner(), metadata, dict(target))
        said.append(str(caught.value))
    assert said[0] == said[1]
    if hole:
        assert "a has only 588 of the 600 elements" in said[1]


def test_makes_entries_for_what_is_asked_for_and_forgets_them() -> None:
    _, indexed = two()
    entries = indexed.state_dict_metadata
    assert isinstance(entries, Entries)
    assert entries["a"] is not entries["a"]
    entries["a"].properties.dtype = torch.int8
    assert entries["a"].properties.dtype == torch.float32
