"""Saving and loading on several ranks, real processes over gloo, on real S3 servers."""

from __future__ import annotations

import pytest

from dcp import scenarios
from dcp.ranks import Ranks
from servers import S3Server

pytestmark = pytest.mark.contract


@pytest.fixture
def root(bucket: str) -> str:
    return f"s3://{bucket}/run"


def keys_of(s3: S3Server, root: str) -> list[str]:
    bucket = root.split("/")[2]
    return [entry["Key"] for entry in s3.client().list_objects_v2(Bucket=bucket).get("Contents", [])]


def test_any_world_size_loads_what_any_other_saved(
    four_ranks: Ranks, two_ranks: Ranks, s3: S3Server, root: str
) -> None:
    four_ranks.run(scenarios.save, f"{root}/four", s3.options)
    four_ranks.run(scenarios.load, f"{root}/four", s3.options)
    two_ranks.run(scenarios.load, f"{root}/four", s3.options)
    scenarios.load_one_process(f"{root}/four", s3.options)
    two_ranks.run(scenarios.save, f"{root}/two", s3.options)
    four_ranks.run(scenarios.load, f"{root}/two", s3.options)


def test_cached_plans_are_served(two_ranks: Ranks, s3: S3Server, root: str) -> None:
    two_ranks.run(scenarios.save_with_cached_plans, root, s3.options)


@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_three_asynchronous_saves_in_a_row(two_ranks: Ranks, s3: S3Server, root: str, kind: str) -> None:
    two_ranks.run(scenarios.save_async, root, s3.options, kind)


def test_a_failing_rank_fails_every_rank_and_commits_nothing(four_ranks: Ranks, s3: S3Server, root: str) -> None:
    answers = four_ranks.run(scenarios.one_rank_fails, f"{root}/failed", s3.options)
    for errors in answers:
        assert any("this disk is on fire" in text and "rank=1" in text for text in errors)
    assert not [key for key in keys_of(s3, root) if key.endswith(".metadata")]


def test_a_save_without_collectives_is_read_by_as_many_ranks(
    two_ranks: Ranks, four_ranks: Ranks, s3: S3Server, root: str
) -> None:
    two_ranks.run(scenarios.save_without_collectives, f"{root}/each", s3.options)
    names = {key.rsplit("/", 1)[-1] for key in keys_of(s3, root)}
    assert {"__0.metadata", "__1.metadata"} <= names
    answers = four_ranks.run(scenarios.load_fails_everywhere, f"{root}/each", s3.options)
    assert all("MismatchError" in kinds for kinds in answers)


def test_a_subgroup_saves_and_loads(four_ranks: Ranks, s3: S3Server, root: str) -> None:
    four_ranks.run(scenarios.save_in_a_subgroup, f"{root}/sub", s3.options)


def test_sharded_tensors_are_staged_saved_and_loaded(two_ranks: Ranks, s3: S3Server, root: str) -> None:
    two_ranks.run(scenarios.sharded_tensor_round_trip, f"{root}/sharded", s3.options)


def test_loading_nothing_raises_the_reason_on_every_rank(two_ranks: Ranks, s3: S3Server, root: str) -> None:
    answers = two_ranks.run(scenarios.load_fails_everywhere, f"{root}/nothing", s3.options)
    assert answers == [["CheckpointNotFoundError"] * 2] * 2
