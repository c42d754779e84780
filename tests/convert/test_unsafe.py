"""Pickles that would run something are refused wherever a foreign checkpoint has one, and nothing is written."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME
from bucketpoint.convert import plan_conversion
from bucketpoint.errors import BucketpointError, CorruptDataError, MetadataError, MismatchError, UnsafeDataError
from convert.conftest import converted, load
from security.corpus import ORDERED, P4, Call, archive, global_, repeated, short, text


class Own:
    """A class of a user's own, which only a trusted source may name."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    __hash__ = None  # type: ignore[assignment]


def evil(path: Path) -> Any:
    return Call(exec, f"open({str(path)!r}, 'w').close()")


def theirs(path: Path, value: Any) -> None:
    dcp.save(value, storage_writer=FileSystemWriter(str(path)), no_dist=True)


@contextlib.contextmanager
def altered(source: Path) -> Iterator[Any]:
    """Metadata of a checkpoint, which is written back as the block leaves it."""
    metadata = pickle.loads((source / ".metadata").read_bytes())
    yield metadata
    (source / ".metadata").write_bytes(pickle.dumps(metadata))


def put_in_place_of_the_tensor(source: Path, frame: bytes) -> None:
    with altered(source) as metadata:
        (info,) = metadata.storage_data.values()
        info.length = len(frame)
    (source / "__0_0.distcp").write_bytes(frame)


@pytest.mark.parametrize("where", ["metadata", "item", "tensor", "file"])
def test_runs_and_writes_nothing_of_an_unsafe_source(tmp_path: Path, where: str) -> None:
    source, ran, out = tmp_path / "a", tmp_path / "ran", tmp_path / "out"
    if where == "file":
        torch.save({"w": torch.ones(3), "x": [evil(ran)]}, source)
    elif where == "item":
        theirs(source, {"w": torch.ones(3), "x": evil(ran)})
    else:
        theirs(source, {"w": torch.ones(3)})
    if where == "metadata":
        (source / ".metadata").write_bytes(pickle.dumps(evil(ran)))
    elif where == "tensor":
        torch.save(evil(ran), tmp_path / "frame")
        put_in_place_of_the_tensor(source, (tmp_path / "frame").read_bytes())
    with pytest.raises(UnsafeDataError):
        plan_conversion(source, out)
    assert not ran.exists()
    assert not out.exists()


def test_checks_a_tensor_that_is_passed_on_as_it_is_against_the_allow_list(tmp_path: Path) -> None:
    """Its pickle ended the interpreter by its work, before that came to the name."""
    copies = P4 + b"]\x94(" + b"K\x01" * 5000 + b"e0" + global_("builtins", "tuple") + b"\x94("
    frame = archive(copies + b"h\x01h\x00\x85R" * 2000 + b"t" + global_("os", "system") + b".")
    source = tmp_path / "a"
    theirs(source, {"w": torch.ones(3)})
    put_in_place_of_the_tensor(source, frame)
    with pytest.raises(UnsafeDataError):
        plan_conversion(source, tmp_path / "out")


def test_refuses_a_sparse_tensor_whose_archive_another_reader_may_read_otherwise(tmp_path: Path) -> None:
    """It is passed on as it is, and torch ignores the case of a record's name."""
    torch.save(torch.eye(3).to_sparse(), tmp_path / "sparse")
    raw = io.BytesIO()
    with zipfile.ZipFile(tmp_path / "sparse") as sparse, zipfile.ZipFile(raw, "w") as twice:
        twice.writestr("sparse/DATA.PKL", pickle.dumps(evil(tmp_path / "ran")))
        for entry in sparse.infolist():
            twice.writestr(entry, sparse.read(entry))
    theirs(tmp_path / "a", {"w": torch.eye(3)})
    put_in_place_of_the_tensor(tmp_path / "a", raw.getvalue())
    with pytest.raises(UnsafeDataError):
        plan_conversion(tmp_path / "a", tmp_path / "out")


@pytest.mark.parametrize("make", [lambda value: {"a": value, "b": value}, lambda value: [value, value]])
def test_converts_a_file_of_shared_containers_without_delay(tmp_path: Path, make: Any) -> None:
    """DCP visits a container once for each place in which it stands: 40 small dictionaries were 2**40 places."""
    value: Any = 1
    for _ in range(20):
        value = make(value)
    torch.save({"x": value}, tmp_path / "a.pt")
    with pytest.raises(MismatchError, match="very many places"):
        plan_conversion(tmp_path / "a.pt", tmp_path / "out")


def test_names_a_tensor_that_cannot_be_moved_to_its_device(tmp_path: Path) -> None:
    body = P4 + b"}" + short("w") + global_("torch._utils", "_rebuild_device_tensor_from_cpu_tensor") + b"("
    body += repeated(1) + global_("torch", "float32") + text("cpu") + b"\x89tRs."
    (tmp_path / "a.pt").write_bytes(archive(body))
    with pytest.raises(MetadataError, match="NotImplementedError"):
        plan_conversion(tmp_path / "a.pt", tmp_path / "out")


def test_lets_trusted_sources_name_what_they_like(tmp_path: Path) -> None:
    value = {"w": torch.ones(3), "own": Own()}
    theirs(tmp_path / "a", value)
    torch.save(value, tmp_path / "a.pt")
    for source in ("a", "a.pt"):
        ours = tmp_path / f"{source} ours"
        with pytest.raises(UnsafeDataError, match="Own"):
            converted(tmp_path / source, ours)
        converted(tmp_path / source, ours, trusted=True)
        assert converted(ours, tmp_path / f"{source} back.pt", trusted=True).checked_bytes
        found = torch.load(tmp_path / f"{source} back.pt", weights_only=False)
        assert found["own"] == Own()


def test_names_dtensors_in_a_file(tmp_path: Path) -> None:
    body = b"\x80\x02}X\x01\x00\x00\x00wctorch.distributed.tensor\nDTensor\ns."
    (tmp_path / "x.pt").write_bytes(archive(body))
    with pytest.raises(MismatchError, match="DTensor"):
        plan_conversion(tmp_path / "x.pt", tmp_path / "out")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("an object is gone", "one of its objects is missing"),
        ("an item has no place", "no data for this item"),
        ("a place has no item", "not in its state dict"),
    ],
)
def test_refuses_data_that_the_metadata_does_not_describe(tmp_path: Path, how: str, said: str) -> None:
    writer = FileSystemWriter(str(tmp_path / "a"), single_file_per_rank=False)
    dcp.save({"w": torch.ones(3), "b": 1}, storage_writer=writer, no_dist=True)
    with altered(tmp_path / "a") as metadata:
        index = next(index for index in metadata.storage_data if index.fqn == "w")
        if how == "an object is gone":
            (tmp_path / "a" / metadata.storage_data[index].relative_path).unlink()
        elif how == "an item has no place":
            del metadata.storage_data[index]
        else:
            metadata.storage_data[MetadataIndex("more")] = metadata.storage_data[MetadataIndex("b")]
    with pytest.raises(BucketpointError, match=said):
        plan_conversion(tmp_path / "a", tmp_path / "out")


@pytest.mark.parametrize("file", ["../b/one.safetensors", "/b/one.safetensors", ""])
def test_refuses_an_index_that_leads_out_of_its_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(UnsafeDataError):
        plan_conversion(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("where", ["file", "object of a file", "bytes item", "quantised item"])
def test_finds_a_flipped_bit_in_what_is_no_plain_tensor(tmp_path: Path, where: str) -> None:
    value = {"w": torch.ones(3), "x": ["as it was", (torch.full((3,), 7.5),)]}
    path, said = tmp_path / "a.pt", b"as it was"
    if where == "quantised item":
        value, said = {"w": torch.quantize_per_tensor(torch.full((9,), 7.0), 1.0, 0, torch.quint8)}, bytes([7] * 9)
    if where.endswith("file"):
        torch.save(value, path)
        said = said if where == "file" else struct.pack("<f", 7.5)
    else:
        theirs(tmp_path / "a", value)
        (path,) = (tmp_path / "a").glob("*.distcp")
    raw = bytearray(path.read_bytes())
    raw[raw.index(said)] ^= 0x04
    path.write_bytes(raw)
    with pytest.raises(CorruptDataError):
        converted(path if path.suffix == ".pt" else path.parent, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_makes_no_huge_number_of_a_few_bytes(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 30)}, tmp_path / "x.pt")
    with pytest.raises(MismatchError, match="over a storage of 4 "):
        plan_conversion(tmp_path / "x.pt", tmp_path / "out")
    few = {"w": torch.ones(3, 1).expand(3, 4)}
    torch.save(few, tmp_path / "y.pt")
    converted(tmp_path / "y.pt", tmp_path / "out")
    assert torch.equal(load(tmp_path / "out", {"w": torch.zeros(3, 4)})["w"], few["w"])


def tensor_of(offset: int, shape: bytes, stride: bytes) -> bytes:
    """A file of a tensor that claims this of its storage, which has four elements."""
    storage = b"(" + text("storage") + global_("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
    within = b"J" + offset.to_bytes(4, "little") + shape + stride
    made = global_("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + within + b"\x89" + ORDERED + b")RtR"
    return archive(b"\x80\x02}" + text("w") + made + b"s.", bytes(16))


def test_refuses_a_tensor_beyond_its_storage_and_accepts_one_within(tmp_path: Path) -> None:
    four, one, billion = b"K\x04\x85", b"K\x01\x85", b"J\x00\x00\x00\x40\x85"
    for offset, shape, stride in [(0, billion, one), (0, four, billion), (1 << 30, four, one), (1, four, one)]:
        (tmp_path / "x.pt").write_bytes(tensor_of(offset, shape, stride))
        with pytest.raises(MetadataError):
            plan_conversion(tmp_path / "x.pt", tmp_path / "out")
    (tmp_path / "x.pt").write_bytes(tensor_of(0, four, one))
    converted(tmp_path / "x.pt", tmp_path / "out")
    assert torch.equal(load(tmp_path / "out", {"w": torch.ones(4)})["w"], torch.zeros(4))


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 0.9, 0.97, 0.999])
def test_ends_in_an_error_of_ours_for_a_truncated_or_damaged_file(tmp_path: Path, at: float) -> None:
    torch.save({"w": torch.ones(300), "x": {"y": (1, "z")}}, tmp_path / "x.pt")
    raw = (tmp_path / "x.pt").read_bytes()
    cut = int(len(raw) * at)
    (tmp_path / "x.pt").write_bytes(raw[:cut])
    with pytest.raises(BucketpointError):
        converted(tmp_path / "x.pt", tmp_path / "out")
    flipped = bytearray(raw)
    flipped[cut] ^= 0xFF
    (tmp_path / "y.pt").write_bytes(flipped)
    try:
        converted(tmp_path / "y.pt", tmp_path / "out")
    except BucketpointError:
        assert not (tmp_path / "out" / ".metadata").exists()
    else:
        # Of the padding and the like, on which nothing depends.
        assert torch.equal(load(tmp_path / "out", {"w": torch.zeros(300)})["w"], torch.ones(300))
