"""Comparison of a save with the one before where something is unusual: the save goes on, and nothing false is told."""

from __future__ import annotations

import logging
import pickle
import random
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint import BucketpointError, BucketWriter, async_save
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.dcp.planning.results import Results
from bucketpoint.dcp.saving.comparison import RankTally, compare
from bucketpoint.dcp.saving.earlier_saves import Announcement, EarlierSaves, Written
from dcp.saving.copied_saves import Run

State = dict[str, Any]


def changes_of(run: Run, step: int) -> dict[str, Any] | None:
    changes = open_checkpoint(run.url(step)).record.changes
    return cast("dict[str, Any] | None", changes)


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "although training went on" in message]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(str(tmp_path / "run"))


def test_a_part_with_a_name_of_any_length_leaves_a_record_that_can_be_read(run: Run) -> None:
    writer = run.writer()
    for step in (1, 2):
        run.save({"x" * 3000: {"model": {"w": torch.full((10,), float(step))}}}, step, writer)
    found = changes_of(run, 2)
    assert found is not None
    (name,) = found["parts"]
    assert len(name) == 256


def test_a_url_too_long_for_the_record_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    told = RankTally("5a5e01", {("model", "model"): (1, 4, 1, 4, 0, 0)}, rates=False, moving_rates=False)
    tallies = Results([], SavePlan([]), tally=told.fields)
    assert compare("5a5e01", [tallies], "s3://bucket/run/1") is not None
    assert compare("5a5e01", [tallies], "s3://bucket/" + "x" * 5000) is None
    assert "is not recorded" in caplog.text


@pytest.mark.parametrize("lr", [10**400, float("nan"), True, torch.tensor(0.1), torch.tensor([0.1, 0.2])], ids=repr)
def test_a_learning_rate_may_be_any_number(run: Run, lr: Any) -> None:
    writer = run.writer()
    for step in (1, 2):
        run.save({"model": {"w": torch.zeros(9)}, "optim": {"param_groups": [{"lr": lr}]}, "step": step}, step, writer)
    assert changes_of(run, 2) is not None


class OddPlanner(DefaultSavePlanner):
    """A planner whose lookups fail once the bytes are stored."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn.endswith(".lr") and any("tally" in name for name in _callers()):
            raise RuntimeError("no such object any more")
        return super().lookup_object(index)


def _callers() -> list[str]:
    import inspect

    return [frame.function for frame in inspect.stack()]


def test_a_planner_that_fails_in_the_comparison_does_not_fail_the_save(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bucketpoint")
    writer = run.writer()
    for step in (1, 2):
        state = {"model": {"w": torch.zeros(9)}, "optim": {"param_groups": [{"lr": 0.1}]}, "step": step}
        dcp.save(state, checkpoint_id=run.url(step), storage_writer=writer, planner=OddPlanner(), no_dist=True)
    run.assert_holds(2, state)
    assert changes_of(run, 2) is None
    assert "were not compared with the last save" in caplog.text


def full(step: int) -> State:
    moments = {"exp_avg": torch.full((9,), float(step)), "step": torch.tensor(step)}
    return {
        "model": {"w": torch.full((9,), float(step))},
        "ema": {"model": {"w": torch.ones(9)}},
        "optim": {"w": moments},
    }


def weights(step: int) -> State:
    return {"model": full(step)["model"]}


@pytest.mark.parametrize("kinds", ["FWFWFWFW", "WFFFF", "FFWFFWFF", "WWFFWWFF"])
def test_saves_of_weights_in_between_raise_no_false_alarm(
    run: Run, kinds: str, caplog: pytest.LogCaptureFixture
) -> None:
    # The weights of `ema` are frozen. A save of weights alone holds neither these nor the optimizer.
    writer = run.writer()
    for step, kind in enumerate(kinds):
        run.save(full(step) if kind == "F" else weights(step), step, writer)
    assert alarms(caplog) == []


def test_moments_that_stop_are_told_also_after_saves_of_weights(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    writer = run.writer()
    for step, kind in enumerate("FFWF"):
        run.save(full(step) if kind == "F" else weights(step), step, writer)
    assert alarms(caplog) == []
    run.save({**full(4), "optim": full(3)["optim"]}, 4, writer)
    (alarm,) = alarms(caplog)
    assert "'optim moments'" in alarm


def test_without_a_comparison_a_rank_sends_what_older_versions_read() -> None:
    plan = SavePlan([])
    told = RankTally("5a5e01", {}, rates=False, moving_rates=False).fields
    without, compared = (pickle.dumps(Results([], plan, tally=tally, report=b"r")) for tally in (None, told))
    assert getattr(pickle.loads(without), "tally", None) is None
    assert pickle.loads(compared).tally == told
    # The function that rebuilds the results is given no argument that older versions do not have.
    figured = Results([], plan, report=b"r").__reduce_ex__(4)
    assert len(figured[1]) < len(Results([], plan, tally=()).__reduce_ex__(4)[1])
    assert figured[2] == {"report": b"r"}


def test_a_save_with_a_plan_that_dcp_has_kept_is_not_compared_with_an_old_one(run: Run) -> None:
    # DCP's planner sends no plan if it is the same again, and uses the kept one, with the announcement of that save.
    writer, caching = run.writer(), DefaultSavePlanner(enable_plan_caching=True)
    for step, (planner, value) in enumerate([(None, 0.0), (caching, 1.0), (caching, 0.0), (None, 0.0)]):
        state = {"model": {"w": torch.full((1 << 19,), value)}, "step": step}
        dcp.save(state, checkpoint_id=run.url(step), storage_writer=writer, planner=planner, no_dist=True)
        run.assert_holds(step, state)
    changed = [
        None if told is None else told["parts"]["model"]["changed_items"]
        for told in [changes_of(run, step) for step in range(4)]
    ]
    assert changed == [None, 1, None, 0]


def test_a_save_keeps_its_id_when_a_later_one_comes_with_the_same(run: Run) -> None:
    saves, said = EarlierSaves(), Announcement("a")
    for step in range(1, 5):
        saves.keep(said, run.url(step), Written())
    found = saves.compared_with(run.url(5), Announcement("b", "a"), None)
    assert found is not None
    assert found.url == run.url(1)


@pytest.mark.parametrize("stock", [False, True], ids=["SavePlanner", "DefaultSavePlanner"])
def test_a_handle_knows_the_changes_with_any_planner_and_the_metadata_stays_plain(run: Run, stock: bool) -> None:
    writer, planner = run.writer(), DefaultSavePlanner() if stock else None
    for step in range(3):
        state = {"model": {"w": torch.full((1 << 19,), 1.0), "b": torch.full((9,), float(step))}}
        handle = async_save(state, checkpoint_id=run.url(step), storage_writer=writer, planner=planner, no_dist=True)
        handle.result()
    assert handle.changes is not None
    assert (handle.changes.since, handle.changes.changed_items) == (run.url(1), 1)
    assert handle.changes.copied_nbytes == pytest.approx(2 << 20, rel=0.01)
    assert "2.1 MB copied by the store" in str(handle.changes)
    store, prefix = run.store(2)
    assert b"PartChanges" not in store.get(f"{prefix}/.metadata" if prefix else ".metadata")[0]


@pytest.mark.parametrize("kept", [DefaultSavePlanner(enable_plan_caching=True), None], ids=["kept plans", "no plans"])
def test_no_metadata_holds_the_changes_of_an_earlier_save(run: Run, kept: Any) -> None:
    writer = run.writer()
    for step in range(3):
        state = {"model": {"w": torch.full((9,), float(step))}}
        dcp.save(state, checkpoint_id=run.url(step), storage_writer=writer, planner=kept, no_dist=True)
        store, prefix = run.store(step)
        assert b"PartChanges" not in store.get(f"{prefix}/.metadata" if prefix else ".metadata")[0]


def test_a_scheduler_alone_tells_that_the_learning_rate_is_zero(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    writer = run.writer()
    for step, rate in enumerate((0.0, 0.0, 0.0, 0.1)):
        state = {
            "model": {"w": torch.ones(9)},
            "optim": {"w": {"exp_avg": torch.full((9,), float(step))}},
            "lr_scheduler": {"_last_lr": [rate, 0.0], "last_epoch": step},
        }
        run.save(state, step, writer)
        assert len(alarms(caplog)) == (step == 3)


def test_a_writer_for_a_checkpoint_process_names_the_callable_that_cannot_be_sent() -> None:
    with pytest.raises(BucketpointError, match=r"progress cannot be sent.*function of a module"):
        pickle.dumps(BucketWriter(progress=lambda _: None))
    writer = pickle.loads(pickle.dumps(BucketWriter(progress=print)))
    assert writer.progress is print


def test_saves_of_one_writer_on_several_threads_and_in_two_runs_hold_what_was_saved(tmp_path: Path) -> None:
    runs = [Run(str(tmp_path / name)) for name in ("one", "two")]
    writer = runs[0].writer()
    failed: list[BaseException] = []

    def save(thread: int) -> None:
        draw = random.Random(thread)
        try:
            for number in range(6):
                weights = {f"layer{layer}": torch.full((300_000,), float(draw.randrange(3))) for layer in range(3)}
                state = {"model": weights, "step": number}
                run, step = runs[number % 2 if thread else 0], 100 * thread + number
                run.save(state, step, writer)
                run.assert_holds(step, state)
        except (BucketpointError, CheckpointException, AssertionError) as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
