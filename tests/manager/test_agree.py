"""Ranks of a manager of which one fails, is late, or never comes; and errors of saves, which are delivered once."""

from __future__ import annotations

import pytest

from bucketpoint.errors import BucketpointError
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Save
from dcp.ranks import Ranks
from manager import agree_scenarios as scenarios
from manager.manager_scenarios import policy, state

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(("bad", "beside"), [(0, False), (1, False), (1, True)])
def test_raises_on_all_ranks_where_one_cannot_make_or_copy_its_state(
    ranks: Ranks, root: str, bad: int, beside: bool
) -> None:
    for outcomes, committed in ranks.run(scenarios.save_where_one_rank_fails, root, bad, beside):
        assert committed == ["step-1", "step-5"]
        assert outcomes[0] == outcomes[4] == "done"
        assert outcomes[1] == f"BucketpointError: Rank {bad} failed: RuntimeError: no state"
        assert outcomes[2] == "StagingError: Copying the state to host memory failed: no room"
        assert outcomes[3].startswith("StagingError: ")


@pytest.mark.parametrize("beside", [False, True])
def test_tells_the_handles_of_other_ranks_of_a_copy_that_failed(ranks: Ranks, root: str, beside: bool) -> None:
    failure = "StagingError: Copying the state to host memory failed: no room"
    assert ranks.run(scenarios.async_save_where_one_rank_fails, root, beside) == [(failure, ["step-2"])] * 2


@pytest.mark.parametrize("bad", [0, 1])
def test_refuses_a_policy_that_one_rank_cannot_read_on_all_ranks(ranks: Ranks, root: str, bad: int) -> None:
    outcomes = ranks.run(scenarios.construct_without_a_policy, root, bad)
    assert [steps for _, steps in outcomes] == [[], []]
    assert all(outcome.startswith("PolicyError: ") for outcome, _ in outcomes)


def test_names_the_ranks_that_never_came_to_a_save(ranks: Ranks, root: str) -> None:
    (first, lines, committed), (second, _, _) = ranks.run(scenarios.save_on_one_rank, root)
    assert first == "BucketpointError: save(1) was given up after 2 s: rank 1 did not begin it"
    assert lines[0] == "save(1) has waited 0 s for rank 1"
    assert second == first
    assert committed == ["step-2"]


def test_refuses_different_calls_on_the_ranks(ranks: Ranks, root: str) -> None:
    refused = (
        "RanksDisagreeError: The ranks make different calls at the same time: rank 0: save(1); rank 1: should_save()"
    )
    assert ranks.run(scenarios.make_different_calls, root) == [(refused, ["step-2"])] * 2


@pytest.mark.parametrize(
    ("how", "first", "last", "steps"),
    [
        ("state", "Rank 1 failed: KeyboardInterrupt: ", "interrupted", (2, 3)),
        ("copies", "Rank 1 failed: KeyboardInterrupt: ", "interrupted", (2, 3)),
        ("begins", "save(1) failed: KeyboardInterrupt: ", "interrupted", (2, 3)),
        ("has begun", "done", "interrupted", (1, 2, 3)),
        ("is late", "rank 1 did not begin it", "rank 1 did not begin it", (1, 2, 3)),
    ],
)
def test_saves_on_together_after_one_rank_was_lost_as_a_save_began(
    ranks: Ranks, root: str, how: str, first: str, last: str, steps: tuple[int, ...]
) -> None:
    outcomes = ranks.run(scenarios.lose_a_rank_as_a_save_begins, root, how)
    for expected, (said, later, committed) in zip((first, last), outcomes, strict=True):
        assert expected in said
        assert later == (["done", "done"], len(steps), 3 - len(steps))
        assert committed == [f"step-{step}" for step in steps]


@pytest.mark.parametrize(("where", "kind"), [("plan", "KeyboardInterrupt"), ("state", "SystemExit")])
def test_raises_what_interrupts_a_load_on_that_rank_and_names_it_on_the_others(
    ranks: Ranks, root: str, where: str, kind: str
) -> None:
    (other, _), (interrupted, committed) = ranks.run(scenarios.interrupt_a_load, root, where)
    assert (interrupted, committed) == (kind, ["step-1", "step-2"])
    assert kind in other
    assert "rank=1" in other


def test_goes_on_together_or_raises_on_all_ranks(ranks: Ranks, root: str) -> None:
    assert ranks.run(scenarios.fail_in_together, root) == [["BucketpointError: of rank 1", rank] for rank in range(2)]


@pytest.mark.parametrize("how", ["result", "exception", "wait"])
def test_makes_the_next_save_once_a_rank_has_received_the_error(ranks: Ranks, root: str, how: str) -> None:
    (first, committed), (second, _) = ranks.run(scenarios.receive_an_error, root, how)
    assert first == ["done" if how == "exception" else "BucketpointError", "done", "done"]
    assert second == ["done", "done"]
    assert committed == ["step-2", "step-3"]


def test_raises_an_error_once_that_nobody_has_received(ranks: Ranks, root: str) -> None:
    (first, committed), (second, _) = ranks.run(scenarios.receive_an_error, root, "nobody")
    assert first == ["done", "BucketpointError", "done"]
    assert second == ["BucketpointError", "done"]
    assert committed == ["step-3"]


def test_raises_no_error_in_close_that_the_program_has_received(root: str) -> None:
    manager = CheckpointManager(root, policy=policy())
    with scenarios.full_disk(True):
        handle = manager.save(1, state(1))
        assert handle is not None
        with pytest.raises(BucketpointError, match="disk is full"):
            handle.result()
    manager.close()


def test_raises_the_error_that_ends_training_and_logs_that_of_the_save(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        scenarios.full_disk(True),
        CheckpointManager(root, policy=policy()) as manager,
    ):
        handle = manager.save(1, state(1))
        assert handle is not None
        handle.wait()
        1 / 0  # noqa: B018 (the error of a training loop)
    assert "the last save failed: " in caplog.text


def test_goes_on_after_failed_saves_where_the_policy_warns(ranks: Ranks, root: str) -> None:
    (made, counts, lines, committed), other = ranks.run(scenarios.go_on_after_failures, root)
    assert made == other[0] == [True, True, False, True]
    assert counts == other[1] == (2, 2)
    assert committed == ["step-1", "step-4"]
    warned = [line for line in lines if "training continues" in line]
    assert [line.partition(" was")[0] for line in warned] == ["step 2", "step 3"]
    assert "the save before it was committed, and the newest checkpoint, of step 1, is 0 min old" in warned[0]
    assert "2 saves have failed in a row" in warned[1]


def test_raises_a_disagreement_of_the_ranks_even_where_the_policy_warns(ranks: Ranks, root: str) -> None:
    assert ranks.run(scenarios.disagree_under_warn, root) == ["raised"] * 2


def test_keeps_the_failure_of_the_last_save_under_warn_for_the_exit_status(root: str) -> None:
    with scenarios.full_disk(True), CheckpointManager(root, policy=policy(save=Save(on_failure="warn"))) as manager:
        handle = manager.save(1, state(1))
        assert handle is not None
    assert handle._at_end is not None
    assert "disk is full" in str(handle._at_end.failure)
    # The exit status of this test's own process is another matter.
    handle.exception()
    assert handle._at_end.failure is None
