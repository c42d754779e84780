"""The alarm for an optimizer whose moments stand still although training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint._extension import ZStandard

import bucketpoint as bp
from bucketpoint.dcp.planning.results import Results
from bucketpoint.dcp.saving.earlier_saves import is_later
from bucketpoint.format.catalog_keys import DEFAULT_RULES, GroupRule
from dcp.planning.test_compact import Job


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "although training continued" in record.getMessage()]


def state(moments: float, step: int = 0) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((9,), float(step)), "frozen": torch.ones(9)},
        "optim": {"w": {"exp_avg": torch.full((9,), moments), "step": torch.tensor(step)}, "lr": 0.1 * step},
        "step": step,
    }


class Run:
    """Saves of one writer to a folder, and how many alarms they gave."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> None:
        self.folder, self.caplog, self.writer = folder, caplog, bp.BucketWriter(progress=False, **options)

    def save(self, step: int, content: dict[str, Any], planner: Any = None) -> int:
        """Return the number of alarms of this save."""
        before = len(alarms(self.caplog))
        url = str(self.folder / f"step-{step}")
        dcp.save(content, checkpoint_id=url, storage_writer=self.writer, planner=planner, no_dist=True)
        return len(alarms(self.caplog)) - before


@pytest.fixture
def run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Run:
    return Run(tmp_path, caplog)


@pytest.mark.parametrize("planner", [bp.SavePlanner, DefaultSavePlanner, lambda: DefaultSavePlanner(True, True)])
@pytest.mark.parametrize("unchanged", ["send", "copy"])
def test_reports_moments_that_stop_once_until_they_move_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, planner: Any, unchanged: Any
) -> None:
    run, kept = Run(tmp_path, caplog, unchanged=unchanged), planner()
    moments = [1.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert [run.save(step, state(value, step), kept) for step, value in enumerate(moments)] == [0, 0, 0, 1, 0, 0, 0, 1]
    for said in ("'optim'", f"{tmp_path}/step-3,", f"since {tmp_path}/step-1.", "stale copy", "Check that"):
        assert said in alarms(caplog)[0]
    assert {record.levelname for record in caplog.records if "although" in record.getMessage()} == {"WARNING"}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # A quick start that is run again saves moments of zeros at the same step.
        ([1, 1, 1, 2, 3, 4], [0, 0, 0, 0, 1, 0]),
        ([500, 400, 400, 500, 600], [0, 0, 0, 0, 1]),
    ],
)
def test_reports_a_stale_copy_at_its_third_step_and_no_tries_without_training(
    run: Run, steps: list[int], expected: list[int]
) -> None:
    assert [run.save(step, state(1.0)) for step in steps] == expected
    assert "since the first save of this process" in alarms(run.caplog)[0]


def test_reports_an_optimizer_that_nothing_steps_and_no_training_with_adam(run: Run) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    told = []
    for step in range(5):
        if step < 3:
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        told.append(run.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    assert told == [0, 0, 0, 0, 1]


def test_counts_moments_only_and_accepts_an_empty_state(run: Run) -> None:
    # Without moments, as with SGD, an optimizer has settings that may stand still, and counts that may not hide them.
    counts = {"model": torch.ones(9), "optim": {"step": torch.tensor(1), "lr": 0.1}}
    assert [run.save(step, {**counts, "step": step}) for step in range(3)] == [0, 0, 0]
    other = {"model": {"w": torch.ones(9)}, "rng": torch.ones(9), "dataloader": torch.ones(9)}
    assert [run.save(step, other) for step in range(3, 6)] == [0, 0, 0]
    assert [run.save(step, {}, bp.SavePlanner()) for step in range(6, 8)] == [0, 0]


@pytest.mark.parametrize("planner", [bp.SavePlanner(), None])
def test_watches_each_group_of_an_optimizer_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, planner: Any
) -> None:
    run = Run(tmp_path, caplog, groups=[GroupRule("optim_critic", ["critic"]), *DEFAULT_RULES])
    told = [run.save(step, {**state(float(step)), "critic": torch.ones(9)}, planner) for step in range(3)]
    assert told == [0, 0, 1]
    assert "'optim_critic'" in alarms(caplog)[0]


@pytest.mark.parametrize("kinds", ["FWFWF", "WFFF", "FFWWFF"])
def test_raises_and_hides_no_alarm_for_saves_of_weights_in_between(run: Run, kinds: str) -> None:
    for step, kind in enumerate(kinds):
        whole = state(float(step), step)
        assert run.save(step, whole if kind == "F" else {"model": whole["model"]}) == 0
    last = len(kinds)
    assert run.save(last, {"model": state(0.0, last)["model"]}) == 0
    assert [run.save(last + more, state(float(last - 1), last + more)) for more in (1, 2)] == [0, 1]


@pytest.mark.parametrize(
    ("last", "now", "went_on"),
    [
        ("step-400", "step-500", True),
        ("step-99", "step-100", True),
        ("9", "10", True),
        ("step-500", "step-400", False),
        ("step-0500", "step-500", False),
        ("step-" + "9" * 200, "step-1" + "0" * 200, True),
        ("step-400", "step-400", False),
        ("step-400", "final", False),
        ("epoch-9", "step-1", False),
        ("last", "best", False),
    ],
)
def test_tells_from_folder_numbers_whether_training_went_on(last: str, now: str, went_on: bool) -> None:
    assert is_later(f"s3://b/run/{now}", f"s3://b/run/{last}/") == went_on


def test_watches_no_moments_behind_a_stream_transform(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("zstandard")
    run = Run(tmp_path, caplog, _extensions=[ZStandard()])
    assert [run.save(step, state(1.0, step)) for step in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("packed", [True, False])
def test_counts_a_change_on_any_rank_as_a_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    if not packed:
        monkeypatch.setattr(Results, "of", lambda results, *_: results)
    job = Job(3)
    for step, moved in enumerate([0, 1, 2, 2, 2]):
        states = [{"model": torch.full((9,), float(step)), "optim": {f"m{rank}": torch.ones(9)}} for rank in range(3)]
        states[1]["optim"]["m1"] *= moved
        job.save(states, f"file://{tmp_path}/step-{step}")
        assert job.in_columns() == [packed] * 3
        assert len(alarms(caplog)) == (step == 4)
