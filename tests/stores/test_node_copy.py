"""The folder of a node's copy: its limit, its claims, what it does not trust, and failures that reach no caller."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bucketpoint.errors import BucketpointError, ObjectNotFoundError
from bucketpoint.stores import node_copy
from bucketpoint.stores.base import ObjectInfo
from bucketpoint.stores.node_copy import CopiedObject, NodeFolder
from bucketpoint.transfer.options import VARIABLE, NodeCopy, TransferOptions

CONTENT = os.urandom(3 << 20)
SIZE, SMALL = 1_100_000, 1_500_000
"""Bytes of an object, large enough to be written past the page cache; and a limit for one of two."""
CHANGES = ["ftruncate", "mkdir", "pwrite", "rename", "unlink", "write"]
CALLS = [*CHANGES, "access", "fstat", "listdir", "open", "pread", "stat"]


def of(step: int = 0, number: int = 0) -> CopiedObject:
    return CopiedObject("file:///bucket", f"run/step-{step}/data/0a/{number}.distcp", "etag")


@pytest.fixture(autouse=True)
def logged_anew() -> None:
    node_copy._logged.clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "copy"


@pytest.fixture
def folder(path: Path) -> NodeFolder:
    return NodeFolder(str(path), 10_000_000)


def put(folder: NodeFolder, start: int, stop: int, obj: CopiedObject | None = None) -> None:
    folder.put(obj or of(), start, iter([memoryview(CONTENT)[start:stop]]), stop - start)


def held(folder: NodeFolder, start: int, stop: int, obj: CopiedObject | None = None) -> int:
    """Bytes of the object in the folder, each of which must be the right one."""
    total = 0
    for low, high, name in folder.cover(obj or of(), start, stop):
        if name is not None:
            data = memoryview(bytearray(high - low))
            folder.read(obj or of(), name, low, [data[:1], data[1:]])
            assert data == CONTENT[low:high]
            total += high - low
    return total


def nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*/*"))


class Watched:
    """The module `os`, of which some calls are announced by their number before they are made."""

    def __init__(self, announce: Callable[[int], object], calls: Sequence[str] = CALLS) -> None:
        self.number = 0
        self._announce = announce
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        if name not in self._calls:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            self._announce(self.number)
            return value(*args, **kwargs)

        return call


def everything(path: Path) -> None:
    """One of each operation, the second object evicting the first."""
    folder = NodeFolder(str(path), SMALL)
    with folder.claim(of(1), 0, SIZE, 0.0):
        put(folder, 0, SIZE, of(1))
    put(folder, 5, SIZE + 5, of(2))
    # The reader of a file guards against its errors.
    with contextlib.suppress(OSError):
        assert held(folder, 0, SIZE + 5, of(2)) in (0, SIZE)
    folder.look(Bucket())


class Bucket:
    identity = "file:///bucket"

    def __init__(self, *gone: str) -> None:
        self.gone = gone
        self.asked = 0

    def head(self, key: str) -> ObjectInfo:
        self.asked += 1
        if key in self.gone:
            raise ObjectNotFoundError("gone")
        return ObjectInfo(key, 1, "etag")


def test_reads_what_several_files_have_and_names_the_gaps(folder: NodeFolder) -> None:
    for start, stop in ((0, 1_500_000), (1_000_000, 2_000_000), (2_000_000, 2_000_001), (2_500_000, 3_000_000)):
        put(folder, start, stop)
    assert [(*piece[:2], piece[2] is None) for piece in folder.cover(of(), 10, 2_600_000)] == [
        (10, 1_500_000, False),
        (1_500_000, 2_000_000, False),
        (2_000_000, 2_000_001, False),
        (2_000_001, 2_500_000, True),
        (2_500_000, 2_600_000, False),
    ]
    assert held(folder, 10, 2_600_000) == 2_600_000 - 10 - 499_999
    assert held(folder, 0, 100, of(1)) == 0


def test_keeps_to_its_limit_and_deletes_the_oldest_checkpoint_first(path: Path) -> None:
    folder = NodeFolder(str(path), 1_000_000)
    for step in range(6):
        for number in range(2):
            put(folder, 0, 200_000, of(step, number))
            assert nbytes(path) <= 1_000_000
        time.sleep(0.02)  # mtimes of two checkpoints differ
    kept = {step: sum(held(folder, 0, 200_000, of(step, number)) for number in range(2)) for step in range(6)}
    assert kept == {0: 0, 1: 0, 2: 0, 3: 0, 4: 400_000, 5: 400_000}


def test_writes_a_new_file_over_the_one_that_it_replaces_unless_that_is_linked(path: Path) -> None:
    folder, backup = NodeFolder(str(path), SMALL), path.with_name("backup")
    put(folder, 0, SIZE, of(0))
    with (path / of(0).folder / f"0-{SIZE}").open("rb") as replaced:
        put(folder, 5, SIZE + 5, of(1))
        last = path / of(1).folder / f"5-{SIZE + 5}"
        assert os.path.sameopenfile(replaced.fileno(), os.open(last, os.O_RDONLY))
    assert held(folder, 5, SIZE + 5, of(1)) == SIZE
    os.link(last, backup)
    put(folder, 0, SIZE, of(2))
    assert backup.read_bytes() == CONTENT[5 : SIZE + 5]
    assert held(folder, 0, SIZE, of(2)) == SIZE


@pytest.mark.parametrize(
    ("limit", "step", "expected"),
    [(SMALL, 1, (0, SIZE, 0)), (SMALL, 0, (SIZE, 0, 0)), (2 * SMALL, 0, (SIZE, SIZE, 0))],
)
def test_counts_and_never_takes_a_file_that_another_writes(path: Path, limit: int, step: int, expected: Any) -> None:
    folder, others = NodeFolder(str(path), limit), (of(step, 1), of(step, 2))

    def views() -> Any:
        yield memoryview(CONTENT)[5:1_060_005]
        for other in others:
            put(folder, 0, SIZE, other)
        yield memoryview(CONTENT)[1_060_005 : SIZE + 5]

    folder.put(of(), 5, views(), SIZE)
    assert (held(folder, 5, SIZE + 5), *(held(folder, 0, SIZE, other) for other in others)) == expected
    assert nbytes(path) <= limit


def test_frees_a_claim_though_a_process_that_was_forked_meanwhile_lives(folder: NodeFolder) -> None:
    with folder.claim(of(), 0, 10):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with folder.claim(of(), 0, 10, wait_s=0.5) as claimed:
            assert claimed
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_deletes_nothing_for_an_object_above_its_limit_nor_of_the_checkpoint_itself(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = NodeFolder(str(path.with_name("another")), SMALL)
    put(folder, 0, SIZE, of(0))
    put(folder, 0, SMALL, of(1))
    assert held(folder, 0, SIZE, of(0)) == SIZE
    caplog.clear()
    folder = NodeFolder(str(path), 500_000)
    for number in range(4):
        put(folder, 0, 200_000, of(0, number))
    assert [held(folder, 0, 200_000, of(0, number)) for number in range(4)] == [200_000, 200_000, 0, 0]
    assert len(caplog.records) == 1
    assert "smaller than a checkpoint's bytes" in caplog.text


def test_logs_one_line_and_goes_on_if_any_call_of_the_system_fails(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fails = 0

    def fail(number: int) -> None:
        if number == fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    caplog.set_level(logging.WARNING)
    counter = Watched(fail)
    monkeypatch.setattr(node_copy, "os", counter)
    everything(path)
    assert counter.number > 40
    for fails in range(1, counter.number + 1):
        logged_before = len(caplog.records)
        node_copy._logged.clear()
        monkeypatch.setattr(node_copy, "os", Watched(fail))
        everything(path.with_name(f"copy-{fails}"))
        assert len(caplog.records) - logged_before <= 1
        monkeypatch.setattr(node_copy, "os", os)
        everything(path.with_name(f"copy-{fails}"))


def test_serves_whole_files_only_after_its_writer_was_killed_at_any_call(path: Path) -> None:
    def kill_at(last: int) -> Callable[[int], None]:
        def kill(number: int) -> None:
            if number == last:
                os.kill(os.getpid(), signal.SIGKILL)

        return kill

    for kills in range(200):
        where = path.with_name(f"copy-{kills}")
        child = os.fork()
        if not child:
            node_copy.os = Watched(kill_at(kills + 1), [*CHANGES, "listdir"])  # type: ignore[assignment]
            try:
                everything(where)
            finally:
                os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            break
        folder = NodeFolder(str(where), SMALL)
        assert held(folder, 0, SIZE, of(1)) in (0, SIZE)
        assert held(folder, 5, SIZE + 5, of(2)) in (0, SIZE)
        everything(where)
        put(folder, 0, SIZE, of(3))
        assert held(folder, 0, SIZE, of(3)) == SIZE
        assert nbytes(where) <= SMALL
    assert kills > 15


@pytest.mark.parametrize("why", ["mode", "link", "file", "owner"])
def test_leaves_a_folder_alone_that_is_not_the_jobs_alone(
    path: Path, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if why == "link":
        path.symlink_to(elsewhere)
    elif why == "file":
        path.write_text("x")
    else:
        path.mkdir(mode=0o755 if why == "mode" else 0o700)
    if why == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    folder = NodeFolder(str(path), 10_000_000)
    with folder.claim(of(), 0, 10) as claimed:
        assert not claimed
    put(folder, 0, 10)
    folder.look(Bucket())
    assert folder.cover(of(), 0, 10) == [(0, 10, None)]
    assert not list(elsewhere.iterdir())
    assert not path.is_dir() or not list(path.iterdir())
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_follows_no_link_in_the_folder(folder: NodeFolder, path: Path, tmp_path: Path) -> None:
    put(folder, 0, 10)
    elsewhere = tmp_path / "elsewhere"
    (path / of().folder).rename(elsewhere)
    (path / of().folder).symlink_to(elsewhere)
    put(folder, 10, 20)
    assert folder.cover(of(), 0, 20) == [(0, 20, None)]
    assert not (elsewhere / "10-20").exists()
    (path / of().folder).unlink()
    put(NodeFolder(str(path), 10_000_000), 10, 20)
    (path / of().folder / "0-10").symlink_to(elsewhere / "0-10")
    with pytest.raises(OSError, match="link"):
        folder.read(of(), "0-10", 0, [memoryview(bytearray(10))])


def test_gives_a_range_to_one_process_until_that_ends(folder: NodeFolder) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        with folder.claim(of(), 0, 100) as claimed:
            os.write(tell, b"y" if claimed else b"n")
            signal.alarm(60)
            time.sleep(600)
    assert os.read(ready, 1) == b"y"
    with folder.claim(of(), 50, 60, 0.0) as claimed, folder.claim(of(), 100, 200, 0.0) as other:
        assert (claimed, other) == (False, True)
    os.kill(child, signal.SIGKILL)
    with folder.claim(of(), 50, 60) as claimed, folder.claim(of(), 0, 55, 0.0) as own:
        assert (claimed, own) == (True, False)  # threads of one process exclude each other, too
    os.waitpid(child, 0)


def test_deletes_what_the_bucket_no_longer_has_once_a_minute(folder: NodeFolder, path: Path) -> None:
    for step in range(3):
        put(folder, 0, 10, of(step))
    replaced, elsewhere = of(3)._replace(etag="old"), of(1)._replace(store="file:///other")
    put(folder, 0, 10, replaced)
    put(folder, 0, 10, elsewhere)
    bucket = Bucket(of(1).key)
    folder.look(bucket)
    assert [held(folder, 0, 10, obj) for obj in (of(0), of(1), of(2), replaced, elsewhere)] == [10, 0, 10, 0, 10]
    bucket.gone = (of(1).key, of(2).key)
    folder.look(bucket)
    assert bucket.asked == 4
    os.utime(path / "looked", (1, 1))
    folder.look(bucket)
    assert [held(folder, 0, 10, of(step)) for step in range(3)] == [10, 0, 0]


def test_takes_folder_and_limit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TransferOptions().node_copy is None
    for text, limit in (("/a:b:12", 12), ("/a:b:3KB", 3000), ("/a:b:2T", 2 * 10**12)):
        monkeypatch.setenv(VARIABLE, text)
        assert TransferOptions().node_copy == NodeCopy("/a:b", limit)
    for text in ("/a", "a:1G", "/a:0", "/a:1X", "/a:-1"):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(BucketpointError):
            TransferOptions()
