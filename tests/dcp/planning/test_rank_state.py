"""State of each rank's own: noticed where ranks would overwrite each other's, saved and loaded where it is keyed."""

from __future__ import annotations

import enum
import logging
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketReader, BucketWriter
from bucketpoint.dcp.planning import save_planner
from bucketpoint.dcp.planning.rank_state import DIGEST_BYTES, compared_digests, rank_state, saved_ranks
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.errors import BucketpointError
from dcp.ranks import Ranks

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are in this process, which has no process group."""
    monkeypatch.setattr(save_planner, "is_initialized", lambda: True)


def planned(states: list[dict[str, Any]], planners: list[SavePlanner] | None = None) -> list[SavePlanner]:
    planners = planners or [SavePlanner() for _ in states]
    plans = []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, None, rank == 0)
        plans.append(planner.create_local_plan())
    planners[0].create_global_plan(plans)
    return planners


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_names_values_that_differ_between_ranks_once_and_five_of_many_keys(caplog: pytest.LogCaptureFixture) -> None:
    states = [{"loader": {"position": rank, "epoch": 3}, "lr": 0.1, "w": torch.ones(3)} for rank in range(3)]
    planners = planned(states)
    (said,) = warnings(caplog)
    assert said.startswith("ranks have different values for these keys, but only one rank's value is saved: ")
    assert "loader.position" in said
    assert "rank_state(value)" in said
    planned([{**state, "new": 1} for state in states], planners)
    assert len(warnings(caplog)) == 1
    planned([{**state, "newer": rank} for rank, state in enumerate(states)], planners)
    assert "newer" in warnings(caplog)[1]
    assert "loader" not in warnings(caplog)[1]
    planned([{f"key{number}": rank for number in range(9)} for rank in range(2)])
    said = warnings(caplog)[2]
    assert "key4 and 4 more. " in said
    assert [f"key{number}" in said for number in range(9)] == [True] * 5 + [False] * 4


def parts(planners: list[SavePlanner], name: str) -> int:
    return len(planners[0].metadata.state_dict_metadata[name].chunks)


@pytest.mark.parametrize("at", [0, 100_000, 199_999])
def test_saves_tensors_that_ranks_hold_different_ones_of_from_one_rank_and_warns(
    at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts that each rank numbers from 0: parts of two ranks' tensors made one."""
    states = []
    for rank in range(3):
        expert = torch.zeros(200_000)
        expert[at] = float(rank == 2)
        # Running statistics of BatchNorm differ rightly, and are too small to be cut.
        states.append(
            {"expert": expert, "shared": torch.ones(200_000), "running_mean": torch.full((4096,), 1.0 * rank)}
        )
    planners = planned(states)
    (said,) = warnings(caplog)
    assert said.startswith(
        "ranks have different tensors under these names, but only one rank's value is saved: expert."
    )
    assert parts(planners, "expert") == 1
    assert parts(planners, "shared") > 1
    # Those of the first rank, so that tensors that belong together are of one rank.
    plans, _ = planners[0].create_global_plan([planner.plan for planner in planners])
    assert any(item.index.fqn == "expert" for item in plans[0].items)
    # Once they are equal they are cut again.
    planners = planned([states[0]] * 3, planners)
    assert parts(planners, "expert") > 1


def test_compares_tensors_in_any_memory(caplog: pytest.LogCaptureFixture) -> None:
    strided = [torch.full((300, 400), float(rank)).t() for rank in range(2)]
    parameters = [torch.nn.Parameter(torch.full((120_000,), float(rank))) for rank in range(2)]
    planned([{"strided": one, "parameter": two} for one, two in zip(strided, parameters, strict=True)])
    (said,) = warnings(caplog)
    assert "parameter, strided" in said


def generator_state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


@pytest.mark.parametrize(
    "make",
    [
        generator_state,
        lambda seed: random.Random(seed).getstate(),
        lambda seed: np.random.RandomState(seed).get_state(),
        lambda seed: np.random.default_rng(seed).bit_generator.state,
        lambda seed: [{"shard": seed}, None],
        lambda seed: b"%d" % seed,
        lambda seed: 10**5000 + seed,
    ],
    ids=["torch generator", "random", "numpy", "numpy generator", "nested", "bytes", "huge"],
)
def test_compares_states_of_random_generators_and_loaders(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    planned([{"state": make(1)} for _ in range(3)])
    assert warnings(caplog) == []
    planned([{"state": make(rank // 2)} for rank in range(3)])
    assert len(warnings(caplog)) == 1


def test_reports_nothing_that_is_equal_of_one_rank_or_cannot_be_compared(caplog: pytest.LogCaptureFixture) -> None:
    one, other = "same", "".join(["sa", "me"])
    values: list[tuple[Any, Any]] = [
        ([one, one], [one, other]),
        ({"a", "b", "c"}, {"c", "b", "a"}),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (float("nan"), float("nan")),
    ]
    for left, right in values:
        planned([{"value": (left,)}, {"value": (right,)}])
    planned([rank_state({"position": rank}, rank) for rank in range(3)])

    class Own:
        def __init__(self, number: int) -> None:
            self.number = number

    deep: Any = ()
    for _ in range(5000):
        deep = (deep,)

    class Unreadable(dict[str, int]):
        def items(self) -> Any:
            raise KeyError("no")

    conjugated = torch.ones(2, dtype=torch.complex64).conj()
    for make in (
        Own,
        lambda rank: (deep, rank),
        lambda rank: list(range(rank, 50_000)),
        lambda rank: (conjugated, rank),
        lambda rank: (torch.eye(2).to_sparse_csr(), rank),
        lambda rank: (enum.Flag("Of", "a b")(0), rank),
        lambda rank: (Unreadable(), rank),
    ):
        planned([{"value": make(rank)} for rank in range(2)])
    planned([{"buffer": torch.full((10,), float(rank))} for rank in range(2)])
    assert warnings(caplog) == []


def test_takes_four_bytes_an_item_for_digests() -> None:
    states = [{f"key{number}": "x" * 1000 for number in range(50)} for _ in range(2)]
    planners = planned(states)
    assert len(compared_digests(planners[0].plan.items, planners[0].state_dict)) == 50 * DIGEST_BYTES


def test_keys_a_value_by_its_rank_and_finds_the_ranks_that_saved(tmp_path: Path) -> None:
    assert rank_state({"position": 3}, 2) == {"rank-2": {"position": 3}}
    assert rank_state(7) == {"rank-0": 7}
    with pytest.raises(BucketpointError, match="-1"):
        rank_state(7, -1)
    state = {
        "train": {"loader": {**rank_state({"a": 1}, 10), **rank_state({"a": 1}, 2)}},
        "rng": rank_state(1, 3),
        "loader": {"rank-x": 1, "rank-07": 1},
    }
    dcp.save(state, storage_writer=BucketWriter(f"file://{tmp_path}", progress=False), no_dist=True)
    metadata = BucketReader(f"file://{tmp_path}", progress=False).read_metadata()
    assert saved_ranks(metadata, "train.loader") == [2, 10]
    assert saved_ranks(metadata, "rng") == [3]
    assert saved_ranks(metadata, "loader") == []
    assert saved_ranks(metadata, "train") == []


def own_state_comes_back(rank: int, world: int, root: str) -> int:
    state: dict[str, Any] = {"w": torch.ones(10), "loader": rank_state({"position": 10 * rank})}
    dcp.save(state, storage_writer=BucketWriter(f"file://{root}", progress=False), planner=SavePlanner())
    loaded: dict[str, Any] = {"w": torch.zeros(10), "loader": rank_state({"position": None})}
    dcp.load(loaded, storage_reader=BucketReader(f"file://{root}", progress=False))
    position: int = loaded["loader"][f"rank-{rank}"]["position"]
    return position


def test_returns_to_each_rank_its_own_value_and_all_to_other_worlds(four_ranks: Ranks, tmp_path: Path) -> None:
    assert four_ranks.run(own_state_comes_back, str(tmp_path)) == [0, 10, 20, 30]
    reader = BucketReader(f"file://{tmp_path}", progress=False)
    saved = saved_ranks(reader.read_metadata(), "loader")
    assert saved == [0, 1, 2, 3]
    state: dict[str, Any] = {"loader": {}}
    for rank in saved:
        state["loader"] |= rank_state({"position": None}, rank)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert [state["loader"][f"rank-{rank}"]["position"] for rank in saved] == [0, 10, 20, 30]
