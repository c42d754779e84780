"""The helper process: it uploads what threads would, survives its own death, and ends with the trainer."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bucketpoint.errors import AccessDeniedError, HelperProcessError, HelperUnavailableError
from bucketpoint.stores.retry import process_budget
from bucketpoint.transfer import Meter, ObjectSource, Progress, Segment, TransferOptions
from bucketpoint.transfer.helper import process, start
from bucketpoint.transfer.helper.messages import AT_ONCE, INLINE_BYTES, described
from bucketpoint.transfer.helper.process import Upload, UploadHelper
from kit.faults import Refuse, Rule, Script
from kit.plugin import MakeProxy
from kit.servers import S3Server
from transfer.helper.orders import MIB, filled_arena, has_ended, meter, stop, upload_of, view_of, wait_until, whole


@pytest.fixture(scope="module")
def helper() -> Iterator[UploadHelper]:
    """One for the tests after which it still runs."""
    helper = UploadHelper()
    yield helper
    helper.close()


@pytest.fixture
def own_helper() -> Iterator[UploadHelper]:
    helper = UploadHelper()
    yield helper
    helper.close()


def in_bucket(minio: S3Server, nbytes: int) -> tuple[str, Upload]:
    """A new bucket, and an upload of an object of random bytes to it."""
    bucket, arena = minio.make_bucket(), filled_arena(nbytes)
    return bucket, upload_of(minio.url(bucket), [whole(arena)], arena, storage_options=minio.options)


def in_folder(folder: Path | str, nbytes: int = MIB) -> Upload:
    arena = filled_arena(nbytes)
    return upload_of(str(folder), [whole(arena)], arena)


def test_counts_here_what_a_process_without_torch_and_secrets_sends(helper: UploadHelper, minio: S3Server) -> None:
    _, work = in_bucket(minio, 12 * MIB)
    seen: list[Progress] = []
    counted, before = meter(seen.append), process_budget().counts["succeeded"]
    (done,) = helper.upload(work, counted)
    assert done.info.size == counted.done_bytes == 12 * MIB
    assert [each.done_bytes for each in seen] == sorted(each.done_bytes for each in seen)
    # CreateMultipartUpload, the parts, and CompleteMultipartUpload.
    assert counted.requests == process_budget().counts["succeeded"] - before == 1 + 3 + 1
    process = Path(f"/proc/{helper.process_id}")
    for shown in ("cmdline", "environ"):
        assert minio.options["secret"].encode() not in (process / shown).read_bytes()
    assert "libtorch" not in (process / "maps").read_text()


def test_unmaps_the_memory_of_an_upload_after_it(helper: UploadHelper, tmp_path: Path) -> None:
    work = in_folder(tmp_path)
    helper.upload(work, meter())
    wait_until(lambda: "bucketpoint-staging" not in Path(f"/proc/{helper.process_id}/maps").read_text())
    descriptors = os.listdir(f"/proc/{helper.process_id}/fd")
    helper.upload(work, meter())
    wait_until(lambda: len(os.listdir(f"/proc/{helper.process_id}/fd")) == len(descriptors))


def test_raises_an_error_of_the_store_and_logs_here_and_keeps_the_process(
    helper: UploadHelper, minio: S3Server, fault_proxy: MakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    arena = filled_arena(6 * MIB)
    refused = Rule((Refuse(403, "AccessDenied"),), kinds=("UploadPart", "AbortMultipartUpload"))
    proxy = fault_proxy(minio, Script((refused,)))
    url = minio.url(minio.make_bucket())
    work = upload_of(url, [whole(arena)], arena, storage_options=minio.at(proxy.url).options)
    with caplog.at_level(logging.WARNING, "bucketpoint"), pytest.raises(AccessDeniedError):
        helper.upload(work, meter())
    (record,) = (each for each in caplog.records if each.name == "bucketpoint.transfer.pieces")
    assert record.process == helper.process_id
    assert record.getMessage().startswith("could not abort the multipart upload of a/whole: ")
    helper.upload(upload_of(url, [whole(arena)], arena, storage_options=minio.options), meter())
    assert helper.process_id == record.process


def test_uses_variables_and_the_folder_that_were_set_after_it_was_started(
    helper: UploadHelper, minio: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper.upload(in_folder(tmp_path / "first"), meter())
    for name, value in minio.env.items():
        monkeypatch.setenv(name, value)
    arena = filled_arena(MIB)
    (done,) = helper.upload(upload_of(minio.url(minio.make_bucket()), [whole(arena)], arena), meter())
    assert done.info.size == arena.nbytes
    monkeypatch.chdir(tmp_path)
    helper.upload(in_folder("second"), meter())
    assert (tmp_path / "second" / "a" / "whole").stat().st_size == MIB


class Own(TransferOptions):
    """Options that another process cannot unpickle."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_refuses_orders_that_mean_nothing_elsewhere_and_keeps_only_the_process(
    helper: UploadHelper, tmp_path: Path
) -> None:
    class Local(TransferOptions):
        pass

    work = in_folder(tmp_path / "sent")
    helper.upload(work, meter())
    process = helper.process_id
    for order, said in (
        (replace(work, storage_options=b"ca_module_of_the_program\nA\n."), "cannot be opened in another process"),
        (replace(work, url=str(tmp_path / "other")), "another store"),
        (replace(work, options=Own()), "cannot be unpickled"),
    ):
        with pytest.raises(HelperUnavailableError, match=said):
            helper.upload(order, meter())
    assert list(tmp_path.iterdir()) == [tmp_path / "sent"]
    links = Path(f"/proc/{process}/fd")
    wait_until(lambda: not [link for link in os.listdir(links) if "memfd" in os.readlink(links / link)])
    helper.upload(work, meter())
    assert helper.process_id == process
    with pytest.raises(HelperUnavailableError, match="pickled"):
        helper.upload(replace(work, options=Local()), meter())
    helper.upload(work, meter())


@pytest.mark.parametrize(
    ("name", "value"),
    [("executable", ""), ("executable", "/bin/true"), ("executable", "/nowhere/python"), ("frozen", True)],
)
def test_names_an_interpreter_that_cannot_be_started_again(
    own_helper: UploadHelper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    said = "started again" if name == "frozen" else "start"
    with pytest.raises(HelperUnavailableError, match=said):
        own_helper.upload(upload_of(str(tmp_path), []), meter())


def test_sends_no_large_message_of_an_order_and_misses_none(helper: UploadHelper, tmp_path: Path) -> None:
    segments = [Segment(2, memoryview(number.to_bytes(2, "little"))) for number in range(2 * AT_ONCE + 3)]
    sources = [ObjectSource("many", segments), ObjectSource("none", []), ObjectSource("one", segments[:1])]
    work = upload_of(str(tmp_path), sources)
    assert [(each.key, each.begins, len(each.segments)) for each in described(sources, work.memory)] == [
        ("many", True, AT_ONCE),
        ("many", False, AT_ONCE),
        ("many", False, 3),
        ("none", True, 0),
        ("one", True, 1),
    ]
    done = helper.upload(work, meter())
    assert [each.info.size for each in done] == [2 * len(segments), 0, 2]
    assert (tmp_path / "many").read_bytes() == b"".join(number.to_bytes(2, "little") for number in range(len(segments)))


def test_keeps_no_upload_waiting_by_workers_that_are_forked_while_it_starts(tmp_path: Path) -> None:
    for _ in range(3):
        helper = UploadHelper()
        helper.start_soon()
        children = []
        for _ in range(4):
            child = os.fork()
            if not child:
                time.sleep(120)
                os._exit(0)
            children.append(child)
        began = time.monotonic()
        helper.upload(upload_of(str(tmp_path), []), meter())
        helper.close()
        ended = time.monotonic() - began
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended < 60


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_repeats_in_another_process_an_upload_whose_process_was_killed_or_stopped(
    own_helper: UploadHelper,
    minio: S3Server,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    stopped: bool,
) -> None:
    bucket, work = in_bucket(minio, 22 * MIB)
    ended: list[int] = []
    late: list[str] = []
    seen: list[int] = []
    started, sign_of_life_s = process.start_process, process.SIGN_OF_LIFE_S

    def start_another(*arguments: Any, **settings: Any) -> Any:
        monkeypatch.setattr(process, "SIGN_OF_LIFE_S", sign_of_life_s)
        return started(*arguments, **settings)

    def end_once(progress: Progress) -> None:
        seen.append(progress.done_bytes)
        if not ended and progress.done_bytes:
            ended.append(own_helper.process_id or 0)
            stop(ended[0]) if stopped else os.kill(ended[0], signal.SIGKILL)
            # It counts as hanging a second later, and the other one after the whole time.
            monkeypatch.setattr(process, "SIGN_OF_LIFE_S", 0.1)
        elif ended and not late and own_helper.process_id != ended[0] and progress.done_bytes:
            # As if the first process had begun it, and the request had been on its way.
            late.append(work.store.create_multipart("a/whole"))

    monkeypatch.setattr(process, "start_process", start_another)
    counted = meter(end_once)
    (done,) = own_helper.upload(work, counted)
    assert has_ended(ended[0])
    assert own_helper.process_id != ended[0]
    assert stopped or "was killed by SIGKILL" in caplog.text
    assert work.store.get("a/whole")[0] == bytes(work.sources[0].segments[0].data)
    assert done.info.size == 22 * MIB == counted.done_bytes
    assert seen == sorted(seen)
    assert late
    assert minio.open_uploads(bucket, "a/whole") == []


@pytest.mark.broad
def test_replaces_a_process_that_takes_no_order(
    own_helper: UploadHelper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It counts as hanging after 6 s: a slow one gives a sign of life every 5 s.
    monkeypatch.setattr(process, "SIGN_OF_LIFE_S", 0.5)
    own_helper.upload(upload_of(str(tmp_path), [ObjectSource("first", [])]), meter())
    stopped = own_helper.process_id
    assert stopped is not None
    stop(stopped)
    # More than the buffers of the channel.
    segments = [Segment(INLINE_BYTES, memoryview(bytes([number] * INLINE_BYTES))) for number in range(100)]
    own_helper.upload(upload_of(str(tmp_path), [ObjectSource("second", segments)]), meter())
    assert has_ended(stopped)
    assert (tmp_path / "second").read_bytes() == b"".join(bytes(segment.data or b"") for segment in segments)


def test_raises_after_two_deaths_during_one_upload_and_leaves_no_upload(
    own_helper: UploadHelper, minio: S3Server
) -> None:
    bucket, work = in_bucket(minio, 22 * MIB)
    killed: set[int] = set()

    class Killing(Meter):
        def add(self, nbytes: int, *, requests: int = 1) -> None:
            process = own_helper.process_id
            if process is not None and process not in killed:
                killed.add(process)
                os.kill(process, signal.SIGKILL)

    with pytest.raises(HelperProcessError, match="SIGKILL"):
        own_helper.upload(work, Killing("save", "x", 0, None))
    assert len(killed) == 2
    assert minio.open_uploads(bucket, "a/whole") == []
    # The next upload gets a third process.
    (done,) = own_helper.upload(work, meter())
    assert done.info.size == 22 * MIB


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "in vain, as it is stopped"])
def test_ends_the_upload_by_an_error_on_this_side_and_leaves_none_open(
    own_helper: UploadHelper, minio: S3Server, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    if stopped:
        monkeypatch.setattr(start, "END_S", 0.2)
    bucket, work = in_bucket(minio, 22 * MIB)

    def fail(progress: Progress) -> None:
        if progress.done_bytes:
            if stopped:
                stop(own_helper.process_id or 0)
            raise ZeroDivisionError

    own_helper.upload(upload_of(minio.url(bucket), [], storage_options=minio.options), meter())
    process = own_helper.process_id
    assert process is not None
    with pytest.raises(ZeroDivisionError):
        own_helper.upload(work, meter(fail))
    assert has_ended(process)
    assert minio.open_uploads(bucket, "a/whole") == []


def test_leaves_signals_to_the_job_to_the_trainer(helper: UploadHelper, tmp_path: Path) -> None:
    helper.upload(upload_of(str(tmp_path), []), meter())
    process = helper.process_id
    assert process is not None
    assert os.getpgid(process) != os.getpgid(0)
    # In another session its niceness would not count against training.
    assert os.getsid(process) == os.getsid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(process, number)
    helper.upload(upload_of(str(tmp_path), []), meter())
    assert helper.process_id == process


def test_leaves_neither_process_nor_descriptor_after_close_and_uploads_again(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    helper = UploadHelper()
    for _ in range(2):
        helper.start_soon()
        helper.upload(upload_of(str(tmp_path), []), meter())
        process = helper.process_id
        helper.close()
        assert process is not None
        assert not Path(f"/proc/{process}").exists()
        assert helper.process_id is None
    assert sorted(os.listdir("/proc/self/fd")) == before
    helper.close()


def test_frees_the_channel_from_a_fork_that_uploads_by_itself(own_helper: UploadHelper, tmp_path: Path) -> None:
    own_helper.upload(upload_of(str(tmp_path), []), meter())
    process = own_helper.process_id
    assert process is not None
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            assert own_helper.process_id is None
            own_helper.upload(upload_of(str(tmp_path), []), meter())
            assert own_helper.process_id not in (None, process)
            own_helper.close()
            status = 0
        if status:
            os._exit(status)
        os.write(write, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(read, 1) == b"x"
        own_helper.upload(upload_of(str(tmp_path), []), meter())
        assert own_helper.process_id == process
        own_helper.close()
        # Although the fork lives on.
        assert has_ended(process)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_uploads_from_two_threads_one_after_the_other(helper: UploadHelper, tmp_path: Path) -> None:
    arenas = [filled_arena(3 * MIB) for _ in range(4)]
    works = [upload_of(str(tmp_path), [whole(arena, f"a/{n}")], arena) for n, arena in enumerate(arenas)]
    threads = [threading.Thread(target=helper.upload, args=(work, meter())) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, arena in enumerate(arenas):
        assert (tmp_path / "a" / str(number)).read_bytes() == bytes(view_of(arena, 0, arena.nbytes))


def test_logs_why_a_copy_failed_in_this_process_and_ends_the_helper(caplog: pytest.LogCaptureFixture) -> None:
    helper, running, work = UploadHelper(), mock.Mock(), mock.Mock()
    running.answer_all.side_effect = ValueError("no such segment")
    helper._copying = running, work, mock.Mock()
    helper.wait_for_copy()
    assert "no such segment" in caplog.text
    running.end.assert_called_once()
