"""Saves whose bytes another process uploads: chosen by itself, and whole or not at all however either process ends."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import bucketpoint
from bucketpoint import BucketReader, BucketWriter, S3Reader, S3Writer, StagingOptions, TransferOptions
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.dcp.saving import uploads
from bucketpoint.errors import (
    BucketpointError,
    CheckpointNotFoundError,
    EndpointError,
    HelperProcessError,
    HelperUnavailableError,
)
from bucketpoint.location import Location
from bucketpoint.transfer import Meter
from dcp.saving.upload_program import state
from dcp.states import assert_loads
from kit import FaultProxy, Script
from kit.faults import Rule, Slow
from kit.plugin import MakeProxy
from kit.programs import TESTS
from kit.servers import S3Server
from transfer.helper.orders import has_ended, stop, wait_until

PROCESS = TransferOptions(background="process")
ENDS_S = 20.0
"""Seconds in which a helper must have ended after its trainer, on a busy machine."""


def small() -> dict[str, Any]:
    # A transposed tensor: its bytes are not in the order in which they are saved.
    return {"model": {"w": torch.arange(5000.0), "t": torch.arange(600.0).reshape(20, 30).t()}, "step": 3}


def helper_of(writer: BucketWriter) -> int | None:
    return writer.uploads.process_id


def save(writer: BucketWriter, url: str, saved: dict[str, Any] | None = None) -> None:
    bucketpoint.async_save(saved or small(), checkpoint_id=url, storage_writer=writer, no_dist=True).result(60)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A state just large enough for a process, also in a run of the tests that chooses otherwise."""
    monkeypatch.setattr(uploads, "LEAST_BYTES", 1 << 20)
    return {"w": torch.zeros((1 << 20) + 1, dtype=torch.uint8)}


def test_saves_by_a_process_that_prefault_starts_and_by_another_after_close(minio: S3Server) -> None:
    url = minio.url(minio.make_bucket(), "run/step-1")
    with closing(S3Writer(storage_options=minio.options, transfer=PROCESS)) as writer:
        writer.prefault(small())
        wait_until(lambda: helper_of(writer), ENDS_S)
        started = helper_of(writer)
        save(writer, url)
        assert helper_of(writer) == started
        writer.close()
        assert helper_of(writer) is None
        assert_loads(small(), S3Reader(url, storage_options=minio.options))
        save(writer, url)
        assert helper_of(writer) not in (None, started)


def test_falls_back_to_threads_for_what_a_process_cannot_do_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, large: dict[str, Any]
) -> None:
    auto = TransferOptions(background="auto")
    refusals = {
        "filesystem object": (tmp_path, BucketWriter(fs=fsspec.filesystem("file"), transfer=auto)),
        "use_shared_memory": (tmp_path, BucketWriter(staging=StagingOptions(use_shared_memory=False), transfer=auto)),
        # What lies in the trainer's memory.
        "same files": ("memory://uploads", BucketWriter(transfer=auto)),
    }
    for words, (folder, writer) in refusals.items():
        caplog.clear()
        with caplog.at_level(logging.INFO, "bucketpoint"), closing(writer):
            for name in ("a", "b"):
                save(writer, f"{folder}/{name}", large)
            assert helper_of(writer) is None
        assert open_checkpoint(f"{folder}/b").metadata.state_dict_metadata
        (said,) = (record.getMessage() for record in caplog.records if "on threads" in record.getMessage())
        assert words in said
    with closing(BucketWriter(transfer=PROCESS)) as writer, pytest.raises(HelperUnavailableError, match="same files"):
        save(writer, "memory://uploads/c")


def test_uploads_by_threads_what_the_process_does_not_and_large_states_by_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, large: dict[str, Any]
) -> None:
    failures: dict[str, tuple[BucketpointError, int]] = {
        # What has sent bytes has reached the store, which is down now.
        "down": (EndpointError("no route"), 100),
        "died": (HelperProcessError("Two processes died"), 0),
        "cut off": (EndpointError("no route"), 0),
    }
    with closing(BucketWriter()) as writer:
        save(writer, str(tmp_path / "small"))
        assert helper_of(writer) is None
        for name, (error, sent) in failures.items():

            def upload(work: Any, meter: Meter, error: BucketpointError = error, sent: int = sent) -> Any:
                meter.add(sent)
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(writer.uploads._helper, "upload", upload)
                with pytest.raises(EndpointError, match="no route") if sent else contextlib.nullcontext():
                    save(writer, str(tmp_path / name), large)
            assert (tmp_path / name / ".metadata").exists() == (not sent)
        assert "Two processes died" in caplog.text
        save(writer, str(tmp_path / "large"), large)
        assert helper_of(writer) is not None


# -- ends --------------------------------------------------------------------------------------------------------------

PYTHON = [sys.executable, "-W", "ignore"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}


@dataclass
class Started:
    """A program whose upload to a bucket of its own is under way."""

    program: subprocess.Popen[str]
    proxy: FaultProxy
    server: S3Server
    bucket: str
    helper: int
    fork: int

    @property
    def place(self) -> Location:
        return Location.of(self.server.url(self.bucket, "run/step-1"), self.server.options)

    def open_uploads(self) -> list[Any]:
        # MinIO lists uploads by the whole key only, and all of a bucket without one.
        return self.server.client().list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])

    def assert_helper_ends(self) -> None:
        wait_until(lambda: has_ended(self.helper), ENDS_S)

    def assert_saved(self) -> None:
        assert_loads(state(1), S3Reader(self.place.url, storage_options=self.server.options))


StartProgram = Callable[[str], Started]


@pytest.fixture
def start(minio: S3Server, fault_proxy: MakeProxy) -> Iterator[StartProgram]:
    """Start the program behind a proxy that lets 5 MB/s through, so that it is killed in the middle of a part."""
    programs: list[subprocess.Popen[str]] = []

    def started(end: str) -> Started:
        proxy = fault_proxy(minio, Script((Rule((Slow(5e6),), kinds=("UploadPart",)),)))
        bucket = minio.make_bucket()
        arguments = [minio.url(bucket, "run/step-1"), end, json.dumps(minio.at(proxy.url).options)]
        program = subprocess.Popen(
            [*PYTHON, "-m", "dcp.saving.upload_program", *arguments],
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
            start_new_session=True,
        )
        programs.append(program)
        begun = Started(program, proxy, minio, bucket, **json.loads(program.stdout.readline()))
        wait_until(begun.open_uploads, 60)
        return begun

    yield started
    for program in programs:
        program.kill()
        program.communicate()


@pytest.mark.parametrize("end", ["fork", "stopped"])
def test_leaves_no_process_upload_or_checkpoint_of_a_killed_trainer(start: StartProgram, end: str) -> None:
    started = start(end)
    try:
        if end == "stopped":
            # Linux wakes a stopped process whose process group has lost its last parent.
            stop(started.helper)
        started.program.kill()
        started.program.wait()
        started.assert_helper_ends()
        assert started.open_uploads() == []
        with pytest.raises(CheckpointNotFoundError):
            open_checkpoint(started.place)
    finally:
        if started.fork:
            os.kill(started.fork, signal.SIGKILL)


@pytest.mark.parametrize(("end", "status"), [("return", 0), ("raise", 1)])
def test_commits_though_the_program_ends_during_the_upload(start: StartProgram, end: str, status: int) -> None:
    started = start(end)
    started.proxy.play(Script())
    assert started.program.wait(60) == status
    started.assert_saved()
    started.assert_helper_ends()


@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an old one"])
def test_leaves_no_file_of_a_killed_helper_in_a_local_folder(tmp_path: Path, over: bool) -> None:
    # Objects in parts, and one that is written whole.
    parts = replace(PROCESS, part_bytes=5 << 20, single_put_bytes=1 << 20)
    saved = {"model": {"w": torch.ones(64 << 20, dtype=torch.uint8)}, "optim": {"m": torch.ones(5000)}}
    url, first = tmp_path / "run", tmp_path / "run" if over else tmp_path / "first"
    with closing(BucketWriter(transfer=parts, overwrite=True)) as writer:
        save(writer, str(first))
        handle = bucketpoint.async_save(saved, checkpoint_id=str(url), storage_writer=writer, no_dist=True)
        ends = time.monotonic() + 60
        while not any(url.glob("data/*/.bucketpoint-tmp-*")):
            assert time.monotonic() < ends
        os.kill(helper_of(writer) or 0, signal.SIGKILL)
        handle.result(60)
    files = {str(path.relative_to(url)) for path in (url / "data").rglob("*") if path.is_file()}
    assert files == set(open_checkpoint(str(url)).by_object)
    assert_loads(saved, BucketReader(str(url)))


PROGRAM = Path(__file__).resolve().with_name("upload_program.py")

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
SMALL_SHM = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
"""A mount namespace of its own, in which /dev/shm has the size that a container has by default."""


@pytest.mark.broad
@pytest.mark.parametrize("how", ["torchrun", "spawn", "notebook", "small shm"])
def test_uploads_by_a_process_that_ends_however_training_was_started(how: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/step-1"
    before, text = list(PYTHON), None
    if how == "torchrun":
        before += TORCHRUN
    elif how == "notebook":
        text = PROGRAM.read_text()
    elif how == "small shm":
        if subprocess.run([*SMALL_SHM, "true"], capture_output=True).returncode:
            pytest.skip("this system lets no user make a mount namespace")
        before = [*SMALL_SHM, 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh", *PYTHON]
    command = [*before, "-" if text else str(PROGRAM), url, how]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=180, env=environment())
    assert done.returncode == 0, done.stderr
    said = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda said: str(said["rank"]))
    ranks = 2 if how in ("torchrun", "spawn") else 1
    assert said == [{"rank": rank, "helper": True, "ended": True} for rank in range(ranks)]
    assert verify(open_checkpoint(url)).ok
