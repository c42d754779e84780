"""Arguments of `CheckpointManager` that are wrong: named at the call, before anything is uploaded."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import bucketpoint
from bucketpoint.errors import AccessDeniedError, BucketpointError, CheckpointNotFoundError, StoreError
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Best, Keep, RetentionPolicy, Save, SaveEvery
from bucketpoint.stores.local import LocalStore
from manager.manager_scenarios import policy, state, value_of

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("value", ["low", "0.5", None])
def test_refuses_a_metric_that_is_no_number_in_save_as_in_report(root: str, value: Any) -> None:
    with CheckpointManager(root, policy=policy()) as manager:
        said = f"A metric must be a number, not {type(value).__name__}"
        with pytest.raises(BucketpointError, match=said):
            manager.report(1, {"loss": value})
        with pytest.raises(BucketpointError, match=said):
            manager.save(1, state(1), metrics={"loss": value})
        assert not Path(root).exists()
        manager.save(1, state(1), metrics={"loss": torch.tensor(0.5)})
        manager.wait()
        assert [*manager.catalog.snapshot().metrics().values()] == [{"loss": 0.5}]


@pytest.mark.parametrize("step", [7.0, "7", -1, 10**16, None])
def test_refuses_a_step_that_is_no_integer_or_out_of_range_in_every_call(root: str, step: Any) -> None:
    with CheckpointManager(root, policy=policy()) as manager:
        calls = [
            lambda: manager.save(step, state(1)),
            lambda: manager.report(step, {"loss": 1.0}),
            lambda: manager.pin(step),
            lambda: manager.unpin(step),
        ]
        for call in calls:
            with pytest.raises(BucketpointError, match=f"must be an integer from 0 to 9+, not {re.escape(repr(step))}"):
                call()
        assert not Path(root).exists()


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7)], ids=["numpy", "torch"])
def test_takes_integers_of_other_libraries_as_steps(root: str, step: Any) -> None:
    with CheckpointManager(root, policy=policy()) as manager:
        manager.save(step, state(7))
        manager.wait()
        assert manager.steps() == [7]
        restored = manager.restore(state(0), step)
        assert restored is not None
        assert (type(restored.step), restored.step) == (int, 7)


def test_refuses_an_unknown_word_for_newer_checkpoints(root: str) -> None:
    with CheckpointManager(root, policy=policy()) as manager:
        manager.save(20, state(20))
        manager.wait()
        for step in (10, 30):
            with pytest.raises(
                BucketpointError, match="newer= must be one of 'error', 'keep', 'discard', not 'discrad'"
            ):
                manager.save(step, state(step), newer="discrad")  # type: ignore[arg-type]
        assert manager.steps() == [20]


def test_pins_a_step_that_is_being_saved_and_raises_for_one_that_is_not_there(root: str) -> None:
    with CheckpointManager(root, policy=policy()) as manager:
        manager.save(7, state(7))
        manager.pin(7)
        manager.wait()
        for call in (manager.pin, manager.unpin):
            with pytest.raises(CheckpointNotFoundError, match="There is no checkpoint of step 1000"):
                call(1000)
        assert [pin.step for pin in manager.catalog.snapshot().notes.pins] == [7]
        manager.unpin(7)
        manager.unpin(7)
        assert manager.catalog.snapshot().notes.pins == ()


def test_refuses_a_root_beside_another_root_in_the_policy(root: str) -> None:
    with pytest.raises(BucketpointError, match=r"root= differs from the root of the policy, which is .*/run"):
        CheckpointManager(f"{root}-other", policy=policy(root=root))
    # One place under two names.
    CheckpointManager(f"file://{root}/", policy=policy(root=root)).close()


def test_names_an_argument_of_a_wrong_type(root: str) -> None:
    model: Any = torch.nn.Linear(2, 2)
    for wrong in ({"keep": {"latest": 1}}, Keep(latest=1)):
        with pytest.raises(BucketpointError, match=f"policy must be a RetentionPolicy .*, not {type(wrong).__name__}"):
            CheckpointManager(root, policy=wrong)  # type: ignore[arg-type]
    with pytest.raises(BucketpointError, match="transfer must be a TransferOptions, not dict"):
        CheckpointManager(root, policy=policy(), transfer={"connections": 8})  # type: ignore[arg-type]
    with CheckpointManager(root, policy=policy()) as manager:
        for call in (lambda: manager.save(1, model), lambda: manager.restore(model)):
            with pytest.raises(BucketpointError, match=r"state must be a dict, .*, not Linear"):
                call()


def test_saves_the_state_that_a_function_makes(root: str) -> None:
    with CheckpointManager(root, policy=policy()) as manager:
        manager.save(1, lambda: state(1))
        manager.wait()
        with pytest.raises(ZeroDivisionError):
            manager.save(2, lambda: {"w": 1 / 0})
        assert manager.steps() == [1]
        target = state(0)
        manager.restore(target)
        assert value_of(target) == 1


def test_makes_the_policy_of_three_keywords_and_loads_its_checkpoints_by_name(tmp_path: Path) -> None:
    root = f"{tmp_path}/run"
    with CheckpointManager(root, keep=2, best="eval/loss", every=3) as manager:
        save = Save([SaveEvery(3)], on=["last_step", "sigterm"])
        expected = RetentionPolicy(Keep(2, [Best("eval/loss", "min")]), save=save)
        assert manager.policy == expected
        assert [step for step in range(1, 8) if manager.should_save(step, last=step == 7)] == [3, 6, 7]
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
            manager.save(step, {"step": step}, metrics={"eval/loss": loss})
    assert [bucketpoint.load(root, step=step) for step in ("latest", "best", 1)] == [
        {"step": step} for step in (3, 2, 1)
    ]
    (tmp_path / "run" / "step-3" / ".metadata").write_bytes(b"damaged")
    assert bucketpoint.load(root, step="latest", keys="step") == {"step": 2}
    for best, rule in (("eval/acc:max", Best("eval/acc", "max")), ("f1:min", Best("f1", "min"))):
        with CheckpointManager(root, keep=2, best=best) as manager:
            assert (manager.policy.keep.best, manager.policy.save) == ((rule,), Save())
    with pytest.raises(BucketpointError, match="There is no checkpoint of step 9"):
        bucketpoint.load(root, step=9)
    with pytest.raises(BucketpointError, match="step= cannot be combined with a state"):
        bucketpoint.load({}, root, step=3)  # type: ignore[call-overload]
    with pytest.raises(BucketpointError, match=r'lowest value.*Pass best="eval/acc:max"'):
        CheckpointManager(root, keep=2, best="eval/acc")
    for given, why in (({}, "no policy"), ({"best": "loss"}, "no policy"), ({"keep": 1, "policy": "p.yaml"}, "both")):
        with pytest.raises(BucketpointError, match=f"There (is|are) {why}.*Pass keep=3"):
            CheckpointManager(root, **given)  # type: ignore[arg-type]


def test_raises_errors_that_can_be_read(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, small = ({"m": {f"l{number}": torch.ones(size) for number in range(9)}} for size in (8, 4))
    misfit = r"m\.l2 is .*; and 6 more; 9 of 9 have 8 in .* the state has 4"
    denied = AccessDeniedError("no", url=f"{root}/step-2/data/1")
    raised: list[BaseException] = []

    def raises(message: str, call: Callable[[], object]) -> None:
        with pytest.raises(BucketpointError, match=message) as caught:
            call()
        raised.append(caught.value)

    with CheckpointManager(root, keep=1) as manager:
        manager.save(1, saved)
        assert manager.wait()
        raises(misfit, lambda: manager.restore(small))
        raises(misfit, lambda: bucketpoint.load(small, f"{root}/step-1"))
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "put", mock.Mock(side_effect=denied))
            raises("no ", lambda: bucketpoint.async_save(saved, f"{root}/step-2").result())
            manager.save(2, saved)
            raises("no ", manager.wait)
    for error in raised:
        lines = "".join(traceback.format_exception(error)).splitlines()
        assert len(lines) < 60
        assert not [line for line in lines if "CheckpointException" in line or "(RANK 0)" in line]


@pytest.mark.parametrize("place", ["", "step-N/notes/", "step-N/steps/0001", "N/pruner.json"])
def test_names_the_run_in_place_of_its_catalogs_objects(place: str) -> None:
    assert StoreError("denied", url=f"s3://bucket/run/_bucketpoint/{place}").url == "s3://bucket/run"
    assert (
        StoreError("denied", url=f"s3://bucket/_bucketpoint/run/{place}x").url
        == f"s3://bucket/_bucketpoint/run/{place}x"
    )
