"""Uploads and copies: what arrives is what lay in memory, failures leave nothing behind, and nothing of ours grows."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc32c

from bucketpoint.errors import (
    BucketpointError,
    CorruptDataError,
    PreconditionFailedError,
    TransientStoreError,
    UploadNotFoundError,
)
from bucketpoint.stores import LocalStore, ObjectInfo, Store, open_store
from bucketpoint.transfer import BufferPool, ObjectSource, Segment, TransferOptions, Uploaded, upload_objects
from bucketpoint.transfer.copy import copy_whole
from bucketpoint.transfer.stream import StreamUpload
from services import Service, in_parts
from transfer.helper.orders import MIB, OPTIONS, meter
from transfer.wrappers import CountingStore, FailingStore


def store_of(service: Service) -> Store:
    return open_store(service.url("x"), storage_options=service.options)[0]


def send(store: Store, *sources: ObjectSource, options: TransferOptions = OPTIONS) -> list[Uploaded]:
    return upload_objects(store, sources, options, pool=BufferPool(options.max_inflight_bytes), meter=meter())


def filler(data: bytes) -> Callable[[int, memoryview], None]:
    def fill(start: int, out: memoryview) -> None:
        out[:] = data[start : start + len(out)]

    return fill


def test_sends_segments_of_every_kind_with_the_checksums_of_their_blocks(service: Service) -> None:
    big, lazy, small = os.urandom(11 * MIB + 7), os.urandom(3 * MIB + 1), b"header"
    segments = [
        Segment(len(small), memoryview(small)),
        Segment(len(big), memoryview(big), block_nbytes=MIB),
        Segment(0, memoryview(b"")),
        Segment(len(lazy), fill=filler(lazy), block_nbytes=len(lazy)),
    ]
    (done,) = send(store_of(service), ObjectSource("a/b", segments))
    assert service.read("a/b") == small + big + lazy
    assert done.info.size == len(small) + len(big) + len(lazy)
    assert list(done.block_crcs[1]) == [crc32c(big[at : at + MIB]) for at in range(0, len(big), MIB)]
    assert list(done.block_crcs[3]) == [crc32c(lazy)]
    assert list(done.block_crcs[0]) == []


PART_BYTES = 100_000
ENDS = [parts * PART_BYTES + more for parts in (1, 2) for more in (-20, -3009, -3003, -3001, 0)]


@pytest.mark.parametrize("nbytes", [0, *ENDS])
def test_makes_a_table_of_the_checksums_of_all_blocks_wherever_parts_end(tmp_path: Path, nbytes: int) -> None:
    first, lazy = os.urandom(nbytes), os.urandom(3001)
    blocks = [first[at : at + 40_000] for at in range(0, len(first), 40_000)]
    blocks += [lazy[at : at + 1000] for at in range(0, len(lazy), 1000)]
    table = struct.pack(f"<{len(blocks)}I", *map(crc32c, blocks))
    segments = [
        Segment(len(first), memoryview(first), block_nbytes=40_000),
        Segment(len(lazy), fill=filler(lazy), block_nbytes=1000),
        Segment(len(table), table_of=[0, 1]),
    ]
    # As large as is asked for: parts are else evened out.
    options = replace(OPTIONS, connections=1, part_bytes=PART_BYTES, single_put_bytes=1)
    store = LocalStore(str(tmp_path))
    (done,) = send(store, ObjectSource("k", segments), options=options)
    assert store.get("k")[0] == first + lazy + table
    assert done.info.size == len(first) + len(lazy) + len(table)


@in_parts
def test_leaves_nothing_of_an_upload_of_which_a_part_or_the_source_fails(service: Service) -> None:
    def fill(start: int, out: memoryview) -> None:
        raise OSError("the device is gone")

    with pytest.raises(OSError, match="device"):
        send(store_of(service), ObjectSource("one", [Segment(20 * MIB, fill=fill)]))
    data = os.urandom(24 * MIB)
    sources = [ObjectSource(key, [Segment(len(data), memoryview(data))]) for key in ("one", "two")]
    inner = store_of(service)
    store = FailingStore(inner, lambda name, n: name == "put_part" and n == 4, lambda: TransientStoreError("cut"))
    with pytest.raises(TransientStoreError, match="cut"):
        send(store, *sources)  # type: ignore[arg-type]
    assert service.open_uploads("one") == service.open_uploads("two") == service.listed() == []


@in_parts
@pytest.mark.parametrize("streamed", [False, True], ids=["memory", "stream"])
def test_takes_a_lost_answer_to_complete_for_no_failure(service: Service, streamed: bool) -> None:
    data = os.urandom(12 * MIB)

    class Lossy(CountingStore):
        def complete_multipart(self, *args: object) -> object:
            self.inner.complete_multipart(*args)
            raise UploadNotFoundError("no such upload")

    lossy: Any = Lossy(store_of(service))
    if streamed:
        with StreamUpload(lossy, "k", OPTIONS, largest_nbytes=len(data), meter=meter()) as stream:
            stream.write(data)
            info = stream.commit()
    else:
        info = send(lossy, ObjectSource("k", [Segment(len(data), memoryview(data))]))[0].info
    assert info.size == len(data)


@in_parts
def test_keeps_memory_of_our_own_within_the_budget(service: Service) -> None:
    data = os.urandom(40 * MIB)
    options = TransferOptions(part_bytes=8 * MIB, connections=4, max_inflight_bytes=12 * MIB)
    pool = BufferPool(options.max_inflight_bytes)
    source = ObjectSource("k", [Segment(len(data), fill=filler(data))])
    upload_objects(store_of(service), [source], options, pool=pool, meter=meter())
    assert 0 < pool.peak_bytes <= options.max_inflight_bytes
    assert service.read("k") == data


def test_makes_an_object_of_a_stream_by_commit_alone(service: Service) -> None:
    data = os.urandom(13 * MIB)
    store = store_of(service)
    with StreamUpload(store, "done", OPTIONS, largest_nbytes=len(data), meter=meter()) as stream:
        for at in range(0, len(data), 1_000_003):
            stream.write(data[at : at + 1_000_003])
        assert stream.take_crc32c() == crc32c(data)
        stream.commit()
    assert service.read("done") == data
    with (
        pytest.raises(KeyError),
        StreamUpload(store, "left", OPTIONS, largest_nbytes=len(data), meter=meter()) as stream,
    ):
        stream.write(data)
        raise KeyError("the producer failed")
    assert service.open_uploads("left") == []
    assert service.listed() == ["done"]


@in_parts
def test_raises_the_error_of_a_part_of_a_stream_that_fails(service: Service) -> None:
    store = FailingStore(store_of(service), lambda name, n: name == "put_part", lambda: BucketpointError("no"))
    with (
        pytest.raises(BucketpointError, match="no"),
        StreamUpload(store, "k", OPTIONS, largest_nbytes=99, meter=meter()) as stream,  # type: ignore[arg-type]
    ):
        for _ in range(20):
            stream.write(bytes(5 * MIB))
        stream.commit()
    assert service.open_uploads("k") == service.listed() == []


class Careless(CountingStore):
    """Copies without a condition, just after another writer has replaced the source."""

    def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
        self.inner.put("k", [memoryview(b"another")])
        return self.inner.copy(replace(source, etag=None), target)


class Short(CountingStore):
    def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
        return replace(self.inner.copy(source, target), size=3)


def test_adds_one_request_to_a_copy_and_retries_none_that_fails(tmp_path: Path) -> None:
    inner = LocalStore(str(tmp_path))
    source = inner.put("k", [memoryview(b"content")])
    counting: Any = CountingStore(inner)
    assert copy_whole(counting, source, "t") == inner.head("t")
    assert counting.calls == {"copy": 1, "head": 1}
    assert inner.get("t")[0] == b"content"
    with pytest.raises(CorruptDataError, match="3 bytes, and the original 7") as caught:
        copy_whole(Short(inner), source, "t")  # type: ignore[arg-type]
    assert "/t" in str(caught.value)
    # Whoever asks has the bytes.
    away: Any = FailingStore(inner, lambda name, number: number == 1, lambda: TransientStoreError("the store is away"))
    with pytest.raises(TransientStoreError):
        copy_whole(away, source, "t")
    with pytest.raises(PreconditionFailedError):
        copy_whole(Careless(inner), source, "t")  # type: ignore[arg-type]
    with pytest.raises(PreconditionFailedError):
        copy_whole(counting, source, "t")
    assert counting.calls["copy"] == 2
