"""Messages in the job's TCP store, where any process may write: plain values, of which none is believed."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bucketpoint.dcp import meeting, process_groups
from bucketpoint.dcp.error_boundary import KINDS, MOST_BYTES, from_plain, to_plain
from bucketpoint.dcp.meeting import Failure, Meeting
from bucketpoint.errors import BucketpointError, CheckpointExistsError, PolicyError, PolicyFault, StoreError
from dcp.deadline import one_call_scenarios as scenarios
from dcp.ranks import Ranks

RANKS = (0, 1)


def sent(error: BucketpointError) -> BucketpointError:
    return from_plain(json.loads(json.dumps(to_plain(error))))


def test_ends_a_meeting_from_which_a_rank_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> bool:
        raise KeyboardInterrupt

    store = dist.HashStore()
    monkeypatch.setattr(process_groups, "store_of", lambda _: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(meeting, "poll", interrupted)
        Meeting.begin(RANKS, "a save").wait(20)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(BucketpointError, match="Rank 1 failed: KeyboardInterrupt"):
        Meeting.begin(RANKS, "a save").wait(20)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_rebuilds_each_class_with_its_fields(kind: type[BucketpointError]) -> None:
    error = kind("what \u202e went wrong \ud800", url="s3://b/run", key="a.b", rank=3, remedy="Do it again")
    error.message = error.message.encode("utf-8", "replace").decode()
    again = sent(error)
    assert type(again) is kind
    assert error.message in again.message
    assert again.fields() == error.fields()


def test_turns_other_classes_into_the_nearest_one_and_their_text() -> None:
    class Own(CheckpointExistsError):
        pass

    assert type(sent(Own("here"))) is CheckpointExistsError
    faults = PolicyError.of(PolicyFault("no such rule", path=("keep", 0)))
    assert "keep[0]: no such rule" in str(sent(faults))
    assert len(sent(StoreError("x" * 10**7)).message) < 10**4


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def failure(
    rank: Any = 1, kind: Any = "error", name: Any = "StoreError", message: Any = "gone", **fields: Any
) -> bytes:
    return json.dumps([rank, kind, [name, message, fields]]).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe\x00",
        b"[" * 200_000,
        b"9" * 100_000,
        b"NaN",
        b"null",
        b"[1, 2]",
        json.dumps([1, "error", "x" * MOST_BYTES]).encode(),
        failure(rank=7),
        failure(rank=True),
        failure(rank=None),
        failure(rank=1e300),
        failure(kind="exit"),
        failure(kind=["error"]),
        failure(name="SystemExit"),
        failure(name="os.system"),
        failure(name=["StoreError"]),
        failure(name="__class__"),
        failure(message=None),
        failure(message={"a": 1}),
        failure(url=3),
        failure(remedy=["rm"]),
        failure(rank=1, kind="late", key={}),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_refuses_what_no_rank_has_written(data: bytes) -> None:
    found = Failure.received(data, RANKS)
    assert (found.kind, type(found.error)) == ("error", BucketpointError)
    assert f"something other than its ranks wrote {len(data)} bytes" in str(found.error)
    assert len(str(found.error)) < 1000


def test_runs_no_pickle_that_lies_in_the_store(two_ranks: Ranks, tmp_path: Path) -> None:
    mark = tmp_path / "owned"
    for error in two_ranks.run(scenarios.plant_in_the_store, f"file://{tmp_path}/a", pickle.dumps(Evil(mark))):
        assert error[0] == "BucketpointError"
        assert "something other than its ranks wrote" in error[1]
    assert not mark.exists()
