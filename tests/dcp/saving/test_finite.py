"""Saves with `check_finite`: how many values are NaN or infinite, in which part, and that a policy may refuse them."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner

import bucketpoint as bp
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.dcp.saving import finite
from bucketpoint.dcp.saving.finite import count_nonfinite
from bucketpoint.errors import PolicyError
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Best, Keep, Prune, RetentionPolicy, Row, from_yaml, plan

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EIGHT_BITS = [torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
NAN, INF = float("nan"), float("inf")


@given(
    st.sampled_from(FLOATS),
    st.lists(st.sampled_from([0.0, -0.0, 1.5, -3e4, 6e-5, NAN, INF, -INF]), max_size=40),
    st.integers(1, 9),
)
def test_the_count_is_torchs_for_any_values_and_pieces(dtype: torch.dtype, values: list[float], most: int) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    expected = int((~torch.isfinite(tensor)).sum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finite, "_PIECE_ELEMENTS", most)
        assert count_nonfinite(tensor) == expected
        # Every second column, so that the elements do not lie side by side.
        wide = tensor.repeat(3, 1).t().contiguous()[:, ::2]
        assert count_nonfinite(wide) == 2 * expected
        assert count_nonfinite(wide.t()) == 2 * expected


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_all_patterns_of_eight_bits(dtype: torch.dtype) -> None:
    tensor = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert count_nonfinite(tensor) == int((~torch.isfinite(tensor.float())).sum()) > 0


def test_all_patterns_of_sixteen_bits() -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        tensor = patterns.view(dtype)
        assert count_nonfinite(tensor) == int((~torch.isfinite(tensor)).sum()) > 0


@pytest.mark.parametrize(
    ("tensor", "count"),
    [
        (torch.tensor(NAN), 1),
        (torch.tensor(1.0), 0),
        (torch.empty(0), 0),
        (torch.empty(3, 0, 2), 0),
        (torch.tensor([complex(NAN, INF), complex(1, 2), complex(1, NAN)]), 3),
        (torch.tensor([complex(NAN, 1)]).conj(), 1),
        (torch.full((2, 2), torch.iinfo(torch.int32).max, dtype=torch.int32), 0),
        (torch.ones(3, dtype=torch.bool), 0),
        (torch.eye(3).to_sparse() * NAN, 0),
        (torch.tensor([INF]).expand(5), 5),
    ],
    ids=lambda each: str(each)[:30],
)
def test_tensors_of_any_kind(tensor: torch.Tensor, count: int) -> None:
    assert count_nonfinite(tensor) == count


def state(bad: int = 0, *, moments: int = 0) -> dict[str, Any]:
    weights, averages = torch.randn(50), torch.randn(50)
    weights[:bad] = NAN
    averages[:moments] = INF
    return {"model": {"w": weights}, "optim": {"w": {"exp_avg": averages}}, "step": bad}


def test_a_save_says_how_many_values_are_not_finite_also_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = bp.BucketWriter(check_finite=True)
    for step, (bad, moments) in enumerate([(3, 0), (0, 0), (1, 2)]):
        url = f"{tmp_path}/run/step-{step}"
        handle = bp.async_save(state(bad, moments=moments), checkpoint_id=url, storage_writer=writer)
        handle.result()
        assert handle.changes is not None
        counts = {name: part.nonfinite for name, part in handle.changes.parts.items() if part.nonfinite}
        assert counts == {name: count for name, count in (("model", bad), ("optim moments", moments)) if count}
        assert handle.changes.nonfinite == bad + moments
        assert handle.changes.since == (f"{tmp_path}/run/step-{step - 1}" if step else None)
    told = [message for message in caplog.messages if "NaN or infinite" in message]
    assert told == [
        f"{tmp_path}/run/step-0 holds values that are NaN or infinite: 3 in model",
        f"{tmp_path}/run/step-2 holds values that are NaN or infinite: 1 in model, 2 in optim moments",
    ]
    shown = subprocess.run(
        [sys.executable, "-m", "bucketpoint.cli", "show", f"{tmp_path}/run/step-2"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "not finite 1 in model, 2 in optim moments" in " ".join(shown.stdout.split())


def test_without_the_check_nothing_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = bp.BucketWriter()
    for step in range(2):
        handle = bp.async_save(state(3), checkpoint_id=f"{tmp_path}/run/step-{step}", storage_writer=writer)
        handle.result()
    assert handle.changes is not None
    assert handle.changes.nonfinite is None
    assert "NaN" not in caplog.text


@pytest.mark.parametrize("planner", [bp.SavePlanner, DefaultSavePlanner])
def test_column_shards_and_synchronous_saves_are_counted(tmp_path: Path, planner: Any) -> None:
    weights = torch.zeros(40, 30)
    weights[5] = NAN
    writer = bp.BucketWriter(check_finite=True)
    dcp.save(
        {"model": {"w": weights[:, ::3], "half": weights.half()}},
        checkpoint_id=f"{tmp_path}/run/step-1",
        storage_writer=writer,
        planner=planner(),
        no_dist=True,
    )
    record = open_checkpoint(f"{tmp_path}/run/step-1").record
    assert record.changes is not None
    assert record.changes["parts"]["model"]["nonfinite"] == 40


def policy(**best: Any) -> RetentionPolicy:
    rule = Best("loss", "min", **best)
    return RetentionPolicy(Keep(latest=1, best=[rule]), prune=Prune(when="manual", grace=timedelta(0)))


def test_a_policy_refuses_checkpoints_with_values_that_are_not_finite_as_best(tmp_path: Path) -> None:
    rules = policy(not_finite="refuse")
    with CheckpointManager(str(tmp_path / "run"), policy=rules, check_finite=True) as manager:
        for step, (bad, loss) in enumerate([(0, 0.5), (2, 0.1), (0, 0.7)], 1):
            manager.save(step, state(bad), metrics={"loss": loss})
        manager.wait()
        report = manager.prune()
        assert report is not None
        assert manager.steps() == [1, 3]


ROWS = [
    Row(step, float(step), str(step), metrics=metrics)
    for step, metrics in enumerate(
        [{"loss": 0.1, "nonfinite_values": 2.0}, {"loss": 0.5, "nonfinite_values": 0.0}, {"loss": 0.9}, {}], 1
    )
]


@pytest.mark.parametrize(("refuse", "best"), [(None, 1), ("refuse", 2)])
def test_only_checkpoints_with_a_count_above_zero_are_refused(refuse: Any, best: int) -> None:
    decided = plan(policy(not_finite=refuse), ROWS)
    assert {entry.row.step for entry in decided.kept} == {best, 4}


def test_the_policy_file_knows_the_word() -> None:
    text = "version: 1\nkeep:\n  latest: 1\n  best:\n    - {metric: loss, mode: min, not_finite: refuse}\n"
    assert from_yaml(text, environ={}).keep.best[0].not_finite == "refuse"
    with pytest.raises(PolicyError, match="refuse"):
        from_yaml(text.replace("refuse", "ignore"), environ={})
