"""Digest tables at the end of objects: found with one read or two, and no crafted table is believed."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from bucketpoint.checkpoint.checksums import read_digests, table_nbytes, table_tail
from bucketpoint.errors import PreconditionFailedError
from bucketpoint.stores import open_store
from bucketpoint.transfer.checksum import DIGEST_BYTES
from transfer.wrappers import CountingStore


def stored(path: Path, data: bytes) -> tuple[Any, dict[str, Any]]:
    store = CountingStore(open_store(str(path))[0])
    info = store.put("k", [memoryview(data)])
    return store, {"size": info.size, "etag": info.etag}


def table(offsets: list[int]) -> tuple[bytes, dict[int, bytes]]:
    digests = [os.urandom(DIGEST_BYTES) for _ in offsets]
    return b"".join(digests) + table_tail(offsets), dict(zip(offsets, digests, strict=True))


@pytest.mark.parametrize(("count", "reads"), [(0, 1), (1, 1), (2729, 1), (2730, 2), (9000, 2)])
def test_reads_digests_back_with_one_read_or_two(tmp_path: Path, count: int, reads: int) -> None:
    data, digests = table([7 * at for at in range(count)])
    assert len(data) == table_nbytes(count)
    store, facts = stored(tmp_path, os.urandom(100_000) + data)
    assert read_digests(store, "k", **facts) == digests
    assert store.calls["read_into"] == reads
    assert store.received <= (64 << 10) + table_nbytes(count)


@pytest.mark.parametrize("nbytes", [0, 1, 23, 24, 100_000])
def test_finds_no_digests_in_an_object_without_a_table(tmp_path: Path, nbytes: int) -> None:
    store, facts = stored(tmp_path, os.urandom(nbytes))
    assert read_digests(store, "k", **facts) == {}
    assert store.calls["read_into"] <= 1


def test_reads_no_object_that_was_replaced(tmp_path: Path) -> None:
    store, facts = stored(tmp_path, os.urandom(100) + table([3])[0])
    assert store.capabilities.pinned_reads
    with pytest.raises(PreconditionFailedError):
        read_digests(store, "k", **{**facts, "etag": "other"})


MAGIC = table_tail([])[-16:]


@pytest.mark.parametrize("count", [3, 4, 1000, 1 << 20, 1 << 32, (1 << 64) - 1])
def test_refuses_a_count_that_does_not_fit_the_object(tmp_path: Path, count: int) -> None:
    store, facts = stored(tmp_path, bytes(3 * 24 - 1) + struct.pack("<Q", count) + MAGIC)
    assert read_digests(store, "k", **facts) == {}
    assert store.calls["read_into"] == 1


def test_refuses_a_count_beyond_all_saves_whatever_the_size_of_the_object(tmp_path: Path) -> None:
    store, _ = stored(tmp_path, b"")
    end = struct.pack("<Q", (1 << 22) + 1) + MAGIC
    with (tmp_path / "k").open("wb") as file:
        file.seek(200 << 20)
        file.write(end)
    info = store.head("k")
    assert read_digests(store, "k", size=info.size, etag=info.etag) == {}
    assert store.received == 64 << 10


@pytest.mark.parametrize("offsets", [[5, 5], [1, 1000], [1, 1 << 63], [1000 + 30], [(1 << 64) - 1]])
def test_refuses_offsets_that_repeat_or_lie_behind_the_items(tmp_path: Path, offsets: list[int]) -> None:
    store, facts = stored(tmp_path, bytes(1000) + table(offsets)[0])
    assert read_digests(store, "k", **facts) == {}


@pytest.mark.parametrize("at", range(-16, 0))
def test_refuses_another_magic_constant(tmp_path: Path, at: int) -> None:
    data = bytearray(bytes(1000) + table([5])[0])
    data[at] ^= 1
    store, facts = stored(tmp_path, bytes(data))
    assert read_digests(store, "k", **facts) == {}
