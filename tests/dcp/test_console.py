"""What a person sees: a bar when wanted or on a terminal, one log line a save and a load, no logging level touched."""

from __future__ import annotations

import io
import logging
import re
import sys
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketReader, BucketWriter
from bucketpoint.dcp.progress_bar import progress_callback
from bucketpoint.transfer import Progress

URL = "memory://console/run"


def round_trip(progress: Any) -> None:
    dcp.save({"w": torch.ones(10)}, checkpoint_id=URL, storage_writer=BucketWriter(progress=progress), no_dist=True)
    target = {"w": torch.zeros(10)}
    dcp.load(target, checkpoint_id=URL, storage_reader=BucketReader(progress=progress), no_dist=True)


def test_shows_a_callable_the_bytes_as_they_grow_to_the_total() -> None:
    events: list[Progress] = []
    round_trip(events.append)
    for phase in ("save", "load"):
        seen = [event for event in events if event.phase == phase]
        assert [event.done_bytes for event in seen] == sorted(event.done_bytes for event in seen)
        assert seen[-1].finished
        assert seen[-1].done_bytes == seen[-1].total_bytes > 0
        assert {event.url for event in seen} == {URL}


def test_shows_nothing_where_nobody_looks_but_logs_a_line_and_sets_no_level(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    levels = {name: logging.getLogger(name).level for name in ("", "bucketpoint", "boto3", "botocore", "urllib3")}
    with caplog.at_level(logging.INFO, logger="bucketpoint"):
        round_trip(None)
    assert capfd.readouterr() == ("", "")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("bucketpoint")]
    assert [line.split()[0] for line in lines] == ["saved", "loaded"]
    assert re.search(r"MB in \d\.\d\d s \(\d+ MB/s\), blocked \d+ ms, 1 items of 1 ranks in 1 objects$", lines[0])
    assert {name: logging.getLogger(name).level for name in levels} == levels


def test_shows_a_bar_when_it_is_asked_for_once_a_byte_or_the_total_is_known(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    round_trip(True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "save memory://" in err
    assert "load memory://" in err
    # On a terminal unasked, and on rank 0 alone.
    with monkeypatch.context() as patch:
        patch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        with progress_callback(None, 0) as shown, progress_callback(None, 1) as hidden:
            assert (shown is not None, hidden) == (True, None)
    for total in (0, 10):
        monkeypatch.setattr("sys.stderr", screen := io.StringIO())
        with progress_callback(True, 0) as callback:
            assert callback is not None
            callback(Progress("save", "s3://b/x", 0, total, False))
        assert ("save s3://b/x" in screen.getvalue()) == bool(total)


def test_writes_a_line_of_progress_now_and_then_without_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bucketpoint.dcp import progress_bar as console

    monkeypatch.delenv("FORCE_COLOR", raising=False)
    round_trip(True)
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["save memory", "load memory"]
    # So is it on a terminal without rich.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rich.console", None)
        for wanted in (True, None):
            with console.progress_callback(wanted, 0) as callback:
                assert (callback is not None) == bool(wanted)
        # A notebook shows lines unasked.
        patch.setitem(sys.modules, "ipykernel", sys)
        patch.setattr(sys.stderr, "isatty", lambda: False)
        with console.progress_callback(None, 0) as callback, console.progress_callback(None, 1) as none:
            assert callback is not None
            assert none is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.progress_callback(True, 0) as callback:
        assert callback is not None
        for second in range(31):
            now[0] = float(second)
            callback(Progress("save", "s3://b/x", second * 1_000_000, 30_000_000, second == 30))
    assert capfd.readouterr().err.splitlines() == [
        "save s3://b/x: 10.0 of 30.0 MB (33 %) in 10 s",
        "save s3://b/x: 20.0 of 30.0 MB (66 %) in 20 s",
        "save s3://b/x: 30.0 of 30.0 MB (100 %) in 30 s",
    ]
