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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint
from bucketpoint import BucketReader, BucketWriter, S3Reader, S3Writer, StagingOptions, TransferOptions
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.dcp.saving import uploads
from bucketpoint.dcp.saving.uploads import LEAST_BYTES
from bucketpoint.errors import CheckpointNotFoundError, EndpointError, HelperProcessError, HelperUnavailableError
from bucketpoint.location import Location
from bucketpoint.transfer import Meter
from dcp.saving.upload_program import NBYTES, state
from kit import FaultProxy, Script
from kit.faults import Rule, Slow
from kit.plugin import MakeProxy
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


@contextlib.contextmanager
def closing(writer: BucketWriter) -> Iterator[BucketWriter]:
    yield writer
    writer.close()


def test_loads_a_save_by_the_process_bit_for_bit(minio: S3Server) -> None:
    url = minio.url(minio.make_bucket(), "run/step-1")
    with closing(S3Writer(storage_options=minio.options, transfer=PROCESS)) as writer:
        save(writer, url)
        assert helper_of(writer) is not None
    other = {"model": {"w": torch.zeros(5000), "t": torch.zeros(20, 30).t()}, "step": 0}
    dcp.load(other, storage_reader=S3Reader(url, storage_options=minio.options), no_dist=True)
    assert torch.equal(other["model"]["w"], small()["model"]["w"])
    assert torch.equal(other["model"]["t"], small()["model"]["t"])
    assert other["step"] == 3


def test_falls_back_to_threads_for_what_a_process_cannot_do_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    big = {"w": torch.zeros(LEAST_BYTES + 1, dtype=torch.uint8)}
    auto = TransferOptions(background="auto")
    refusals = {
        "filesystem object": BucketWriter(fs=fsspec.filesystem("file"), transfer=auto),
        "use_shared_memory": BucketWriter(staging=StagingOptions(use_shared_memory=False), transfer=auto),
    }
    for words, writer in refusals.items():
        caplog.clear()
        with caplog.at_level(logging.INFO, "bucketpoint"), closing(writer):
            for name in ("a", "b"):
                save(writer, str(tmp_path / name), big)
            assert helper_of(writer) is None
        (said,) = (record.getMessage() for record in caplog.records if "on threads" in record.getMessage())
        assert words in said


def test_uploads_by_threads_after_repeated_deaths_and_retries_the_process_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    big = {"w": torch.zeros(LEAST_BYTES + 1, dtype=torch.uint8)}

    def dies(*given: Any) -> Any:
        raise HelperProcessError("Two processes died")

    with closing(BucketWriter(transfer=TransferOptions(background="auto"))) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(writer.uploads._helper, "upload", dies)
            save(writer, str(tmp_path / "a"), big)
        assert open_checkpoint(str(tmp_path / "a")).metadata.state_dict_metadata
        assert "Two processes died" in caplog.text
        save(writer, str(tmp_path / "b"), big)
        assert helper_of(writer) is not None


@pytest.mark.parametrize("sent", [0, 100])
def test_tries_by_threads_what_the_process_cannot_reach_unless_it_sent_bytes(
    sent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_cut_off(work: Any, meter: Meter) -> Any:
        meter.add(sent)
        raise EndpointError("no route")

    with closing(BucketWriter(transfer=TransferOptions(background="auto"))) as writer:
        monkeypatch.setattr(writer.uploads._helper, "upload", is_cut_off)
        with pytest.raises(EndpointError, match="no route") if sent else contextlib.nullcontext():
            save(writer, str(tmp_path / "a"), {"w": torch.zeros(LEAST_BYTES + 1, dtype=torch.uint8)})
    assert (tmp_path / "a" / ".metadata").exists() == (not sent)


@pytest.mark.parametrize("background", ["auto", "process"])
def test_hands_no_filesystem_in_the_trainers_memory_to_a_process(background: Any) -> None:
    writer = BucketWriter(transfer=TransferOptions(background=background))
    big = {"w": torch.zeros(LEAST_BYTES + 1, dtype=torch.uint8)}
    with closing(writer):
        if background == "auto":
            save(writer, "memory://uploads/a", big)
            assert open_checkpoint("memory://uploads/a").metadata.state_dict_metadata
        else:
            with pytest.raises(HelperUnavailableError, match="same files"):
                save(writer, "memory://uploads/b", big)


def test_uploads_large_states_only_by_a_process_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Against a run of the tests that chooses otherwise.
    monkeypatch.setattr(uploads, "LEAST_BYTES", 1 << 20)
    with closing(BucketWriter()) as writer:
        save(writer, str(tmp_path / "small"))
        assert helper_of(writer) is None
        save(writer, str(tmp_path / "large"), {"w": torch.zeros((1 << 20) + 1, dtype=torch.uint8)})
        assert helper_of(writer) is not None


def test_starts_the_process_before_the_first_save_by_prefault(tmp_path: Path) -> None:
    with closing(BucketWriter(transfer=PROCESS)) as writer:
        writer.prefault(small())
        wait_until(lambda: helper_of(writer), ENDS_S)


def test_starts_another_process_after_a_writer_was_closed(tmp_path: Path) -> None:
    writer = BucketWriter(transfer=PROCESS)
    seen = set()
    for name in ("a", "b"):
        save(writer, str(tmp_path / name))
        seen.add(helper_of(writer))
        writer.close()
        assert helper_of(writer) is None
    assert len(seen) == 2


# -- ends --------------------------------------------------------------------------------------------------------------


@dataclass
class Started:
    """A program whose upload is under way."""

    program: subprocess.Popen[str]
    helper: int
    fork: int
    proxy: FaultProxy


StartProgram = Callable[[str], Started]


@pytest.fixture
def place(minio: S3Server) -> tuple[str, str]:
    return minio.make_bucket(), "run/step-1"


@pytest.fixture
def start(minio: S3Server, place: tuple[str, str], fault_proxy: MakeProxy) -> Iterator[StartProgram]:
    """Start the program behind a proxy that lets 5 MB/s through, so that it is killed in the middle of a part."""
    programs: list[subprocess.Popen[str]] = []

    def started(end: str) -> Started:
        proxy = fault_proxy(minio, Script((Rule((Slow(5e6),), kinds=("UploadPart",)),)))
        here = Path(__file__).resolve()
        paths = [str(here.parents[2]), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-W", "ignore", str(here.with_name("upload_program.py"))]
        program = subprocess.Popen(
            [*command, minio.url(*place), json.dumps(minio.at(proxy.url).options), end],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            text=True,
            start_new_session=True,
        )
        programs.append(program)
        told = json.loads(program.stdout.readline())
        wait_until(lambda: open_uploads(minio, place), 60)
        return Started(program, told["helper"], told["fork"], proxy)

    yield started
    for program in programs:
        program.kill()
        program.communicate()


def wait_for_end(process: int) -> None:
    wait_until(lambda: has_ended(process), ENDS_S)


def assert_saved(minio: S3Server, place: tuple[str, str]) -> None:
    loaded = state(0)
    dcp.load(loaded, storage_reader=S3Reader(minio.url(*place), storage_options=minio.options), no_dist=True)
    assert torch.equal(loaded["model"]["weight"], torch.ones(NBYTES, dtype=torch.uint8))


def open_uploads(minio: S3Server, place: tuple[str, str]) -> list[Any]:
    # MinIO lists uploads by the whole key only, and all of a bucket without one.
    return minio.client().list_multipart_uploads(Bucket=place[0]).get("Uploads", [])


@pytest.mark.parametrize("end", ["fork", "stopped"])
def test_leaves_no_process_upload_or_checkpoint_of_a_killed_trainer(
    start: StartProgram, minio: S3Server, place: tuple[str, str], end: str
) -> None:
    started = start(end)
    try:
        if end == "stopped":
            # Linux wakes a stopped process whose process group has lost its last parent.
            stop(started.helper)
        started.program.kill()
        started.program.wait()
        wait_for_end(started.helper)
        assert open_uploads(minio, place) == []
        with pytest.raises(CheckpointNotFoundError):
            open_checkpoint(Location.of(minio.url(*place), minio.options))
    finally:
        if started.fork:
            os.kill(started.fork, signal.SIGKILL)


def test_loses_no_save_by_a_killed_helper(start: StartProgram, minio: S3Server, place: tuple[str, str]) -> None:
    started = start("result")
    os.kill(started.helper, signal.SIGKILL)
    started.proxy.play(Script())
    assert started.program.wait(60) == 0
    assert_saved(minio, place)
    assert open_uploads(minio, place) == []


def test_continues_the_upload_after_ctrl_c_that_the_trainer_answers(
    start: StartProgram, minio: S3Server, place: tuple[str, str]
) -> None:
    started = start("result")
    os.killpg(started.program.pid, signal.SIGINT)
    started.proxy.play(Script())
    out, _ = started.program.communicate(timeout=60)
    assert json.loads(out) == {"interrupted": 1}
    assert started.program.returncode == 0
    assert_saved(minio, place)
    wait_for_end(started.helper)


@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an old one"])
def test_leaves_no_file_of_a_killed_helper_in_a_local_folder(tmp_path: Path, over: bool) -> None:
    # Objects in parts, and one that is written whole.
    parts = replace(PROCESS, part_bytes=5 << 20, single_put_bytes=1 << 20)
    saved = {"model": {"w": torch.ones(128 << 20, dtype=torch.uint8)}, "optim": {"m": torch.ones(5000)}}
    url, first = tmp_path / "run", tmp_path / "run" if over else tmp_path / "first"
    with closing(BucketWriter(transfer=parts, overwrite=True)) as writer:
        save(writer, str(first), saved)
        handle = bucketpoint.async_save(saved, checkpoint_id=str(url), storage_writer=writer, no_dist=True)
        ends = time.monotonic() + 60
        while not any(url.glob("data/*/.bucketpoint-tmp-*")):
            assert time.monotonic() < ends
        os.kill(helper_of(writer) or 0, signal.SIGKILL)
        handle.result(60)
    found = open_checkpoint(str(url))
    assert sorted(str(path.relative_to(url)) for path in (url / "data").rglob("*") if path.is_file()) == sorted(
        found.by_object
    )
    loaded = {"model": {"w": torch.zeros(128 << 20, dtype=torch.uint8)}, "optim": {"m": torch.zeros(5000)}}
    dcp.load(loaded, storage_reader=BucketReader(str(url)), no_dist=True)
    assert torch.equal(loaded["model"]["w"], saved["model"]["w"])
    assert torch.equal(loaded["optim"]["m"], saved["optim"]["m"])


@pytest.mark.parametrize(("end", "status"), [("return", 0), ("raise", 1)])
def test_commits_though_the_program_ends_during_the_upload(
    start: StartProgram, minio: S3Server, place: tuple[str, str], end: str, status: int
) -> None:
    started = start(end)
    started.proxy.play(Script())
    assert started.program.wait(60) == status
    assert_saved(minio, place)
    wait_for_end(started.helper)


PROGRAM = Path(__file__).resolve().with_name("places_program.py")

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
SMALL_SHM = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
"""A mount namespace of its own, in which /dev/shm has the size that a container has by default."""


def ends(command: list[str], text: str | None = None) -> list[dict[str, object]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=180, env=env)
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda said: str(said["rank"]))


@pytest.mark.broad
@pytest.mark.parametrize("how", ["torchrun", "spawn", "notebook", "small shm"])
def test_uploads_by_a_process_that_ends_however_training_was_started(how: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/step-1"
    python = [sys.executable, "-W", "ignore"]
    if how == "torchrun":
        said = ends([*python, *TORCHRUN, str(PROGRAM), url, how])
    elif how == "notebook":
        said = ends([*python, "-", url, how], PROGRAM.read_text())
    elif how == "small shm":
        if subprocess.run([*SMALL_SHM, "true"], capture_output=True).returncode:
            pytest.skip("this system lets no user make a mount namespace")
        script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
        said = ends([*SMALL_SHM, script, "sh", *python, str(PROGRAM), url, how])
    else:
        said = ends([*python, str(PROGRAM), url, how])
    ranks = 2 if how in ("torchrun", "spawn") else 1
    assert said == [{"rank": rank, "helper": True, "ended": True} for rank in range(ranks)]
    assert verify(open_checkpoint(url)).ok
