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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bucketpoint.errors import (
    BucketpointError,
    CorruptDataError,
    PreconditionFailedError,
    TransientStoreError,
    UploadNotFoundError,
)
from bucketpoint.stores import LocalStore, ObjectInfo, Store, open_store
from bucketpoint.transfer import BufferPool, Meter, ObjectSource, Segment, TransferOptions, Uploaded, upload_objects
from bucketpoint.transfer.copy import copy_whole
from bucketpoint.transfer.stream import StreamUpload
from services import Service, in_parts
from transfer.wrappers import CountingStore, FailingStore

MIB = 1 << 20
OPTIONS = TransferOptions(part_bytes=5 * MIB, connections=3, single_put_bytes=MIB, max_inflight_bytes=16 * MIB)


def store_of(service: Service) -> Store:
    return open_store(service.url("x"), storage_options=service.options)[0]


def send(store: Store, *sources: ObjectSource, options: TransferOptions = OPTIONS) -> list[Uploaded]:
    meter = Meter("save", "s3://x", 0, None)
    return upload_objects(store, sources, options, pool=BufferPool(options.max_inflight_bytes), meter=meter)


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


@pytest.mark.parametrize("more", [-20, -3009, -3003, -3001, 0])
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_makes_a_table_of_the_checksums_of_all_blocks_wherever_parts_end(
    service: Service, parts: int, more: int
) -> None:
    first, lazy = os.urandom(max(parts * OPTIONS.part_bytes + more, 0)), os.urandom(3001)
    blocks = [first[at : at + 4 * MIB] for at in range(0, len(first), 4 * MIB)]
    blocks += [lazy[at : at + 1000] for at in range(0, len(lazy), 1000)]
    table = struct.pack(f"<{len(blocks)}I", *map(crc32c, blocks))
    segments = [
        Segment(len(first), memoryview(first), block_nbytes=4 * MIB),
        Segment(len(lazy), fill=filler(lazy), block_nbytes=1000),
        Segment(len(table), table_of=[0, 1]),
    ]
    # As large as is asked for: parts are else evened out.
    options = replace(OPTIONS, connections=1)
    (done,) = send(store_of(service), ObjectSource("k", segments), options=options)
    assert service.read("k") == first + lazy + table
    assert done.info.size == len(first) + len(lazy) + len(table)


@in_parts
def test_aborts_the_upload_of_a_failed_part_and_the_others(service: Service) -> None:
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
        meter = Meter("save", "", 0, None)
        with StreamUpload(lossy, "k", OPTIONS, largest_nbytes=len(data), meter=meter) as stream:
            stream.write(data)
            info = stream.commit()
    else:
        info = send(lossy, ObjectSource("k", [Segment(len(data), memoryview(data))]))[0].info
    assert info.size == len(data)


def test_fails_the_upload_by_a_source_that_raises_and_leaves_nothing(service: Service) -> None:
    def fill(start: int, out: memoryview) -> None:
        raise OSError("the device is gone")

    source = ObjectSource("k", [Segment(20 * MIB, fill=fill)])
    with pytest.raises(OSError, match="device"):
        send(store_of(service), source)
    assert service.open_uploads("k") == service.listed() == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    block=st.integers(1, 1500),
    lazy=st.integers(0, 1 << 12),
)
def test_makes_the_same_object_of_any_split_into_segments(
    service: Service, sizes: list[int], block: int, lazy: int
) -> None:
    pieces = [os.urandom(size) for size in sizes]
    segments = [
        Segment(len(piece), fill=filler(piece), block_nbytes=block)
        if lazy >> at & 1
        else Segment(len(piece), memoryview(piece), block_nbytes=block)
        for at, piece in enumerate(pieces)
    ]
    (done,) = send(store_of(service), ObjectSource("k", segments))
    assert service.read("k") == b"".join(pieces)
    for piece, crcs in zip(pieces, done.block_crcs, strict=True):
        assert list(crcs) == [crc32c(piece[at : at + block]) for at in range(0, len(piece), block)]


@in_parts
def test_keeps_memory_of_our_own_within_the_budget(service: Service) -> None:
    data = os.urandom(40 * MIB)
    options = TransferOptions(part_bytes=8 * MIB, connections=4, max_inflight_bytes=12 * MIB)
    pool = BufferPool(options.max_inflight_bytes)
    source = ObjectSource("k", [Segment(len(data), fill=filler(data))])
    upload_objects(store_of(service), [source], options, pool=pool, meter=Meter("save", "", 0, None))
    assert 0 < pool.peak_bytes <= options.max_inflight_bytes
    assert service.read("k") == data


def test_makes_an_object_of_a_stream_by_commit_alone(service: Service) -> None:
    data = os.urandom(13 * MIB)
    store = store_of(service)
    meter = Meter("save", "", 0, None)
    with StreamUpload(store, "done", OPTIONS, largest_nbytes=len(data), meter=meter) as stream:
        for at in range(0, len(data), 1_000_003):
            stream.write(data[at : at + 1_000_003])
        assert stream.take_crc32c() == crc32c(data)
        stream.commit()
    assert service.read("done") == data
    with (
        pytest.raises(KeyError),
        StreamUpload(store, "left", OPTIONS, largest_nbytes=len(data), meter=meter) as stream,
    ):
        stream.write(data)
        raise KeyError("the producer failed")
    assert service.open_uploads("left") == []
    assert service.listed() == ["done"]


@in_parts
def test_raises_the_error_of_a_part_of_a_stream_that_fails(service: Service) -> None:
    store = FailingStore(store_of(service), lambda name, n: name == "put_part", lambda: BucketpointError("no"))
    meter = Meter("save", "", 0, None)
    with (
        pytest.raises(BucketpointError, match="no"),
        StreamUpload(store, "k", OPTIONS, largest_nbytes=99, meter=meter) as stream,  # type: ignore[arg-type]
    ):
        for _ in range(20):
            stream.write(bytes(5 * MIB))
        stream.commit()
    assert service.open_uploads("k") == service.listed() == []


def test_counts_no_byte_twice_if_an_upload_begins_again() -> None:
    meter = Meter("save", "", 0, None)
    meter.add(3 * MIB)
    meter.begin_again()
    for _ in range(4):
        meter.add(MIB)
    assert (meter.done_bytes, meter.requests) == (4 * MIB, 5)


def test_adds_one_request_to_the_copy_itself(tmp_path: Path) -> None:
    inner = LocalStore(str(tmp_path))
    source = inner.put("k", [memoryview(b"content")])
    store: Any = CountingStore(inner)
    assert copy_whole(store, source, "t") == inner.head("t")
    assert store.calls == {"copy": 1, "head": 1}
    assert inner.get("t")[0] == b"content"


def test_leaves_a_transient_failure_to_the_caller_who_has_the_bytes(tmp_path: Path) -> None:
    inner = LocalStore(str(tmp_path))
    source = inner.put("k", [memoryview(b"content")])
    store: Any = FailingStore(inner, lambda name, number: number == 1, lambda: TransientStoreError("the store is away"))
    with pytest.raises(TransientStoreError):
        copy_whole(store, source, "t")


def test_refuses_a_source_that_is_replaced_during_a_copy_without_a_condition(tmp_path: Path) -> None:
    class Careless(CountingStore):
        def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
            self.inner.put("k", [memoryview(b"another")])
            return self.inner.copy(replace(source, etag=None), target)

    store: Any = Careless(LocalStore(str(tmp_path)))
    source = store.put("k", [memoryview(b"content")])
    with pytest.raises(PreconditionFailedError):
        copy_whole(store, source, "t")


def test_refuses_a_replaced_source_at_once(tmp_path: Path) -> None:
    store: Any = CountingStore(LocalStore(str(tmp_path)))
    source = store.put("k", [memoryview(b"content")])
    store.put("k", [memoryview(b"another")])
    with pytest.raises(PreconditionFailedError):
        copy_whole(store, source, "t")
    assert store.calls["copy"] == 1


def test_treats_a_copy_of_another_size_as_corrupt(tmp_path: Path) -> None:
    class Short(CountingStore):
        def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
            return replace(self.inner.copy(source, target), size=3)

    store: Any = Short(LocalStore(str(tmp_path)))
    source = store.put("k", [memoryview(b"content")])
    with pytest.raises(CorruptDataError, match="3 bytes, and the original 7") as caught:
        copy_whole(store, source, "t")
    assert "/t" in str(caught.value)
