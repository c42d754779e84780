"""Each region of each object of a checkpoint, flipped: a load and `verify` name it, and nothing is loaded wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint.checkpoint.open import SavedCheckpoint, open_checkpoint
from bucketpoint.checkpoint.verify import Verification, verify
from bucketpoint.errors import BucketpointError, MetadataError
from bucketpoint.format.index import ref as index_ref
from bucketpoint.format.record import CommitRecord
from kit.tally import Tally

FLIPS = "bits flipped in a checkpoint where it lies"


def state(value: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((600, 1000), value), "b": torch.full((7,), value, dtype=torch.bfloat16)},
        "optim": {"m": torch.full((50,), value)},
        "step": int(value),
    }


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # So few items have an index of their own only where that is asked for.
    monkeypatch.setattr(index_ref, "INDEX_ITEMS", 1)
    url = f"file://{tmp_path}/run/step-1"
    dcp.save(state(3.0), checkpoint_id=url, storage_writer=bp.BucketWriter(), no_dist=True)
    return url


def load(url: str) -> dict[str, Any]:
    target = state(0.0)
    dcp.load(target, checkpoint_id=url, storage_reader=bp.BucketReader(), planner=bp.LoadPlanner(), no_dist=True)
    return target


def loads(url: str) -> str | None:
    """The name of the error of a load, or None if it loaded; what it loads is always what was saved."""
    try:
        target = load(url)
    except dcp.CheckpointException as failed:
        error = next(iter(failed.failures.values()))[0]
        assert isinstance(error, BucketpointError), error
        return type(error).__name__
    assert torch.equal(target["model"]["w"], state(3.0)["model"]["w"])
    assert torch.equal(target["model"]["b"], state(3.0)["model"]["b"])
    assert torch.equal(target["optim"]["m"], state(3.0)["optim"]["m"])
    assert target["step"] == 3
    return None


def verified(url: str) -> list[str]:
    """What `verify` finds, by kind."""
    try:
        found: Verification = verify(open_checkpoint(url))
    except BucketpointError as error:
        return [type(error).__name__]
    return sorted({one.kind for one in found.damage})


def regions(saved: SavedCheckpoint) -> Iterator[tuple[str, str, str, int]]:
    """(name, path, kind of object, a byte) of each stretch of each object."""
    for path, items in sorted(saved.by_object.items()):
        for index, info in items:
            begin = info.offset + (info.payload_offset or 0)
            if info.payload_nbytes is None:
                last = info.offset + info.length - 1
                places = {"first": info.offset, "middle": (info.offset + last) // 2, "last": last}
            else:
                end = begin + info.payload_nbytes
                places = {
                    "header, first": info.offset,
                    "header": info.offset + 40,
                    "header, last": begin - 1,
                    "payload, first": begin,
                    "payload": begin + info.payload_nbytes // 2,
                    "payload, last": end - 1,
                    "trailer, first": end,
                    "trailer, last": info.offset + info.length - 1,
                }
            for name, at in places.items():
                yield f"{index.fqn}: {name}", path, "payload" if "payload" in name else "around", at


def flipped(url: str, path: str, at: int) -> Callable[[], None]:
    """Flip a bit, and return what puts it back. The file keeps its identity: only its bytes tell."""
    file = Path(url.removeprefix("file://")) / path
    original = file.read_bytes()
    data = bytearray(original)
    data[at] ^= 0x10
    file.write_bytes(data)
    return lambda: (file.write_bytes(original), None)[1]


@pytest.fixture
def no_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a copy elsewhere is read: checksums alone, no ETags. A flipped object has another ETag besides."""
    import bucketpoint.checkpoint.open as saved_module
    import bucketpoint.dcp.reader as reader

    for module in (reader, saved_module):
        if hasattr(module, "committed_etags"):
            monkeypatch.setattr(module, "committed_etags", lambda *_: {})


@pytest.mark.usefixtures("no_pins")
def test_names_a_flip_in_any_region_of_any_data_object(saved: str, bucketpoint_tally: Tally) -> None:
    assert (loads(saved), verified(saved)) == (None, [])
    seen = 0
    for name, path, kind, at in list(regions(open_checkpoint(saved))):
        put_back = flipped(saved, path, at)
        found = verified(saved)
        assert found, f"verify: {name}"
        assert "checksum" in found, f"verify: {name} {found}"
        # Headers and trailers are for readers of other kinds: ours goes by the metadata, and loads what was saved.
        failure = loads(saved)
        if kind == "payload" or "step" in name:
            assert failure is not None, f"load: {name}"
        put_back()
        seen += 1
    bucketpoint_tally.made(FLIPS, seen)
    assert seen >= 3 * 8 + 3
    assert (loads(saved), verified(saved)) == (None, [])


def test_names_a_flip_anywhere_in_the_metadata(saved: str, bucketpoint_tally: Tally) -> None:
    """Every 23rd byte of `.metadata`: no load gives other values, and none is overlooked by `verify`."""
    size = (Path(saved.removeprefix("file://")) / ".metadata").stat().st_size
    for at in range(0, size, 23):
        bucketpoint_tally.made(FLIPS)
        put_back = flipped(saved, ".metadata", at)
        loads(saved)
        assert verified(saved), f"byte {at}"
        put_back()
    assert verified(saved) == []


def test_gives_no_other_state_or_copy_of_a_flip_in_the_metadata(tmp_path: Path) -> None:
    """Without an index every byte counts, and without a state to load into the names in the metadata do, too."""
    bp.save(state(3.0), tmp_path / "a")
    assert bp.load(tmp_path / "a")["optim"].keys() == {"m"}
    for at in range(0, (tmp_path / "a/.metadata").stat().st_size, 7):
        put_back = flipped(str(tmp_path / "a"), ".metadata", at)
        with pytest.raises(MetadataError):
            bp.load(tmp_path / "a")
        # `cp` and `convert` read the metadata so.
        with pytest.raises(MetadataError):
            open_checkpoint(str(tmp_path / "a"))
        put_back()


def test_treats_a_table_of_objects_that_has_lost_its_name_as_damage(saved: str) -> None:
    """Its name ends the list of facts, and the reader of ETags once took it for granted."""
    data = (Path(saved.removeprefix("file://")) / ".metadata").read_bytes()
    put_back = flipped(saved, ".metadata", data.index(b"\x07objects\x94") + 3)
    loads(saved)
    assert verified(saved)
    put_back()


def test_names_a_flip_anywhere_in_the_index_at_no_cost_to_a_load(saved: str, bucketpoint_tally: Tally) -> None:
    """The index is a copy: a damaged one is not used, and the metadata says the same."""
    root = Path(saved.removeprefix("file://"))
    (path,) = [file for file in root.rglob("*") if file.is_file() and "index" in file.name]
    for at in range(0, path.stat().st_size, 31):
        put_back = flipped(saved, str(path.relative_to(root)), at)
        bucketpoint_tally.made(FLIPS)
        assert loads(saved) is None, f"byte {at}"
        assert verified(saved) == ["checksum"], f"byte {at}"
        put_back()


def test_names_a_flip_anywhere_in_the_record_at_no_cost_to_a_load(saved: str, bucketpoint_tally: Tally) -> None:
    """Loads do not read it. A flip in the name of its checksum leaves a record that has none and is else whole."""
    file = Path(saved.removeprefix("file://")) / ".bucketpoint.json"
    written = CommitRecord.from_json(file.read_bytes())
    harmless = 0
    for at in range(0, file.stat().st_size, 11):
        put_back = flipped(saved, ".bucketpoint.json", at)
        bucketpoint_tally.made(FLIPS)
        assert loads(saved) is None
        found = verified(saved)
        if not found:
            assert CommitRecord.from_json(file.read_bytes()) == written, f"byte {at}"
            harmless += 1
        assert found in ([], ["record"]), f"byte {at}"
        put_back()
    assert harmless <= 1
    assert verified(saved) == []


@pytest.mark.usefixtures("no_pins")
@pytest.mark.parametrize("cut", [0, 1, 0.5, -1], ids=["empty", "one byte", "half", "one byte less"])
def test_names_any_object_cut_short(saved: str, cut: float) -> None:
    root = Path(saved.removeprefix("file://"))
    for file in sorted(one for one in root.rglob("*") if one.is_file() and one.name != ".bucketpoint.json"):
        original = file.read_bytes()
        size = int(cut) if isinstance(cut, int) and cut >= 0 else len(original) - 1 if cut < 0 else len(original) // 2
        file.write_bytes(original[:size])
        failure, found = loads(saved), verified(saved)
        if "index" not in file.name:
            assert found, file
        if file.name == ".metadata":
            assert failure is not None
        file.write_bytes(original)
    assert (loads(saved), verified(saved)) == (None, [])
