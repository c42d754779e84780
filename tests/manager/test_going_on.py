"""Going on after a restore: past damaged checkpoints, and behind a rollback. With real ranks where they must agree."""

from __future__ import annotations

import logging
import pickle
import shutil
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint
from bucketpoint import BucketWriter
from bucketpoint.catalog import restore_candidates
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.deletion.prune import prune
from bucketpoint.catalog.deletion.state import undo
from bucketpoint.catalog.restore_candidates import roll_back
from bucketpoint.errors import BucketpointError, CheckpointExistsError, EndpointError, NewerFormatError, UnsafeDataError
from bucketpoint.format.metadata import codec as metadata
from bucketpoint.format.metadata import facts as metadata_facts
from bucketpoint.manager import CheckpointManager
from bucketpoint.manager import manager as managing
from bucketpoint.retention import Best, InFlight, Keep, MaxDelete, Prune, RetentionPolicy, Save, SaveEvery
from bucketpoint.stores.local import LocalStore
from catalog.memory import order
from dcp.ranks import Ranks
from dcp.saving.async_scenarios import GatedFileSystem
from kit.damage import flip, flip_all
from manager import manager_scenarios as scenarios
from manager.agree_scenarios import full_disk
from manager.manager_scenarios import policy, saved, state, value_of

pytestmark = pytest.mark.contract

DAY = policy(prune=Prune(grace=timedelta(hours=24)))
"""Nothing goes within a test, but all that is to go has a tombstone."""


class Own:
    """What no allow-list knows."""


def committed(root: str) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in Path(root).glob("*/.metadata"))


def damage(root: str, step: int) -> None:
    """Change one byte in the middle of each data object."""
    flip_all(Path(root, f"step-{step}", "data"))


def lose(root: str, step: int) -> None:
    """Remove a data object."""
    next(file for file in Path(root, f"step-{step}", "data").rglob("*") if file.is_file()).unlink()


def garble(root: str, step: int) -> None:
    Path(root, f"step-{step}", ".metadata").write_bytes(b"\x80\x04nonsense")


def run_with(root: str, *steps: int) -> None:
    with CheckpointManager(root, policy=DAY) as manager:
        for step in steps:
            manager.save(step, state(step), metrics={"eval/loss": 1.0 / step})


def going(manager: CheckpointManager) -> list[int]:
    return sorted({one.step for one in manager.catalog.steps().notes.tombstones})


def counted(manager: CheckpointManager) -> list[int]:
    """What rules count, without what they have given a tombstone."""
    return [row.step for row in manager.catalog.snapshot().rows() if row.tombstone is None]


# -- damaged ones -----------------------------------------------------------------------------------------------------


def test_saves_over_damaged_checkpoints_which_the_next_commit_sets_aside(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_with(root, 10, 20, 30, 40, 50)
    lose(root, 50)
    damage(root, 40)
    best = policy(best=(Best("eval/loss", "min"),), prune=Prune(grace=timedelta(hours=24)))
    target = state(0)
    with CheckpointManager(root, policy=best) as manager:
        restored = manager.restore(target)
        assert restored is not None
        assert (restored.step, [step for step, _ in restored.passed]) == (30, [50, 40])
        # Only once something is there to go on from.
        assert going(manager) == []
        saved(manager, 35)
        assert going(manager) == [40, 50]
        assert counted(manager) == [10, 20, 30, 35]
        for step in (40, 50):
            assert (
                f"step {step} is set aside and will be deleted when its grace period of 1d is over: it could not be "
                "loaded" in caplog.text
            )
            assert f"`bucketpoint undo {root} {step}` withdraws its tombstone" in caplog.text
        assert manager.restore(target, "best").step == 30  # type: ignore[union-attr]
        manager.save(40, state(41))
        manager.wait()
    with CheckpointManager(root, policy=best) as manager:
        restored = manager.restore(target)
        assert (restored.step, value_of({**target, "step": 41}), restored.passed) == (40, 41.0, ())  # type: ignore[union-attr]
        # A job that begins again needs nobody's help either.
        saved(manager, 50)
        assert counted(manager) == [10, 20, 30, 35, 40, 50]


@pytest.mark.parametrize("harm", [damage, lose, garble])
@pytest.mark.parametrize("grace", [timedelta(0), timedelta(hours=24)])
def test_makes_progress_in_every_loop_of_restarts(root: str, harm: Any, grace: timedelta) -> None:
    """Each job restores, saves one step and is gone; what it saved last is damaged."""
    rule = policy(3, prune=Prune(grace=grace))
    run_with(root, 10, 20, 30, 40, 50)
    for step in (40, 50):
        harm(root, step)
    seen = []
    for _ in range(4):
        with CheckpointManager(root, policy=rule) as manager:
            found = manager.restore(state(0))
            assert found is not None
            seen.append((found.step, [step for step, _ in found.passed]))
            manager.save(found.step + 10, state(found.step + 10))
    assert seen == [(30, [50, 40]), (40, []), (50, []), (60, [])]
    with CheckpointManager(root, policy=rule) as manager:
        manager.pruning.now()
        assert [step for step in counted(manager) if step > 30] == [50, 60, 70] if grace else [40, 50, 60, 70]


def test_sets_nothing_aside_that_could_not_be_reached(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(root, 10, 20)
    get = LocalStore.get

    def away(self: Any, key: str, *given: Any, **more: Any) -> Any:
        if "step-20/" in self._url(key):
            raise EndpointError("the store is away", key=key)
        return get(self, key, *given, **more)

    with CheckpointManager(root, policy=DAY) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(LocalStore, "get", away)
            with pytest.raises(BucketpointError, match="the store is away"):
                manager.restore(state(0))
        assert manager.pruning.given_up == ()
        saved(manager, 30)
        assert going(manager) == []


def test_sets_nothing_aside_that_was_saved_again_since(root: str) -> None:
    run_with(root, 10, 20)
    lose(root, 20)
    with CheckpointManager(root, policy=DAY) as manager:
        assert manager.restore(state(0)).step == 10  # type: ignore[union-attr]
        with CheckpointManager(root, policy=DAY) as other:
            other.save(20, state(20), overwrite=True)
        saved(manager, 15, newer="keep")
        assert going(manager) == []
        assert counted(manager) == [10, 15, 20]


def test_raises_for_what_needs_trust_and_gives_nothing_up(root: str) -> None:
    run_with(root, 10)
    trusting = CheckpointManager(root, policy=DAY, trusted=True)
    trusting.save(20, {**state(20), "own": Own()})
    trusting.close()
    with CheckpointManager(root, policy=DAY) as manager:
        with pytest.raises(UnsafeDataError, match=r"pass trusted=True to .* CheckpointManager"):
            manager.restore({**state(0), "own": None})
        assert manager.pruning.given_up == ()


def test_raises_for_plain_checkpoints_that_need_trust_and_leaves_them(root: str) -> None:
    """No record tells whether what is refused is what was saved: then it may be whole."""
    bucketpoint.save({**state(5), "own": 1}, f"{root}/step-5")
    for step in (8, 9):
        bucketpoint.save({**state(step), "own": Own()}, f"{root}/step-{step}")
    with CheckpointManager(root, policy=policy(prune=Prune(grace=timedelta(0)))) as manager:
        with pytest.raises(UnsafeDataError, match="trusted=True"):
            manager.restore({**state(0), "own": None})
        assert manager.restore({**state(0), "own": None}, fresh=True).step == 5  # type: ignore[union-attr]
        saved(manager, 6, 7)
        manager.prune()
        assert going(manager) == []
    assert committed(root) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("recorded", [True, False])
def test_raises_for_checkpoints_of_a_newer_bucketpoint_and_leaves_them(
    root: str, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    run_with(root, 5)
    with monkeypatch.context() as patched:
        patched.setattr(metadata, "FORMAT_VERSION", 2)
        patched.setattr(metadata_facts, "FORMAT_VERSION", 2)
        if recorded:
            run_with(root, 6)
        else:
            bucketpoint.save(state(6), f"{root}/step-6")
    with CheckpointManager(root, policy=DAY) as manager:
        with pytest.raises(NewerFormatError, match="Upgrade bucketpoint"):
            manager.restore(state(0))
        assert manager.pruning.given_up == ()


def test_keeps_a_plain_checkpoint_that_is_saved_anew_during_the_restore(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(root, 5)
    bucketpoint.save(state(10), f"{root}/step-10")
    lose(root, 10)
    real = managing.attempt

    def beside_another_job(given: Any, url: str, *args: Any, **more: Any) -> Any:
        outcome = real(given, url, *args, **more)
        if url.endswith("step-10"):
            bucketpoint.save(state(11), url)
        return outcome

    monkeypatch.setattr(managing, "attempt", beside_another_job)
    with CheckpointManager(root, policy=policy(prune=Prune(grace=timedelta(0)))) as manager:
        assert manager.restore(state(0)).step == 5  # type: ignore[union-attr]
        saved(manager, 6, newer="keep")
        manager.prune()
        assert going(manager) == []
    assert committed(root) == [5, 6, 10]


def test_saves_behind_a_plain_checkpoint_whose_metadata_cannot_be_read(root: str) -> None:
    run_with(root, 5)
    bucketpoint.save(state(10), f"{root}/step-10")
    Path(root, "step-10", ".metadata").write_bytes(b"not metadata")
    for first in (6, 8):
        with CheckpointManager(root, policy=DAY) as manager:
            assert manager.restore(state(0)).step == first - 1  # type: ignore[union-attr]
            saved(manager, first, first + 1)
    rolled = roll_back(open_catalog(root), 9, grace=0.0)
    assert rolled.buried == []
    assert [why for _, why in rolled.held] == ["without readable metadata"]


def test_keeps_what_a_save_that_failed_or_never_began_was_to_discard(root: str) -> None:
    run_with(root, 5, 7, 8)
    with CheckpointManager(root, policy=DAY) as manager:
        with pytest.raises(BucketpointError):
            manager.save(6, {**state(6), "lock": threading.Lock()}, newer="discard")
            manager.wait()
        with pytest.raises(BucketpointError, match="'wieghts' is not a kind of checkpoint"):
            manager.save(6, state(6), newer="discard", kind="wieghts")
        saved(manager, 6, newer="keep")
        assert going(manager) == []


def test_agrees_at_the_next_save_among_ranks_that_wait_for_unequal_times(ranks: Ranks, root: str) -> None:
    assert ranks.run(scenarios.wait_unequally, root) == [[1, 2, 3]] * 2


def test_fails_the_restore_on_all_ranks_if_one_has_no_state_to_load_into(ranks: Ranks, root: str) -> None:
    said = ranks.run(scenarios.restore_without_memory, root)
    assert said == ["BucketpointError: Rank 1 failed: MemoryError: no memory"] * 2


def test_makes_states_in_one_order_on_ranks_whose_keys_come_in_another(ranks: Ranks, root: str) -> None:
    assert ranks.run(scenarios.restore_in_another_order, root) == [1, 1]


def test_fails_the_restore_on_all_ranks_if_a_hook_raises_on_one(ranks: Ranks, root: str) -> None:
    said = ranks.run(scenarios.restore_with_a_hook_that_raises, root)
    assert said == [[kind, "CheckpointNotFoundError"] for kind in ("BucketpointError", "ValueError")]


def test_sets_damaged_checkpoints_without_a_record_aside(root: str) -> None:
    for step in (10, 20, 30):
        dcp.save(state(step), checkpoint_id=f"{root}/step-{step}", storage_writer=BucketWriter(), no_dist=True)
    lose(root, 30)
    garble(root, 20)
    with CheckpointManager(root, policy=DAY) as manager:
        assert manager.restore(state(0)).step == 10  # type: ignore[union-attr]
        saved(manager, 20)
        assert going(manager) == [30]
        saved(manager, 30)
        assert counted(manager) == [20, 30]


def test_continues_on_all_ranks_over_what_one_of_them_found_damaged(ranks: Ranks, root: str) -> None:
    ranks.run(scenarios.save_steps, root, [10, 20, 30])
    (file,) = (file for file in Path(root, "step-30", "data").rglob("*-1-model-*") if file.is_file())
    flip(file)
    assert ranks.run(scenarios.go_on_over_damage, root) == [(20, [30], 30, 31.0, ())] * 2


def test_prunes_on_once_a_damaged_newest_is_set_aside(root: str) -> None:
    run_with(root, 10, 20, 30, 40)
    garble(root, 40)
    rule = policy(1)
    with CheckpointManager(root, policy=rule) as manager:
        manager.restore(state(0))
        saved(manager, 35, drain=True)
        assert manager.pruning.last.done.stopped is None  # type: ignore[union-attr]
        assert committed(root) == [35]


# -- rollbacks --------------------------------------------------------------------------------------------------------


def test_rolls_back_by_one_word(root: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bucketpoint")
    run_with(root, 10, 20, 30)
    target = state(0)
    with CheckpointManager(root, policy=DAY) as manager:
        assert manager.restore(target, 10, rollback=True).step == 10  # type: ignore[union-attr]
        assert pickle.loads(pickle.dumps(manager.pruning.given_up)) == manager.pruning.given_up != ()
        # The step itself may be saved again, and nothing goes before a commit.
        assert going(manager) == []
        manager.save(10, state(11))
        manager.wait()
        assert going(manager) == [20, 30]
        assert (
            "step 30 is set aside and will be deleted when its grace period of 1d is over: training was rolled back "
            "to step 10" in caplog.text
        )
        for step in (15, 20):
            manager.save(step, state(step + 1))
            manager.wait()
        assert counted(manager) == [10, 15, 20]
    with CheckpointManager(root, policy=DAY) as manager:
        assert manager.restore(target).step == 20  # type: ignore[union-attr]
        manager.save(30, state(31))
        manager.wait()
        assert manager.restore(target).step == 30  # type: ignore[union-attr]
        assert value_of({**target, "step": 31}) == 31.0


@pytest.mark.usefixtures("threads_upload")
def test_keeps_a_discarded_step_discarded_after_a_save_over_it_dies(root: str) -> None:
    run_with(root, 10, 20)
    with CheckpointManager(root, policy=DAY) as manager:
        manager.restore(state(0), 10, rollback=True)
        saved(manager, 15)
        with full_disk(True):
            manager.save(20, state(20))
            with pytest.raises(BucketpointError, match="the disk is full"):
                manager.wait()
    with CheckpointManager(root, policy=DAY) as manager:
        assert manager.restore(state(0)).step == 15  # type: ignore[union-attr]


def test_says_in_every_error_on_the_way_back_how_to_roll_back(root: str) -> None:
    run_with(root, 10, 20, 30)
    with CheckpointManager(root, policy=DAY) as manager:
        manager.restore(state(0), 10)
        for step, kind in ((15, BucketpointError), (20, CheckpointExistsError)):
            with pytest.raises(kind) as caught:
                manager.save(step, state(step))
            assert "restore(state, step, rollback=True)" in str(caught.value)
            assert "checkpoint_id" not in str(caught.value)
    plain = CheckpointExistsError("Checkpoint already exists at this URL")
    assert "rollback=True" in str(plain)
    assert "checkpoint_id" not in str(plain)


def test_leaves_and_names_in_a_rollback_what_somebody_holds(root: str, caplog: pytest.LogCaptureFixture) -> None:
    run_with(root, 10, 20, 30)
    with CheckpointManager(root, policy=DAY) as manager:
        manager.pin(20, reason="a release")
        manager.restore(state(0), 10, rollback=True)
        saved(manager, 14, 15)
        assert going(manager) == [30]
        assert (
            caplog.text.count(
                "step 20 was given up (training was rolled back to step 10), but stays because it is pinned"
            )
            == 1
        )
        with pytest.raises(CheckpointExistsError, match="step 20 is committed and pinned"):
            manager.save(20, state(20))
        manager.unpin(20)
        saved(manager, 16)
        assert going(manager) == [20, 30]
        manager.save(20, state(20))


def test_respects_the_undo_of_a_rollback_in_the_next_save(root: str) -> None:
    run_with(root, 10, 20)
    with CheckpointManager(root, policy=DAY) as manager:
        manager.restore(state(0), 10, rollback=True)
        saved(manager, 15)
        assert undo(manager.catalog, 20) == 1
        with pytest.raises(BucketpointError, match="training was probably rolled back"):
            manager.save(16, state(16))


@pytest.mark.parametrize(("which", "recorded"), [("latest", True), ("best", True), ("latest", False)])
def test_holds_a_rollback_for_another_restore_before_the_next_commit(
    root: str, which: str, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fewer than are rolled back.
    monkeypatch.setattr(restore_candidates, "LOOKED_AT_MOST", 1)
    run_with(root, 5, 10, 20, 30)
    if not recorded:
        shutil.rmtree(Path(root, "_bucketpoint"))
    ranked = replace(DAY, keep=replace(DAY.keep, best=(Best("eval/loss", "min"),)))
    with CheckpointManager(root, policy=ranked) as manager:
        manager.restore(state(0), 10, rollback=True)
        target = state(0)
        assert manager.restore(target, which).step == 10  # type: ignore[union-attr]
        assert value_of(target) == 10.0
        # The step itself may still be saved anew, and then those above it.
        manager.save(10, state(11))
        manager.wait()
        assert going(manager) == [20, 30]
        manager.save(20, state(21))


def test_withdraws_a_rollback_by_restoring_a_rolled_back_step_by_its_number(root: str) -> None:
    run_with(root, 10, 20)
    with CheckpointManager(root, policy=DAY) as manager:
        manager.restore(state(0), 10, rollback=True)
        manager.restore(state(0), 20)
        assert manager.restore(state(0)).step == 20  # type: ignore[union-attr]
        saved(manager, 30)
        assert going(manager) == []


def test_gives_up_what_the_save_under_way_commits_in_a_rollback(root: str) -> None:
    run_with(root, 10)
    with CheckpointManager(root, policy=DAY) as manager:
        manager.save(20, state(20))
        manager.restore(state(0), 10, rollback=True)
        saved(manager, 15)
        assert going(manager) == [20]


def test_waits_in_a_rollback_for_the_save_under_way_and_refuses_meanwhile(root: str) -> None:
    """It might commit behind the rollback, and no one would have given it up."""
    run_with(root, 10)
    gated = GatedFileSystem()
    short = replace(DAY, save=Save(in_flight=InFlight(timeout=timedelta(seconds=1))))
    with CheckpointManager(root, policy=short, fs=gated) as manager:
        manager.save(20, state(20))
        with pytest.raises(BucketpointError, match="the save of step 20 is still running"):
            manager.restore(state(0), 10, rollback=True)
        gated.gate.set()
        assert manager.wait(60)
        manager.restore(state(0), 10, rollback=True)
        saved(manager, 15)
        assert going(manager) == [20]


# -- max_delete -------------------------------------------------------------------------------------------------------


def test_prunes_many_fast_saves_without_a_refusal_also_after_a_restart(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    rule = policy(1, prune=Prune(grace=timedelta(0), max_delete=MaxDelete(), when="manual"))
    with CheckpointManager(root, policy=rule) as manager:
        for step in range(1, 13):
            manager.save(step, {"step": step})
        manager.wait()
        manager.prune()
        assert committed(root) == [12]
        for step in range(13, 28):
            manager.save(step, {"step": step})
    assert "max_delete" not in caplog.text
    # The job is gone before it has pruned. What it left goes by and by.
    left = []
    for step in range(28, 31):
        with CheckpointManager(root, policy=policy(1, prune=Prune(grace=timedelta(0)))) as manager:
            manager.save(step, {"step": step})
            manager.wait()
            manager.pruning.drain()
            left.append(len(committed(root)))
    assert left == [11, 6, 1]


def test_logs_each_deletion_with_its_rule_and_its_bytes(root: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bucketpoint")
    with CheckpointManager(root, policy=policy(1)) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(1_000_000)})
            manager.wait()
            manager.pruning.drain()
    assert "step 1 will be deleted" not in caplog.text
    assert "step 1 is deleted, which frees 4.0 MB: latest: 1 (2nd latest" in caplog.text
    caplog.clear()
    later = f"{root}-2"
    with CheckpointManager(later, policy=policy(1, prune=Prune(grace=timedelta(hours=24)))) as manager:
        saved(manager, 1, 2, drain=True)
    assert "step 1 will be deleted when its grace period of 1d is over: latest: 1 (2nd latest" in caplog.text
    assert "is deleted" not in caplog.text


def test_logs_a_checkpoint_that_a_late_metric_saves_with_its_rule(root: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bucketpoint")
    keep = Keep(1, best=[Best("loss", "min")])
    with CheckpointManager(root, policy=RetentionPolicy(keep, prune=Prune(grace=timedelta(hours=24)))) as manager:
        saved(manager, 1, 2, 3)
        manager.pruning.drain()
        manager.report(1, {"loss": 0.1})
        manager.prune()
    assert "step 1 is kept again, and its tombstone is withdrawn: best: loss min 1 (1st best loss)" in caplog.text


def test_warns_once_of_a_rule_for_a_metric_that_nobody_reports(root: str, caplog: pytest.LogCaptureFixture) -> None:
    line = "no checkpoint has a value of evl/loss (rule best); the metrics reported are eval/loss"
    keep = Keep(1, best=[Best("evl/loss", "min")])
    with CheckpointManager(root, policy=RetentionPolicy(keep, prune=Prune(grace=timedelta(hours=24)))) as manager:
        for step, metrics, times in ((1, {}, 0), (2, {"eval/loss": 0.5}, 1), (3, {"eval/loss": 0.4}, 1)):
            saved(manager, step, metrics=metrics, drain=True)
            assert [one.getMessage() for one in caplog.records].count(line) == times


def test_leaves_a_save_under_way_in_a_prune_of_what_lost_its_data_there(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new objects are as many and as large as those that are gone."""
    run_with(root, 10, 20, 30)
    for file in Path(root, "step-20", "data").rglob("*.distcp"):
        file.unlink()
    catalog = open_catalog(root)
    (lost,) = [one for one in catalog.snapshot().checkpoints if one.step == 20]
    put = LocalStore.put

    def beside_a_prune(store: LocalStore, key: str, *args: Any, **more: Any) -> Any:
        if key == ".metadata":
            monkeypatch.setattr(LocalStore, "put", put)
            prune(catalog, lambda rows: [order(20, lost.id)], grace=0.0, holder="me")
        return put(store, key, *args, **more)

    monkeypatch.setattr(LocalStore, "put", beside_a_prune)
    bucketpoint.save(state(21), f"{root}/step-20")
    target = state(0)
    bucketpoint.load(target, f"{root}/step-20")
    assert value_of(target) == 21.0


@pytest.mark.usefixtures("threads_upload")
def test_keeps_discards_of_the_next_save_though_the_one_before_notes_late(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that has ended tells those who wait for it before it notes that it has committed."""
    run_with(root, 5, 7, 8)
    ended, put = managing.note_end, LocalStore.put

    def late(*given: Any) -> None:
        time.sleep(0.5)
        ended(*given)

    def full(store: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        if Path(store.root).name == "step-6":
            time.sleep(1.5)
            raise OSError("the disk is full")
        return put(store, key, *args, **kwargs)

    monkeypatch.setattr(managing, "note_end", late)
    monkeypatch.setattr(LocalStore, "put", full)
    skips = policy(
        prune=Prune(grace=timedelta(hours=24)), save=Save(every=(SaveEvery(1),), in_flight=InFlight(when_busy="skip"))
    )
    with CheckpointManager(root, policy=skips) as manager:
        first = manager.save(9, state(9))
        assert first is not None
        first.result()
        assert manager.save(6, state(6), newer="discard") is not None
        with pytest.raises(BucketpointError, match="the disk is full"):
            manager.wait()
        assert manager.save(10, state(10)) is not None
        manager.wait()
        assert going(manager) == []


def test_begins_from_scratch_beside_damaged_checkpoints_and_warns_of_their_traces(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_with(root, 10, 20)
    damage(root, 10)
    lose(root, 20)
    with CheckpointManager(root, policy=DAY) as manager, caplog.at_level(logging.WARNING):
        assert manager.restore(state(3), fresh=True) is None
        assert "initialise" in caplog.text
        saved(manager, 10)
        assert counted(manager) == [10]
