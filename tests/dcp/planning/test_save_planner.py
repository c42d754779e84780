"""Plans are made once for each structure of the state, crossed by no failure, and written by every replica alike."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import Metadata, default_planner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.testing._internal.distributed.fake_pg import FakeStore

from bucketpoint.dcp.planning import save_planner
from bucketpoint.dcp.planning.balance import item_bytes
from bucketpoint.dcp.planning.global_plan import plan_globally
from bucketpoint.dcp.planning.plan_cache import KEPT_PLANS, PlanCache
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.errors import BucketpointError
from dcp.planning import planner_scenarios as scenarios
from dcp.ranks import Ranks

pytestmark = pytest.mark.contract


HALF, BRAIN = torch.float16, torch.bfloat16


class Job:
    """Some ranks' planners, called in the order in which DCP calls them, in one process."""

    def __init__(self, world: int) -> None:
        self.planners = [SavePlanner() for _ in range(world)]

    def ask(self, states: list[dict[str, Any]]) -> list[SavePlan]:
        plans = []
        for rank, (planner, state) in enumerate(zip(self.planners, states, strict=True)):
            planner.set_up_planner(state, None, rank == 0)
            plans.append(planner.create_local_plan())
        return plans

    def plan(self, states: list[dict[str, Any]]) -> tuple[list[SavePlan], Metadata, bool]:
        """What each rank writes, the metadata, and whether any items crossed ranks."""
        asked = self.ask(states)
        dealt, metadata = self.planners[0].create_global_plan(asked)
        crossed = any(plan.items for plan in (*asked, *dealt))
        return (
            [planner.finish_plan(plan) for planner, plan in zip(self.planners, dealt, strict=True)],
            metadata,
            crossed,
        )


class JobOfSaves(Job):
    """The same with planners made for each save, which reuse the plans of earlier saves."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.caches = [PlanCache() for _ in range(world)]
        self.planned = 0
        monkeypatch.setattr(save_planner, "plan_globally", self._plan_globally)

    def _plan_globally(self, *args: Any, **kwargs: Any) -> Any:
        self.planned += 1
        return plan_globally(*args, **kwargs)

    def ask(self, states: list[dict[str, Any]]) -> list[SavePlan]:
        self.planners = [SavePlanner.with_plans(cache) for cache in self.caches]
        # The items of other ranks arrive in pickled form.
        return [
            plan if rank == 0 else pickle.loads(pickle.dumps(plan)) for rank, plan in enumerate(super().ask(states))
        ]


def model(rank: int = 0, *, rows: int = 4000, fill: float = 0.0) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((rows, 300), fill), "b": torch.full((300,), fill)},
        f"only{rank}": torch.full((5,), fill),
        "step": int(fill),
    }


def written(plans: list[SavePlan]) -> set[Any]:
    return {item.index for plan in plans for item in plan.items}


def test_the_second_save_of_the_same_structure_sends_no_items() -> None:
    job = Job(3)
    first, metadata, crossed = job.plan([model(rank) for rank in range(3)])
    assert crossed
    second, again, crossed = job.plan([model(rank, fill=1.0) for rank in range(3)])
    assert not crossed
    assert second == first
    assert again.state_dict_metadata == metadata.state_dict_metadata
    assert again is not metadata


def test_what_a_rank_sends_for_an_unchanged_state_is_small() -> None:
    job = Job(2)
    states = [{f"layer{number}": torch.ones(3) for number in range(1000)} for _ in range(2)]
    job.plan(states)
    asked = job.ask(states)
    dealt, _ = job.planners[0].create_global_plan(asked)
    assert max(len(pickle.dumps(plan)) for plan in (*asked, *dealt)) < 500


def test_planners_of_single_saves_plan_an_unchanged_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobOfSaves(3, monkeypatch)
    first, metadata, _ = job.plan([model(rank) for rank in range(3)])
    for fill in (1.0, 2.0):
        plans, again, _ = job.plan([model(rank, fill=fill) for rank in range(3)])
        assert plans == first
        assert again == metadata
    assert job.planned == 1


@pytest.mark.parametrize("without_plans", [[0], [1], [0, 2]])
def test_planners_of_single_saves_need_no_plans_of_others(
    without_plans: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobOfSaves(3, monkeypatch)
    states = [model(rank) for rank in range(3)]
    first, metadata, _ = job.plan(states)
    for rank in without_plans:
        job.caches[rank] = PlanCache()
    plans, again, _ = job.plan(states)
    assert (plans, again) == (first, metadata)


def test_planners_of_single_saves_plan_a_change_of_one_rank_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobOfSaves(2, monkeypatch)
    job.plan([model(0), model(1)])
    for _ in range(2):
        plans, metadata, _ = job.plan([model(0), {**model(1), "new": torch.ones(2)}])
        assert {index.fqn for index in written(plans)} == set(metadata.state_dict_metadata) > {"new", "only0", "only1"}
    assert job.planned == 2
    back, _, _ = job.plan([model(0), model(1)])
    assert "new" not in {index.fqn for index in written(back)}
    assert job.planned == 2


def test_planners_of_single_saves_write_all_items_whoever_altered_the_last_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = JobOfSaves(2, monkeypatch)
    states = [model(0), model(1)]
    plans, metadata, _ = job.plan(states)
    for plan in plans:
        plan.items.clear()
    again, _, _ = job.plan(states)
    assert {index.fqn for index in written(again)} == set(metadata.state_dict_metadata)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"w": torch.zeros(4001, 300), "b": torch.zeros(300)}, "only1": torch.zeros(5), "step": 0},
        {"model": {"w": torch.zeros(4000, 300, dtype=torch.float16), "b": torch.zeros(300)}, "step": 0},
        {"model": {"w": torch.zeros(4000, 300)}, "only1": torch.zeros(5), "step": 0},
    ],
    ids=["shape", "dtype", "key"],
)
def test_a_change_on_every_rank_is_planned_anew(changed: dict[str, Any]) -> None:
    job = Job(2)
    job.plan([model(rank) for rank in range(2)])
    plans, metadata, crossed = job.plan([changed, changed])
    assert crossed
    sizes = {name: entry.size for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")}
    assert sizes["model.w"] == changed["model"]["w"].shape
    assert {index.fqn for index in written(plans)} == set(metadata.state_dict_metadata)


def test_a_change_on_one_rank_is_planned_with_what_the_others_had_said() -> None:
    job = Job(3)
    job.plan([model(rank) for rank in range(3)])
    plans, metadata, crossed = job.plan([model(0), {**model(1), "new": torch.ones(2)}, model(2)])
    assert crossed
    assert {"new", "only0", "only1", "only2"} <= set(metadata.state_dict_metadata)
    assert {index.fqn for index in written(plans)} == set(metadata.state_dict_metadata)
    _, _, crossed = job.plan([model(0), {**model(1), "new": torch.ones(2)}, model(2)])
    assert not crossed


def test_a_model_and_an_optimizer_saved_in_turn_keep_a_plan_each() -> None:
    job = Job(2)
    model_states = [{"w": torch.ones(10, 10)}] * 2
    optimizer_states = [{"m": torch.ones(10, 10), "v": torch.ones(10, 10)}] * 2
    job.plan(model_states)
    job.plan(optimizer_states)
    for _ in range(3):
        plans, _, crossed = job.plan(model_states)
        assert not crossed
        assert {index.fqn for index in written(plans)} == {"w"}
        plans, _, crossed = job.plan(optimizer_states)
        assert not crossed
        assert {index.fqn for index in written(plans)} == {"m", "v"}


def test_structures_that_keep_changing_do_not_pile_up() -> None:
    job = Job(2)
    for rows in range(1, 20):
        job.plan([{"w": torch.ones(rows)}] * 2)
    assert len(job.planners[1]._cache.kept) == KEPT_PLANS
    assert len(job.planners[0]._cache.agreed) == 2 * KEPT_PLANS


def test_a_save_that_fails_before_the_plan_is_dealt_out_leaves_nothing_behind() -> None:
    job = Job(2)
    states = [model(rank) for rank in range(2)]
    first, _, _ = job.plan(states)
    job.ask(states)  # and the save fails on some rank, or on the way
    plans, _, crossed = job.plan(states)
    assert crossed
    assert [plan.items for plan in plans] == [plan.items for plan in first]
    _, _, crossed = job.plan(states)
    assert not crossed


def test_a_rank_that_fails_after_the_coordinator_planned_asks_for_its_items_again() -> None:
    job = Job(2)
    states = [model(rank) for rank in range(2)]
    dealt, _ = job.planners[0].create_global_plan(job.ask(states))
    job.planners[0].finish_plan(dealt[0])  # rank 1 never gets here
    plans, metadata, _ = job.plan(states)
    assert {index.fqn for index in written(plans)} == set(metadata.state_dict_metadata)


def test_a_coordinator_that_was_made_anew_says_so() -> None:
    job = Job(2)
    states = [model(rank) for rank in range(2)]
    job.plan(states)
    job.planners[0] = SavePlanner()
    with pytest.raises(BucketpointError, match="does not have"):
        job.plan(states)
    # That failure is the end of it: the next save sends everything.
    _, _, crossed = job.plan(states)
    assert crossed


def test_kept_plans_of_two_coordinators_are_told_apart_by_what_they_hold() -> None:
    job, part = Job(3), Job(0)
    part.planners = job.planners[1:]
    halves, brains = ([{"a": torch.ones(5)}, *[{"w": torch.ones(9, dtype=dtype)}] * 2] for dtype in (HALF, BRAIN))
    job.plan(halves)
    part.plan(brains[1:])
    # Each of the three refers to the first plan that its coordinator made, and rank 0 to another one than the others.
    with pytest.raises(BucketpointError, match=r"does not have.*another one for another process group"):
        job.plan(brains)
    plans, metadata, crossed = job.plan(brains)
    assert crossed
    assert {item.tensor_data.properties.dtype for plan in plans[1:] for item in plan.items if item.tensor_data} == {
        BRAIN
    }
    assert metadata.state_dict_metadata["w"].properties.dtype == BRAIN  # type: ignore[union-attr]


def test_a_group_of_the_same_coordinator_is_planned_with_what_its_ranks_had_said() -> None:
    job, part = Job(3), Job(0)
    part.planners = job.planners[:2]
    states = [model(rank) for rank in range(3)]
    job.plan(states)
    plans, metadata, _ = part.plan(states[:2])
    assert {index.fqn for index in written(plans)} == set(metadata.state_dict_metadata)
    assert "only2" not in metadata.state_dict_metadata


def test_without_caching_every_save_is_planned() -> None:
    job = Job(2)
    for planner in job.planners:
        planner._keep_plans = False
    for _ in range(2):
        _, _, crossed = job.plan([model(rank) for rank in range(2)])
        assert crossed


def test_slices_of_a_replicated_tensor_are_its_rows_without_a_copy() -> None:
    job = Job(4)
    states = [{"w": torch.arange(8000.0 * 300).reshape(8000, 300)} for _ in range(4)]
    plans, _, _ = job.plan(states)
    rows = 0
    for planner, state, plan in zip(job.planners, states, plans, strict=True):
        assert len(plan.items) > 1
        for item in plan.items:
            assert item.type == WriteItemType.SHARD
            assert item.tensor_data is not None
            found = planner.resolve_data(item)
            first = item.tensor_data.chunk.offsets[0]
            assert isinstance(found, torch.Tensor)
            assert torch.equal(found, state["w"][first : first + found.shape[0]])
            assert found.untyped_storage().data_ptr() == state["w"].untyped_storage().data_ptr()
            rows += found.shape[0]
    assert rows == 8000
    totals = [sum(map(item_bytes, plan.items)) for plan in plans]
    assert max(totals) <= 1.05 * sum(totals) / 4


def test_a_planner_that_is_sent_to_a_process_again_finds_what_it_had_planned_there() -> None:
    sent = pickle.dumps([SavePlanner() for _ in range(2)])
    crossings = []
    for _ in range(2):
        job = Job(2)
        job.planners = pickle.loads(sent)
        crossings.append(job.plan([model(rank) for rank in range(2)])[2])
    assert crossings == [True, False]


def test_replicas_and_hybrid_shards_are_balanced_and_load_with_any_reader(four_ranks: Ranks, tmp_path: Any) -> None:
    answers = four_ranks.run(scenarios.balanced_saves, str(tmp_path))
    for save in range(3):
        sizes = [answer[save] for answer in answers]
        assert max(sizes) <= 1.05 * sum(sizes) / 4


def test_partial_sums_are_refused_by_name() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        partial = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
        planner = SavePlanner()
        planner.set_up_planner({"model": {"w": partial, "b": torch.ones(2)}}, None, True)
        with pytest.raises(BucketpointError, match=r"model\.w has the placements \[Partial"):
            planner.create_local_plan()
    finally:
        dist.destroy_process_group()


def test_plain_tensors_are_found_without_asking_dcp_whether_they_are_shards(monkeypatch: pytest.MonkeyPatch) -> None:
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
