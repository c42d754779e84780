"""`BucketStorage`: the contract of torch_checkpointing's `Storage`, its commits, its requests and its leftovers."""

from __future__ import annotations

import json
import pickle
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.hf.consolidation import consolidate_hf_safetensors_checkpoint
from torch_checkpointing.hf.metadata import HuggingFaceSafetensorsDistributedMetadataFormat
from torch_checkpointing.storage.torch_serialization import load_torch_serialized_from_storage

from bucketpoint import CommitInfo, CorruptDataError
from bucketpoint.errors import BucketpointError, InvalidURLError, StoreError, TransientStoreError
from bucketpoint.integrations.torch_checkpointing import (
    BucketStorage,
    BucketStorageConfig,
    MissingFileError,
    OccupiedError,
    names,
    sweep,
)
from bucketpoint.stores import DeleteFailure
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.checksum import crc32c
from kit.faults import Reset, always
from kit.plugin import MakeProxy
from kit.programs import run_program
from kit.servers import S3Server
from kit.trainers import block

MIB = 1 << 20

PARTED = TransferOptions(part_bytes=8 * MIB, connections=4)


@pytest.fixture(params=["memory", "local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> BucketStorage:
    """A storage on each kind of store."""
    if request.param == "memory":
        return BucketStorageConfig(f"memory://{uuid.uuid4().hex}").create_storage()
    if request.param == "local":
        return BucketStorageConfig(str(tmp_path / "root")).create_storage()
    server: S3Server = request.getfixturevalue("minio")
    return BucketStorageConfig(f"s3://{server.make_bucket()}/run", server.options).create_storage()


def on(server: S3Server, bucket: str, **more: Any) -> BucketStorage:
    return BucketStorageConfig(f"s3://{bucket}/run", server.options, **more).create_storage()


def put(storage: BucketStorage, path: str, data: bytes = b"bytes") -> None:
    storage.write(Path(path), data)


def commit(storage: BucketStorage, name: str = "step-1", *files: str) -> None:
    for file in files or ("a", "b/c"):
        put(storage, f"tmp_{name}/{file}", file.encode())
    storage.rename(Path(f"tmp_{name}"), Path(name), is_directory=True)


# -- the table of Storage.rename ---------------------------------------------------------------------------------------


def test_renames_a_directory_to_an_absent_destination(storage: BucketStorage) -> None:
    storage.mkdir(Path("step-1"))
    commit(storage)
    assert storage.ls(Path("step-1")) == ["a", "b"]
    assert storage.ls(Path("step-1/b")) == ["c"]
    assert storage.read(Path("step-1/b/c")) == b"b/c"
    assert storage.getsize(Path("step-1/b/c")) == 3
    assert (storage.isdir(Path("step-1")), storage.isdir(Path("step-1/a"))) == (True, False)
    assert not storage.exists(Path("tmp_step-1"))
    assert storage.ls(Path()) == ["step-1"]


@pytest.mark.parametrize("written", ["step-1/old", "step-1"])
def test_raises_for_a_directory_onto_files_and_changes_nothing(storage: BucketStorage, written: str) -> None:
    put(storage, written, b"old")
    with pytest.raises(OSError, match="occupied") as raised:
        commit(storage)
    assert isinstance(raised.value, OccupiedError)
    assert storage.read(Path(written)) == b"old"
    assert storage.read(Path("tmp_step-1/a")) == b"a"


def test_leaves_a_committed_directory_when_another_save_fails_and_is_deleted(storage: BucketStorage) -> None:
    commit(storage)
    put(storage, "tmp_step-1/a", b"of a second save")
    with pytest.raises(OccupiedError, match="occupied"):
        storage.rename(Path("tmp_step-1"), Path("step-1"), is_directory=True)
    # The second save has written the same names, and has harmed nothing.
    assert storage.read(Path("step-1/a")) == b"a"
    assert storage.ls(Path("step-1")) == ["a", "b"]
    assert storage.read(Path("tmp_step-1/a")) == b"of a second save"
    storage.rmdir(Path("tmp_step-1"))
    assert not storage.exists(Path("tmp_step-1"))
    assert storage.read(Path("step-1/a")) == b"a"


def test_replaces_a_file_by_a_file(storage: BucketStorage) -> None:
    put(storage, "x", b"old")
    for data in (b"new", b"newer"):
        put(storage, "y", data)
        storage.rename(Path("y"), Path("x"))
        assert storage.read(Path("x")) == data
        assert not storage.exists(Path("y"))
    storage.rename(Path("x"), Path("x"))
    assert storage.read(Path("x")) == b"newer"
    put(storage, "x", b"newest")
    assert storage.read(Path("x")) == b"newest"


def test_raises_for_a_file_onto_a_directory(storage: BucketStorage) -> None:
    commit(storage)
    put(storage, "d/e")
    for source, directory in (("y", "step-1"), ("y", "d"), ("step-1/y", "step-1/b")):
        put(storage, source)
        with pytest.raises(OSError, match="occupied"):
            storage.rename(Path(source), Path(directory))
        assert storage.exists(Path(source))
    assert storage.ls(Path("step-1/b")) == ["c"]


def test_refuses_what_torch_checkpointing_never_does(storage: BucketStorage) -> None:
    commit(storage)
    put(storage, "tmp_step-2/a")
    put(storage, "d/x")
    for source, target in (
        ("step-1", "best"),
        ("step-1/a", "step-1/z"),
        ("tmp_step-2", "other"),
        ("tmp_step-2/a", "tmp_step-2/b"),
        ("d/x", "d/tmp_x"),
        ("d/x", "x"),
        ("d", "e"),
    ):
        with pytest.raises(BucketpointError, match="Two renames work: of a temporary directory"):
            storage.rename(Path(source), Path(target))
    for refused in ("step-1/a", "step-1", "tmp_step-2/a", "d"):
        with pytest.raises(BucketpointError, match="Delete a checkpoint as a whole"):
            storage.delete(Path(refused))
    for refused in ("step-1/b", ""):
        with pytest.raises(BucketpointError, match="Delete a checkpoint as a whole"):
            storage.rmdir(Path(refused))
    assert [storage.exists(Path(path)) for path in ("step-1/a", "d/x")] == [True] * 2
    assert storage.ls(Path("tmp_step-2")) == ["a"]


# -- files and directories ---------------------------------------------------------------------------------------------


def test_lists_files_written_into_a_committed_directory_beside_its_own(storage: BucketStorage) -> None:
    commit(storage)
    put(storage, "step-1/.x.tmp", b"consolidated")
    storage.rename(Path("step-1/.x.tmp"), Path("step-1/x"))
    assert storage.ls(Path("step-1")) == ["a", "b", "x"]
    assert storage.read(Path("step-1/x")) == b"consolidated"
    put(storage, "step-1/a", b"replaced")
    assert storage.read(Path("step-1/a")) == b"replaced"
    assert sweep(storage, older_than_s=-5) == []
    for written in ("x", "a"):
        storage.delete(Path("step-1") / written)
    assert storage.ls(Path("step-1")) == ["a", "b"]
    assert storage.read(Path("step-1/a")) == b"a"


def test_takes_the_last_write_of_a_file_for_the_file(storage: BucketStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    for path in ("x", "tmp_d/x"):
        for data in (b"old", b"new"):
            put(storage, path, data)
            # The clock is set back between two writes.
            monkeypatch.setattr(names.time, "time_ns", lambda: now - 10**9)
        assert storage.read(Path(path)) == b"new"
    storage.delete(Path("x"))
    assert not storage.exists(Path("x"))


def test_raises_as_a_filesystem_does_for_what_is_not_there(storage: BucketStorage) -> None:
    put(storage, "d/x")
    for ask in (storage.read, storage.getsize, storage.delete, storage.ls, storage.rmdir):
        with pytest.raises(FileNotFoundError) as raised:
            ask(Path("nothing"))
        assert isinstance(raised.value, MissingFileError)
    for directory in ("d", ""):
        with pytest.raises(IsADirectoryError):
            storage.read(Path(directory))
    with pytest.raises(IsADirectoryError):
        storage.stream_write(Path())
    with pytest.raises(NotADirectoryError):
        storage.ls(Path("d/x"))
    assert (storage.exists(Path("nothing")), storage.isdir(Path("nothing"))) == (False, False)
    for source, target in (("tmp_step-1", "step-1"), ("x", "y")):
        with pytest.raises(FileNotFoundError, match="no such file"):
            storage.rename(Path(source), Path(target))


def test_finds_no_checkpoint_that_a_tool_of_the_store_deleted(storage: BucketStorage) -> None:
    commit(storage)
    assert storage.read(Path("step-1/a")) == b"a"
    storage.store.delete([storage.where.key(("step-1",), "@d")])
    assert not storage.exists(Path("step-1/a"))
    with pytest.raises(MissingFileError):
        storage.read(Path("step-1/a"))
    assert len(sweep(storage, older_than_s=-5)) == 2
    commit(storage, "step-1", "other")
    assert storage.ls(Path("step-1")) == ["other"]


def test_deletes_a_directory_with_its_objects_and_saves_it_again(storage: BucketStorage) -> None:
    put(storage, "tmp_step-1/killed")
    (leftover,) = storage.store.list(storage.where.prefix)
    run = BucketStorageConfig(storage._config.root, storage._config.storage_options, attempt="next").create_storage()
    commit(run)
    put(run, "step-1/x", b"consolidated")
    put(run, "step-1/a", b"replaced")
    assert run.read(Path("step-1/a")) == b"replaced"
    run.rmdir(Path("step-1"))
    assert not run.exists(Path("step-1"))
    with pytest.raises(MissingFileError):
        run.read(Path("step-1/b/c"))
    # What another save has written stays for `sweep`.
    assert [info.key for info in storage.store.list(storage.where.prefix)] == [leftover.key]
    commit(run, "step-1", "other")
    assert run.ls(Path("step-1")) == ["other"]


def test_treats_names_that_look_like_ours_as_files_and_ignores_objects_of_others(storage: BucketStorage) -> None:
    looking = ["@d", "@f.0.0.0", "@n", "@tmp", "tmp_", "tmp_x", "x"]
    for name in looking:
        put(storage, f"dir/{name}", name.encode())
    assert storage.ls(Path("dir")) == looking
    assert [storage.read(Path("dir") / name).decode() for name in looking] == looking
    commit(storage)
    for name in ("@f.x", "@dx.zz", "@o.x", "events.out"):
        storage.store.put(storage.where.key(("step-1",), name), [memoryview(b"1")])
    assert storage.ls(Path("step-1")) == ["a", "b"]


def test_takes_a_path_that_begins_with_the_root_as_below_it(storage: BucketStorage) -> None:
    put(storage, "d/x", b"x")
    url = storage.remap_path(Path("d/x"))
    # As a Path it has lost a slash.
    assert storage.read(Path(url)) == b"x"
    assert storage.read(Path("/d/x")) == b"x"
    with pytest.raises(InvalidURLError, match="not below"):
        storage.read(Path("s3://elsewhere/x"))
    with pytest.raises(InvalidURLError, match=r"\.\."):
        storage.read(Path("../x"))


# -- objects that others wrote -----------------------------------------------------------------------------------------


def put_manifest(storage: BucketStorage, name: str, version: str, **document: Any) -> None:
    body = json.dumps({"format": f"bucketpoint torch_checkpointing {version}", **document}).encode()
    data = b"%08x\n" % crc32c(memoryview(body)) + body
    storage.store.put(storage.where.key((name,), "@d"), [memoryview(data)])


def test_reads_what_version_0_2_wrote_and_does_not_sweep_it(storage: BucketStorage) -> None:
    put(storage, "tmp_s/x", b"old")
    (written,) = storage.store.list(storage.where.key(("tmp_s", "x")))
    put_manifest(
        storage, "s", "1", files=[["x", written.key, written.size, written.etag]], token="1" * 16, source="tmp_s"
    )
    # A file that was saved in place had no entry.
    data, *_ = storage.store.get(written.key)
    storage.store.put(storage.where.key(("d", "x"), "@f.1111111111111111..22222222"), [memoryview(data)])
    assert sweep(storage, older_than_s=-5) == []
    assert [storage.read(Path(path)) for path in ("s/x", "d/x")] == [b"old", b"old"]
    put(storage, "d/x", b"new")
    assert storage.read(Path("d/x")) == b"new"


def put_link(storage: BucketStorage, document: Any) -> None:
    body = json.dumps(document).encode()
    storage.store.put(storage.where.key(("d", "y"), "@l.1111111111111112..22222222"), [memoryview(body)])


def test_reads_a_file_that_version_0_2_renamed_and_keeps_its_source(storage: BucketStorage) -> None:
    put(storage, "tmp_s/x", b"renamed")
    (written,) = storage.store.list(storage.where.key(("tmp_s", "x")))
    data, *_ = storage.store.get(written.key)
    source = storage.where.key(("d", ".y"), "@f.1111111111111111..22222222")
    storage.store.put(source, [memoryview(data)])
    put_link(storage, {"key": source, "size": written.size, "etag": None})
    marker = storage.where.key(("d", ".y"), "@dx.1111111111111113")
    storage.store.put(marker, [])
    storage.rmdir(Path("tmp_s"))
    assert storage.ls(Path("d")) == ["y"]
    assert storage.read(Path("d/y")) == b"renamed"
    assert sweep(storage, older_than_s=-5) == []
    with pytest.raises(BucketpointError, match="cannot be deleted"):
        storage.rmdir(Path("d"))
    storage.store.delete([marker])
    storage.rmdir(Path("d"))
    assert list(storage.store.list(storage.where.prefix)) == []


@pytest.mark.parametrize("document", [5, [], {"key": 5, "size": "a", "etag": None}, {"key": "../x"}])
def test_refuses_a_damaged_link_of_version_0_2(storage: BucketStorage, document: Any) -> None:
    put_link(storage, document)
    with pytest.raises(CorruptDataError, match="link"):
        storage.read(Path("d/y"))


_NOT_OURS: list[Any] = [
    5,
    [["x"]],
    [["x", "/etc/passwd", 100, None]],
    [["x", "../o/@f.1.1.1", 100, None]],
    [["x", "x/@f.1.1.1", 10**30, None]],
]


@pytest.mark.parametrize("rows", _NOT_OURS)
def test_refuses_a_manifest_that_names_no_files_of_the_root(tmp_path: Path, rows: Any) -> None:
    storage = BucketStorageConfig(str(tmp_path)).create_storage()
    commit(storage)
    put_manifest(storage, "t", "2", files=rows)
    with pytest.raises(CorruptDataError, match="malformed"):
        storage.read(Path("t/x"))
    with pytest.raises(CorruptDataError, match="malformed"):
        sweep(storage, older_than_s=-5)
    # The other checkpoints can be found all the same.
    assert storage.ls(Path()) == ["step-1", "t"]


def test_refuses_a_manifest_of_a_later_version_or_a_damaged_one(tmp_path: Path) -> None:
    storage = BucketStorageConfig(str(tmp_path)).create_storage()
    put_manifest(storage, "t", "3", files=[])
    with pytest.raises(CorruptDataError, match="newer"):
        storage.read(Path("t/x"))
    manifest = tmp_path / "t" / "@d"
    manifest.write_bytes(manifest.read_bytes().replace(b"torch_checkpointing 3", b"torch_checkpointing 2"))
    with pytest.raises(CorruptDataError, match="damaged"):
        storage.read(Path("t/x"))


def test_treats_an_object_that_is_too_short_as_damaged(storage: BucketStorage) -> None:
    storage.store.put(storage.where.key(("x",), f"@f.{'1' * 16}..00000000"), [memoryview(b"abc")])
    for ask in (storage.getsize, storage.read):
        with pytest.raises(CorruptDataError):
            ask(Path("x"))


# -- requests ----------------------------------------------------------------------------------------------------------


def test_makes_two_small_requests_more_than_data_in_a_save_of_four_ranks(
    minio: S3Server, fault_proxy: MakeProxy
) -> None:
    proxy = fault_proxy(minio)
    bucket = minio.make_bucket()
    ranks = [on(minio.at(proxy.url), bucket, transfer=PARTED) for _ in range(4)]
    states = [{"a": torch.randn(5 * MIB), "rank": rank} for rank in range(4)]
    folder = Path("checkpoints/tmp_step-1")

    def write(rank: int) -> None:
        # What torch_checkpointing's CheckpointWriter does on each rank.
        ranks[rank].mkdir(folder)
        with ranks[rank].get_write_stream(folder / f"model_{rank}.pt", states[rank]) as stream:
            torch.save(states[rank], stream)  # type: ignore[arg-type]
        if rank == 0:
            ranks[rank].write(folder / "metadata.pkl", b"metadata")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert all(storage.exists(folder) for storage in ranks)
    ranks[0].rename(folder, Path("checkpoints/step-1"), is_directory=True)
    # 20 MiB in parts of 7 MiB at most, and one small file.
    parts = proxy.counts.requests["UploadPart"]
    assert parts >= 8
    assert proxy.counts.requests == {
        "CreateMultipartUpload": 4,
        "UploadPart": parts,
        "CompleteMultipartUpload": 4,
        "PutObject": 1 + 1,
        "ListObjects": 1,
    }
    reader = on(minio, bucket)
    for rank in range(4):
        loaded = load_torch_serialized_from_storage(Path(f"checkpoints/step-1/model_{rank}.pt"), reader)
        assert torch.equal(loaded["a"], states[rank]["a"])


def test_fails_one_of_two_commits_to_one_place(minio: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = minio.make_bucket()
    one, other = (on(minio, bucket, attempt=attempt) for attempt in ("one", "other"))
    put(one, "tmp_s/x", b"one")
    put(other, "tmp_s/x", b"other")
    read = type(other.trees).read

    def late(self: Any, infos: Any) -> Any:
        found = read(self, infos)
        # The other one has seen that the place is free, and now loses the race.
        monkeypatch.setattr(type(other.trees), "read", read)
        one.rename(Path("tmp_s"), Path("s"), is_directory=True)
        return found

    monkeypatch.setattr(type(other.trees), "read", late)
    with pytest.raises(OccupiedError):
        other.rename(Path("tmp_s"), Path("s"), is_directory=True)
    assert on(minio, bucket).read(Path("s/x")) == b"one"


def test_counts_a_commit_whose_answer_was_lost(minio: S3Server, fault_proxy: MakeProxy) -> None:
    proxy = fault_proxy(minio)
    bucket = minio.make_bucket()
    storage = on(minio.at(proxy.url), bucket)
    put(storage, "tmp_s/x", b"x")
    proxy.play(always(Reset(acted=True), kinds=["PutObject"], times=1))
    storage.rename(Path("tmp_s"), Path("s"), is_directory=True)
    assert proxy.counts.faults
    assert on(minio, bucket).read(Path("s/x")) == b"x"


# -- runs that were killed ---------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, torch
from pathlib import Path
from bucketpoint.integrations.torch_checkpointing import BucketStorageConfig
from bucketpoint.stores.s3 import S3Store
from bucketpoint.transfer import TransferOptions
send = S3Store.put_part
def put_part(self, key, upload, number, *args, **more):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return send(self, key, upload, number, *args, **more)
S3Store.put_part = put_part
options = TransferOptions(part_bytes=8 << 20, connections=1)
storage = BucketStorageConfig(sys.argv[1], attempt="killed", transfer=options).create_storage()
storage.write(Path("tmp_s/small"), b"small")
state = {"a": torch.randn(8 << 20)}
with storage.get_write_stream(Path("tmp_s/large"), state) as stream:
    torch.save(state, stream)
"""


def test_leaves_nothing_to_see_of_a_save_killed_in_a_part_and_sweeps_it(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    run_program(KILLED, f"s3://{bucket}/run", status=-signal.SIGKILL, env=minio.env)
    (leftover,) = minio.keys(bucket)
    storage = on(minio, bucket, attempt="next")
    assert not storage.exists(Path("s"))
    assert not storage.exists(Path("tmp_s"))
    assert on(minio, bucket).ls(Path("tmp_s")) == ["small"]
    commit(storage, "s", "mine")
    # The commit took nothing of the killed run.
    assert storage.ls(Path("s")) == ["mine"]
    assert not storage.exists(Path("tmp_s"))
    assert sweep(storage) == []
    assert sweep(storage, older_than_s=-5, dry_run=True) == [leftover]
    assert sweep(storage, older_than_s=-5) == [leftover]
    assert minio.keys(bucket) == [key for key in minio.keys(bucket) if "/mine/" in key or key.endswith("/@d")]
    assert storage.read(Path("s/mine")) == b"mine"


@pytest.mark.parametrize("step", ["put", "delete"])
def test_leaves_a_whole_file_by_a_rename_that_fails_in_a_step(
    storage: BucketStorage, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    put(storage, "x", b"old")
    put(storage, "y", b"new")
    act = getattr(type(storage.store), step)

    def fail(self: Any, *args: Any, **more: Any) -> None:
        if step == "put":
            act(self, *args, **more)
        raise TransientStoreError("the store is down")

    with monkeypatch.context() as patch:
        patch.setattr(type(storage.store), step, fail)
        with pytest.raises(TransientStoreError):
            storage.rename(Path("y"), Path("x"))
    # What torch_checkpointing does after an error: the request may have been carried out all the same.
    assert storage.exists(Path("y"))
    storage.delete(Path("y"))
    assert storage.read(Path("x")) == b"new"
    assert len(sweep(storage, older_than_s=-5)) == 1
    assert storage.read(Path("x")) == b"new"


def test_sweeps_what_was_replaced_and_nothing_that_is_needed(storage: BucketStorage) -> None:
    commit(storage)
    put(storage, "plain", b"old")
    put(storage, "plain", b"new")
    put(storage, "y", b"moved")
    storage.rename(Path("y"), Path("z"))
    put(storage, "tmp_step-2/a")
    assert sweep(storage) == []
    left = sweep(storage, older_than_s=-5)
    assert len(left) == 2
    assert sum("plain" in key for key in left) == 1
    assert sum("step-2" in key for key in left) == 1
    needed = {"step-1/a": b"a", "step-1/b/c": b"b/c", "plain": b"new", "z": b"moved"}
    assert {path: storage.read(Path(path)) for path in needed} == needed


def test_raises_for_a_deletion_that_the_store_refuses(storage: BucketStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    put(storage, "x", b"old")
    put(storage, "x", b"new")
    put(storage, "d/x")

    def refused(self: Any, keys: list[str]) -> list[DeleteFailure]:
        return [DeleteFailure(key, "AccessDenied", "no") for key in keys]

    monkeypatch.setattr(type(storage.store), "delete", refused)
    for delete, path in ((storage.delete, "x"), (storage.rmdir, "d")):
        with pytest.raises(StoreError, match="AccessDenied"):
            delete(Path(path))
    with pytest.raises(StoreError, match="AccessDenied"):
        sweep(storage, older_than_s=-5)


# -- the configuration -------------------------------------------------------------------------------------------------


def test_pickles_configurations_shows_no_secret_and_refuses_those_that_cannot_work() -> None:
    options = {"key": "AKIAIOSFODNN7EXAMPLE", "secret": "wJalrXUtnFEMI"}
    config = BucketStorageConfig("s3://bucket/run", options, attempt="7")
    assert pickle.loads(pickle.dumps(config)) == config
    for shown in (repr(config), repr(config.create_storage())):
        assert "s3://bucket/run" in shown
        assert "wJalr" not in shown
        assert "AKIA" not in shown
    with pytest.raises(InvalidURLError, match="no bucket"):
        BucketStorageConfig("s3://")
    with pytest.raises(BucketpointError, match="attempt"):
        BucketStorageConfig("s3://bucket", attempt="a/b")
    one, other = (BucketStorageConfig.for_this_run("s3://bucket/run") for _ in range(2))
    assert one.attempt != other.attempt


def test_tells_the_one_who_commits_and_fails_no_save_by_its_error(tmp_path: Path) -> None:
    told: list[CommitInfo] = []

    def tell(info: CommitInfo) -> None:
        told.append(info)
        raise RuntimeError("of the tracker")

    storage = BucketStorageConfig(str(tmp_path), on_commit=tell).create_storage()
    commit(storage, "step-7")
    assert [(info.url, info.step, info.nbytes) for info in told] == [(f"{tmp_path}/step-7", None, 4)]
    assert told[0].commit_s >= 0
    assert storage.exists(Path("step-7"))


def test_tells_the_time_of_a_save_after_a_question_for_its_directory(tmp_path: Path) -> None:
    told: list[CommitInfo] = []
    storage = BucketStorageConfig(str(tmp_path), on_commit=told.append).create_storage()
    put(storage, "tmp_s/a")
    begun = time.monotonic()
    time.sleep(0.05)
    assert storage.exists(Path("tmp_s"))
    least = time.monotonic() - begun
    put(storage, "tmp_s/b")
    storage.rename(Path("tmp_s"), Path("s"))
    assert told[0].commit_s >= least


# -- torch_checkpointing's manager -------------------------------------------------------------------------------------


def manager_on(config: BucketStorageConfig) -> CheckpointManager:
    settings = CheckpointManager.Config.with_sync_save()
    settings.storage_config = config
    return settings.build()


def test_saves_and_loads_by_a_manager_and_does_not_overwrite(storage: BucketStorage) -> None:
    manager = manager_on(storage._config)
    state = {"model": {"w": torch.randn(100, 100)}, "step": 3}
    manager.save("step-3", state)
    loaded = manager.load("step-3", into={"model": {"w": torch.zeros(100, 100)}, "step": 0})
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])  # type: ignore[index]
    assert loaded["step"] == 3
    with pytest.raises(OSError, match="occupied"):
        manager.save("step-3", {"model": {"w": torch.zeros(100, 100)}, "step": 4})
    assert manager.load("step-3", into={"step": 0})["step"] == 3
    with pytest.raises(FileNotFoundError):
        manager.load("step-4", into={"step": 0})
    manager.close()


def test_consolidates_a_checkpoint_beside_its_files(storage: BucketStorage) -> None:
    settings = CheckpointManager.Config.with_sync_save()
    settings.storage_config = storage._config
    layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
    settings.items = {"model": ItemSpec(layout=layout, resharder=DefaultResharder())}
    manager = settings.build()
    weight = torch.randn(40, 50)
    manager.save("step-3", {"model": {"w": weight}})
    for _ in range(2):
        consolidate_hf_safetensors_checkpoint("step-3", storage_config=storage._config)
    target = {"w": torch.zeros(40, 50)}
    reader = HuggingFaceSafetensorsDistributedMetadataFormat
    manager.load("step-3", into={"model": target}, strict=True, metadata_format=reader)
    manager.close()
    assert torch.equal(target["w"], weight)
    shard = "model-00001-of-00001.safetensors"
    assert storage.ls(Path("step-3")) == ["metadata.pkl", shard, "model.safetensors.index.json", "model_0.safetensors"]


def test_trains_and_resumes_with_the_example_of_the_page(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    code = block("frameworks.md", "python").replace("s3://bucket/", f"s3://{bucket}/")
    for last in (20, 40):
        ran = run_program(code.replace("LAST = 40", f"LAST = {last}"), env=minio.env)
        assert f"from {last - 20}" in ran.stdout
    storage = BucketStorageConfig(f"s3://{bucket}/run-7", minio.options).create_storage()
    assert storage.ls(Path()) == ["step-10", "step-20", "step-30", "step-40"]
