"""`BucketStorage`: the contract of torch_checkpointing's `Storage`, its requests, its checksums and its leftovers."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.base_storage import ReadArgs
from torch_checkpointing.storage.torch_serialization import load_torch_serialized_from_storage

from bucketpoint import CommitInfo, CorruptDataError
from bucketpoint.errors import BucketpointError, InvalidURLError
from bucketpoint.integrations.torch_checkpointing import (
    BucketStorage,
    BucketStorageConfig,
    MissingFileError,
    OccupiedError,
    sweep,
)
from bucketpoint.integrations.torch_checkpointing.sums import BLOCK_BYTES, file_bytes, object_bytes
from bucketpoint.transfer import TransferOptions
from kit.faults import Reset, always
from kit.plugin import MakeProxy
from kit.servers import S3Server

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


def test_a_directory_lands_at_an_absent_destination(storage: BucketStorage) -> None:
    commit(storage)
    assert storage.ls(Path("step-1")) == ["a", "b"]
    assert storage.ls(Path("step-1/b")) == ["c"]
    assert storage.read(Path("step-1/b/c")) == b"b/c"
    assert storage.getsize(Path("step-1/b/c")) == 3
    assert (storage.isdir(Path("step-1")), storage.isdir(Path("step-1/a"))) == (True, False)
    assert not storage.exists(Path("tmp_step-1"))
    assert storage.ls(Path()) == ["step-1"]


def test_a_directory_replaces_an_empty_one(storage: BucketStorage) -> None:
    storage.mkdir(Path("step-1"))
    commit(storage)
    assert storage.read(Path("step-1/a")) == b"a"


@pytest.mark.parametrize("written", ["step-1/old", "step-1"])
def test_a_directory_onto_files_raises_and_changes_nothing(storage: BucketStorage, written: str) -> None:
    put(storage, written, b"old")
    with pytest.raises(OSError, match="occupied") as raised:
        commit(storage)
    assert isinstance(raised.value, OccupiedError)
    assert storage.read(Path(written)) == b"old"
    assert storage.read(Path("tmp_step-1/a")) == b"a"


def test_a_committed_directory_is_not_replaced_by_another_save(storage: BucketStorage) -> None:
    commit(storage)
    put(storage, "tmp_step-1/a", b"of a second save")
    with pytest.raises(OccupiedError, match="occupied"):
        storage.rename(Path("tmp_step-1"), Path("step-1"), is_directory=True)
    # The second save has written the same names, and has harmed nothing.
    assert storage.read(Path("step-1/a")) == b"a"
    assert storage.ls(Path("step-1")) == ["a", "b"]


def test_a_file_replaces_a_file(storage: BucketStorage) -> None:
    put(storage, "x", b"old")
    put(storage, "y", b"new")
    storage.rename(Path("y"), Path("x"))
    assert storage.read(Path("x")) == b"new"
    assert not storage.exists(Path("y"))
    put(storage, "y", b"newer")
    storage.rename(Path("y"), Path("x"))
    assert storage.read(Path("x")) == b"newer"
    put(storage, "x", b"newest")
    assert storage.read(Path("x")) == b"newest"


def test_a_file_onto_a_directory_raises(storage: BucketStorage) -> None:
    commit(storage)
    put(storage, "y")
    storage.mkdir(Path("empty"))
    for directory in ("step-1", "empty"):
        with pytest.raises(OSError, match="occupied"):
            storage.rename(Path("y"), Path(directory))
    assert storage.exists(Path("y"))


def test_a_directory_that_was_committed_can_be_renamed(storage: BucketStorage) -> None:
    commit(storage)
    put(storage, "step-1/later", b"later")
    storage.rename(Path("step-1"), Path("best"), is_directory=True)
    assert storage.ls(Path("best")) == ["a", "b", "later"]
    assert storage.read(Path("best/a")) == b"a"
    assert not storage.exists(Path("step-1"))
    assert storage.ls(Path()) == ["best"]
    storage.rmdir(Path("best"))
    assert storage.ls(Path()) == []


def test_nothing_cannot_be_renamed(storage: BucketStorage) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        storage.rename(Path("tmp_step-1"), Path("step-1"), is_directory=True)


# -- files and directories ---------------------------------------------------------------------------------------------


def test_files_written_into_a_committed_directory_are_listed_beside_its_own(storage: BucketStorage) -> None:
    commit(storage)
    put(storage, "step-1/.x.tmp", b"consolidated")
    storage.rename(Path("step-1/.x.tmp"), Path("step-1/x"))
    assert storage.ls(Path("step-1")) == ["a", "b", "x"]
    assert storage.read(Path("step-1/x")) == b"consolidated"
    storage.delete(Path("step-1/a"))
    storage.delete(Path("step-1/x"))
    assert storage.ls(Path("step-1")) == ["b"]
    with pytest.raises(FileNotFoundError):
        storage.read(Path("step-1/a"))


def test_a_deleted_directory_is_gone_with_its_objects_and_can_be_saved_again(storage: BucketStorage) -> None:
    commit(storage)
    storage.rmdir(Path("step-1"))
    assert not storage.exists(Path("step-1"))
    assert list(storage.store.list(storage.where.prefix)) == []
    commit(storage, "step-1", "other")
    assert storage.ls(Path("step-1")) == ["other"]


def test_the_last_write_of_a_file_is_the_file(storage: BucketStorage) -> None:
    put(storage, "x", b"old")
    put(storage, "x", b"new")
    assert storage.read(Path("x")) == b"new"
    storage.delete(Path("x"))
    assert not storage.exists(Path("x"))


def test_questions_about_what_is_not_there(storage: BucketStorage) -> None:
    put(storage, "d/x")
    for ask in (storage.read, storage.getsize, storage.delete, storage.ls, storage.rmdir):
        with pytest.raises(FileNotFoundError) as raised:
            ask(Path("nothing"))
        assert isinstance(raised.value, MissingFileError)
    with pytest.raises(IsADirectoryError):
        storage.read(Path("d"))
    with pytest.raises(NotADirectoryError):
        storage.ls(Path("d/x"))
    assert (storage.exists(Path("nothing")), storage.isdir(Path("nothing"))) == (False, False)


def test_names_that_look_like_ours_are_ordinary_files(storage: BucketStorage) -> None:
    names = ["@d", "@f.0.0.0", "@tmp", "tmp_", "tmp_x", "x"]
    for name in names:
        put(storage, f"dir/{name}", name.encode())
    assert storage.ls(Path("dir")) == names
    assert [storage.read(Path("dir") / name).decode() for name in names] == names


def test_a_path_that_begins_with_the_root_is_below_it(storage: BucketStorage) -> None:
    put(storage, "d/x", b"x")
    url = storage.remap_path(Path("d/x"))
    # As a Path it has lost a slash.
    assert storage.read(Path(url)) == b"x"
    assert storage.read(Path("/d/x")) == b"x"
    with pytest.raises(InvalidURLError, match="not below"):
        storage.read(Path("s3://elsewhere/x"))
    with pytest.raises(InvalidURLError, match=r"\.\."):
        storage.read(Path("../x"))


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 5 << 40])
def test_the_size_of_a_file_follows_from_that_of_its_object(nbytes: int) -> None:
    assert file_bytes(object_bytes(nbytes)) == nbytes


def test_any_range_of_a_large_file_is_read_back(storage: BucketStorage) -> None:
    data = os.urandom(21 * MIB + 77)
    stream = storage.stream_write(Path("x"))
    with stream:
        for start in range(0, len(data), 3 * MIB + 5):
            stream.write(data[start : start + 3 * MIB + 5])  # type: ignore[attr-defined]
    assert storage.getsize(Path("x")) == len(data)
    assert storage.read(Path("x")) == data
    with storage.stream_read(Path("x"), ReadArgs(pre_read_full_file=False)) as file:
        for start, count in ((0, 10), (MIB - 5, 10), (5 * MIB + 1, 9 * MIB), (len(data) - 3, 10), (len(data) + 5, 10)):
            assert file.seek(start) == start
            assert file.read(count) == data[start : start + count]
        assert file.seek(-4, io.SEEK_END) == len(data) - 4
        assert file.read() == data[-4:]


def test_tensors_are_sent_from_where_they_are(minio: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = on(minio, minio.make_bucket(), transfer=PARTED)
    base = torch.randn(5 * MIB)
    state = {"a": base, "view": base[10:], "b": torch.randn(300, 300), "text": "x" * 100}
    addresses = []
    send = type(storage.store).put_part

    def put_part(self: Any, key: str, upload: str, number: int, body: Any, **more: Any) -> Any:
        addresses.extend((torch.frombuffer(piece, dtype=torch.uint8).data_ptr(), len(piece)) for piece in body)
        return send(self, key, upload, number, body, **more)

    monkeypatch.setattr(type(storage.store), "put_part", put_part)
    with storage.get_write_stream(Path("x"), state) as stream:
        torch.save(state, stream)  # type: ignore[arg-type]
    low, high = base.data_ptr(), base.data_ptr() + base.nbytes
    assert sum(nbytes for start, nbytes in addresses if low <= start < high) == base.nbytes
    assert sum(nbytes for start, nbytes in addresses if not low <= start < high) < MIB
    loaded = load_torch_serialized_from_storage(Path("x"), storage)
    assert all(torch.equal(loaded[name], state[name]) for name in ("a", "view", "b"))


@pytest.mark.parametrize("nbytes", [100, 20 * MIB])
def test_a_stream_that_is_left_with_an_error_leaves_nothing(minio: S3Server, nbytes: int) -> None:
    bucket = minio.make_bucket()
    storage = on(minio, bucket, transfer=PARTED)
    with pytest.raises(RuntimeError, match="of the caller"), storage.stream_write(Path("x")) as stream:
        stream.write(bytes(nbytes))  # type: ignore[attr-defined]
        raise RuntimeError("of the caller")
    dropped = storage.stream_write(Path("y"))
    dropped.write(bytes(nbytes))  # type: ignore[attr-defined]
    del dropped
    assert minio.keys(bucket) == []
    assert not storage.exists(Path("x"))


def test_a_stream_that_is_dropped_while_it_sends_a_part_leaves_nothing_and_no_thread(
    minio: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = minio.make_bucket()
    storage = on(minio, bucket, transfer=PARTED)
    dropped, sending = threading.Event(), threading.Event()
    send = type(storage.store).put_part

    def put_part(*args: Any, **more: Any) -> Any:
        sending.set()
        assert dropped.wait(60)
        return send(*args, **more)

    monkeypatch.setattr(type(storage.store), "put_part", put_part)
    stream = storage.stream_write(Path("x"))
    stream.write(bytes(9 * MIB))  # type: ignore[attr-defined]
    assert sending.wait(60)
    # From here on only the thread that sends the part holds the stream.
    del stream
    dropped.set()
    for thread in threading.enumerate():
        if thread.name.startswith("bucketpoint-stream"):
            thread.join(60)
            assert not thread.is_alive()
    assert minio.keys(bucket) == []
    assert minio.client().list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []


# -- checksums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1000, 6 * MIB + 5])
@pytest.mark.parametrize("place", [0.0, 0.5, 0.999999, 1.0])
def test_a_flipped_byte_is_found_wherever_it_is(tmp_path: Path, nbytes: int, place: float) -> None:
    storage = BucketStorageConfig(str(tmp_path)).create_storage()
    put(storage, "tmp_s/x", os.urandom(nbytes))
    storage.rename(Path("tmp_s"), Path("s"))
    (path,) = tmp_path.glob("s/@tmp/x/*")
    data = bytearray(path.read_bytes())
    data[int((len(data) - 1) * place)] ^= 1
    stamp = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    fresh = BucketStorageConfig(str(tmp_path)).create_storage()
    with pytest.raises(CorruptDataError):
        fresh.read(Path("s/x"))
    with (
        pytest.raises(CorruptDataError),
        fresh.stream_read(Path("s/x"), ReadArgs(pre_read_full_file=False)) as stream,
    ):
        while stream.readinto(bytearray(100_000)):  # type: ignore[attr-defined]
            pass


def test_a_damaged_manifest_is_found(tmp_path: Path) -> None:
    commit(BucketStorageConfig(str(tmp_path)).create_storage())
    manifest = tmp_path / "step-1" / "@d"
    manifest.write_bytes(manifest.read_bytes().replace(b"/a/", b"/b/"))
    with pytest.raises(CorruptDataError, match="manifest"):
        BucketStorageConfig(str(tmp_path)).create_storage().read(Path("step-1/a"))


def test_an_object_that_was_replaced_after_the_commit_is_found(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    storage = on(minio, bucket)
    put(storage, "tmp_s/x", bytes(6 * MIB))
    put(storage, "other", bytes(5 * MIB) + os.urandom(MIB))
    storage.rename(Path("tmp_s"), Path("s"))
    client = minio.client()
    (key,) = minio.keys(bucket, "run/s/@tmp/")
    (other,) = minio.keys(bucket, "run/other/")
    client.put_object(Bucket=bucket, Key=key, Body=client.get_object(Bucket=bucket, Key=other)["Body"].read())
    with pytest.raises(CorruptDataError, match="replaced"):
        on(minio, bucket).read(Path("s/x"))


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_save_of_four_ranks_makes_two_small_requests_more_than_data(minio: S3Server, fault_proxy: MakeProxy) -> None:
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


def test_of_two_commits_to_one_place_one_fails(minio: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = minio.make_bucket()
    one, other = on(minio, bucket), on(minio, bucket)
    put(one, "tmp_s/x", b"one")
    put(other, "else/x", b"other")
    listing = type(other.trees).listing

    def late(self: Any, parts: Any, **more: Any) -> Any:
        found = listing(self, parts, **more)
        if parts == ("s",):
            # The other one has seen that the place is free, and now loses the race.
            monkeypatch.setattr(type(other.trees), "listing", listing)
            one.rename(Path("tmp_s"), Path("s"), is_directory=True)
        return found

    monkeypatch.setattr(type(other.trees), "listing", late)
    with pytest.raises(OccupiedError):
        other.rename(Path("else"), Path("s"), is_directory=True)
    assert on(minio, bucket).read(Path("s/x")) == b"one"


def test_a_commit_whose_answer_was_lost_counts(minio: S3Server, fault_proxy: MakeProxy) -> None:
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
from bucketpoint.stores import S3Store
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


def test_a_save_killed_in_a_part_leaves_nothing_to_see_and_can_be_swept(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    command = [sys.executable, "-c", KILLED, f"s3://{bucket}/run"]
    ran = subprocess.run(command, env={**os.environ, **minio.env}, capture_output=True, timeout=100, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    (leftover,) = minio.keys(bucket)
    storage = on(minio, bucket, attempt="next")
    assert not storage.exists(Path("s"))
    assert storage.ls(Path("tmp_s")) == ["small"]
    commit(storage, "s", "mine")
    # The commit took nothing of the killed run.
    assert storage.ls(Path("s")) == ["mine"]
    assert not storage.exists(Path("tmp_s"))
    assert sweep(storage) == []
    assert sweep(storage, older_than_s=-5, dry_run=True) == [leftover]
    assert sweep(storage, older_than_s=-5) == [leftover]
    assert minio.keys(bucket) == [key for key in minio.keys(bucket) if "/mine/" in key or key.endswith("/@d")]
    assert storage.read(Path("s/mine")) == b"mine"


def test_a_sweep_takes_what_was_replaced_and_nothing_that_is_needed(storage: BucketStorage) -> None:
    commit(storage)
    put(storage, "plain", b"old")
    put(storage, "plain", b"new")
    put(storage, "y", b"moved")
    storage.rename(Path("y"), Path("z"))
    put(storage, "tmp_step-2/a")
    left = sweep(storage, older_than_s=-5)
    assert len(left) == 2
    assert sum("plain" in key for key in left) == 1
    assert sum("step-2" in key for key in left) == 1
    assert [storage.read(Path(path)) for path in ("step-1/a", "step-1/b/c", "plain", "z")] == [
        b"a",
        b"b/c",
        b"new",
        b"moved",
    ]


# -- the configuration -------------------------------------------------------------------------------------------------


def test_the_configuration_can_be_pickled_and_shows_no_secret() -> None:
    options = {"key": "AKIAIOSFODNN7EXAMPLE", "secret": "wJalrXUtnFEMI"}
    config = BucketStorageConfig("s3://bucket/run", options, attempt="7")
    assert pickle.loads(pickle.dumps(config)) == config
    for shown in (repr(config), repr(config.create_storage())):
        assert "s3://bucket/run" in shown
        assert "wJalr" not in shown
        assert "AKIA" not in shown


def test_a_configuration_that_cannot_work_is_refused() -> None:
    with pytest.raises(InvalidURLError, match="no bucket"):
        BucketStorageConfig("s3://")
    with pytest.raises(BucketpointError, match="attempt"):
        BucketStorageConfig("s3://bucket", attempt="a/b")


def test_runs_have_names_of_their_own(tmp_path: Path) -> None:
    one, other = (BucketStorageConfig.for_this_run(str(tmp_path)) for _ in range(2))
    assert one.attempt != other.attempt


def test_the_one_who_commits_is_told(tmp_path: Path) -> None:
    told: list[CommitInfo] = []
    config = BucketStorageConfig(str(tmp_path), on_commit=told.append)
    commit(config.create_storage(), "step-7")
    assert [(info.url, info.step, info.nbytes) for info in told] == [(f"{tmp_path}/step-7", None, 4)]
    assert told[0].commit_s >= 0


def test_an_error_of_on_commit_fails_no_save(tmp_path: Path) -> None:
    def fail(info: CommitInfo) -> None:
        raise RuntimeError("of the tracker")

    storage = BucketStorageConfig(str(tmp_path), on_commit=fail).create_storage()
    commit(storage)
    assert storage.exists(Path("step-1"))


# -- torch_checkpointing's manager -------------------------------------------------------------------------------------


def manager_on(config: BucketStorageConfig) -> CheckpointManager:
    settings = CheckpointManager.Config.with_sync_save()
    settings.storage_config = config
    return settings.build()


def test_a_manager_saves_and_loads_and_does_not_overwrite(storage: BucketStorage) -> None:
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


def test_the_example_of_the_page_trains_and_goes_on(minio: S3Server, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "torch-checkpointing.md"
    program = tmp_path / "train.py"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    bucket = minio.make_bucket()
    code = code.replace("s3://bucket/", f"s3://{bucket}/").replace("LAST = 40", "LAST = int(os.environ['LAST'])")
    program.write_text(f"import os\n{code}")
    for last in ("20", "40"):
        env = {**os.environ, **minio.env, "LAST": last}
        ran = subprocess.run(
            [sys.executable, str(program)], env=env, capture_output=True, text=True, check=False, timeout=200
        )
        assert ran.returncode == 0, ran.stderr[-4000:]
        assert f"from {int(last) - 20}" in ran.stdout
    storage = BucketStorageConfig(f"s3://{bucket}/run-7", minio.options).create_storage()
    assert storage.ls(Path()) == ["step-10", "step-20", "step-30", "step-40"]
