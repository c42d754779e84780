"""The streams of `BucketStorage` and their checksums."""

from __future__ import annotations

import io
import itertools
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch_checkpointing.storage.base_storage import ReadArgs
from torch_checkpointing.storage.torch_serialization import load_torch_serialized_from_storage

from bucketpoint import CorruptDataError
from bucketpoint.integrations.torch_checkpointing import BucketStorage, BucketStorageConfig
from bucketpoint.integrations.torch_checkpointing.names import BLOCK_BYTES, file_bytes, object_bytes
from bucketpoint.stores.s3 import S3Store
from bucketpoint.transfer import TransferOptions
from kit.damage import flip
from kit.servers import S3Server
from torch_ckpt.test_storage import MIB, PARTED, on


@pytest.fixture(params=["memory", "s3"])
def storage(request: pytest.FixtureRequest) -> BucketStorage:
    """A storage that sends whole objects, and one that sends parts."""
    if request.param == "memory":
        return BucketStorageConfig(f"memory://{uuid.uuid4().hex}").create_storage()
    server: S3Server = request.getfixturevalue("minio")
    return on(server, server.make_bucket(), transfer=PARTED)


Sent = dict[int, list[tuple[int, int]]]
"""Addresses and sizes of the pieces of each part that was sent, by its number."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    parts: Sent = {}
    send = S3Store.put_part

    def put_part(self: S3Store, key: str, upload: str, number: int, body: Any, **more: Any) -> Any:
        parts[number] = [(len(one) and torch.frombuffer(one, dtype=torch.uint8).data_ptr(), len(one)) for one in body]
        return send(self, key, upload, number, body, **more)

    monkeypatch.setattr(S3Store, "put_part", put_part)
    return parts


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 5 << 40])
def test_derives_the_size_of_a_file_from_that_of_its_object(nbytes: int) -> None:
    assert file_bytes(object_bytes(nbytes)) == nbytes


def test_reads_any_range_of_a_large_file_back(storage: BucketStorage) -> None:
    data = os.urandom(21 * MIB + 77)
    stream = storage.stream_write(Path("x"))
    with stream:
        for start in range(0, len(data), 3 * MIB + 5):
            stream.write(data[start : start + 3 * MIB + 5])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="closed"):
        stream.write(data)  # type: ignore[attr-defined]
    assert storage.getsize(Path("x")) == len(data)
    assert storage.read(Path("x")) == data
    with storage.stream_read(Path("x"), ReadArgs(pre_read_full_file=False)) as file:
        for start, count in ((0, 10), (MIB - 5, 10), (5 * MIB + 1, 9 * MIB), (len(data) - 3, 10), (len(data) + 5, 10)):
            assert file.seek(start) == start
            assert file.read(count) == data[start : start + count]
        assert file.seek(-4, io.SEEK_END) == len(data) - 4
        assert file.read() == data[-4:]


def test_sends_tensors_from_where_they_are(minio: S3Server, sent: Sent) -> None:
    storage = on(minio, minio.make_bucket(), transfer=PARTED)
    base = torch.randn(5 * MIB)
    state = {"a": base, "view": base[10:], "b": torch.randn(300, 300), "text": "x" * 100}
    with storage.get_write_stream(Path("x"), state) as stream:
        torch.save(state, stream)  # type: ignore[arg-type]
    addresses = [piece for pieces in sent.values() for piece in pieces]
    low, high = base.data_ptr(), base.data_ptr() + base.nbytes
    assert sum(nbytes for start, nbytes in addresses if low <= start < high) == base.nbytes
    assert sum(nbytes for start, nbytes in addresses if not low <= start < high) < MIB
    loaded = load_torch_serialized_from_storage(Path("x"), storage)
    assert all(torch.equal(loaded[name], state[name]) for name in ("a", "view", "b"))


@pytest.mark.parametrize("nbytes", [100, 20 * MIB])
def test_leaves_nothing_of_a_stream_that_is_left_with_an_error(minio: S3Server, nbytes: int) -> None:
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


def test_leaves_nothing_of_a_stream_dropped_while_it_sends_a_part(
    minio: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = minio.make_bucket()
    storage = on(minio, bucket, transfer=PARTED)
    dropped, sending = threading.Event(), threading.Event()
    send = S3Store.put_part

    def put_part(*args: Any, **more: Any) -> Any:
        sending.set()
        assert dropped.wait(60)
        return send(*args, **more)

    monkeypatch.setattr(S3Store, "put_part", put_part)
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
def test_finds_a_flipped_byte_wherever_it_is(tmp_path: Path, nbytes: int, place: float) -> None:
    storage = BucketStorageConfig(str(tmp_path)).create_storage()
    storage.write(Path("tmp_s/x"), os.urandom(nbytes))
    storage.rename(Path("tmp_s"), Path("s"))
    (path,) = tmp_path.glob("s/@tmp/x/*")
    flip(path, place)
    fresh = BucketStorageConfig(str(tmp_path)).create_storage()
    with pytest.raises(CorruptDataError):
        fresh.read(Path("s/x"))
    with (
        pytest.raises(CorruptDataError),
        fresh.stream_read(Path("s/x"), ReadArgs(pre_read_full_file=False)) as stream,
    ):
        while stream.readinto(bytearray(100_000)):  # type: ignore[attr-defined]
            pass


def test_finds_an_object_that_was_replaced_after_the_commit(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    storage = on(minio, bucket, transfer=PARTED)
    storage.write(Path("tmp_s/x"), bytes(6 * MIB))
    storage.write(Path("other"), bytes(5 * MIB) + os.urandom(MIB))
    storage.rename(Path("tmp_s"), Path("s"))
    client = minio.client()
    (key,) = minio.keys(bucket, "run/s/@tmp/")
    (other,) = minio.keys(bucket, "run/other/@o.")
    client.put_object(Bucket=bucket, Key=key, Body=client.get_object(Bucket=bucket, Key=other)["Body"].read())
    with pytest.raises(CorruptDataError, match="replaced"):
        on(minio, bucket, transfer=PARTED).read(Path("s/x"))


def test_writes_an_array_without_elements_as_an_empty_file(storage: BucketStorage) -> None:
    storage.write(Path("x"), np.empty((0, 3)))
    assert storage.read(Path("x")) == b""


def test_saves_a_tensor_without_memory_of_its_own(storage: BucketStorage) -> None:
    state = {"w": TwoTensor(torch.randn(5), torch.randn(5))}
    with storage.get_write_stream(Path("x"), state) as stream:
        torch.save(state, stream)  # type: ignore[arg-type]
    assert storage.getsize(Path("x")) > 0


@pytest.mark.parametrize("left", [-64, -24, -10, 0])
def test_makes_all_parts_but_the_last_of_one_size(minio: S3Server, sent: Sent, left: int) -> None:
    storage = on(minio, minio.make_bucket(), transfer=TransferOptions(part_bytes=5 * MIB, connections=4))
    data = os.urandom(10 * MIB + left)
    storage.write(Path("x"), data)
    assert storage.read(Path("x")) == data
    *others, last = (sum(size for _, size in pieces) for _, pieces in sorted(sent.items()))
    assert set(others) == {5 * MIB}
    assert last <= 5 * MIB


def test_leaves_the_upload_alone_in_a_forked_process(minio: S3Server) -> None:
    storage = on(minio, minio.make_bucket(), transfer=TransferOptions(part_bytes=5 * MIB, connections=2))
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
