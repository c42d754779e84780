"""Tables of checksums: of blocks behind the items of an object, and of digests at its end. No crafted one is believed.

Those of blocks are read for parts of items, and needed for no whole one.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from bucketpoint import BucketReader, BucketWriter, CorruptDataError, LoadPlanner, TransferOptions
from bucketpoint.checkpoint.checksums import read_digests, table_nbytes, table_tail
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.errors import PreconditionFailedError
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.metadata.thinning import Outline
from bucketpoint.stores import open_store
from bucketpoint.transfer.checksum import DIGEST_BYTES
from dcp.states import same_bits
from dcp.test_compat import counted
from transfer.wrappers import CountingStore

pytestmark = pytest.mark.contract

ROWS, COLUMNS = 4096, 512
NAMES = ("model.a", "model.b", "optim.a")


def part(first: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Some rows to load into, which say of what whole."""
    made: Any = torch.zeros((rows, COLUMNS), dtype=dtype)
    made.global_shape, made.global_offsets = (ROWS, COLUMNS), [(first, 0)]
    made.local_offsets, made.local_sizes = [(0, 0)], [(rows, COLUMNS)]
    found: torch.Tensor = made
    return found


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[CountingStore]:
    return counted(monkeypatch)


def saved(path: Path) -> dict[str, torch.Tensor]:
    """Three tensors of 8 MiB, whose blocks are of 256 KiB, in two objects."""
    drawn = torch.Generator().manual_seed(7)
    state = {name: torch.rand((ROWS, COLUMNS), generator=drawn) for name in NAMES}
    dcp.save(dict(state), storage_writer=BucketWriter(path, progress=False), no_dist=True)
    return state


def load(path: Path, target: dict[str, Any], options: TransferOptions | None = None) -> None:
    reader = BucketReader(path, progress=False, transfer=options)
    dcp.load(target, storage_reader=reader, planner=LoadPlanner(), no_dist=True)


def requests(stores: list[CountingStore]) -> int:
    return sum(store.calls["read_into"] for store in stores)


def place(path: Path, name: str) -> ItemInfo:
    return next(info for index, info in open_checkpoint(path).items if index.fqn == name)


def flipped(path: Path, object_path: str, at: int) -> None:
    """A bit that another has: the inode, the size and the time stay."""
    status = (path / object_path).stat()
    with (path / object_path).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path / object_path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_places_tables_behind_items_of_an_object_where_stock_readers_do_not_mind(tmp_path: Path) -> None:
    state = saved(tmp_path)
    infos = {name: place(tmp_path, name) for name in NAMES}
    first, second = infos["model.a"], infos["model.b"]
    assert first.path == second.path != infos["optim.a"].path
    assert first.block_nbytes == 256 << 10
    assert first.table_nbytes == second.table_nbytes == 4 * 32
    assert first.table_offset == second.offset + second.length
    assert second.table_offset == (first.table_offset or 0) + first.table_nbytes
    assert (tmp_path / first.path).stat().st_size == (second.table_offset or 0) + second.table_nbytes
    assert (tmp_path / ".metadata").stat().st_size < 3000
    target = {name: torch.zeros(ROWS, COLUMNS) for name in NAMES}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert all(torch.equal(target[name], state[name]) for name in NAMES)


def test_reads_tables_for_parts_of_items_only(tmp_path: Path, stores: list[CountingStore]) -> None:
    state = saved(tmp_path)
    stores.clear()
    load(tmp_path, {name: torch.zeros(ROWS, COLUMNS) for name in NAMES})
    whole = requests(stores)
    items = sum(place(tmp_path, name).checked_nbytes for name in NAMES)
    assert sum(store.received for store in stores) < items + 4096
    stores.clear()
    target = {name: part(1024, 512) for name in NAMES}
    load(tmp_path, dict(target))
    for name, rows in target.items():
        assert same_bits(rows, state[name][1024:1536])
    # A range of each item, and all the tables of each of the two objects in one.
    assert requests(stores) == len(NAMES) + 2
    needed = sum(rows.nbytes for rows in target.values())
    assert needed < sum(store.received for store in stores) <= needed + 3 * 4 * 32
    assert whole <= 2 * len(NAMES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("at", [0, 5 << 20, (8 << 20) - 1])
def test_finds_a_flipped_bit_in_wholes_and_in_the_part_that_it_is_in(
    tmp_path: Path, dtype: torch.dtype, at: int
) -> None:
    state = saved(tmp_path)
    info = place(tmp_path, "model.b")
    flipped(tmp_path, info.path, info.offset + (info.payload_offset or 0) + at)
    small = TransferOptions(part_bytes=1 << 20, max_inflight_bytes=4 << 20, connections=4)
    for options in (None, small):
        with pytest.raises(dcp.CheckpointException) as caught:
            load(tmp_path, {"model.b": torch.zeros(ROWS, COLUMNS, dtype=dtype)}, options)
        (error,) = caught.value.failures.values()
        assert isinstance(error[0], CorruptDataError)
        assert "model.b" in str(error[0])
    row = at // (4 * COLUMNS)
    with pytest.raises(dcp.CheckpointException, match=r"model\.b"):
        load(tmp_path, {"model.b": part(row // 64 * 64, 64, dtype)})
    first = (row // 128 * 128 + 2048) % ROWS
    beside = part(first, 128, dtype)
    load(tmp_path, {"model.b": beside})
    assert torch.equal(beside, state["model.b"][first : first + 128].to(dtype))


def test_fails_parts_and_no_whole_for_a_table_that_was_altered(tmp_path: Path) -> None:
    state = saved(tmp_path)
    info = place(tmp_path, "model.a")
    flipped(tmp_path, info.path, (info.table_offset or 0) + 9)
    target = torch.zeros(ROWS, COLUMNS)
    load(tmp_path, {"model.a": target})
    assert torch.equal(target, state["model.a"])
    with pytest.raises(dcp.CheckpointException, match=r"model\.a: the checksums of its blocks"):
        load(tmp_path, {"model.a": part(0, 64)})
    # Each item has a table of its own.
    load(tmp_path, {"model.b": part(0, 64)})


def test_finds_tables_in_a_checkpoint_that_was_thinned(tmp_path: Path) -> None:
    state = saved(tmp_path)
    data = Outline((tmp_path / ".metadata").read_bytes()).thinned()
    (tmp_path / ".metadata").write_bytes(data)
    rows = part(64, 64)
    load(tmp_path, {"model.b": rows})
    assert same_bits(rows, state["model.b"][64:128])


# Digests at the end of objects


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
