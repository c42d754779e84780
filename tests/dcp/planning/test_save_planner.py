"""Plans are made once for each structure of the state, crossed by no failure, and written by every replica alike."""

from __future__ import annotations

import contextlib
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    Metadata,
    TensorStorageMetadata,
    default_planner,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.testing._internal.distributed.fake_pg import FakeStore

from bucketpoint import BucketWriter
from bucketpoint.dcp.planning import save_planner
from bucketpoint.dcp.planning.global_plan import KEPT_PLANS, PlanCache, WriterMeta, plan_globally
from bucketpoint.dcp.planning.nested_state import merged_int_keys, nested
from bucketpoint.dcp.planning.results import Results
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.errors import BucketpointError, RanksDisagreeError
from dcp.reshard_job import crossed

pytestmark = pytest.mark.contract


HALF, BRAIN = torch.float16, torch.bfloat16


class Job:
    """Some ranks' planners, called in the order in which DCP calls them, in one process; plans cross as pickles.

    Attributes:
        planned: how often all items were assigned to ranks.
    """

    def __init__(self, world: int) -> None:
        self.planners = [SavePlanner() for _ in range(world)]
        self.planned = 0

    def ask(self, states: list[dict[str, Any]]) -> list[SavePlan]:
        plans = []
        for rank, (planner, state) in enumerate(zip(self.planners, states, strict=True)):
            planner.set_up_planner(state, None, rank == 0)
            plans.append(planner.create_local_plan())
        return crossed(plans)

    def plan(self, states: list[dict[str, Any]]) -> tuple[list[SavePlan], Metadata]:
        """What each rank writes, and the metadata."""
        asked = self.ask(states)
        with mock.patch.object(save_planner, "plan_globally", self._plan_globally):
            dealt, metadata = self.planners[0].create_global_plan(asked)
        return [
            planner.finish_plan(plan) for planner, plan in zip(self.planners, crossed(dealt), strict=True)
        ], metadata

    def _plan_globally(self, *args: Any, **kwargs: Any) -> Any:
        self.planned += 1
        return plan_globally(*args, **kwargs)


class JobOfSaves(Job):
    """The same with planners made for each save, which reuse the plans of earlier saves."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.caches = [PlanCache() for _ in range(world)]

    def ask(self, states: list[dict[str, Any]]) -> list[SavePlan]:
        self.planners = [SavePlanner.with_plans(cache) for cache in self.caches]
        return super().ask(states)


def model(rank: int = 0, *, rows: int = 4000, fill: float = 0.0) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((rows, 300), fill), "b": torch.full((300,), fill)},
        f"only{rank}": torch.full((5,), fill),
        "step": int(fill),
    }


def written(plans: list[SavePlan]) -> set[Any]:
    return {item.index for plan in plans for item in plan.items}


@pytest.mark.parametrize("kind", [Job, JobOfSaves])
def test_plans_an_unchanged_structure_once_unless_plans_are_not_kept(kind: type[Job]) -> None:
    job = kind(3)
    first, metadata = job.plan([model(rank) for rank in range(3)])
    for fill in (1.0, 2.0):
        plans, again = job.plan([model(rank, fill=fill) for rank in range(3)])
        assert plans == first
        assert again == metadata
        assert again is not metadata
    assert job.planned == 1
    keeps_none = Job(2)
    keeps_none.planners = [SavePlanner(enable_plan_caching=False) for _ in range(2)]
    for _ in range(2):
        keeps_none.plan([model(rank) for rank in range(2)])
    assert keeps_none.planned == 2


def test_asks_for_an_unchanged_structure_with_the_items_of_the_last_save() -> None:
    job = Job(2)
    states = [{f"layer{number}": torch.ones(3) for number in range(1000)} for _ in range(2)]
    first, _ = job.plan(states)
    with mock.patch.object(save_planner, "write_items", None):
        again, _ = job.plan(states)
    assert again == first
    assert all(len(pickle.dumps(plan)) < 24_000 for plan in job.ask(states))


@pytest.mark.parametrize("without_plans", [[0], [1], [0, 2]])
def test_needs_on_no_rank_what_another_has_kept(without_plans: list[int]) -> None:
    job = Job(3)
    states = [model(rank) for rank in range(3)]
    first, metadata = job.plan(states)
    for rank in without_plans:
        job.planners[rank] = SavePlanner()
    plans, again = job.plan(states)
    assert (plans, again) == (first, metadata)
    assert job.planned == 1 + (0 in without_plans)


def test_plans_a_change_of_one_rank_anew() -> None:
    job = Job(2)
    job.plan([model(0), model(1)])
    for _ in range(2):
        plans, metadata = job.plan([model(0), {**model(1), "new": torch.ones(2)}])
        assert {index.fqn for index in written(plans)} == set(metadata.state_dict_metadata) > {"new", "only0", "only1"}
    assert job.planned == 2
    back, _ = job.plan([model(0), model(1)])
    assert "new" not in {index.fqn for index in written(back)}
    assert job.planned == 2


def test_plans_another_shape_or_dtype_on_every_rank_anew() -> None:
    for w in (torch.zeros(4001, 300), torch.zeros(4000, 300, dtype=HALF)):
        job = Job(2)
        job.plan([model(rank) for rank in range(2)])
        plans, metadata = job.plan([{"model": {"w": w, "b": torch.zeros(300)}, "only1": torch.zeros(5), "step": 0}] * 2)
        assert job.planned == 2
        entry = metadata.state_dict_metadata["model.w"]
        assert isinstance(entry, TensorStorageMetadata)
        assert (entry.size, entry.properties.dtype) == (w.shape, w.dtype)
        assert {index.fqn for index in written(plans)} == set(metadata.state_dict_metadata)


def test_limits_the_plans_kept_of_structures_that_keep_changing() -> None:
    job = Job(2)
    for rows in range(1, 20):
        job.plan([{"w": torch.ones(rows)}] * 2)
    for planner in job.planners:
        assert len(planner._cache.kept) == KEPT_PLANS
    assert len(job.planners[0]._cache.agreed) == KEPT_PLANS


def test_serves_several_process_groups_by_one_planner() -> None:
    job, part = Job(3), Job(0)
    part.planners = job.planners[1:]
    halves, brains = ([{"a": torch.ones(5)}, *[{"w": torch.ones(9, dtype=dtype)}] * 2] for dtype in (HALF, BRAIN))
    for states in (halves, brains, halves):
        plans, metadata = job.plan(states)
        alone, _ = part.plan(states[1:])
        for mine in (plans[1:], alone):
            assert {item.tensor_data.properties.dtype for plan in mine for item in plan.items if item.tensor_data} == {
                states[1]["w"].dtype
            }
        assert set(metadata.state_dict_metadata) == {"a", "w"}
    assert (job.planned, part.planned) == (2, 2)


def test_slices_rows_of_a_replicated_tensor_without_a_copy() -> None:
    job = Job(4)
    states = [{"w": torch.arange(8000.0 * 300).reshape(8000, 300)} for _ in range(4)]
    plans, _ = job.plan(states)
    rows = 0
    for planner, state, plan in zip(job.planners, states, plans, strict=True):
        assert len(plan.items) > 1
        for item in plan.items:
            assert item.type == WriteItemType.SHARD
            found = planner.resolve_data(item)
            first = item.tensor_data.chunk.offsets[0]
            assert isinstance(found, torch.Tensor)
            assert torch.equal(found, state["w"][first : first + found.shape[0]])
            assert found.untyped_storage().data_ptr() == state["w"].untyped_storage().data_ptr()
            rows += found.shape[0]
    assert rows == 8000


def test_finds_its_plan_in_a_process_that_a_planner_is_sent_to_again() -> None:
    sent = pickle.dumps([SavePlanner() for _ in range(2)])
    counts = []
    for _ in range(2):
        job = Job(2)
        job.planners = pickle.loads(sent)
        job.plan([model(rank) for rank in range(2)])
        counts.append(job.planned)
    assert counts == [1, 0]


def test_refuses_partial_sums_by_name() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        partial = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
        planner = SavePlanner()
        planner.set_up_planner({"model": {"w": partial, "b": torch.ones(2)}}, None, True)
        with pytest.raises(BucketpointError, match=r"model\.w has the placements \[Partial"):
            planner.create_local_plan()
    finally:
        dist.destroy_process_group()


def test_finds_plain_tensors_without_asking_dcp_whether_they_are_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    find = default_planner.find_state_dict_object

    def counted(state: dict[str, Any], index: MetadataIndex) -> Any:
        asked.append(index.fqn)
        return find(state, index)

    monkeypatch.setattr(default_planner, "find_state_dict_object", counted)
    labelled = torch.ones(2)
    labelled.__dict__["origin"] = "rank 3"
    state = {
        "w": torch.ones(2, 3),
        "p": torch.nn.Parameter(torch.ones(3)),
        "scalar": torch.tensor(1.0),
        "own": labelled,
    }
    planner = SavePlanner()
    planner.set_up_planner(state, None, True)
    plan = planner.create_local_plan()
    dealt, _ = planner.create_global_plan([plan])

    found = {item.index.fqn: planner.resolve_data(item) for item in planner.finish_plan(dealt[0]).items}

    assert all(found[name] is value for name, value in state.items())
    assert asked == ["own"]
    for misplaced in (MetadataIndex("w", (1, 0)), MetadataIndex("w", (0,))):
        with pytest.raises(ValueError, match="offset"):
            planner.lookup_object(misplaced)
    with pytest.raises(ValueError, match="gone"):
        planner.lookup_object(MetadataIndex("gone"))


def test_refuses_to_save_the_state_of_another_thread() -> None:
    """A save under way would store the other thread's state at its own URL, and report success."""
    planner = SavePlanner()
    meta = WriterMeta(save_id="one")
    planner.set_up_planner({"w": torch.ones(3)}, meta, True)
    plan = planner.create_local_plan()
    (dealt,), _ = planner.create_global_plan([plan])
    (item,) = planner.finish_plan(dealt).items
    other = threading.Thread(target=planner.set_up_planner, args=({"w": torch.zeros(3)}, meta, True))
    other.start()
    other.join()
    for step in (planner.create_local_plan, lambda: planner.finish_plan(dealt), lambda: planner.resolve_data(item)):
        with pytest.raises(BucketpointError, match="two threads use one SavePlanner"):
            step()
    planner.set_up_planner({"w": torch.ones(3)}, None, True)
    assert planner.create_local_plan().items


def test_decodes_the_items_of_an_unchanged_plan_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, decoded, planner = save_planner.items_of, [], SavePlanner()
    monkeypatch.setattr(save_planner, "items_of", lambda *args: decoded.append(args) or decode(*args))
    for step, size in enumerate([4, 4, 5, 4]):
        state = {"w": torch.full((size,), float(step)), "v": torch.ones(2)}
        dcp.save(state, storage_writer=BucketWriter(tmp_path / str(step)), planner=planner, no_dist=True)
        target = {"w": torch.zeros(size), "v": torch.zeros(2)}
        dcp.load(target, storage_reader=FileSystemReader(tmp_path / str(step)), no_dist=True)
        assert torch.equal(target["w"], state["w"])
    assert len(decoded) == 2


@pytest.mark.parametrize("change", ["grown", "added"])
def test_commits_nothing_if_a_planner_alters_the_metadata_after_ours(tmp_path: Path, change: str) -> None:
    class Altering(SavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            plans, metadata = super().create_global_plan(all_plans)
            entry: Any = metadata.state_dict_metadata["v"]
            if alters and change == "grown":
                entry.size = torch.Size([9])
            elif alters:
                metadata.state_dict_metadata["ghost"] = replace(entry, chunks=[])
            return plans, metadata

    planner, state = Altering(), {"w": torch.arange(8.0), "v": torch.ones(4)}
    for alters in (False, True, True):
        refused = pytest.raises(CheckpointException, match=r"v has only 4 of its 9|ghost has only 0 of its 4 elements")
        with refused if alters else contextlib.nullcontext():
            dcp.save(state, storage_writer=BucketWriter(tmp_path / str(alters)), planner=planner, no_dist=True)
    assert not (tmp_path / "True" / ".metadata").exists()


def test_lets_a_writer_that_wraps_ours_count_what_was_written(tmp_path: Path) -> None:
    class Counting(BucketWriter):
        def write_data(self, plan: SavePlan, planner: Any) -> Any:
            future = super().write_data(plan, planner)
            written.extend((result.index.fqn, result.size_in_bytes > 0) for result in future.value())
            return future

    written: list[tuple[str, bool]] = []
    dcp.save({"w": torch.ones(4)}, storage_writer=Counting(tmp_path), planner=SavePlanner(), no_dist=True)
    assert written == [("w", True)]
    with pytest.raises(BucketpointError, match="of another rank"):
        list(pickle.loads(pickle.dumps(Results(b"", b"", None, None, []))))


W = torch.ones(2)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"a": W}, {"a": {"b": W}}, r"rank 0: state\['a'\]; rank 1: state\['a'\]\['b'\] \[key=a,"),
        ({"a": [W]}, {"a": {"x": W}}, r"rank 0: state\['a'\]\[0\]; rank 1: state\['a'\]\['x'\]"),
        ({"a": [W]}, {"a": {"0": W}}, r"rank 0: state\['a'\]\[0\]; rank 1: state\['a'\]\['0'\]"),
        ({"a.b": W}, {"a": {"b": W}}, r"rank 0: state\['a.b'\]; rank 1: state\['a'\]\['b'\]"),
        ({"a": {1: W}}, {"a": {"2": W}}, r"rank 0: integers as keys; rank 1: the text '2' as a key \[key=a.2,"),
        ({"a": {"1": W}}, {"a": {1: W, "2": W}}, r"rank 0: the text '1' as a key; rank 1: integers as keys"),
        ({1: W}, {"2": W}, "the text '2' as a key"),
        ({"a": {0: W, 1: W}}, {"a": {4: W}, "b": {"4": W}}, None),
        ({"a": {1: W, "2": W}}, {"a": {3: W, "4": W, "x": W}}, None),
        ({"a": {1: W}}, {"a": {"x": W, 2: W}}, None),
        ({"a": [W]}, {"a": [[W], W]}, r"rank 0: state\['a'\]\[0\]; rank 1: state\['a'\]\[0\]\[0\] \[key=a.0,"),
        ({"a": {"layer0": W, "list": [W, W]}}, {"a": {"layer4": W, "list": [W, W, W]}}, None),
        ({"a": {}, "b": W}, {"a": {"c": W}, "b": W}, None),
        ({"a": None, "b": W}, {"a": {"c": W}, "b": W}, None),
        ({"a": {"c": [W]}}, {"a": {"c": []}}, None),
    ],
)
def test_refuses_structures_of_ranks_exactly_where_a_load_would_not_restore_both(
    first: dict[Any, Any], second: dict[Any, Any], named: str | None
) -> None:
    job = Job(2)
    if named is not None:
        with pytest.raises(RanksDisagreeError, match=named):
            job.plan([first, second])
        return
    job.plan([first, second])
    plan = next(iter(job.planners[0]._cache.agreed.values()))
    loaded = nested(dict.fromkeys(plan.metadata.planner_data), plan.metadata, merged_int_keys(plan.int_keys).items())
    for held in (first, second):
        assert {*plan.metadata.planner_data.values()} >= {*flatten_state_dict(held)[1].values()}
        assert all(loaded[key].keys() >= part.keys() for key, part in held.items() if isinstance(part, dict))


@pytest.mark.parametrize("state", [{1: W, "1": W}, {"a": {1: [W], "1": {"x": W}}}, {"a": {1: {"x": W}, "1": {"y": W}}}])
def test_refuses_two_keys_of_a_dict_with_the_same_text(state: dict[Any, Any]) -> None:
    with pytest.raises(BucketpointError, match=r"have the same text.*key=(a\.)?1"):
        Job(1).ask([state])
