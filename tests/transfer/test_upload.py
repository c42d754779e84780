"""Uploads and copies: what arrives is what lay in memory, failures leave nothing behind, and nothing of ours grows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from awscrt.checksums import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bucketpoint.checkpoint.checksums import read_digests, table_nbytes, table_tail
from bucketpoint.errors import (
    BucketpointError,
    CorruptDataError,
    PreconditionFailedError,
    TransientStoreError,
    UploadNotFoundError,
)
from bucketpoint.stores import LocalStore, ObjectInfo, Store, open_store
from bucketpoint.transfer import BufferPool, ObjectSource, Segment, TransferOptions, Uploaded, upload_objects
from bucketpoint.transfer.checksum import BLOCK_BYTES, digest
from bucketpoint.transfer.copy import copy_whole
from bucketpoint.transfer.helper.process import UploadHelper
from bucketpoint.transfer.stream import StreamUpload
from services import Service, in_parts
from transfer.helper.orders import MIB, OPTIONS, filled_arena, meter, upload_of, view_of
from transfer.wrappers import CountingStore, FailingStore


def store_of(service: Service) -> Store:
    return open_store(service.url("x"), storage_options=service.options)[0]


def send(store: Store, *sources: ObjectSource, options: TransferOptions = OPTIONS) -> list[Uploaded]:
    return upload_objects(store, sources, options, pool=BufferPool(options.max_inflight_bytes), meter=meter())


def filler(data: bytes) -> Callable[[int, memoryview], None]:
    def fill(start: int, out: memoryview) -> None:
        out[:] = data[start : start + len(out)]

    return fill


def blocks_of(raw: bytes, nbytes: int) -> list[int]:
    """The checksums of the blocks of this size."""
    return [crc32c(raw[at : at + nbytes]) for at in range(0, len(raw), nbytes)] if nbytes else []


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
    assert list(map(list, done.block_crcs)) == [[], blocks_of(big, MIB), [], [crc32c(lazy)]]


PART_BYTES = 100_000
ENDS = [parts * PART_BYTES + more for parts in (1, 2) for more in (-20, -3009, -3003, -3001, 0)]


@pytest.mark.parametrize("nbytes", [0, *ENDS])
def test_makes_a_table_of_the_checksums_of_all_blocks_wherever_parts_end(tmp_path: Path, nbytes: int) -> None:
    first, lazy = os.urandom(nbytes), os.urandom(3001)
    table = b"".join(crc.to_bytes(4, "little") for crc in (*blocks_of(first, 40_000), *blocks_of(lazy, 1000)))
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


def with_table(segments: list[Segment]) -> list[Segment]:
    """The segments, and behind them the digests of those that have a seed."""
    digested = [index for index, segment in enumerate(segments) if segment.digest_seed is not None]
    # Distinct, as the offsets of items are.
    tail = table_tail(digested)
    return [*segments, Segment(table_nbytes(len(digested)), memoryview(tail), digests_of=digested)]


SIZES = st.one_of(
    st.integers(0, 5000),
    st.sampled_from([BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES + 77]),
)


@pytest.fixture(scope="module")
def helper() -> Iterator[UploadHelper]:
    helper = UploadHelper()
    yield helper
    helper.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_sends_each_item_with_checksums_and_digest_wherever_it_lies_and_parts_end(
    data: st.DataObject, helper: UploadHelper, tmp_path: Path
) -> None:
    arena = filled_arena(4 * MIB)
    raws: list[bytes] = []
    segments: list[Segment] = []
    for number, nbytes in enumerate(data.draw(st.lists(SIZES, min_size=1, max_size=5), label="sizes")):
        kind = data.draw(st.sampled_from(["shared", "elsewhere", "read-only", "filled", "without"]), label="kind")
        block = data.draw(st.sampled_from([0, 1000, 300_001, BLOCK_BYTES, MIB]), label="block")
        view = view_of(arena, data.draw(st.integers(0, arena.nbytes - nbytes)), nbytes)
        raw = bytes(view)
        seed = None if kind == "without" else b"seed %d" % number
        others = {"filled": None, "elsewhere": memoryview(bytearray(raw)), "read-only": memoryview(raw)}
        filled = filler(raw) if kind == "filled" else None
        segments.append(Segment(nbytes, others.get(kind, view), filled, block_nbytes=block, digest_seed=seed))
        raws.append(raw)
    crcs = [blocks_of(raw, segment.block_nbytes) for raw, segment in zip(raws, segments, strict=True)]
    packed = b"".join(crc.to_bytes(4, "little") for blocks in crcs for crc in blocks)
    if any(segment.block_nbytes for segment in segments):
        tabled = [index for index, segment in enumerate(segments) if segment.block_nbytes]
        segments.append(Segment(len(packed), table_of=tabled))
        raws.append(packed)
        crcs.append([])
    table = with_table(segments)
    expected = [
        None if segment.digest_seed is None else digest(memoryview(raw), segment.digest_seed)
        for raw, segment in zip(raws, segments, strict=True)
    ]
    options = TransferOptions(
        part_bytes=data.draw(st.sampled_from([100_003, BLOCK_BYTES, 700_001, 64 * MIB]), label="part"),
        connections=4,
        single_put_bytes=data.draw(st.sampled_from([1, 64 * MIB])),
        max_inflight_bytes=64 * MIB,
    )
    if data.draw(st.booleans(), label="helper"):
        work = upload_of(str(tmp_path), [ObjectSource("k", table)], arena, options=options)
        (done,), store = helper.upload(work, meter()), work.store
    else:
        store, _ = open_store(str(tmp_path))
        (done,) = send(store, ObjectSource("k", table), options=options)
    assert list(map(list, done.block_crcs)) == [*crcs, []]
    assert list(done.digests) == [*expected, None]
    stored, info = store.get("k")
    assert stored[: sum(map(len, raws))] == b"".join(raws)
    found = read_digests(store, "k", size=info.size, etag=info.etag)
    if sum(map(len, raws)) > len(raws):
        assert found == {index: each for index, each in enumerate(expected) if each is not None}


def test_receives_a_table_from_the_helper_however_large_it_is(helper: UploadHelper, tmp_path: Path) -> None:
    arena = filled_arena(20_000)
    segments = [Segment(2, view_of(arena, 2 * at, 2), digest_seed=b"s") for at in range(10_000)]
    work = upload_of(str(tmp_path), [ObjectSource("k", with_table(segments))], arena)
    helper.upload(work, meter())
    stored, info = work.store.get("k")
    found = read_digests(work.store, "k", size=info.size, etag=info.etag)
    assert found == {at: digest(memoryview(stored)[2 * at : 2 * at + 2], b"s") for at in range(10_000)}


def test_keeps_digests_from_version_to_version() -> None:
    data = bytes(range(256)) * 4096
    blocks = [data[at : at + (512 << 10)] for at in range(0, len(data), 512 << 10)]
    hashed = b"".join(map(xxhash.xxh3_128_digest, blocks))
    assert digest(memoryview(data), b"f32") == xxhash.xxh3_128_digest(b"f32" + len(data).to_bytes(8, "little") + hashed)
