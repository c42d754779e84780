"""What asynchronous saves return, when that is done, and what a failed one leaves behind: one process, THREAD."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import staging as torch_staging
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import bucketpoint
from bucketpoint import BucketWriter, Stager, StagingOptions, TransferOptions
from bucketpoint.dcp.planning import save_planner
from bucketpoint.errors import StagingError, StagingOverlapError
from bucketpoint.staging import stager as stager_module
from dcp.saving.async_scenarios import (
    BESIDE,
    WAIT_S,
    WAYS,
    FailingPlanner,
    GatedFileSystem,
    SlowFileSystem,
    Training,
    assert_errors_of_ours,
    assert_holds,
    assert_one_shape,
    begin_alone,
    error_of,
    upload_of,
    wait,
)
from staging.helpers import Beside, held_copies

pytestmark = pytest.mark.contract

THREAD = AsyncCheckpointerType.THREAD

either_save = pytest.mark.parametrize("save", [dcp.async_save, bucketpoint.async_save], ids=["dcp", "bucketpoint"])


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def gated() -> Iterator[GatedFileSystem]:
    fs = GatedFileSystem()
    yield fs
    fs.gate.set()


@pytest.fixture
def copies() -> Iterator[threading.Event]:
    with held_copies() as opened:
        yield opened


def fail_to_copy(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("an illegal memory access was encountered")


# -- dcp.async_save ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, BESIDE, torch_staging.StagingOptions(use_async_staging=True)])
@pytest.mark.parametrize("own_stager", [False, True])
def test_returns_one_future_or_two_from_asynchronous_staging(
    root: str, gated: GatedFileSystem, copies: threading.Event, own_stager: bool, options: Any
) -> None:
    training = Training()
    if own_stager:
        given = {"storage_writer": BucketWriter(fs=gated), "async_stager": Stager(options)}
    else:
        given = {"storage_writer": BucketWriter(fs=gated, staging=options)}
    if options is None:
        copies.set()
    begun = dcp.async_save(training.run(1), checkpoint_id=root, no_dist=True, **given)
    assert type(begun) is (Future if options is None else AsyncSaveResponse)
    if isinstance(begun, AsyncSaveResponse):
        assert not begun.staging_completion.done()
        copies.set()
        assert begun.staging_completion.result(WAIT_S) is None
    training.spoil()
    assert gated.arrived.wait(WAIT_S)
    assert not upload_of(begun).done()
    gated.gate.set()
    wait(begun)
    assert_holds(root, 1)


@pytest.mark.parametrize("own_stager", [False, True])
def test_fails_both_futures_and_the_handle_if_a_copy_beside_training_fails(
    root: str, monkeypatch: pytest.MonkeyPatch, own_stager: bool
) -> None:
    stager = Stager(BESIDE) if own_stager else None
    writer = BucketWriter(staging=BESIDE)
    training = Training()
    with monkeypatch.context() as patch:
        patch.setattr(stager_module, "run_copies", fail_to_copy)
        begun = begin_alone(training.run(1), root, writer, async_stager=stager)
        handle = begin_alone(training.state, root, writer, async_stager=stager, by=bucketpoint.async_save)
        for future in (begun.staging_completion, begun.upload_completion, handle.staged, handle):
            with pytest.raises(StagingError, match="illegal memory access"):
                future.result(WAIT_S)
    assert not Path(root, ".metadata").exists()
    wait(begin_alone(training.run(2), root, writer, async_stager=stager))
    assert_holds(root, 2)


def test_raises_from_async_save_if_a_copy_fails_before_it_returns(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stager_module, "run_copies", fail_to_copy)
    for save in (dcp.async_save, bucketpoint.async_save):
        with pytest.raises(StagingError, match="illegal memory access"):
            begin_alone(Training().state, root, by=save)


# -- bucketpoint.async_save -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_returns_alike_handles_by_every_way(root: str, way: str) -> None:
    assert_one_shape(way, root, THREAD, no_dist=True)


@pytest.mark.parametrize("where", ["plan", "upload"])
@pytest.mark.parametrize("way", WAYS)
def test_raises_our_errors_by_every_way(root: str, way: str, where: str) -> None:
    assert_errors_of_ours(way, root, THREAD, where, no_dist=True)


@pytest.mark.parametrize("staging", [None, BESIDE])
def test_distinguishes_staged_from_committed_in_a_handle(
    root: str, gated: GatedFileSystem, copies: threading.Event, staging: StagingOptions | None
) -> None:
    writer = BucketWriter(fs=gated, staging=staging)
    if staging is None:
        copies.set()
    handle = begin_alone(Training().run(1), root, writer, by=bucketpoint.async_save)
    assert handle.staged.done() == (staging is None)
    assert "running" in repr(handle)
    copies.set()
    handle.staged.result(WAIT_S)
    assert gated.arrived.wait(WAIT_S)
    assert not handle.done()
    assert not handle.committed.done()
    assert not handle.wait(0)
    with pytest.raises(concurrent.futures.TimeoutError):
        handle.result(0)
    with pytest.raises(concurrent.futures.TimeoutError):
        handle.exception(0)
    gated.gate.set()
    assert handle.wait(WAIT_S)
    assert "committed" in repr(handle)


def test_shows_the_uploads_progress(root: str, gated: GatedFileSystem) -> None:
    seen = []

    def note(event: Any) -> None:
        seen.append((event, begun[0].progress if begun else None))

    begun: list[Any] = []
    writer = BucketWriter(fs=gated, progress=note)
    begun.append(begin_alone(Training().run(1), root, writer, by=bucketpoint.async_save))
    assert begun[0].progress is None
    gated.gate.set()
    begun[0].result(WAIT_S)
    assert seen
    assert all(progress is event for event, progress in seen)
    assert begun[0].progress.finished
    assert begun[0].progress.url == root


# -- what a failed save leaves behind ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["plan", "upload"])
@either_save
def test_returns_the_memory_of_a_failed_save_although_its_error_is_kept(root: str, save: Any, where: str) -> None:
    """`when_busy="error"` would refuse the next state if the memory were still leased."""
    writer = BucketWriter(staging=StagingOptions(when_busy="error"))
    kept = []
    for step in range(3):
        begun = begin_alone(Training().run(step), root, writer, planner=FailingPlanner(where), by=save)
        kept.append((begun, error_of(begun)))
        assert kept[-1][1] is not None
    held = writer._own_stager().staged_bytes
    wait(begin_alone(Training().run(3), root, writer, by=save))
    assert_holds(root, 3)
    assert writer._own_stager().staged_bytes == held
    del kept


class UnreachableWriter(FileSystemWriter):
    def reset(self, checkpoint_id: Any = None) -> None:
        # Torch 2.9 calls it on the caller's thread too, where the error would need no future.
        if threading.current_thread() is not threading.main_thread():
            raise OSError("the file server is down")


@either_save
def test_returns_the_memory_of_a_save_that_fails_before_the_state_is_read(root: str, save: Any) -> None:
    """Nothing tells of such a save, so plain DCP's is given up after `unread_timeout_s`."""
    kept = []
    with Stager(StagingOptions(unread_timeout_s=0.5)) as stager:
        for step in range(2):
            begun = begin_alone(Training().run(step), root, UnreachableWriter(root), async_stager=stager, by=save)
            kept.append((begun, error_of(begun)))
            assert "the file server is down" in str(kept[-1][1])
        wait(begin_alone(Training().run(2), root, async_stager=stager, by=save))
        assert_holds(root, 2)
    assert stager.staged_bytes == 0


@pytest.mark.parametrize(
    ("planner", "overwrite", "said"),
    [
        (FailingPlanner("upload"), True, "this disk is on fire"),
        (None, False, "Checkpoint already exists at this URL"),
    ],
    ids=["upload", "commit"],
)
@either_save
def test_logs_a_failed_save_although_its_future_is_dropped(
    root: str, save: Any, planner: Any, overwrite: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save(Training().run(1), checkpoint_id=root, storage_writer=BucketWriter(), no_dist=True)
    writer = BucketWriter(overwrite=overwrite)
    with caplog.at_level(logging.ERROR, "bucketpoint"):
        begin_alone(Training().run(2), root, writer, planner=planner, by=save)
        writer.close()
    told = [record for record in caplog.records if record.name.startswith("bucketpoint")]
    assert [record.levelno for record in told] == [logging.ERROR]
    assert f"the asynchronous save of {root} failed: " in told[0].getMessage()
    assert said in told[0].getMessage()


# -- overlap ----------------------------------------------------------------------------------------------------------


@either_save
def test_refuses_a_save_that_would_overlap_by_policy(root: str, gated: GatedFileSystem, save: Any) -> None:
    writer = BucketWriter(fs=gated, staging=StagingOptions(when_busy="error"))
    first = begin_alone(Training().run(1), f"{root}/first", writer, by=save)
    assert gated.arrived.wait(WAIT_S)
    said = rf"the save of {root}/first, staged \d+\.\d s ago, has not ended"
    for other in (writer, BucketWriter(fs=gated, staging=StagingOptions(when_busy="error"))):
        with pytest.raises(StagingOverlapError, match=said) as caught:
            begin_alone(Training().run(2), f"{root}/second", other, by=save)
        assert not caught.value.remedy.startswith("None")
        assert not other._own_stager().staged_bytes or other is writer
    gated.gate.set()
    wait(first)
    wait(begin_alone(Training().run(3), f"{root}/third", writer, by=save))
    assert_holds(f"{root}/first", 1)
    assert_holds(f"{root}/third", 3)
    assert not Path(root, "second").exists()


# -- writers and stagers ----------------------------------------------------------------------------------------------


def test_sends_a_writer_without_its_staging_memory(root: str) -> None:
    writer = BucketWriter(staging=BESIDE)
    wait(begin_alone(Training().run(1), root, writer))
    assert writer._own_stager().staged_bytes > 0
    sent = pickle.dumps(writer)
    assert len(sent) < 4000
    arrived = pickle.loads(sent)
    assert arrived._stager is None
    assert arrived.staging == BESIDE
    begun = begin_alone(Training().run(2), root, arrived)
    assert isinstance(begun, AsyncSaveResponse)
    wait(begun)
    assert_holds(root, 2)


def test_plans_saves_of_one_state_by_one_writer_once(root: str) -> None:
    writer = BucketWriter()
    with mock.patch.object(save_planner, "plan_globally", wraps=save_planner.plan_globally) as planned:
        for step in range(3):
            wait(begin_alone(Training().run(step), f"{root}/{step}", writer, by=bucketpoint.async_save))
            assert_holds(f"{root}/{step}", step)
    assert planned.call_count == 1


def test_saves_by_a_closed_writer_that_has_no_memory(root: str, gated: GatedFileSystem) -> None:
    writer = BucketWriter(fs=gated)
    handle = begin_alone(Training().run(1), f"{root}/1", writer, by=bucketpoint.async_save)
    stager = writer._own_stager()
    assert gated.arrived.wait(WAIT_S)
    closing = Beside(writer.close)
    assert closing.is_blocked()
    assert stager.staged_bytes > 0
    gated.gate.set()
    closing.outcome.result(WAIT_S)
    assert handle.done()
    assert stager.staged_bytes == 0
    wait(begin_alone(Training().run(2), f"{root}/2", writer))
    for step in (1, 2):
        assert_holds(f"{root}/{step}", step)
    writer.close()
    writer.close()


# -- priority -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the process's")
@pytest.mark.parametrize("nice", [None, 7])
def test_lowers_the_priority_of_threads_beside_training_only_if_told_to(root: str, nice: int | None) -> None:
    transfer = TransferOptions(background_nice=nice)
    writers = [BucketWriter(fs=SlowFileSystem(mark=f"{root}/{name}"), transfer=transfer) for name in "ab"]
    wait(begin_alone(Training().state, f"{root}/beside", writers[0]))
    dcp.save(Training().state, checkpoint_id=f"{root}/plain", storage_writer=writers[1], no_dist=True)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    # This process may have been started with a higher one.
    assert [int(Path(root, name).read_text()) for name in "ab"] == [max(own, nice or own), own]
