"""Saves and loads, two jobs at one URL, and a job that is killed, on the filesystems of fsspec that tests reach."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import (
    BucketReader,
    BucketWriter,
    CheckpointExistsError,
    CommitConflictError,
    TransferOptions,
    latest_checkpoint,
)
from bucketpoint.stores.fsspec import FsspecStore
from fsspec_backends import IN_PROCESS, SERVED, Backend, backend
from kit import kills

pytestmark = pytest.mark.contract

# An upload in parts, and as small as S3 lets one be.
LARGE = (5 << 20) + 1000
OPTIONS = TransferOptions(part_bytes=5 << 20, connections=2, single_put_bytes=1 << 20)
HANGS_S = 240
WRITES = ("put", "create_multipart", "put_part", "complete_multipart", "abort_multipart", "delete")


@pytest.fixture
def found(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with backend(request.param, request, tmp_path) as one:
        yield one


def state(value: int) -> dict[str, Any]:
    large, small = torch.full((LARGE,), value, dtype=torch.uint8), torch.ones(100) * value
    # The `.metadata` of different values have different sizes.
    return {"large": large, "small": small, "value": value, "text": "x" * (300 if value % 2 else 10)}


def save(fs: Any, url: str, value: int, **settings: Any) -> None:
    writer = BucketWriter(fs=fs, transfer=OPTIONS, **settings)
    dcp.save(state(value), checkpoint_id=url, storage_writer=writer, no_dist=True)


def load(fs: Any, url: str) -> int:
    """The one value of everything in the checkpoint."""
    target = state(0)
    reader = BucketReader(fs=fs, transfer=OPTIONS)
    dcp.load(target, checkpoint_id=url, storage_reader=reader, no_dist=True)
    # Not `unique`, which sorts.
    ends = [end.item() for name in ("large", "small") for end in (target[name].min(), target[name].max())]
    assert {*ends, target["value"]} == {target["value"]}, "a mix"
    return int(target["value"])


# A `LocalStore` serves "file".
@pytest.mark.parametrize("found", [name for name in (*IN_PROCESS, *SERVED) if name != "file"], indirect=True)
def test_loads_what_was_saved_and_replaces_it_only_if_it_may(found: Backend, caplog: pytest.LogCaptureFixture) -> None:
    url = f"{found.root}/step-1"
    with caplog.at_level(logging.WARNING, logger="bucketpoint"):
        save(found.fs, url, 1)
        save(found.fs, url, 2)
    assert load(found.fs, url) == 2
    # Said once, and only where a commit has no condition to rely on.
    told = sum("no conditional writes" in record.getMessage() for record in caplog.records)
    assert told == (not found.creates)
    with pytest.raises(dcp.CheckpointException) as caught:
        save(found.fs, url, 3, overwrite=False)
    assert isinstance(next(iter(caught.value.failures.values()))[0], CheckpointExistsError)
    assert not [name for name in found.left_behind() if "probe" in name or "tmp-" in name]


class Together:
    """Lets each thread's first commit go on only when the other's is there too."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._barrier = threading.Barrier(2)
        self._came = threading.local()
        put = FsspecStore.put

        def together(store: FsspecStore, key: str, *args: Any, **settings: Any) -> Any:
            if key.endswith(".metadata") and not hasattr(self._came, "here"):
                self._came.here = True
                self._barrier.wait(HANGS_S)
            return put(store, key, *args, **settings)

        patch.setattr(FsspecStore, "put", together)


@pytest.mark.parametrize("found", ["memory", "dir", "async", *SERVED], indirect=True)
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an old one"])
def test_keeps_one_of_two_saves_that_commit_at_once_whole_and_tells_the_other(
    found: Backend, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{found.root}/step-1"
    if over:
        save(found.fs, url, 1)

    def one(value: int) -> BaseException | None:
        try:
            save(found.fs, url, value, overwrite=over)
        except dcp.CheckpointException as failure:
            return next(iter(failure.failures.values()))[0]
        return None

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        Together(patch)
        ends = dict(zip((2, 3), pool.map(one, (2, 3)), strict=True))
    lost = [error for error in ends.values() if error is not None]
    assert all(isinstance(error, CommitConflictError | CheckpointExistsError) for error in lost), lost
    # Where a commit checks, writes and checks again, the one that was replaced may have checked in between.
    refuses = found.creates and (found.replaces or not over)
    assert len(lost) == 1 if refuses else len(lost) <= 1
    assert ends[load(found.fs, url)] is None


def save_and_die(rank: int, world: int, fs: Any, url: str, value: int, after: int) -> int:
    """Dies of SIGKILL after so many writes have reached the filesystem; 0: says how many there are."""
    number = itertools.count(1)
    made = []

    def dying(name: str) -> Any:
        method = getattr(FsspecStore, name)

        def call(*args: Any, **settings: Any) -> Any:
            answer = method(*args, **settings)
            made.append(name)
            if next(number) == after:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call

    for name in WRITES:
        setattr(FsspecStore, name, dying(name))
    save(fs, url, value)
    return len(made)


# Not memory, which ends with its process.
@pytest.mark.slow
@pytest.mark.parametrize("found", ["dir", *SERVED], indirect=True)
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an old one"])
def test_leaves_the_old_checkpoint_or_the_new_after_a_kill_behind_any_write(
    found: Backend, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Once for all jobs: importing a library takes longer than a save.
    monkeypatch.setattr(kills, "PRELOAD", (*kills.PRELOAD, *SERVED))
    values = itertools.count(1)

    def url(step: int) -> str:
        return f"{found.root}/step-{step}"

    def killed(step: int, value: int, after: int) -> Any:
        with kills.Job(1) as job:
            job.ready()
            (outcome,) = job.run(save_and_die, found.fs, url(step), value, after)
        assert outcome.died or not outcome.text, outcome.text
        return outcome

    step, old = 1, next(values)
    save(found.fs, url(step), old)
    undisturbed = next(values)
    step += not over
    writes = killed(step, undisturbed, 0).value
    assert writes >= 4
    old, died = undisturbed, []
    for after in range(1, writes + 1):
        target, new = step if over else step + 1, next(values)
        died.append(killed(target, new, after).died)
        newest = latest_checkpoint(found.root, fs=found.fs)
        assert newest is not None
        value = load(found.fs, newest)
        assert (newest, value) in ((url(step), old), (url(target), new))
        # What a killed job left is no obstacle for the next, which saves to the same URL.
        step, old = (target, new) if value == new else (step, old)
    save(found.fs, url(step), old + 1)
    assert load(found.fs, url(step)) == old + 1
    # The order of what is sent in parallel differs, not its number.
    assert all(died)
