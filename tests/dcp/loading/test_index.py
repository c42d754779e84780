"""Checkpoints with an index: when it is written, how it is found, and that nothing depends on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bucketpoint import BucketReader, BucketWriter, LoadPlanner, SavePlanner
from bucketpoint.errors import TransientStoreError
from bucketpoint.format.catalog_keys import GroupRule
from bucketpoint.format.index import encode
from bucketpoint.format.index import ref as index_ref
from bucketpoint.format.index.ref import MAGIC, find_ref
from bucketpoint.format.index.view import Entries, decode_index
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.plain import read_record
from bucketpoint.format.record import CommitRecord
from bucketpoint.stores import LocalStore
from dcp.ranks import Ranks
from dcp.test_compat import counted
from services import Service
from transfer.wrappers import CountingStore, wrap_stores

ITEMS, HEAD = 12, 600


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes for checkpoints of a dozen items."""
    monkeypatch.setattr(index_ref, "INDEX_ITEMS", ITEMS)
    # The size of the first read of a reader, and not that of `get_metadata`.
    monkeypatch.setattr("bucketpoint.catalog.catalog.HEAD_BYTES", index_ref.HEAD_BYTES)
    monkeypatch.setattr(index_ref, "HEAD_BYTES", HEAD)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[CountingStore]:
    return counted(monkeypatch)


def state(value: float | None, items: int = 20) -> dict[str, Any]:
    tensors = {
        f"t{number}": torch.full((4, 3), -1.0 if value is None else value + number) for number in range(items - 1)
    }
    return {"model": tensors, "step": 0 if value is None else 3}


def save(path: Any, value: float = 1.0, items: int = 20, writer: Any = None, planner: Any = None) -> None:
    writer = writer or BucketWriter()
    dcp.save(state(value, items), checkpoint_id=path, storage_writer=writer, planner=planner, no_dist=True)


def load(path: Any, value: float = 1.0, items: int = 20, reader: Any = None, planner: Any = None) -> Any:
    """Load, compare, and return the kind of the metadata's entries."""
    reader, target = reader or BucketReader(), state(None, items)
    dcp.load(target, checkpoint_id=path, storage_reader=reader, planner=planner, no_dist=True)
    for name, expected in state(value, items)["model"].items():
        assert torch.equal(target["model"][name], expected), name
    assert target["step"] == 3
    return type(getattr(getattr(reader, "_load", None), "metadata", reader).__dict__.get("state_dict_metadata"))


def index_files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*-index-0.distcp") if file.read_bytes().startswith(MAGIC)]


def calls(stores: list[CountingStore]) -> dict[str, int]:
    names = {name for store in stores for name in store.calls}
    return {name: sum(store.calls[name] for store in stores) for name in names}


def test_loads_a_small_checkpoint_without_an_index_in_one_request_more(
    tmp_path: Path, stores: list[CountingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_ref, "HEAD_BYTES", 128 << 10)
    save(tmp_path, items=ITEMS - 1)
    assert index_files(tmp_path) == []
    puts = calls(stores)["put"]
    stores.clear()
    assert load(tmp_path, items=ITEMS - 1) is dict
    assert calls(stores)["get"] == 1
    stores.clear()
    save(tmp_path / "more", items=ITEMS)
    assert len(index_files(tmp_path / "more")) == 1
    assert calls(stores)["put"] == puts + 1


@pytest.mark.contract
def test_loads_a_large_checkpoint_from_its_index_in_one_request_more_unless_trusted(
    tmp_path: Path, stores: list[CountingStore]
) -> None:
    save(tmp_path)
    stores.clear()
    assert load(tmp_path) is Entries
    assert calls(stores)["get"] == 2
    assert load(tmp_path, planner=LoadPlanner()) is Entries
    stores.clear()
    assert load(tmp_path, reader=BucketReader(trusted=True)) is dict
    assert calls(stores)["get"] == 1
    # What other writers saved has none.
    dcp.save(state(1.0), storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    stores.clear()
    assert load(tmp_path / "stock") is dict
    assert calls(stores)["get"] == 2
    # By fsspec.
    save("memory://index/a")
    assert load("memory://index/a") is Entries


@pytest.mark.contract
def test_reads_first_bytes_and_index_from_a_bucket(service: Service, stores: list[CountingStore]) -> None:
    url = service.url("a")
    save(url, writer=service.writer())
    stores.clear()
    assert load(url, reader=service.reader()) is Entries
    assert calls(stores)["get"] == 2


@pytest.mark.contract
def test_says_the_same_in_index_and_metadata_to_every_reader_without_the_record(tmp_path: Path) -> None:
    save(tmp_path)
    load(tmp_path, reader=FileSystemReader(tmp_path))
    data = (tmp_path / ".metadata").read_bytes()
    (index,) = index_files(tmp_path)
    assert decode_index(index.read_bytes()) == decode_metadata(data)
    index.unlink()
    record = read_record(data)
    written = CommitRecord.from_json((tmp_path / ".bucketpoint.json").read_bytes())
    assert (record.items, record.bytes, record.objects) == (written.items, written.bytes, written.objects)
    assert record.items == 20
    assert "index" not in record.groups


def test_writes_the_index_before_the_commit_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[str] = []

    class Watched(CountingStore):
        def put(self, key: str, *args: Any, **kwargs: Any) -> Any:
            put.append(key.rpartition("/")[2])
            if "-index-" in key and len(put) < 10:
                raise TransientStoreError("gone")
            return self.inner.put(key, *args, **kwargs)

    wrap_stores(monkeypatch, Watched)
    with pytest.raises(dcp.CheckpointException):
        save(tmp_path)
    assert not (tmp_path / ".metadata").exists()
    put += [""] * 10
    save(tmp_path)
    assert [name.split("-")[2] if "-" in name else name for name in put[-4:]] == ["other", "index", ".metadata", ".bucketpoint.json"]  # fmt: skip # noqa: E501


@pytest.mark.parametrize("what", ["missing", "cut", "longer", "altered", "another's", "empty"])
def test_ignores_an_index_that_is_not_the_one_meant(
    tmp_path: Path, what: str, stores: list[CountingStore], caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b", 50.0)
    (index,), (other,) = index_files(tmp_path / "a"), index_files(tmp_path / "b")
    data = index.read_bytes()
    made = {
        "missing": None,
        "cut": data[:-1],
        "longer": data + b"x",
        "altered": data[:-1] + bytes([data[-1] ^ 1]),
        "another's": other.read_bytes(),
        "empty": b"",
    }[what]
    index.unlink()
    if made is not None:
        index.write_bytes(made)
    stores.clear()
    assert load(tmp_path / "a") is dict
    # An object longer than it should be may have been damaged on the way, and is read once more.
    assert calls(stores)["get"] == (4 if made is not None and len(made) > len(data) else 3)
    if what in ("cut", "altered", "empty"):
        assert "is damaged" in caplog.text


def test_loads_a_checkpoint_overwritten_between_the_two_reads_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    original, seen = LocalStore.get, []

    def get(self: LocalStore, key: str, **kwargs: Any) -> Any:
        found = original(self, key, **kwargs)
        seen.append(key)
        if len(seen) == 1:
            monkeypatch.setattr(LocalStore, "get", original)
            save(tmp_path, 70.0)
            monkeypatch.setattr(LocalStore, "get", get)
        return found

    monkeypatch.setattr(LocalStore, "get", get)
    assert load(tmp_path, 70.0) is dict
    assert [key.endswith(".metadata") for key in seen] == [True, True]


def test_deletes_the_index_that_an_overwrite_replaces(tmp_path: Path) -> None:
    save(tmp_path)
    before = index_files(tmp_path)
    save(tmp_path, 2.0)
    assert len(index_files(tmp_path)) == 1
    assert index_files(tmp_path) != before
    save(tmp_path, 3.0, items=4)
    assert index_files(tmp_path) == []
    assert len(list(tmp_path.rglob("*.distcp"))) == 2


def test_fills_the_index_before_in_anew_for_an_unchanged_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, planner = BucketWriter(), SavePlanner()
    made = []
    for name in ("encode_index", "make_index"):
        original = getattr(encode, name)
        monkeypatch.setattr(encode, name, lambda *a, call=original, **k: made.append(1) or call(*a, **k))
    for step in range(3):
        save(tmp_path / str(step), float(step), writer=writer, planner=planner)
        assert load(tmp_path / str(step), float(step)) is Entries
        data = (tmp_path / str(step) / ".metadata").read_bytes()
        (index,) = index_files(tmp_path / str(step))
        assert decode_index(index.read_bytes()) == decode_metadata(data)
        ref = find_ref(data[:HEAD])
        assert ref.fits(index.read_bytes())
    assert len(made) == 1


def test_allows_a_group_of_objects_called_index(tmp_path: Path) -> None:
    save(tmp_path, writer=BucketWriter(groups=[GroupRule("index", ["model"])]))
    assert index_files(tmp_path) == []
    assert len(list(tmp_path.rglob("*-index-0.distcp"))) == 1
    load(tmp_path)


def test_refuses_an_index_at_the_place_of_the_metadata(tmp_path: Path) -> None:
    save(tmp_path)
    (index,) = index_files(tmp_path)
    os.replace(index, tmp_path / ".metadata")
    for reader in (BucketReader(), BucketReader(trusted=True)):
        with pytest.raises(dcp.CheckpointException, match="holds an index"):
            load(tmp_path, reader=reader)


TENSORS = 600


def sharded(world: int, step: int | None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    wholes = [torch.full((8, 2), -1.0 if step is None else float(number + step)) for number in range(TENSORS)]
    return {
        "model": {f"layer{number}": distribute_tensor(whole, mesh, [Shard(0)]) for number, whole in enumerate(wholes)}
    }


def save_twice_and_load(rank: int, world: int, root: str, cooperative: str) -> tuple[str, int, str]:
    """Returns what the metadata is, how many tensors it has, and how they were read."""
    writer, planner = BucketWriter(), SavePlanner()
    for step in range(2):
        dcp.save(sharded(world, step), checkpoint_id=f"{root}/{step}", storage_writer=writer, planner=planner)
    for step in range(2):
        reader, target = BucketReader(cooperative=cooperative), sharded(world, None)
        dcp.load(target, checkpoint_id=f"{root}/{step}", storage_reader=reader, planner=LoadPlanner())
        for number in range(TENSORS):
            assert target["model"][f"layer{number}"].to_local().unique().tolist() == [float(number + step)]
    entries = reader._load.metadata.state_dict_metadata
    return ("index" if isinstance(entries, Entries) else "pickle"), len(entries), reader.explain()


READS = {"off": 'Plain: cooperative="off"', "group": "Plain: no two of the 2 ranks need the same bytes"}


@pytest.mark.parametrize("cooperative", READS)
def test_saves_and_loads_on_many_ranks_with_an_index(two_ranks: Ranks, tmp_path: Path, cooperative: str) -> None:
    found = two_ranks.run(save_twice_and_load, f"file://{tmp_path}", cooperative)
    assert found == [("index", TENSORS, READS[cooperative])] * 2
    for step in range(2):
        (index,) = index_files(tmp_path / str(step))
        data = (tmp_path / str(step) / ".metadata").read_bytes()
        assert decode_index(index.read_bytes()) == decode_metadata(data)
        assert len(data) > 10 * index.stat().st_size
