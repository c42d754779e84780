"""The way of a plain load through the package: which files run, and which files the bytes cross."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint
from bucketpoint import S3Reader, S3Writer
from bucketpoint.stores.http_store import HttpStore
from kit.servers import S3Server

PACKAGE = Path(bucketpoint.__file__).parent


@contextmanager
def files_run() -> Iterator[set[str]]:
    """Collect the package's files of which a function is called within the block, on this and on new threads."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            seen.add(Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix())

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def test_runs_nothing_of_cooperation_and_crosses_four_files_from_the_plan_to_the_reply(
    minio: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = minio.url(minio.make_bucket(), "step-1")
    state = {f"weight{number}": torch.full((300, 300), float(number)) for number in range(4)}
    dcp.save(state, checkpoint_id=url, storage_writer=S3Writer(storage_options=minio.options))
    loaded = {name: torch.zeros(300, 300) for name in state}
    reader = S3Reader(storage_options=minio.options)
    open_range, crossed = HttpStore.open_range, set[str]()

    def opened(*arguments: Any, **named: Any) -> Any:
        reply = open_range(*arguments, **named)
        receive = reply.receive

        def note_the_stack(buffers: Any) -> None:
            frame: FrameType | None = sys._getframe()
            while frame is not None:
                if frame.f_code.co_filename.startswith(str(PACKAGE)):
                    crossed.add(Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix())
                frame = frame.f_back
            receive(buffers)

        reply.receive = note_the_stack  # type: ignore[method-assign]
        return reply

    monkeypatch.setattr(HttpStore, "open_range", opened)
    with files_run() as seen:
        dcp.load(loaded, checkpoint_id=url, storage_reader=reader)

    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert "transfer/long_reads.py" in seen
    assert [name for name in seen if name.startswith("dcp/cooperative/")] == []
    # Before them: dcp/reader, which waits for the tasks, with loading/extents and read_plan. After: stores/http_store.
    assert crossed == {
        "transfer/tasks.py",
        "transfer/download.py",
        "stores/retry.py",
        "transfer/long_reads.py",
    }
