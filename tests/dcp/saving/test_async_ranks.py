"""Asynchronous saves on real ranks: in order however they overlap, and through DCP's checkpoint process."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bucketpoint import BucketpointError, BucketWriter, StagingOptions
from dcp.ranks import Ranks
from dcp.saving import async_scenarios as scenarios

pytestmark = pytest.mark.contract

POLICIES = {
    "wait": None,
    "double_buffer": StagingOptions(when_busy="double_buffer"),
    "beside training": StagingOptions(use_async_staging=True),
    "double_buffer beside training": StagingOptions(use_async_staging=True, when_busy="double_buffer"),
}


@pytest.fixture
def rank_to_break() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.mark.parametrize("policy", POLICIES)
def test_holds_in_each_save_of_one_writer_what_it_was_given(two_ranks: Ranks, tmp_path: Any, policy: str) -> None:
    two_ranks.run(scenarios.one_writer_overlaps, str(tmp_path), POLICIES[policy])


@pytest.mark.parametrize(
    ("scenario", "policy"),
    [
        (scenarios.two_writers_overlap, "wait"),
        (scenarios.two_writers_overlap, "beside training"),
        (scenarios.a_foreign_writer_is_put_in_order, "wait"),
        (scenarios.a_foreign_writer_is_put_in_order, "double_buffer"),
        (scenarios.a_writer_for_each_step, None),
        (scenarios.plans_are_made_once_for_a_writer, None),
        (scenarios.a_save_and_a_load_wait_for_the_asynchronous_save, None),
    ],
)
def test_orders_saves_and_loads_that_overlap(
    two_ranks: Ranks, tmp_path: Any, scenario: Callable[..., None], policy: str | None
) -> None:
    two_ranks.run(scenario, str(tmp_path), *([POLICIES[policy]] if policy else []))


# -- through a checkpoint process -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.handles_of_a_checkpoint_process,
        scenarios.dtensors_cross_too,
        scenarios.what_cannot_be_pickled_is_named,
    ],
)
def test_saves_through_a_checkpoint_process(one_rank: Ranks, tmp_path: Any, scenario: Callable[..., None]) -> None:
    one_rank.run(scenario, str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_keeps_staged_memory_of_the_checkpoint_process_between_saves(one_rank: Ranks, tmp_path: Any) -> None:
    saves = one_rank.run(scenarios.shared_memory_crosses_without_a_copy, str(tmp_path))[0]
    for here, there in saves:
        assert here == there
    files = {(device, inode) for here, _ in saves for device, inode, _ in here.values()}
    assert len(files) == 1
    assert all(inode for _, inode in files)


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a thread's own on Linux only")
def test_uploads_in_no_helper_and_by_nice_threads_in_a_checkpoint_process(one_rank: Ranks, tmp_path: Any) -> None:
    assert one_rank.run(scenarios.uploads_by_a_checkpoint_process, str(tmp_path)) == [([None, None], 19)]


@pytest.mark.parametrize("where", ["plan", "upload"])
@pytest.mark.parametrize("executor", ["THREAD", "PROCESS"])
def test_saves_three_times_before_and_after_two_that_fail(
    two_ranks: Ranks, tmp_path: Any, executor: str, where: str
) -> None:
    two_ranks.run(scenarios.three_saves_before_and_after_failures, str(tmp_path), executor, where)


def test_names_a_killed_checkpoint_process_in_its_save_and_in_the_next(rank_to_break: Ranks, tmp_path: Any) -> None:
    rank_to_break.run(scenarios.a_killed_checkpoint_process_is_named, str(tmp_path))


def test_names_the_callable_of_a_writer_that_cannot_be_sent() -> None:
    with pytest.raises(BucketpointError, match=r"progress cannot be sent.*function of a module"):
        pickle.dumps(BucketWriter(progress=lambda _: None))
    assert pickle.loads(pickle.dumps(BucketWriter(progress=print))).progress is print
