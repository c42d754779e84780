"""Errors of saves and loads name what is wrong, and their remedies help."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint import errors


def failures(error: BaseException) -> list[Any]:
    assert isinstance(error, dcp.CheckpointException)
    return [failure[0] for failure in error.failures.values()]


@pytest.mark.parametrize("planner", [None, bp.SavePlanner()], ids=["DCP's planner", "SavePlanner"])
def test_names_the_key_of_what_dcp_save_cannot_pickle(tmp_path: Path, planner: Any) -> None:
    state = {"w": torch.ones(2), "a": {"lock": threading.Lock()}}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(state, checkpoint_id=tmp_path, storage_writer=bp.BucketWriter(), planner=planner, no_dist=True)
    (error,) = failures(caught.value)
    assert error.key == "a.lock"


@pytest.mark.parametrize(
    ("saved", "state", "said", "unsaid"),
    [
        (
            {"loader": {**bp.rank_state(7, 0), **bp.rank_state(8, 1)}},
            {"loader": bp.rank_state(0, 2)},
            "loader was saved by ranks: 0, 1. Leave it out of the state, and read these values",
            "allow_partial_load",
        ),
        ({"w": torch.ones(3)}, {"w": torch.ones(4)}, "bucketpoint.load(url, keys=...)", "allow_partial_load"),
        ({"w": torch.ones(3)}, {"v": torch.ones(3)}, "allow_partial_load", "keys=..."),
    ],
    ids=["rank", "shape", "key"],
)
def test_names_the_remedy_for_each_misfit(
    tmp_path: Path, saved: dict[str, Any], state: dict[str, Any], said: str, unsaid: str
) -> None:
    bp.save(saved, f"{tmp_path}/a")
    with pytest.raises(bp.MismatchError) as caught:
        bp.load(state, f"{tmp_path}/a")
    assert said in str(caught.value)
    assert unsaid not in str(caught.value)


@pytest.mark.parametrize("through", ["bucketpoint", "dcp"])
def test_says_that_a_run_is_one_and_names_its_newest_checkpoint(tmp_path: Path, through: str) -> None:
    for step in (9, 10):
        bp.save({"w": torch.ones(3)}, f"{tmp_path}/step-{step}")
    error: BaseException
    if through == "bucketpoint":
        with pytest.raises(bp.CheckpointNotFoundError) as caught:
            bp.load({"w": torch.ones(3)}, tmp_path)
        error = caught.value
    else:
        with pytest.raises(dcp.CheckpointException) as other:
            dcp.load({"w": torch.ones(3)}, checkpoint_id=tmp_path, storage_reader=bp.BucketReader(), no_dist=True)
        (error,) = failures(other.value)
    assert not isinstance(error, errors.IncompleteCheckpointError)
    assert "The URL is that of a run" in str(error)
    assert f"Pass the newest one: {tmp_path}/step-10" in str(error)
    assert "latest_checkpoint" in str(error)
    assert "interrupted" not in str(error)


def test_names_tensors_on_the_meta_device_with_what_to_do(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    bp.save({"model": model.state_dict()}, f"{tmp_path}/a")
    with torch.device("meta"):
        empty = torch.nn.Linear(2, 2)
    with pytest.raises(bp.MismatchError) as caught:
        bp.load({"model": empty.state_dict()}, f"{tmp_path}/a")
    assert "2 tensors to load into are on the meta device" in str(caught.value)
    assert "such as model.weight" in str(caught.value)
    assert "to_empty" in str(caught.value)


@pytest.mark.parametrize("through", ["bucketpoint", "dcp"])
@pytest.mark.parametrize("damage", ["nothing there", "no metadata"])
def test_logs_no_tracebacks_of_dcp_for_a_failed_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, through: str, damage: str
) -> None:
    if damage == "no metadata":
        (tmp_path / ".metadata").write_bytes(b"no pickle")
    with caplog.at_level(logging.WARNING), pytest.raises((bp.BucketpointError, dcp.CheckpointException)):
        if through == "bucketpoint":
            bp.load({"w": torch.ones(3)}, tmp_path)
        else:
            dcp.load({"w": torch.ones(3)}, checkpoint_id=tmp_path, storage_reader=bp.BucketReader(), no_dist=True)
    # To the other one, of structured events, torch gives a handler that drops them.
    assert [record.getMessage() for record in caplog.records if "NullHandler" not in record.name] == []
