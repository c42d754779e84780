"""The way of a plain load through the package: which files the bytes cross."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import bucketpoint
from bucketpoint import S3Reader, S3Writer
from bucketpoint.stores.http_store import HttpStore
from kit.servers import S3Server

PACKAGE = Path(bucketpoint.__file__).parent


def test_crosses_four_files_between_the_readers_plan_and_the_reply(minio: S3Server, monkeypatch: Any) -> None:
    url = minio.url(minio.make_bucket(), "step-1")
    state = {"weight": torch.ones(300, 300)}
    dcp.save(state, checkpoint_id=url, storage_writer=S3Writer(storage_options=minio.options))
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
    dcp.load(state, checkpoint_id=url, storage_reader=S3Reader(storage_options=minio.options))

    # Before them: dcp/reader, which waits for the tasks, with loading/extents and read_plan. After: stores/http_store.
    assert crossed == {
        "transfer/tasks.py",
        "transfer/download.py",
        "stores/retry.py",
        "transfer/long_reads.py",
    }
