"""Folders that other users share, and filesystems without locks or links: what `LocalStore` does there."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem

from bucketpoint.errors import (
    BucketpointError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    ThrottledError,
)
from bucketpoint.stores import LocalStore, ObjectInfo, Store, open_store, retry
from bucketpoint.stores import local_lock as lock_module
from bucketpoint.stores.local_folders import temporary
from bucketpoint.stores.local_lock import locked
from kit.buffers import views

SECRET = b"aws_secret_access_key"

READS: list[Callable[[Store, str], object]] = [
    lambda store, key: store.get(key),
    lambda store, key: store.get(key, first=4),
    lambda store, key: store.head(key),
    lambda store, key: store.read_into(key, 0, [memoryview(bytearray(4))]),
    lambda store, key: store.copy(ObjectInfo(key, 4), "copy"),
    lambda store, key: store.put(key, views(b"x"), if_match="etag"),
    lambda store, key: store.delete_if(key, "etag"),
]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/credentials").write_bytes(SECRET)
    return tmp_path / "home/credentials"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "root").mkdir()
    return LocalStore(str(tmp_path / "root"))


class TestLinks:
    @pytest.mark.parametrize("target", ["{secret}", "../../home/credentials", "chain", "./../step/chain", "/dev/zero"])
    def test_refuses_a_link_that_leaves_the_root(self, target: str, store: LocalStore, secret: Path) -> None:
        step = Path(store.root, "step")
        step.mkdir()
        (step / "chain").symlink_to(secret)
        (step / "data").symlink_to(target.format(secret=secret))
        for read in READS:
            with pytest.raises(StoreError, match=r"is a symbolic link, and it leads out.*follow_links") as caught:
                read(store, "step/data")
            assert not isinstance(caught.value, ObjectNotFoundError)
        assert list(store.list("")) == list(store.list("step/data")) == []
        store.put("step/data", views(b"mine"))
        assert secret.read_bytes() == SECRET
        assert store.get("step/data")[0] == b"mine"
        assert store.delete(["step/chain"]) == []
        assert secret.read_bytes() == SECRET

    def test_follows_links_out_of_the_root_if_asked_to(self, tmp_path: Path, secret: Path) -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache/weights").symlink_to(secret)
        for url in (f"file://{tmp_path}/cache", f"{tmp_path}/cache"):
            for fs in (None, fsspec.filesystem("file")):
                store, _ = open_store(url, storage_options={"follow_links": True}, fs=fs)
                assert store.get("weights")[0] == SECRET
                assert store.head("weights").size == len(SECRET)
                assert [info.key for info in store.list("")] == ["weights"]
        with pytest.raises(BucketpointError, match="follow_links"):
            open_store(str(tmp_path), storage_options={"follow_links": "no"})

    def test_follows_a_link_that_stays_below_the_root(self, store: LocalStore, tmp_path: Path) -> None:
        store.put("blobs/abc", views(b"weights"))
        store.put("other", views(b"x"))
        for name in ("read", "deleted", "replaced", "compared"):
            (tmp_path / "root/snapshot").mkdir(exist_ok=True)
            (tmp_path / "root/snapshot" / name).symlink_to("../snapshot/./../blobs/abc")
        (tmp_path / "root/loop").symlink_to("loop")
        assert store.get("snapshot/read")[0] == b"weights"
        assert {info.size for info in store.list("snapshot/")} == {7}
        assert store.delete(["snapshot/deleted"]) == []
        store.put("snapshot/replaced", views(b"new"))
        store.delete_if("snapshot/compared", store.head("snapshot/compared").etag or "")
        assert [info.key for info in store.list("")] == ["blobs/abc", "other", "snapshot/read", "snapshot/replaced"]
        assert store.get("blobs/abc")[0] == b"weights"

    @pytest.mark.parametrize("kind", ["file", "dir", "dir in dir"])
    def test_refuses_links_through_filesystems_of_the_caller(self, kind: str, tmp_path: Path, secret: Path) -> None:
        (tmp_path / "root/step").mkdir(parents=True)
        (tmp_path / "root/step/data").symlink_to(secret)
        local, path = fsspec.filesystem("file"), str(tmp_path / "root/step")
        if kind != "file":
            local, path = DirFileSystem(str(tmp_path / "root"), local), "step"
        if kind == "dir in dir":
            local, path = DirFileSystem("step", local), "."
        store, _ = open_store(path, fs=local)
        with pytest.raises(StoreError, match="leads out of the root"):
            store.get("data")

    def test_makes_no_hard_link_of_a_file_behind_a_link(
        self, store: LocalStore, secret: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def swap(fd: int, body: object) -> None:
            partial = next(Path(store.root).iterdir())
            partial.unlink()
            partial.symlink_to(secret)

        monkeypatch.setattr("bucketpoint.stores.local._write", swap)
        store.put("data", views(b"x"), if_none_match=True)
        assert secret.stat().st_nlink == 1
        with pytest.raises(StoreError, match="leads out of the root"):
            store.get("data")

    def test_reads_and_lists_no_upload_that_is_or_has_a_link_a_pipe_or_a_file(
        self, store: LocalStore, secret: Path
    ) -> None:
        key = "k" * 101  # too long for the name of the upload's folder
        upload = store.create_multipart(key)
        part = store.put_part(key, upload, 1, views(b"x"))
        folder = next(path for path in Path(store.root).iterdir() if upload in path.name)
        assert [one.key for one in store.list_multipart("")] == [key]
        (folder / "1").unlink()
        (folder / "1").symlink_to(secret)
        with pytest.raises(StoreError):
            store.complete_multipart(key, upload, [part])
        for make in (lambda path: path.symlink_to(secret), os.mkfifo):
            (folder / "target").unlink()
            make(folder / "target")
            assert list(store.list_multipart("")) == []
        Path(store.root, ".bucketpoint-upload-1-data").symlink_to(secret.parent)
        Path(store.root, ".bucketpoint-upload-2-data").touch()
        Path(store.root, ".bucketpoint-tmp-3-data").mkdir()
        assert list(store.list_multipart("")) == []

    def test_aborts_an_upload_that_version_0_2_began(self, store: LocalStore) -> None:
        folder = Path(store.root, "step/.bucketpoint-upload-0123456789abcdef")
        folder.mkdir(parents=True)
        (folder / "target").write_text("step/data")
        (folder / "1").write_bytes(b"x")
        (upload,) = store.list_multipart("step/data")
        store.abort_multipart(upload.key, upload.upload_id)
        assert not folder.exists()

    def test_waits_for_no_pipe_and_lists_none(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        os.mkfifo(Path(store.root, "pipe"))
        with socket.socket(socket.AF_UNIX) as listening, monkeypatch.context() as patch:
            # The path of a socket is short.
            patch.chdir(store.root)
            listening.bind("socket")
        for name in ("pipe", "socket"):
            for read in READS[:5]:
                with pytest.raises(ObjectNotFoundError):
                    read(store, name)
            for exclusive in (False, True):
                with pytest.raises(StoreError, match=r"has the name of the object.*Move it away") as caught:
                    store.put(name, views(b"x"), if_none_match=exclusive)
                assert type(caught.value) is StoreError
        assert list(store.list("")) == []

    @pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT", "EROFS", "EFBIG", "EACCES", "EIO"])
    def test_names_a_remedy_and_keeps_the_old_object_if_the_filesystem_refuses_a_write(
        self, number: str, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put("k", views(b"old"))
        monkeypatch.setattr(os, "fsync", raising(getattr(errno, number)))
        with pytest.raises(StoreError, match=os.strerror(getattr(errno, number))) as caught:
            store.put("k", views(b"new"))
        assert caught.value.remedy
        assert store.get("k")[0] == b"old"
        assert names(Path(store.root)) == ["k"]

    def test_stays_below_the_root_while_a_folder_is_replaced_by_a_link(self, store: LocalStore, secret: Path) -> None:
        step, aside, over = Path(store.root, "step"), Path(store.root, "aside"), threading.Event()
        store.put("step/credentials", views(b"mine"))

        def swap() -> None:
            while not over.is_set():
                step.rename(aside)
                step.symlink_to(secret.parent)
                step.unlink()
                aside.rename(step)

        with ThreadPoolExecutor(1) as pool:
            swapping = pool.submit(swap)
            try:
                for number in range(40):
                    with contextlib.suppress(StoreError):
                        assert store.get("step/credentials")[0] == b"mine"
                    with contextlib.suppress(StoreError):
                        store.put(f"step/new-{number % 3}", views(b"mine"))
                    with contextlib.suppress(StoreError):
                        assert all(info.size == 4 for info in store.list(""))
                    store.delete([f"step/new-{number % 3}", "step/nothing"])
            finally:
                over.set()
            with contextlib.suppress(OSError):  # a put may have made the folder in between
                swapping.result()
        assert names(secret.parent) == ["credentials"]
        assert secret.read_bytes() == SECRET


def lock_of(store: LocalStore, name: str, content: str, *, age: float = 0) -> Path:
    path = Path(store.root, temporary("lock", name))
    path.write_text(content)
    moment = path.stat().st_mtime - age
    os.utime(path, (moment, moment))
    return path


@contextlib.contextmanager
def owner(*, state: str) -> Iterator[str]:
    """Describe a process that runs, has ended, or has ended unnoticed by its parent."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, lock_module._process().encode())
        signal.pause()
    described = os.read(read, 200).decode()
    if state != "runs":
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    if state == "gone":
        os.waitpid(child, 0)
    yield described
    if state != "gone":
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(read)
    os.close(write)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_WAIT_S", 0.02)


@pytest.mark.usefixtures("impatient")
class TestLock:
    @pytest.mark.skipif(sys.platform != "linux", reason="only /proc tells if a process runs")
    @pytest.mark.parametrize(("state", "age"), [("gone", 0.0), ("zombie", 0.0), ("runs", 1e6)])
    def test_breaks_the_lock_of_a_process_that_has_ended_only(self, state: str, age: float, store: LocalStore) -> None:
        etag = store.put("k", views(b"old")).etag
        with owner(state=state) as described:
            lock = lock_of(store, "k", f"0123456789ab {described}", age=age)
            if state != "runs":
                store.put("k", views(b"new"), if_match=etag)
                assert names(Path(store.root)) == ["k"]
                return
            for change in (
                lambda: store.put("k", views(b"new"), if_match=etag),
                lambda: store.put("k", views(b"new")),
                lambda: store.delete_if("k", etag or ""),
            ):
                with retry.deadline(0.1), pytest.raises(ThrottledError, match=r"process \d+ of this machine.*delete"):
                    change()
            with retry.deadline(0.1):
                assert [failure.code for failure in store.delete(["k"])] == ["ThrottledError"]
            assert store.get("k")[0] == b"old"
            assert lock.exists()

    @pytest.mark.parametrize("content", ["", "0123456789ab", "0123456789ab another-boot 1f 17 99", "\0\xff junk " * 99])
    def test_breaks_a_lock_from_elsewhere_by_its_age(self, content: str, store: LocalStore) -> None:
        etag = store.put("k", views(b"old")).etag
        lock_of(store, "k", content)
        with retry.deadline(0.1), pytest.raises(ThrottledError):
            store.put("k", views(b"new"), if_match=etag)
        lock_of(store, "k", content, age=lock_module.ABANDONED_S + 1)
        store.put("k", views(b"new"), if_match=etag)
        assert names(Path(store.root)) == ["k"]

    @pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "link"])
    def test_hangs_on_nothing_that_lies_in_the_place_of_a_lock(
        self, make: Callable[[str], None], store: LocalStore
    ) -> None:
        store.put("k", views(b"old"))
        make(os.path.join(store.root, temporary("lock", "k")))
        with retry.deadline(0.1), pytest.raises(ThrottledError):
            store.put("k", views(b"new"))

    def test_counts_each_change_once_beside_abandoned_locks(self, store: LocalStore) -> None:
        store.put("k", views(b"0"))
        again = threading.Event()

        def add() -> None:
            while True:
                data, info = store.get("k")
                with contextlib.suppress(PreconditionFailedError):
                    store.put("k", views(b"%d" % (int(data) + 1)), if_match=info.etag)
                    return

        def abandon() -> None:
            while not again.wait(0.01):
                with contextlib.suppress(FileExistsError), open(Path(store.root, temporary("lock", "k")), "x") as file:
                    os.utime(file.fileno(), (1, 1))

        with ThreadPoolExecutor(9) as pool:
            abandoning = pool.submit(abandon)
            for change in [pool.submit(add) for _ in range(40)]:
                change.result()
            again.set()
            abandoning.result()
        assert store.get("k")[0] == b"40"

    def test_refuses_a_change_after_it_was_suspended(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        etag = store.put("k", views(b"old")).etag
        monkeypatch.setattr(lock_module, "HELD_S", -1.0)
        for change in (lambda: store.put("k", views(b"new"), if_match=etag), lambda: store.delete_if("k", etag or "")):
            with retry.deadline(0.1), pytest.raises(StoreError, match="suspended"):
                change()
        assert store.get("k")[0] == b"old"

    def test_leaves_the_lock_of_whoever_has_broken_its_own(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fd = os.open(store.root, os.O_RDONLY)
        monkeypatch.setattr(lock_module, "HELD_S", -1.0)
        with locked(fd, "k"):
            lock = lock_of(store, "k", "ba9876543210 other")
        os.close(fd)
        assert lock.read_text() == "ba9876543210 other"

    def test_deletes_on_a_full_disk(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put("k", views(b"old"))
        real = os.open

        def full(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", full)
        with pytest.raises(StoreError, match="No space left"):
            store.delete_if("k", store.head("k").etag or "")
        assert store.delete(["k"]) == []
        assert names(Path(store.root)) == []


class TestFilesystems:
    @pytest.mark.parametrize("number", ["EPERM", "EOPNOTSUPP", "ENOSYS", "EMLINK", "EACCES"])
    def test_creates_exclusively_without_hard_links(
        self, number: str, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "link", raising(getattr(errno, number)))

        def create(content: int) -> bool:
            try:
                store.put("k", views(b"%d" % content), if_none_match=True)
            except PreconditionFailedError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert sum(won) == 1
        assert store.get("k")[0] == b"%d" % won.index(True)
        store.put("k", views(b"plain"))
        assert store.get("k")[0] == b"plain"
        assert names(Path(store.root)) == ["k"]

    def test_names_what_is_missing_without_links_and_renames(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "link", raising(errno.EPERM))
        monkeypatch.setattr(os, "replace", raising(errno.ENOSYS))
        with pytest.raises(StoreError, match=r"no links and no renames.*bucket behind the mount"):
            store.put("k", views(b"x"), if_none_match=True)
        assert names(Path(store.root)) == []

    @pytest.mark.parametrize("call", ["open", "stat", "link", "replace", "fsync", "scandir", "unlink", "mkdir"])
    def test_tries_again_after_a_stale_handle(
        self, call: str, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retry, "FIRST_DELAY_S", 0.001)
        for number in range(3):
            store.put(f"step-{number}/k", views(b"old"))
        etags = [store.head(f"step-{number}/k").etag or "" for number in range(3)]
        real = getattr(os, call)
        for request in (
            lambda: store.put("step-0/k", views(b"new")),
            lambda: store.put("step-0/new/k", views(b"new")),
            lambda: store.get("step-0/k"),
            lambda: store.head("step-0/k"),
            lambda: store.read_into("step-0/k", 0, [memoryview(bytearray(3))]),
            lambda: store.delete(["step-1/k"]),
            lambda: store.delete_if("step-2/k", etags[2]),
            lambda: store.copy(ObjectInfo("step-0/k", 3), "copy"),
            lambda: store.create_multipart("other"),
        ):
            monkeypatch.setattr(os, call, once(real, errno.ESTALE))
            request()
        monkeypatch.setattr(os, call, once(real, errno.ESTALE))
        assert [info.key for info in store.list("")] == ["copy", "step-0/k", "step-0/new/k"]
        monkeypatch.setattr(os, call, once(real, errno.ESTALE))
        assert list(store.list_folders("")) == ["step-0/"]

    def test_lists_each_key_once_after_a_stale_handle_in_the_middle(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = [f"{folder}/{name:02}" for folder in "abc" for name in range(70)]
        for key in keys:
            Path(store.root, key).parent.mkdir(exist_ok=True)
            Path(store.root, key).touch()
        monkeypatch.setattr(retry, "FIRST_DELAY_S", 0.001)
        real, calls = os.stat, iter(range(1 << 30))

        def stale(*args: Any, **kwargs: Any) -> os.stat_result:
            if next(calls) in (60, 150, 151):
                raise OSError(errno.ESTALE, "Stale file handle")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, "stat", stale)
        assert [info.key for info in store.list("")] == keys
        assert next(calls) > 210

    def test_lists_folders_with_one_scan_of_each(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        for number in range(30):
            for name in ("a", "b/c"):
                store.put(f"step-{number:02}/{name}", views(b"x"))
        scans: Counter[int] = Counter()
        stats: list[Any] = []
        scandir, stat = os.scandir, os.stat

        def counted(fd: Any) -> Any:
            scans[os.fstat(fd).st_ino] += 1
            return scandir(fd)

        monkeypatch.setattr(os, "scandir", counted)
        monkeypatch.setattr(os, "stat", lambda *args, **kwargs: stats.append(args) or stat(*args, **kwargs))
        assert len(list(store.list_folders(""))) == 30
        assert len(scans) == 31
        assert set(scans.values()) == {1}
        assert len(stats) == 0
        assert len(list(store.list(""))) == 60
        assert len(stats) == 60
        assert max(scans.values()) == 2


def raising(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def once(real: Callable[..., Any], number: int) -> Callable[..., Any]:
    failed: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(number)
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return call
