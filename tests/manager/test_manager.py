"""`CheckpointManager` on real ranks and a real store: saving, restoring, stopping, pruning."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketReader, LoadPlanner, TransferOptions, location
from bucketpoint.catalog import catalog, save_log
from bucketpoint.catalog.deletion.fence import MIN_SWEEP_AGE_S
from bucketpoint.catalog.deletion.prune import prune
from bucketpoint.catalog.deletion.sweep import sweep
from bucketpoint.catalog.records import process_name
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.dcp import session
from bucketpoint.errors import (
    BucketpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    MismatchError,
)
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import InFlight, MaxDelete, Prune, Save, SaveEvery
from bucketpoint.stores.local import LocalStore
from catalog.memory import order
from dcp.ranks import Ranks
from dcp.saving.async_scenarios import GatedFileSystem
from kit.damage import flip_all
from manager import manager_scenarios as scenarios
from manager.agree_scenarios import committed
from manager.manager_scenarios import BEST, policy, saved, state, value_of
from services import Service
from transfer.helper.orders import has_ended
from transfer.wrappers import CountingStore

pytestmark = pytest.mark.contract


def damage(root: str, step: int) -> None:
    flip_all(Path(root, f"step-{step}", "data"))


def save(root: str, *steps: int, **arguments: Any) -> None:
    with CheckpointManager(root, policy=policy()) as manager:
        for step in steps:
            manager.save(step, state(step), **arguments)


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_restores_what_ranks_save_and_lists_on_the_coordinator_alone(ranks: Ranks, root: str) -> None:
    answers = ranks.run(scenarios.save_and_restore, root)
    assert [answer[:3] for answer in answers] == [(30, 30.0, [20, 30])] * 2
    assert [answer[3] for answer in answers] == [1, 0]


@pytest.mark.filterwarnings("error:torch.distributed is disabled")
def test_saves_and_restores_in_one_process_without_a_warning_of_dcp(tmp_path: Path) -> None:
    save(str(tmp_path), 1)
    with CheckpointManager(str(tmp_path), policy=policy()) as manager:
        assert manager.restore(state(0)).step == 1


def test_raises_on_every_rank_for_a_damaged_step_that_was_asked_for_by_number(ranks: Ranks, root: str) -> None:
    ranks.run(scenarios.save_steps, root, [10, 20])
    damage(root, 20)
    for kind, _ in ranks.run(scenarios.restore_past_damage, root, 20):
        assert kind == "CorruptDataError"


def test_counts_minutes_on_the_coordinator_alone(ranks: Ranks, root: str) -> None:
    assert ranks.run(scenarios.minutes_are_the_coordinators, root) == [[False, True]] * 2


def test_raises_on_every_rank_if_policies_differ(ranks: Ranks, root: str) -> None:
    assert ranks.run(scenarios.policies_differ, root) == [("RanksDisagreeError", True)] * 2


# -- saving -----------------------------------------------------------------------------------------------------------


def test_skips_refuses_or_waits_during_another_save_as_the_policy_says(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bucketpoint")
    for when_busy, expected in (("skip", None), ("error", BucketpointError), ("wait", BucketpointError)):
        gated = GatedFileSystem()
        how = Save(in_flight=InFlight(when_busy=when_busy, timeout=timedelta(seconds=1)))
        with CheckpointManager(f"{root}/{when_busy}", policy=policy(save=how), fs=gated) as manager:
            manager.save(1, state(1))
            # The intent is written too, behind the same gate.
            assert gated.arrived.wait(240)
            if expected is None:
                assert manager.save(2, state(2)) is None
                assert manager.skipped == 1
                assert "step 2 is not saved, because the save of step 1 is still running" in caplog.text
            else:
                with pytest.raises(expected, match="the save of step 1 is still running"):
                    manager.save(2, state(2))
            gated.gate.set()
            manager.wait()
            assert manager.save(3, state(3)) is not None
        assert committed(f"{root}/{when_busy}") == ["step-1", "step-3"]


@pytest.mark.parametrize("when_busy", ["skip", "error"])
@pytest.mark.parametrize("last", [False, True], ids=["after a signal", "last step"])
def test_waits_for_the_save_before_one_by_a_signal_or_the_end_of_training(
    root: str, when_busy: Literal["skip", "error"], last: bool
) -> None:
    gated = GatedFileSystem()
    how = Save(on=("sigterm", "last_step"), in_flight=InFlight(when_busy=when_busy))
    with CheckpointManager(root, policy=policy(save=how), fs=gated) as manager:
        manager.save(1, state(1))
        assert gated.arrived.wait(240)
        if not last:
            os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_save(2, last=last)
        threading.Timer(0.2, gated.gate.set).start()
        assert manager.save(2, state(2)) is not None
    assert committed(root) == ["step-1", "step-2"]


def test_replaces_a_committed_step_only_if_told_to(root: str) -> None:
    save(root, 5)
    with CheckpointManager(root, policy=policy()) as manager:
        with pytest.raises(CheckpointExistsError, match="Checkpoint already exists at this URL: step 5 is committed"):
            manager.save(5, state(6))
        manager.save(5, state(7), overwrite=True)
        manager.wait()
        target = state(0)
        manager.restore(target)
        assert value_of({**target, "step": 7}) == 7.0


def test_says_of_a_save_behind_newer_steps_what_becomes_of_them(root: str) -> None:
    save(root, 10, 20, 30)
    with CheckpointManager(root, policy=policy()) as manager:
        with pytest.raises(BucketpointError, match="2 checkpoints have higher steps than 15; the highest is step 30"):
            manager.save(15, state(15))
        saved(manager, 15, newer="keep")
        assert manager.steps() == [10, 15, 20, 30]
        saved(manager, 17, newer="discard")
        # Once said is enough: they are on their way out.
        saved(manager, 18)
    with CheckpointManager(root, policy=policy()) as manager:
        assert manager.steps() == [10, 15, 17, 18]


def test_names_the_job_that_committed_and_offers_a_rollback_only_after_a_warning(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusals() -> list[str]:
        texts = []
        with CheckpointManager(root, policy=policy()) as manager:
            for step in (20, 30):
                with pytest.raises(BucketpointError) as caught:
                    manager.save(step, state(step))
                texts.append(str(caught.value))
        return texts

    with monkeypatch.context() as patched:
        patched.setattr(save_log, "process_name", lambda: "node-7-4321")
        save(root, 30)
    for text in refusals():
        assert re.search(r"committed,? at 2\d{3}-\d\d-\d\d \d\d:\d\d:\d\d UTC by node-7-4321", text)
        assert text.index("give this job a run with another URL") < text.index("rollback=True")
    # Records of older versions have no host.
    monkeypatch.setattr(save_log, "process_name", lambda: None)
    save(root, 40)
    assert all("give this job a run with another URL" in text for text in refusals()[:1])
    monkeypatch.undo()
    save(root, 50)
    first, _ = refusals()
    assert process_name() in first
    assert "rollback=True" in first
    assert "another URL" not in first


def test_decides_on_the_best_by_metrics_of_the_save_and_later_ones(root: str) -> None:
    with CheckpointManager(root, policy=BEST) as manager:
        manager.save(1, state(1), metrics={"eval/loss": 0.5})
        manager.save(2, state(2), metrics={"eval/loss": 0.9})
        saved(manager, 3)
        target = state(0)
        assert manager.restore(target, "best").step == 1  # type: ignore[union-attr]
        manager.report(2, {"eval/loss": 0.1})
        manager.report(3, {"eval/loss": float("nan")})
        assert manager.restore(target, "best").step == 2  # type: ignore[union-attr]
        assert value_of(target) == 2.0
        with pytest.raises(BucketpointError, match="The policy has no `best` rule for accuracy"):
            manager.restore(target, "best", metric="accuracy")


# -- restoring --------------------------------------------------------------------------------------------------------


def test_starts_from_scratch_in_a_run_without_a_trace(root: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bucketpoint")
    with CheckpointManager(root, policy=policy()) as manager:
        assert manager.restore(state(0)) is None
        assert f"training begins from scratch: {root} has no checkpoint that can be loaded" in caplog.text
        with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 7.*The run has no checkpoint"):
            manager.restore(state(0), 7)


def test_passes_over_damaged_checkpoints_loudly_until_none_is_left(root: str, caplog: pytest.LogCaptureFixture) -> None:
    save(root, 10, 20, 30)
    damage(root, 30)
    Path(root, "step-20", ".metadata").write_bytes(b"\x80\x04nonsense")
    target = state(0)
    with CheckpointManager(root, policy=policy()) as manager:
        restored = manager.restore(target)
        assert restored is not None
        assert (restored.step, value_of(target)) == (10, 10.0)
        assert [step for step, _ in restored.passed] == [30, 20]
        assert "step 30 cannot be loaded" in caplog.text
        damage(root, 10)
        with pytest.raises(BucketpointError, match="None of 3 checkpoints can be loaded"):
            manager.restore(target)
        assert manager.restore(target, fresh=True) is None


def test_refuses_to_start_from_scratch_beside_saves_that_never_committed(root: str) -> None:
    save(root, 10)
    Path(root, "step-10", ".metadata").unlink()
    for file in Path(root, "_bucketpoint").rglob("*"):
        if file.is_file():
            file.unlink()
    with CheckpointManager(root, policy=policy()) as manager:
        with pytest.raises(IncompleteCheckpointError, match=r"folders of saves that never committed \(1\)"):
            manager.restore(state(0))
        assert manager.restore(state(0), fresh=True) is None


def test_starts_from_scratch_after_a_job_was_killed_in_its_first_save(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, 10)
    Path(root, "step-10", ".metadata").unlink()
    run = catalog.open_catalog(root)
    run.store.delete([one.key for one in run.steps().checkpoints if one.key is not None])
    # Another one died before it left a folder.
    for step in (10, 20):
        SaveLog(run).begin(run.url_of(step), f"0123456789a{step // 10}")
    target = state(0)
    with CheckpointManager(root, policy=policy()) as manager:
        assert manager.restore(target) is None
        assert "the saves of these steps began and never committed: 10, 20" in caplog.text
        assert manager.save(10, state(10)) is not None
    with CheckpointManager(root, policy=policy()) as manager:
        assert manager.restore(target).step == 10  # type: ignore[union-attr]


def test_treats_another_state_than_was_saved_as_no_damage(root: str) -> None:
    save(root, 10, 20)
    target = {**state(0), "no_such": state(0)["model"]["w"]}
    with CheckpointManager(root, policy=policy()) as manager:
        with pytest.raises(MismatchError, match="no_such") as caught:
            manager.restore(target)
        assert "planner=LoadPlanner" in str(caught.value)
        assert manager.restore(target, planner=LoadPlanner(allow_partial_load=True)).step == 20  # type: ignore[union-attr]


# -- keeping ----------------------------------------------------------------------------------------------------------


def test_applies_the_policy_after_each_commit_and_keeps_what_was_restored(root: str) -> None:
    save(root, 10, 20, 30)
    with CheckpointManager(root, policy=policy(1)) as manager:
        manager.restore(state(0), 10)
        saved(manager, 40, 50, 60, newer="keep", drain=True)
        # The run went on from 10 until 40 was there.
        assert committed(root) == ["step-60"]
        manager.pin(60, reason="a release")
        saved(manager, 70, drain=True)
        assert committed(root) == ["step-60", "step-70"]
        manager.unpin(60)
        done = manager.prune()
        assert done is not None
        assert [step for step, _ in done.done.deleted] == [60]


def test_deletes_a_few_of_a_plan_that_deletes_too_much_and_says_how_to_go_on(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, *range(10, 20))
    careful = policy(1, prune=Prune(grace=timedelta(0), max_delete=MaxDelete(count=3)))
    with CheckpointManager(root, policy=careful) as manager:
        saved(manager, 20, drain=True)
        # Three, and one for the commit.
        assert committed(root) == [f"step-{step}" for step in range(14, 21)]
        assert (
            "the plan deletes or thins 10 of 11 checkpoints, and max_delete allows 3; "
            "this prune is limited to 4 of them" in caplog.text
        )
        assert "The manager's `prune(force=True)`, or with the policy's file" in caplog.text
        assert f"`bucketpoint prune FILE --root {root} --yes`, carries out" in caplog.text
        manager.prune(force=True)
        assert committed(root) == ["step-20"]


# -- triggers ---------------------------------------------------------------------------------------------------------


def test_saves_steps_on_the_grid_and_one_stepped_over_at_the_next(root: str) -> None:
    when = Save(every=(SaveEvery(10),), on=("first_step", "last_step"))
    with CheckpointManager(root, policy=policy(save=when)) as manager:
        asked = [1, 2, 9, 10, 11, 19, 23, 29, 30]
        assert [step for step in asked if manager.should_save(step)] == [1, 10, 23, 30]
        assert manager.should_save(33, last=True)
    save(root, 45)
    with CheckpointManager(root, policy=policy(save=when)) as manager:
        manager.restore(state(0))
        assert [step for step in range(46, 62) if manager.should_save(step)] == [50, 60]


# -- ending -----------------------------------------------------------------------------------------------------------


def test_uploads_all_saves_of_a_run_by_one_process_that_ends_with_it(root: str) -> None:
    transfer = TransferOptions(background="process")
    seen = set()
    with CheckpointManager(root, policy=policy(), transfer=transfer) as manager:
        for step in (1, 2, 3):
            handle = manager.save(step, state(step))
            assert handle is not None
            handle.result()
            seen.add(manager._uploads.process_id)
    (process,) = seen
    assert process is not None
    assert has_ended(process)


def test_shows_that_the_save_fails_despite_ctrl_c_in_close(root: str) -> None:
    gated = GatedFileSystem()
    manager = CheckpointManager(root, policy=policy(), fs=gated)
    handle = manager.save(3, state(3))
    assert handle is not None
    with mock.patch.object(handle, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        manager.close()
    shutil.rmtree(root, ignore_errors=True)
    Path(root).touch()
    gated.gate.set()
    with pytest.raises(BucketpointError):
        manager.close()


def test_gives_the_signals_back_when_a_manager_is_dropped_without_close(root: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    manager = CheckpointManager(root, policy=policy(save=Save(on=("sigterm",))))
    assert signal.getsignal(signal.SIGTERM) is not before
    del manager
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) is before


def test_waits_in_close_after_sigterm_no_longer_than_there_is_time(root: str) -> None:
    gated = GatedFileSystem()
    asked = policy(save=Save(on=("sigterm",)))
    manager = CheckpointManager(root, policy=asked, fs=gated, grace_s=1)
    os.kill(os.getpid(), 15)
    assert manager.should_save(3)
    assert manager.stop_asked
    manager.save(3, state(3))
    threading.Timer(3, gated.gate.set).start()
    with pytest.raises(BucketpointError, match=r"Step 3 was not committed within 1 s of SIGTERM"):
        manager.close()
    # Not lost if the scheduler is in no hurry after all.
    assert manager.save.__self__._running.handle.wait(240)
    assert committed(root) == ["step-3"]


@pytest.mark.parametrize("agreed", [False, True])
def test_close_warns_of_a_sigterm_that_no_save_has_answered(
    root: str, caplog: pytest.LogCaptureFixture, agreed: bool
) -> None:
    """As in a rank of torch.multiprocessing.spawn, which is interrupted by the end of its parent."""
    with (
        pytest.raises(KeyboardInterrupt),
        CheckpointManager(root, policy=policy(save=Save(on=("sigterm",)))) as manager,
    ):
        manager.save(3, state(3))
        os.kill(os.getpid(), signal.SIGTERM)
        if agreed:
            assert manager.should_save(4)
        raise KeyboardInterrupt
    ends = [record.getMessage() for record in caplog.records if "SIGTERM" in record.getMessage()]
    assert ends == ["SIGTERM: no save has begun since the signal, and the newest checkpoint is step 3"]


@pytest.mark.parametrize("grace_s", [-1, 0, float("nan"), float("inf"), "60"])
def test_refuses_a_grace_that_is_no_time(root: str, grace_s: Any) -> None:
    with pytest.raises(BucketpointError, match="grace_s must be a number of seconds above 0"):
        CheckpointManager(root, policy=policy(), grace_s=grace_s)


@pytest.mark.parametrize("asked_by", ["sigterm", "last"])
def test_makes_the_last_save_although_the_one_before_has_failed(root: str, asked_by: str) -> None:
    manager = CheckpointManager(root, policy=policy(save=Save(on=("sigterm", "last_step"))))
    with mock.patch.object(LocalStore, "put", side_effect=OSError("the disk is full")):
        manager.save(1, state(1))
        manager._running.handle.wait(60)  # type: ignore[union-attr]
    if asked_by == "sigterm":
        os.kill(os.getpid(), 15)
    assert manager.should_save(2, last=asked_by == "last")
    assert manager.save(2, state(2)) is not None
    manager.close()
    assert committed(root) == ["step-2"]


def test_passes_signals_on_after_a_manager_is_closed_on_another_thread(root: str) -> None:
    """Only the main thread may change handlers: ours stays, and calls the one that was there before."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        manager = CheckpointManager(root, policy=policy(save=Save(on=("sigusr1",))))
        closing = threading.Thread(target=manager.close)
        closing.start()
        closing.join()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_refuses_a_closed_manager(root: str) -> None:
    manager = CheckpointManager(root, policy=policy())
    manager.close()
    manager.close()
    with pytest.raises(BucketpointError, match="The CheckpointManager is closed"):
        manager.save(1, state(1))
    with pytest.raises(BucketpointError, match="the URL of its run"):
        CheckpointManager(policy=policy())


def test_keeps_the_index_of_a_large_checkpoint_until_it_is_thinned(root: str) -> None:
    many = {
        "model": {f"w{n}": torch.ones(2) for n in range(800)},
        "optim": {f"m{n}": torch.ones(2) for n in range(800)},
    }
    with CheckpointManager(root, policy=policy()) as manager:
        manager.save(1, many)
        manager.save(2, many)
        manager.wait()
        # Two pruners never work at once.
        manager.pruning.drain()
        later = replace(manager.catalog, now=time.time() + 2 * MIN_SWEEP_AGE_S)
        assert sweep(later, older_than=MIN_SWEEP_AGE_S, deep=True).objects == []
        assert len(list(Path(root).rglob("*-index-0.distcp"))) == 2
        first = manager.catalog.steps().checkpoints[0]
        orders = [order(1, first.id, "thin")]
        done = prune(manager.catalog, lambda rows: orders, grace=0.0, holder="somebody")
        assert done.thinned == [(1, first.id)]
        assert [file.relative_to(root).parts[0] for file in Path(root).rglob("*-index-0.distcp")] == ["step-2"]
        weights = {"model": {f"w{n}": torch.zeros(2) for n in range(800)}}
        dcp.load(weights, checkpoint_id=f"{root}/step-1", storage_reader=BucketReader(), no_dist=True)
        assert all(tensor.tolist() == [1, 1] for tensor in weights["model"].values())


# -- what it costs ----------------------------------------------------------------------------------------------------


class Asked(CountingStore):
    """Notes each request for something else than data, by name and key."""

    def __init__(self, inner: Any, into: list[tuple[str, str]]) -> None:
        super().__init__(inner)
        self.into = into

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **more: Any) -> Any:
            if args and isinstance(args[0], str) and ("/data/" not in args[0] or "-index-" in args[0]):
                self.into.append((name, args[0]))
            return value(*args, **more)

        return call


@pytest.mark.parametrize("items", [2, 1000])
def test_restores_the_latest_with_two_listings_two_reads_and_a_note(
    service: Service, monkeypatch: pytest.MonkeyPatch, items: int
) -> None:
    root = service.url("run")
    reached = {"policy": policy(), "storage_options": service.options}

    def full(value: float) -> dict[str, Any]:
        return {"model": {f"w{n}": torch.full((2,), value) for n in range(items)}}

    with CheckpointManager(root, **reached) as manager:
        for step in (10, 20, 30):
            manager.save(step, full(step))
    asked: list[tuple[str, str]] = []
    for module in (location, session):
        opened = module.open_store

        def wrapped(*args: Any, opened: Any = opened, **more: Any) -> Any:
            store, prefix = opened(*args, **more)
            return Asked(store, asked), prefix

        monkeypatch.setattr(module, "open_store", wrapped)
    target = full(0)
    with CheckpointManager(root, **reached) as manager:
        restored = manager.restore(target)
    assert restored is not None
    assert (restored.step, target["model"]["w1"].tolist()) == (30, [30.0, 30.0])
    # Of the records, and of the folders: one without a record may be the newest.
    assert [key for name, key in asked if name.startswith("list")] == ["run/_bucketpoint/step-N/steps/", "run/"]
    assert len([key for name, key in asked if name in ("get", "open_range", "head")]) <= 2, asked
    assert [name for name, key in asked if "/notes/" in key] == ["put"]
    assert len(asked) <= 5
