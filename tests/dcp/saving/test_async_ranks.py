"""Asynchronous saves on real ranks: in order however they overlap, and through DCP's checkpoint process."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from bucketpoint import BucketpointError, BucketWriter, Stager, StagingOptions
from dcp.ranks import Ranks
from dcp.saving import async_scenarios as scenarios

pytestmark = pytest.mark.contract

POLICIES = {
    "wait": None,
    "double_buffer": StagingOptions(when_busy="double_buffer"),
    "beside training": StagingOptions(use_async_staging=True),
    "double_buffer beside training": StagingOptions(use_async_staging=True, when_busy="double_buffer"),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_holds_in_each_save_of_one_writer_what_it_was_given(two_ranks: Ranks, tmp_path: Any, policy: str) -> None:
    two_ranks.run(scenarios.saves_overlap, str(tmp_path), POLICIES[policy])


@pytest.mark.parametrize(
    ("scenario", "policy"),
    [
        (partial(scenarios.saves_overlap, states=2), "wait"),
        (partial(scenarios.saves_overlap, states=2), "beside training"),
        (scenarios.a_foreign_writer_is_put_in_order, "wait"),
        (scenarios.a_foreign_writer_is_put_in_order, "double_buffer"),
        (scenarios.a_writer_for_each_step, None),
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


def test_sends_a_staged_state_in_the_memory_where_it_lies_and_which_the_stager_keeps() -> None:
    with Stager() as stager:
        staged: Any = stager.stage({"a": torch.ones(1000), "b": {"c": torch.ones(10)}})
        before = staged["a"].data_ptr(), staged["b"]["c"].data_ptr()
        # As DCP sends it to its checkpoint process.
        sent = ForkingPickler.dumps(staged)
        assert (staged["a"].data_ptr(), staged["b"]["c"].data_ptr()) == before
        assert staged["a"].is_shared()
        assert len(sent) < 4000
        ForkingPickler.loads(sent)["b"]["c"].fill_(7)
        assert staged["b"]["c"].unique().tolist() == [7]
        assert stager.staged_bytes > 4000
        del staged


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a thread's own on Linux only")
def test_uploads_in_no_helper_and_by_nice_threads_in_a_checkpoint_process(one_rank: Ranks, tmp_path: Any) -> None:
    assert one_rank.run(scenarios.uploads_by_a_checkpoint_process, str(tmp_path)) == [([None, None], 19)]


@pytest.mark.parametrize("where", ["plan", "upload"])
@pytest.mark.parametrize("executor", ["THREAD", "PROCESS"])
def test_saves_three_times_before_and_after_two_that_fail(
    two_ranks: Ranks, tmp_path: Any, executor: str, where: str
) -> None:
    two_ranks.run(scenarios.three_saves_before_and_after_failures, str(tmp_path), executor, where)


def test_names_a_killed_checkpoint_process_in_its_save_and_in_the_next(tmp_path: Any) -> None:
    # Its rank saves for no other test.
    with Ranks(1) as ranks:
        ranks.run(scenarios.a_killed_checkpoint_process_is_named, str(tmp_path))


def test_names_the_callable_of_a_writer_that_cannot_be_sent() -> None:
    with pytest.raises(BucketpointError, match=r"progress cannot be sent.*function of a module"):
        pickle.dumps(BucketWriter(progress=lambda _: None))
    assert pickle.loads(pickle.dumps(BucketWriter(progress=print))).progress is print
