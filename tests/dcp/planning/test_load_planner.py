"""`LoadPlanner` by itself and through our reader: what it narrows, what it notes, and what it refuses."""

from __future__ import annotations

import datetime
import itertools
import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

import bucketpoint as bp
from dcp.reshard_job import Box
from kit.metadata import tensor_entry


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """Cut as torch does: rows of equal size, and what is left for the last one that gets any."""
    axes = []
    for size, count in zip(shape, parts, strict=True):
        step = -(-size // count)
        starts = [min(at * step, size) for at in range(count + 1)]
        axes.append([(a, b - a) for a, b in itertools.pairwise(starts) if b > a])
    cells = itertools.product(*axes)
    return [(tuple(at for at, _ in cell), tuple(size for _, size in cell)) for cell in cells]


def box(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float32).reshape(shape)


def metadata_of(**tensors: tuple[tuple[int, ...], list[Box]]) -> Metadata:
    return Metadata({fqn: tensor_entry(*tensor) for fqn, tensor in tensors.items()})


def side_by_side(shape: tuple[int, ...], boxes: list[Box], gap: int = 0) -> torch.Tensor:
    """One plain tensor that holds chunks of one of `shape`, one after another along the first dimension."""
    extents = [max((sizes[axis] for _, sizes in boxes), default=0) for axis in range(len(shape))]
    local = torch.zeros(sum(sizes[0] + gap for _, sizes in boxes), *extents[1:])
    starts = itertools.accumulate((sizes[0] + gap for _, sizes in boxes), initial=0)
    told: Any = local
    told.global_shape = shape
    told.global_offsets = tuple(offsets for offsets, _ in boxes)
    told.local_offsets = tuple((at, *(0,) * (len(shape) - 1)) for at, _ in zip(starts, boxes, strict=False))
    told.local_sizes = tuple(sizes for _, sizes in boxes)
    return local


def planned(planner: bp.LoadPlanner, state: dict[str, Any], metadata: Metadata) -> list[ReadItem]:
    planner.set_up_planner(state, metadata, True)
    [plan] = planner.create_global_plan([planner.create_local_plan()])
    return list(planner.finish_plan(plan).items)


def refusal(state: dict[str, Any], metadata: Metadata, **how: Any) -> str:
    planner = bp.LoadPlanner(**how)
    planner.set_up_planner(state, metadata, True)
    with pytest.raises(bp.MismatchError) as caught:
        planner.create_local_plan()
    return str(caught.value)


@st.composite
def resharding(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], list[int], int]:
    """Shape, saved grid, loaded grid, which of its cells this process has, and the rows between them."""
    dims = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=dims, max_size=dims)))
    saved, loaded = (tuple(draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims))) for _ in range(2))
    cells = len(grid(shape, loaded))
    # A cell may be drawn twice: a process with two devices that hold the same.
    held = draw(st.lists(st.integers(0, cells - 1), min_size=0, max_size=5))
    return shape, saved, loaded, held, draw(st.integers(0, 2))


@pytest.mark.contract
@given(resharding())
def test_narrows_every_item_to_its_place_in_its_chunk(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], list[int], int],
) -> None:
    shape, saved, loaded, held, gap = case
    source, boxes = numbered(shape), [grid(shape, loaded)[number] for number in held]
    target, planner = side_by_side(shape, boxes, gap), bp.LoadPlanner()
    items = planned(planner, {"w": target}, metadata_of(w=(shape, grid(shape, saved))))
    wanted = sum(math.prod(sizes) for _, sizes in boxes)
    assert planner.pending.total() == wanted
    for item in items:
        view = planner.resolve_tensor(item)
        assert tuple(view.shape) == tuple(item.lengths)
        at = [a + b for a, b in zip(item.storage_index.offset, item.storage_offsets, strict=True)]
        view.copy_(box(source, tuple(at), tuple(item.lengths)))
        planner.commit_tensor(item, view)
        wanted -= math.prod(item.lengths)
        assert planner.pending.total() == wanted
    assert wanted == 0
    assert not planner.pending
    for (offsets, sizes), start in zip(boxes, target.local_offsets, strict=True):  # type: ignore[attr-defined]
        assert torch.equal(box(target, start, sizes), box(source, offsets, sizes))
        box(target, start, sizes).zero_()
    assert not target.any(), "something was written between the chunks"


@pytest.mark.contract
def test_names_all_that_does_not_fit_before_anything_is_read(tmp_path: Path) -> None:
    class Unread(bp.BucketReader):
        def read_data(self, plan: LoadPlan, planner: Any) -> Any:
            raise AssertionError("something was read")

    saved = {"a": torch.ones(4, 4), "b": torch.ones(3), "c": torch.ones(6), "fits": torch.ones(2), "number": 3}
    dcp.save(saved, storage_writer=bp.BucketWriter(tmp_path.as_uri()), no_dist=True)
    state = {
        "a": side_by_side((4, 5), [((0, 0), (2, 2))]),
        "b": [1, 2, 3],
        "c": side_by_side((6,), [((4,), (3,))]),
        "fits": torch.zeros(2),
        "number": deque([1]),
        "absent": {"deep": datetime.date(2020, 2, 2)},
    }
    with pytest.raises(dcp.CheckpointException) as caught:
        reader = Unread(tmp_path.as_uri())
        dcp.load(state, storage_reader=reader, planner=bp.LoadPlanner(), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, bp.MismatchError)
    for said in (
        "a is [4, 4] in the checkpoint and [4, 5] in the state",
        "b is a tensor in the checkpoint but not in the state",
        "absent.deep is not in the checkpoint",
        "; and 1 more",
        tmp_path.as_uri(),
    ):
        assert said in str(error)
    assert "fits" not in str(error)
    # DCP has made None of both by then.
    assert state["number"] == deque([1])
    assert state["absent"] == {"deep": datetime.date(2020, 2, 2)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"local_offsets": ((0, 0), (2, 0), (4, 0))}, "of different lengths"),
        ({"global_offsets": ((0,), (2,))}, "does not lie within global_shape [4, 4]"),
        ({"global_offsets": ((0, 0), (-1, 0))}, "a chunk 1 of [2, 4] at [-1, 0]"),
        ({"local_offsets": ((0, 0), (3, 0))}, "does not lie within its tensor's [4, 4]"),
        ({"local_sizes": ((2, 4), (2, 5))}, "a chunk 1 of [2, 5] at [2, 0]"),
    ],
)
def test_refuses_chunks_that_are_described_wrongly(change: dict[str, Any], said: str) -> None:
    target = side_by_side((4, 4), grid((4, 4), (2, 1)))
    for name, value in change.items():
        setattr(target, name, value)
    assert said in refusal({"w": target}, metadata_of(w=((4, 4), grid((4, 4), (1, 1)))))


@pytest.mark.contract
@pytest.mark.parametrize("parts", [(1, 1), (2, 2)])
def test_names_a_part_that_no_chunk_of_the_checkpoint_covers_and_loads_others(parts: tuple[int, int]) -> None:
    metadata = metadata_of(w=((4, 4), grid((4, 4), (2, 2))[:-1]), v=((2,), grid((2,), (1,))))
    target = side_by_side((4, 4), grid((4, 4), parts))
    said = refusal({"w": target, "v": torch.zeros(2)}, metadata)
    assert ("w has only 12 of the 16 elements" if parts == (1, 1) else "w has only 0 of the 4 elements") in said
    assert "v has" not in said
    # Beside a key that DCP itself refuses too.
    said = refusal({"w": target, "absent": torch.zeros(2)}, metadata)
    assert "w has" in said
    assert "absent is not in the checkpoint" in said
    # Chunks beside the hole are loaded.
    target = side_by_side((4, 4), grid((4, 4), (2, 2))[:-1])
    assert len(planned(bp.LoadPlanner(), {"w": target}, metadata)) == 3


@pytest.mark.contract
def test_leaves_what_the_checkpoint_lacks_in_a_partial_load_and_names_it(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4), "step": 3}, storage_writer=bp.BucketWriter(tmp_path.as_uri()), no_dist=True)
    seen, when = deque([1]), datetime.date(2020, 2, 2)
    state = {
        "w": torch.zeros(4),
        "step": 0,
        "queue": seen,
        "nested": {"dates": [when, (when, torch.zeros(1))]},
        "bias": torch.full((2,), 7.0),
        "part": side_by_side((8,), [((0,), (2,))]),
    }
    planner = bp.LoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=bp.BucketReader(tmp_path.as_uri()), planner=planner, no_dist=True)
    assert state["w"].tolist() == [1.0] * 4
    assert state["step"] == 3
    assert state["queue"] is seen
    assert state["nested"]["dates"][0] == when
    assert state["nested"]["dates"][1] == (when, torch.zeros(1))
    assert state["bias"].tolist() == [7.0, 7.0]
    assert "queue" in planner.skipped
    assert {"bias", "part"} <= set(planner.skipped)
    assert not {"w", "step"} & set(planner.skipped)
    assert not planner.pending


def test_refuses_in_a_partial_load_what_is_there_and_does_not_fit() -> None:
    metadata = metadata_of(w=((4,), grid((4,), (1,))))
    said = refusal({"w": torch.zeros(5), "absent": torch.zeros(2)}, metadata, allow_partial_load=True)
    assert "w is [4] in the checkpoint and [5] in the state" in said
    assert "absent" not in said


def test_counts_by_key_what_has_yet_to_arrive_and_refuses_an_item_twice() -> None:
    metadata = metadata_of(w=((4, 4), grid((4, 4), (2, 1))), scalar=((), [((), ())]))
    metadata.state_dict_metadata["step"] = BytesStorageMetadata()
    planner = bp.LoadPlanner()
    items = planned(planner, {"w": torch.zeros(4, 4), "scalar": torch.zeros(()), "step": 1}, metadata)
    assert planner.pending == {"w": 16, "scalar": 1, "step": 1}
    first = next(item for item in items if item.dest_index.fqn == "w")
    planner.commit_tensor(first, planner.resolve_tensor(first))
    assert planner.pending == {"w": 8, "scalar": 1, "step": 1}
    second = next(item for item in items if item.dest_index.fqn == "scalar")
    planner.commit_tensor(second, planner.resolve_tensor(second))
    with pytest.raises(bp.BucketpointError, match="twice") as caught:
        planner.commit_tensor(second, planner.resolve_tensor(second))
    assert caught.value.key == "scalar"
    # The next load begins at the beginning.
    planned(planner, {"scalar": torch.zeros(())}, metadata)
    assert planner.pending == {"scalar": 1}


@pytest.mark.parametrize("flatten", [True, False])
def test_keeps_hooks_and_options_of_the_default_planner(flatten: bool, tmp_path: Path) -> None:
    class Halved(bp.LoadPlanner):
        def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(tensor.shape))
            return super().transform_tensor(read_item, tensor)

    seen: list[tuple[int, ...]] = []
    # One dotted name twice.
    dotted = [{"a.b": torch.arange(4.0), "a": {"b": 1}}, {"a.b": torch.zeros(4), "a": {"b": 0}}]
    nested = [{}, {}] if flatten else dotted
    state = {"w": torch.arange(6.0), "other": [1, 2], **nested[0]}
    saver = dcp.DefaultSavePlanner(flatten_state_dict=flatten)
    dcp.save(state, storage_writer=bp.BucketWriter(tmp_path.as_uri()), planner=saver, no_dist=True)
    target = {"w": torch.zeros(6), "other": [0], **nested[1]}
    planner = Halved(flatten_state_dict=flatten, flatten_sharded_tensors=flatten)
    dcp.load(target, storage_reader=bp.BucketReader(tmp_path.as_uri()), planner=planner, no_dist=True)
    assert torch.equal(target["w"], state["w"])
    assert target["other"] == [1, 2]
    assert flatten or torch.equal(target["a.b"], state["a.b"])
    assert sorted(seen) == ([(6,)] if flatten else [(4,), (6,)])
    assert not planner.pending
