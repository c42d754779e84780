"""Ranks that do not agree on a save: all raise, with the names of those that differ, and nothing is committed."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties

from bucketpoint import BucketWriter, LoadPlanner
from bucketpoint.dcp.planning.agreement import agree, make_statement
from bucketpoint.errors import RanksDisagreeError
from bucketpoint.format.index.ref import INDEX_ITEMS
from bucketpoint.stores import open_store
from dcp.planning import agreement_scenarios as scenarios
from dcp.planning.test_compact import Job, states
from dcp.ranks import Ranks

pytestmark = pytest.mark.contract

HALF, BRAIN = torch.float16, torch.bfloat16


def files(root: Path, pattern: str) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob(pattern))


@pytest.mark.parametrize(
    ("kind", "before"),
    [("ours", 0), ("ours", 2), ("DCP's", 0), ("DCP's, keeping plans", 0), ("DCP's, keeping plans", 2)],
)
def test_raises_on_all_ranks_that_name_different_urls_and_commits_nothing(
    two_ranks: Ranks, tmp_path: Path, kind: str, before: int
) -> None:
    answers = two_ranks.run(scenarios.save_to_places_of_their_own, f"file://{tmp_path}", kind, before)
    for failed in answers:
        assert [name for name, _ in failed] == ["RanksDisagreeError"]
        assert "rank 0: '" in failed[0][1]
        assert "step-of-rank-0'; rank 1: '" in failed[0][1]
        assert "step-of-rank-1'" in failed[0][1]
    assert files(tmp_path, "step-*/.metadata") == []
    if kind != "DCP's, keeping plans" or not before:
        # It was the plans that told, and nothing had been sent.
        assert files(tmp_path, "step-*/**/*.distcp") == []


def test_raises_on_all_ranks_whose_writers_or_planners_differ(two_ranks: Ranks, tmp_path: Path) -> None:
    for what, said in (
        ("options", "different options"),
        ("versions", "rank 0: 0.3.0; rank 1: 0.3.1"),
        ("planners", "do not use SavePlanner"),
    ):
        for failed in two_ranks.run(scenarios.save_unlike_the_others, f"file://{tmp_path}", what):
            assert [name for name, _ in failed] == ["RanksDisagreeError"]
            assert said in failed[0][1]
            assert "rank=1" in failed[0][1]
    assert files(tmp_path, ".metadata") == []


@pytest.mark.parametrize(
    ("layout", "how", "said"),
    [
        (
            "replicated",
            [(HALF, (700, 300)), (BRAIN, (700, 300))],
            "rank 0: float16 [700, 300]; rank 1: bfloat16 [700, 300]",
        ),
        (
            "replicated",
            [(HALF, (700, 300)), (HALF, (300, 700))],
            "rank 0: float16 [700, 300]; rank 1: float16 [300, 700]",
        ),
        (
            "sharded",
            [(HALF, (7, 3)), (BRAIN, (7, 3))],
            "float16 [14, 3], chunk [7, 3] at [0, 0]; rank 1: bfloat16 [14, 3]",
        ),
    ],
    ids=["dtype", "shape", "shards"],
)
@pytest.mark.parametrize("kind", ["ours", "DCP's"])
def test_refuses_by_name_or_saves_once_a_tensor_that_ranks_hold_differently(
    two_ranks: Ranks, tmp_path: Path, kind: str, layout: str, how: Any, said: str
) -> None:
    answers = two_ranks.run(scenarios.save_tensors_of_their_own, f"file://{tmp_path}", kind, layout, how)
    if kind == "DCP's" and layout == "replicated":
        # It keeps the item of the rank that writes, and so the description that goes with the bytes.
        assert any(loaded.dtype == held.dtype and torch.equal(loaded, held) for _, loaded, held in answers)
        return
    for failed, _, _ in answers:
        assert [name for name, _ in failed] == ["RanksDisagreeError"]
        assert said in failed[0][1]
        assert "key=w" in failed[0][1]
    assert files(tmp_path, "*.distcp") == files(tmp_path, ".metadata") == []


class KeepsAnother(DefaultSavePlanner):
    """The coordinator has the metadata of a plan that the ranks do not have."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        entry = metadata.state_dict_metadata["model.w"]
        assert isinstance(entry, TensorStorageMetadata)
        kept = dataclasses.replace(entry, properties=TensorProperties(dtype=torch.int32))
        return plans, Metadata({**metadata.state_dict_metadata, "model.w": kept}, metadata.planner_data)


def test_refuses_by_name_results_that_do_not_fit_the_coordinators_plan(tmp_path: Path) -> None:
    with pytest.raises(RanksDisagreeError, match=r"a dtype or shape that the coordinator did not plan.*key=model\.w"):
        Job(2, KeepsAnother).save(states(2, 1.0), f"file://{tmp_path}")
    assert files(tmp_path, ".metadata") == []


def test_drops_a_kept_plan_of_dcps_for_a_tensor_that_was_converted_since(tmp_path: Path) -> None:
    scenarios.forget_plans()
    given: dict[str, Any] = {"planner": DefaultSavePlanner(enable_plan_caching=True), "no_dist": True}
    dcp.save({"w": torch.ones(3, dtype=HALF)}, storage_writer=BucketWriter(tmp_path / "1"), **given)
    # It does not notice: the shape is the same.
    with pytest.raises(dcp.CheckpointException, match=r"torch.bfloat16 for an item planned as torch.float16"):
        dcp.save({"w": torch.ones(3, dtype=BRAIN)}, storage_writer=BucketWriter(tmp_path / "2"), **given)


# -- loads ------------------------------------------------------------------------------------------------------------


def save_full(url: str, value: float) -> None:
    state = {"w": torch.full((3,), value)}
    dcp.save(state, checkpoint_id=url, storage_writer=BucketWriter(progress=False), no_dist=True)


@pytest.mark.parametrize("planner", [None, LoadPlanner])
def test_refuses_a_load_of_two_checkpoints_on_all_ranks(two_ranks: Ranks, tmp_path: Path, planner: Any) -> None:
    urls = [f"file://{tmp_path}/step-{step}" for step in (1, 2)]
    for step, url in enumerate(urls, 1):
        save_full(url, step)
    for failed, left in two_ranks.run(scenarios.load_places_of_their_own, urls, planner):
        assert [name for name, _ in failed] == ["RanksDisagreeError"]
        assert "The ranks load different checkpoints: rank 0: '" in failed[0][1]
        assert "broadcast its URL" in failed[0][1]
        assert left == [0, 0, 0]
    # Groups of ranks may load what they like.
    groups = two_ranks.run(scenarios.load_places_of_their_own, urls, planner, True)
    assert groups == [([], [1, 1, 1]), ([], [2, 2, 2])]
    # Copies of one commit, on the disk of each node, are one checkpoint.
    shutil.copytree(tmp_path / "step-1", tmp_path / "copied")
    copies = [urls[0], f"file://{tmp_path}/copied"]
    assert two_ranks.run(scenarios.load_places_of_their_own, copies, planner) == [([], [1, 1, 1])] * 2


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("saving", [0, 1])
def test_refuses_a_save_beside_a_load_in_one_group(two_ranks: Ranks, tmp_path: Path, saving: int, ours: bool) -> None:
    save_full(f"file://{tmp_path}/step-1", 1)
    for failed in two_ranks.run(scenarios.save_beside_a_load, f"file://{tmp_path}", saving, ours):
        assert [name for name, _ in failed] == ["RanksDisagreeError"]
        assert "rank=1" in failed[0][1]
    assert files(tmp_path, "x/**/*") == []


@pytest.mark.parametrize("stock", [False, True])
def test_refuses_a_load_of_two_commits_at_one_url(two_ranks: Ranks, tmp_path: Path, stock: bool) -> None:
    for failed, left in two_ranks.run(scenarios.load_while_another_job_saves, f"{tmp_path}/latest", stock):
        assert [name for name, _ in failed] == ["RanksDisagreeError"]
        assert "latest' (commit " in failed[0][1]
        assert left == [0, 0, 0]


def test_accepts_one_commit_that_ranks_read_from_its_index_and_from_its_metadata(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    more = {f"t{number}": torch.zeros(1) for number in range(INDEX_ITEMS)}
    state = {"w": torch.ones(3), "more": more}
    dcp.save(state, checkpoint_id=f"{tmp_path}/large", storage_writer=BucketWriter(progress=False), no_dist=True)
    found = two_ranks.run(scenarios.load_with_the_index_on_one_rank, f"{tmp_path}/large")
    assert found == [([], [1, 1, 1], "Entries"), ([], [1, 1, 1], "dict")]


class CannotPlan(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        raise ValueError("no plan today")


def test_saves_without_a_checkpoint_id_to_the_constructors_url(tmp_path: Path) -> None:
    writer = BucketWriter(f"file://{tmp_path}/own", progress=False)
    assert writer.checkpoint_id == f"file://{tmp_path}/own"
    other = f"file://{tmp_path}/other"
    state = {"w": torch.ones(3)}
    for planner in (CannotPlan(), DefaultSavePlanner()):
        with contextlib.suppress(dcp.CheckpointException):
            dcp.save(state, checkpoint_id=other, storage_writer=writer, planner=planner, no_dist=True)
        assert writer.checkpoint_id == other
        dcp.save(state, storage_writer=writer, no_dist=True)
        assert files(tmp_path, ".metadata")[-1] == "own/.metadata"
        assert writer.checkpoint_id == f"file://{tmp_path}/own"
        (tmp_path / "own/.metadata").unlink()


# -- the comparison ---------------------------------------------------------------------------------------------------

places = st.tuples(
    st.sampled_from(["s3://bucket/run", "s3a://bucket/run/", "s3://bucket/run2", "s3://other/run", "file:///tmp/run"]),
    st.sampled_from([None, "http://127.0.0.1:1", "http://127.0.0.1:2"]),
    st.integers(1, 3),
    st.integers(0, 1),
)


def stated(place: tuple[str, str | None, int, int], rank: int) -> Any:
    url, endpoint, world, option = place
    options = {} if url.startswith("file") else {"endpoint_url": endpoint, "key": "k", "secret": "s"}
    made = make_statement(*open_store(url, storage_options=options), url, options=option, world=world, rank=rank)
    return pickle.loads(pickle.dumps(made))


def same_place(place: tuple[str, str | None, int, int]) -> Any:
    url, endpoint, world, option = place
    if url.startswith("file"):
        return url, world, option
    return url.replace("s3a:", "s3:").rstrip("/"), endpoint, world, option


@given(st.lists(places | st.none(), min_size=1, max_size=5))
def test_refuses_statements_exactly_where_two_ranks_say_different_things(drawn: list[Any]) -> None:
    known = {rank: same_place(each) for rank, each in enumerate(drawn) if each is not None}
    statements = [None if each is None else stated(each, rank) for rank, each in enumerate(drawn)]
    if len(set(known.values())) <= 1:
        agree(statements, "s3://bucket/run")
        return
    with pytest.raises(RanksDisagreeError) as caught:
        agree(statements, "s3://bucket/run")
    # The rank that is blamed says something else than some other one, and every rank that spoke is named.
    assert caught.value.rank in known
    for rank in known:
        assert str(rank) in caught.value.message
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_keeps_a_statement_small_and_quotes_no_secret() -> None:
    url = "memory://" + "long/" * 60 + "run?token=very-secret"
    packed = pickle.dumps(make_statement(*open_store(url), url, options=(), world=8, rank=7))
    assert len(packed) < 150
    assert b"secret" not in packed
    many = [
        make_statement(*open_store(f"memory://run-{rank}"), f"run-{rank}", options=(), world=8, rank=rank)
        for rank in range(500)
    ]
    with pytest.raises(RanksDisagreeError) as caught:
        agree(many, "memory://run-0")
    assert len(str(caught.value)) < 600
