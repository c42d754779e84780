"""`BucketStorage` with several actors, wrong clocks, killed renames, damaged documents and unusual callers."""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch_checkpointing.storage.base_storage import ReadArgs

from bucketpoint import CommitInfo, CorruptDataError
from bucketpoint.errors import StoreError, TransientStoreError
from bucketpoint.integrations.torch_checkpointing import BucketStorage, BucketStorageConfig, OccupiedError, sweep
from bucketpoint.integrations.torch_checkpointing import names as storage_names
from bucketpoint.stores import DeleteFailure
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.checksum import crc32c
from kit.servers import S3Server

MIB = 1 << 20


@pytest.fixture
def storage() -> BucketStorage:
    return BucketStorageConfig(f"memory://{uuid.uuid4().hex}").create_storage()


def other(storage: BucketStorage, **more: Any) -> BucketStorage:
    """Return a storage of another process on the same root."""
    return BucketStorageConfig(storage._config.root, **more).create_storage()


def put(storage: BucketStorage, path: str, data: bytes = b"bytes") -> None:
    storage.write(Path(path), data)


def move(storage: BucketStorage, source: str, target: str) -> None:
    storage.rename(Path(source), Path(target))


def commit(storage: BucketStorage, name: str = "s", *files: str) -> None:
    for file in files or ("a", "b/c"):
        put(storage, f"tmp_{name}/{file}", file.encode())
    move(storage, f"tmp_{name}", name)


def read(storage: BucketStorage, path: str) -> bytes:
    """Read as another process does."""
    data: bytes = other(storage).read(Path(path))
    return data


# -- deletions beside renames ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_deleting_a_refused_save_leaves_the_checkpoint(storage: BucketStorage, whole: bool) -> None:
    commit(storage)
    put(storage, "tmp_s/a", b"second")
    with pytest.raises(OccupiedError):
        move(storage, "tmp_s", "s")
    if whole:
        storage.rmdir(Path("tmp_s"))
    else:
        storage.delete(Path("tmp_s/a"))
    assert not other(storage).exists(Path("tmp_s"))
    assert read(storage, "s/a") == b"a"


def test_deleting_what_was_written_where_a_renamed_file_was_leaves_that_file(storage: BucketStorage) -> None:
    put(storage, "x", b"one")
    move(storage, "x", "z")
    put(storage, "x", b"two")
    storage.delete(Path("x"))
    assert read(storage, "z") == b"one"
    assert sweep(storage, older_than_s=-5) == []
    assert read(storage, "z") == b"one"


@pytest.mark.parametrize("committed", [True, False])
def test_deleting_what_was_written_where_a_renamed_directory_was_leaves_that_one(
    storage: BucketStorage, committed: bool
) -> None:
    if committed:
        commit(storage, "d")
    else:
        put(storage, "d/a", b"a")
    move(storage, "d", "e")
    put(storage, "d/new")
    storage.rmdir(Path("d"))
    assert not other(storage).exists(Path("d"))
    assert read(storage, "e/a") == b"a"


def test_a_name_is_free_once_its_checkpoint_was_renamed(storage: BucketStorage) -> None:
    commit(storage)
    move(storage, "s", "best")
    commit(storage, "s", "new")
    assert storage.ls(Path("s")) == ["new"]
    storage.rmdir(Path("s"))
    again = other(storage)
    assert again.ls(Path()) == ["best"]
    assert not again.exists(Path("tmp_s"))
    assert again.read(Path("best/a")) == b"a"


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch, storage: BucketStorage) -> Iterator[pytest.MonkeyPatch]:
    """Fail the last request of a rename: the marker that hides the source."""
    send = type(storage.store).put

    def fail(self: Any, key: str, body: Any, **more: Any) -> Any:
        if "@dx." in key and not sum(map(len, body)):
            raise TransientStoreError("the store is down")
        return send(self, key, body, **more)

    with monkeypatch.context() as patch:
        patch.setattr(type(storage.store), "put", fail)
        yield patch


@pytest.mark.parametrize("kind", ["file", "directory", "committed"])
def test_deleting_the_source_of_a_killed_rename_leaves_its_target(
    storage: BucketStorage, dying: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "committed":
        commit(storage, "d", "a")
    else:
        put(storage, "d" if kind == "file" else "d/a", b"a")
    with pytest.raises(TransientStoreError):
        move(storage, "d", "e")
    dying.undo()
    late = other(storage)
    (late.delete if kind == "file" else late.rmdir)(Path("d"))
    assert not other(storage).exists(Path("d"))
    assert read(storage, "e" if kind == "file" else "e/a") == b"a"


def test_a_sweep_keeps_a_file_that_is_renamed_while_it_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = BucketStorageConfig(str(tmp_path)).create_storage()
    put(storage, "d/x", b"x")
    for info in storage.store.list(""):
        os.utime(tmp_path / info.key, (1, 1))
    listing = type(storage.store).list

    def by_page(self: Any, prefix: str, **more: Any) -> Any:
        monkeypatch.setattr(type(storage.store), "list", listing)
        yield from listing(self, "a/")
        move(other(storage), "d", "a")
        yield from listing(self, "d/")

    monkeypatch.setattr(type(storage.store), "list", by_page)
    assert sweep(storage) == []
    assert read(storage, "a/x") == b"x"


def test_a_deletion_that_the_store_refuses_raises(storage: BucketStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(storage)
    put(storage, "x", b"old")
    put(storage, "x", b"new")

    def refused(self: Any, keys: list[str]) -> list[DeleteFailure]:
        return [DeleteFailure(key, "AccessDenied", "no") for key in keys]

    monkeypatch.setattr(type(storage.store), "delete", refused)
    with pytest.raises(StoreError, match="AccessDenied"):
        storage.rmdir(Path("s"))
    with pytest.raises(StoreError, match="AccessDenied"):
        storage.delete(Path("x"))
    with pytest.raises(StoreError, match="AccessDenied"):
        sweep(storage, older_than_s=-5)


# -- renames -----------------------------------------------------------------------------------------------------------


def test_a_rename_to_the_same_path_or_into_itself_loses_nothing(storage: BucketStorage) -> None:
    put(storage, "x", b"x")
    move(storage, "x", "x")
    put(storage, "d/x", b"x")
    with pytest.raises(OSError, match="into itself"):
        move(storage, "d", "d/e")
    assert read(storage, "x") == read(storage, "d/x") == b"x"
    with pytest.raises(OSError, match="root"):
        storage.rmdir(Path())


def test_a_directory_of_a_checkpoint_is_occupied(storage: BucketStorage) -> None:
    commit(storage)
    put(storage, "d/e")
    put(storage, "y")
    for source in ("d", "y"):
        with pytest.raises(OccupiedError):
            move(storage, source, "s/b")
    assert other(storage).ls(Path("s/b")) == ["c"]


def test_another_run_renames_all_that_is_there(storage: BucketStorage) -> None:
    first, second = other(storage, attempt="A"), other(storage, attempt="B")
    commit(first)
    put(first, "s/later", b"later")
    put(first, "x", b"x")
    move(second, "s", "best")
    move(second, "x", "y")
    assert other(storage).ls(Path("best")) == ["a", "b", "later"]
    assert read(storage, "y") == b"x"


def test_a_commit_takes_no_file_that_a_killed_run_has_renamed(storage: BucketStorage) -> None:
    killed, run = other(storage, attempt="A"), other(storage, attempt="B")
    put(killed, "tmp_s/.x.tmp")
    move(killed, "tmp_s/.x.tmp", "tmp_s/x")
    commit(run, "s", "y")
    assert other(storage).ls(Path("s")) == ["y"]


# -- clocks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch, storage: BucketStorage) -> Callable[[], BucketStorage]:
    """Set the clock of this machine back by a minute, in a new process."""
    now = time.time_ns

    def set_back() -> BucketStorage:
        monkeypatch.setattr(storage_names, "_last", 0)
        monkeypatch.setattr(time, "time_ns", lambda: now() - 60 * 10**9)
        return other(storage)

    return set_back


@pytest.mark.parametrize("way", ["write", "rename"])
@pytest.mark.parametrize("path", ["x", "s/a", "moved"])
def test_a_file_is_replaced_by_a_machine_whose_clock_is_behind(
    storage: BucketStorage, behind: Any, way: str, path: str
) -> None:
    put(storage, "x", b"old")
    commit(storage)
    put(storage, "moved", b"old")
    move(storage, "moved", "elsewhere")
    late = behind()
    put(late, path if way == "write" else "y", b"new")
    if way == "rename":
        move(late, "y", path)
    assert read(storage, path) == b"new"


def test_a_checkpoint_is_saved_again_by_a_machine_whose_clock_is_behind(storage: BucketStorage, behind: Any) -> None:
    commit(storage, "all", "s/a")
    storage.rmdir(Path("all/s"))
    late = behind()
    put(late, "all/tmp_s/x", b"x")
    move(late, "all/tmp_s", "all/s")
    assert read(storage, "all/s/x") == b"x"


# -- damaged and foreign objects ---------------------------------------------------------------------------------------


def test_objects_of_other_tools_are_ignored(storage: BucketStorage) -> None:
    commit(storage)
    for name in ("@f.x", "@l.x", "@dx.zz", "events.out"):
        storage.store.put(storage.where.key(("s",), name), [memoryview(b"1")])
    assert storage.ls(Path("s")) == ["a", "b"]
    storage.delete(Path("s/a"))
    assert storage.ls(Path("s")) == ["b"]


@pytest.mark.parametrize(
    "body", [b"no json", b"[]", b'{"key": 5, "size": "a", "etag": null}', b'{"key": "../x", "size": 9, "etag": null}']
)
def test_a_damaged_link_is_found(storage: BucketStorage, body: bytes) -> None:
    put(storage, "x")
    move(storage, "x", "y")
    (key,) = [info.key for info in storage.store.list("") if "@l." in info.key]
    storage.store.put(key, [memoryview(body)])
    with pytest.raises(CorruptDataError, match="link"):
        read(storage, "y")


_ROWS: list[Any] = [
    5,
    [["x"]],
    [["x", "/etc/passwd", 100, None]],
    [["x", "../o/@f.1.1.1", 100, None]],
    [["x", "x/@f.1.1.1", 10**30, None]],
]


@pytest.mark.parametrize("rows", _ROWS)
def test_a_manifest_that_names_no_files_of_the_root_is_refused(storage: BucketStorage, rows: Any) -> None:
    commit(storage)
    document = {"format": "bucketpoint torch_checkpointing 1", "token": "1" * 16, "source": "tmp_t", "files": rows}
    body = json.dumps(document).encode()
    data = b"%08x\n" % crc32c(memoryview(body)) + body
    storage.store.put(storage.where.key(("t",), "@d"), [memoryview(data)])
    with pytest.raises(CorruptDataError, match="manifest"):
        read(storage, "t/x")
    # The other checkpoints can be found all the same.
    assert other(storage).ls(Path()) == ["s", "t"]


def test_an_object_that_is_too_short_is_damaged(storage: BucketStorage) -> None:
    storage.store.put(storage.where.key(("x",), f"@f.{'1' * 16}..00000000"), [memoryview(b"abc")])
    for ask in (storage.getsize, storage.read):
        with pytest.raises(CorruptDataError):
            ask(Path("x"))


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [None, ReadArgs(pre_read_full_file=False)])
def test_a_stream_refuses_what_files_refuse(storage: BucketStorage, args: ReadArgs | None) -> None:
    put(storage, "x", b"0123456789")
    stream = storage.stream_read(Path("x"), args)
    for offset, whence in ((-1, 0), (-100, 1), (0, 9)):
        with pytest.raises(ValueError, match=r"position|whence"):
            stream.seek(offset, whence)
    assert stream.readline() == b"0123456789"
    stream.close()
    asks = (stream.read, stream.tell, lambda: stream.seek(0), lambda: stream.readinto(bytearray(1)), stream.readall)
    for ask in asks:
        with pytest.raises(ValueError, match="closed"):
            ask()


def test_an_array_without_elements_is_an_empty_file(storage: BucketStorage) -> None:
    storage.write(Path("x"), np.empty((0, 3)))
    assert read(storage, "x") == b""


def test_a_tensor_without_memory_of_its_own_is_saved(storage: BucketStorage) -> None:
    state = {"w": TwoTensor(torch.randn(5), torch.randn(5))}
    with storage.get_write_stream(Path("x"), state) as stream:
        torch.save(state, stream)  # type: ignore[arg-type]
    assert storage.getsize(Path("x")) > 0


@pytest.mark.parametrize("left", [-64, -24, -10, 0])
def test_all_parts_but_the_last_are_of_one_size(minio: S3Server, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    options = TransferOptions(part_bytes=5 * MIB, connections=4)
    root = f"s3://{minio.make_bucket()}/run"
    storage = BucketStorageConfig(root, minio.options, transfer=options).create_storage()
    sizes = {}
    send = type(storage.store).put_part

    def put_part(self: Any, key: str, upload: str, number: int, body: Any, **more: Any) -> Any:
        sizes[number] = sum(map(len, body))
        return send(self, key, upload, number, body, **more)

    monkeypatch.setattr(type(storage.store), "put_part", put_part)
    data = os.urandom(10 * MIB + left)
    storage.write(Path("x"), data)
    assert storage.read(Path("x")) == data
    *others, last = (size for _, size in sorted(sizes.items()))
    assert set(others) == {5 * MIB}
    assert last <= 5 * MIB


def test_a_forked_process_leaves_the_upload_alone(minio: S3Server) -> None:
    options = TransferOptions(part_bytes=5 * MIB, connections=2)
    root = f"s3://{minio.make_bucket()}/run"
    storage = BucketStorageConfig(root, minio.options, transfer=options).create_storage()
    with storage.stream_write(Path("x")) as stream:
        stream.write(bytes(6 * MIB))
        child = os.fork()
        if not child:
            try:
                stream.__exit__(SystemExit, SystemExit(), None)
            finally:
                os._exit(0)
        for _ in itertools.takewhile(lambda _: os.waitpid(child, os.WNOHANG) == (0, 0), range(300)):
            time.sleep(0.1)
        stream.write(bytes(6 * MIB))
    assert storage.read(Path("x")) == bytes(12 * MIB)


def test_the_time_of_a_save_is_told_after_a_question_for_its_directory(tmp_path: Path) -> None:
    told: list[CommitInfo] = []
    storage = BucketStorageConfig(str(tmp_path), on_commit=told.append).create_storage()
    put(storage, "tmp_s/a")
    begun = time.monotonic()
    time.sleep(0.05)
    assert storage.exists(Path("tmp_s"))
    least = time.monotonic() - begun
    move(storage, "tmp_s", "s")
    assert told[0].commit_s >= least
