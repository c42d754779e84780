"""Uploads by threads and by the helper: checksums and digests are those of the whole, wherever parts end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from awscrt.checksums import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bucketpoint.checkpoint.checksums import read_digests, table_nbytes, table_tail
from bucketpoint.stores import Store, open_store
from bucketpoint.transfer import BufferPool, ObjectSource, Segment, TransferOptions, Uploaded, upload_objects
from bucketpoint.transfer.checksum import BLOCK_BYTES, digest
from bucketpoint.transfer.helper.process import UploadHelper
from transfer.helper.orders import MIB, filled_arena, meter, upload_of, view_of

SMALL = TransferOptions(part_bytes=1, connections=4, single_put_bytes=1, max_inflight_bytes=64 * MIB)


def send(store: Store, segments: list[Segment], options: TransferOptions) -> Uploaded:
    pool = BufferPool(options.max_inflight_bytes)
    (done,) = upload_objects(store, [ObjectSource("k", segments)], options, pool=pool, meter=meter())
    return done


def with_table(segments: list[Segment]) -> list[Segment]:
    """The segments, and behind them the digests of those that have a seed."""
    digested = [index for index, segment in enumerate(segments) if segment.digest_seed is not None]
    # Distinct, as the offsets of items are.
    tail = table_tail(digested)
    return [*segments, Segment(table_nbytes(len(digested)), memoryview(tail), digests_of=digested)]


def blocks_of(raw: bytes, nbytes: int) -> list[int]:
    """The checksums of the blocks of this size."""
    return [crc32c(raw[at : at + nbytes]) for at in range(0, len(raw), nbytes)] if nbytes else []


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

        def fill(start: int, out: memoryview, raw: bytes = raw) -> None:
            out[:] = raw[start : start + len(out)]

        seed = None if kind == "without" else b"seed %d" % number
        others = {"filled": None, "elsewhere": memoryview(bytearray(raw)), "read-only": memoryview(raw)}
        filled = fill if kind == "filled" else None
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
    part_bytes = data.draw(st.sampled_from([100_003, BLOCK_BYTES, 700_001, 64 * MIB]), label="part")
    options = replace(SMALL, part_bytes=part_bytes, single_put_bytes=data.draw(st.sampled_from([1, 64 * MIB])))
    if data.draw(st.booleans(), label="helper"):
        work = upload_of(str(tmp_path), [ObjectSource("k", table)], arena, options=options)
        (done,), store = helper.upload(work, meter()), work.store
    else:
        store, _ = open_store(str(tmp_path))
        done = send(store, table, options)
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
