"""Loads from folders of safetensors, by the readers of all checkpoints."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import bucketpoint
from bucketpoint import BucketReader
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME, SINGLE_NAME, SafetensorsFolder
from bucketpoint.checkpoint.summary import summarise
from bucketpoint.checkpoint.verify import verify
from bucketpoint.errors import (
    AccessDeniedError,
    BucketpointError,
    CorruptDataError,
    IncompleteCheckpointError,
    MetadataError,
    UnsafeDataError,
)
from bucketpoint.format import keys
from bucketpoint.stores import open_store
from convert.conftest import in_minio
from dcp.states import assert_same, blank, filled
from kit.servers import S3Server

safetensors = pytest.importorskip("safetensors.torch")

STATE = {
    "model.embed.weight": filled((512, 256), torch.bfloat16, seed=1),
    "model.layers.0.weight": filled((256, 300), torch.float32, seed=2),
    "model.scale": torch.tensor(2.5),
    "model.empty": torch.empty(0, 3),
    "lm_head.weight": filled((64, 256), torch.float8_e4m3fn, seed=3),
}
FILES = {
    f"model-0000{number}-of-00002.safetensors": names for number, names in ((1, list(STATE)[:2]), (2, list(STATE)[2:]))
}


def single(folder: Path, state: dict[str, Any] = STATE, name: str = SINGLE_NAME) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save_file(state, folder / name, metadata={"format": "pt"})
    return folder


def sharded(folder: Path) -> Path:
    for name, members in FILES.items():
        single(folder, {key: STATE[key] for key in members}, name)
    weight_map = {key: name for name, members in FILES.items() for key in members}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def uploaded(folder: Path, url: str) -> str:
    store, prefix = open_store(url)
    for path in folder.iterdir():
        store.put(keys.join(prefix, path.name), [memoryview(path.read_bytes())])
    return url


@pytest.fixture(params=["file", "minio", "memory"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of an empty place: of the stores with a data plane, and of one by fsspec."""
    if request.param == "minio":
        return in_minio(request, monkeypatch)
    return f"file://{tmp_path}/there" if request.param == "file" else f"memory://there/{tmp_path.name}"


@pytest.mark.parametrize("make", [single, sharded])
def test_loads_a_folder_as_any_checkpoint(place: str, tmp_path: Path, make: Any) -> None:
    url = uploaded(make(tmp_path / "hf"), f"{place}/hf")
    target = blank(STATE)
    dcp.load(target, checkpoint_id=url, storage_reader=BucketReader(), no_dist=True)
    assert_same(target, STATE)
    assert_same(bucketpoint.load(url), STATE)
    some = bucketpoint.load(url, keys="lm_head")
    assert list(some) == ["lm_head.weight"]
    wider = {"model.embed.weight": torch.zeros(512, 256)}
    dcp.load(wider, checkpoint_id=url, storage_reader=BucketReader(), no_dist=True)
    assert torch.equal(
        torch.nan_to_num(wider["model.embed.weight"]), torch.nan_to_num(STATE["model.embed.weight"].float())
    )


@pytest.mark.parametrize("make", [single, sharded])
def test_shows_and_verifies_what_can_be_verified(tmp_path: Path, make: Any) -> None:
    folder = make(tmp_path / "hf")
    summary = summarise(open_checkpoint(folder, plain=True))
    assert not summary.ours
    assert {key: entry.shape for key, entry in summary.entries.items()} == {
        key: tuple(tensor.shape) for key, tensor in STATE.items()
    }
    report = verify(open_checkpoint(folder))
    assert report.ok
    assert report.unchecked == {"its writer recorded no checksum": sum(tensor.nbytes for tensor in STATE.values())}
    assert report.notes == ["safetensors have no checksums: their headers, sizes and ETags were checked"]


def load_box(reader: BucketReader, name: str, offsets: Any, lengths: Any, dtype: torch.dtype) -> torch.Tensor:
    """Load a box of a tensor, as a rank of FSDP or of tensor parallelism."""
    target, at = torch.zeros(*lengths, dtype=dtype), torch.Size([0] * len(offsets))
    metadata, planner = reader.read_metadata(), dcp.DefaultLoadPlanner()
    (index,) = [index for index in metadata.storage_data if index.fqn == name]
    box = {"storage_offsets": torch.Size(offsets), "lengths": torch.Size(lengths)}
    item = ReadItem(LoadItemType.TENSOR, dest_index=index, dest_offsets=at, storage_index=index, **box)
    planner.set_up_planner({name: target}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(LoadPlan([item]), planner).wait()
    return target


def test_reads_only_the_wanted_rows(tmp_path: Path) -> None:
    rows = {"w": filled((4096, 1024), torch.float32)}
    single(tmp_path / "hf", rows)
    url = str(tmp_path / "hf")
    for start in (0, 1024, 3072):
        reader = BucketReader(url)
        target = load_box(reader, "w", (start, 0), (1024, 1024), torch.float32)
        assert torch.equal(target.view(torch.int32), rows["w"][start : start + 1024].view(torch.int32))
        assert reader.stats is not None
        assert reader.stats.read_bytes == target.nbytes


def test_reads_a_header_of_any_length_in_two_requests(tmp_path: Path) -> None:
    many = {f"a tensor with a long name {number:06}": torch.full((1,), float(number)) for number in range(4000)}
    single(tmp_path / "hf", many)
    assert (tmp_path / "hf" / SINGLE_NAME).read_bytes()[:8] > struct.pack("<Q", 128 << 10)
    assert_same(bucketpoint.load(str(tmp_path / "hf")), many)


# -- bad input --------------------------------------------------------------------------------------------------------


def raw(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / SINGLE_NAME).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return folder


def tensor(start: int, stop: int, shape: Any = None) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        ({"w": tensor(0, 8)}, bytes(8), 1 << 60),
        ({"w": tensor(0, 8)}, bytes(8), 99_999_999),
        ({"w": tensor(0, 8), "v": tensor(4, 12)}, bytes(12), None),
        ({"w": tensor(0, 8), "v": tensor(0, 8)}, bytes(8), None),
        ({"w": tensor(0, 9)}, bytes(8), None),
        ({"w": tensor(0, 8)}, bytes(9), None),
        ({"w": tensor(0, 1 << 61)}, bytes(8), None),
        ({"w": tensor(0, 8, [1 << 40, 1 << 40])}, bytes(8), None),
        (b'{"w":%b,"w":%b}' % (2 * (json.dumps(tensor(0, 8)).encode(),)), bytes(8), None),
        (b"[" * 100_000, b"", None),
    ],
    ids=["huge", "beyond the file", "overlap", "same", "long", "short", "large", "shape", "twice", "nested"],
)
def test_refuses_a_header_that_lies_in_little_memory(
    tmp_path: Path, header: Any, data: bytes, length: int | None
) -> None:
    folder = raw(tmp_path / "hf", header, data, length)
    open_checkpoint(single(tmp_path / "sound"))
    tracemalloc.start()
    with pytest.raises(MetadataError, match="malformed"):
        BucketReader(str(folder)).read_metadata()
    with pytest.raises(MetadataError):
        bucketpoint.load(str(folder))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_bounds_the_bytes_of_all_headers_together(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hf")
    size = sum(struct.unpack("<Q", (folder / name).read_bytes()[:8])[0] for name in FILES)
    store, prefix = open_store(str(folder))
    SafetensorsFolder(store, prefix, str(folder), max_bytes=4 * size).read()
    with pytest.raises(MetadataError, match="headers of the files have more than"):
        SafetensorsFolder(store, prefix, str(folder), max_bytes=4 * size - 1).read()


def test_names_the_missing_file_of_an_index(place: str, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hf")
    (folder / min(FILES)).unlink()
    url = uploaded(folder, f"{place}/hf")
    for call in (
        lambda: bucketpoint.load(url),
        lambda: dcp.load(blank(STATE), checkpoint_id=url, storage_reader=BucketReader(), no_dist=True),
    ):
        with pytest.raises((CorruptDataError, CheckpointException), match=f"are missing: {min(FILES)}"):
            call()


@pytest.mark.parametrize("kind", ["file", "minio"])
def test_refuses_a_file_that_is_replaced_during_a_load(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    root = in_minio(request, monkeypatch) if kind == "minio" else f"file://{tmp_path}/there"
    url = uploaded(sharded(tmp_path / "hf"), f"{root}/hf")
    reader = BucketReader(url)
    original = BucketReader.set_up_storage_reader

    def replaced(self: Any, *arguments: Any, **options: Any) -> None:
        other = {key: torch.zeros_like(STATE[key]) for key in FILES[max(FILES)]}
        os.utime(single(tmp_path / "other", other, max(FILES)))
        uploaded(tmp_path / "other", url)
        original(self, *arguments, **options)

    monkeypatch.setattr(BucketReader, "set_up_storage_reader", replaced)
    with pytest.raises(CheckpointException, match=r"CorruptDataError: .* missing or was replaced") as refused:
        dcp.load(blank(STATE), storage_reader=reader, no_dist=True)
    assert max(FILES) in str(refused.value)


OUTSIDE = ("../hf2/model.safetensors", "/etc/model.safetensors", "a/../../b", "")
NO_FILE = ({}, {"w\ud800": "a.safetensors"}, {"w": "a\ud800.safetensors"}, {"w": 1})


@pytest.mark.parametrize(
    ("index", "error"),
    [*(({"w": file}, UnsafeDataError) for file in OUTSIDE), *((index, MetadataError) for index in NO_FILE)],
)
def test_refuses_an_index_that_leads_out_of_the_folder_or_names_nothing_or_no_text(
    tmp_path: Path, index: Any, error: type[BucketpointError]
) -> None:
    folder = sharded(tmp_path / "hf")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(error) as refused:
        bucketpoint.load(str(folder))
    assert refused.value.remedy
    with pytest.raises(MetadataError, match="half a surrogate pair"):
        bucketpoint.load(str(raw(tmp_path / "single", {"w\ud800": tensor(0, 8)}, bytes(8))))


@pytest.mark.parametrize("make", [single, sharded])
def test_loads_without_the_right_to_list(minio: S3Server, tmp_path: Path, make: Any) -> None:
    """S3 then answers 403 for a missing object, and so does MinIO for those that a policy does not name."""
    bucket, folder = minio.make_bucket(), make(tmp_path / "hf")
    there = [f"arn:aws:s3:::{bucket}/hf/{path.name}" for path in folder.iterdir() if path.name != min(FILES)]
    options = minio.limited_options({"Effect": "Allow", "Action": "s3:GetObject", "Resource": there})
    for path in folder.iterdir():
        minio.client().put_object(Bucket=bucket, Key=f"hf/{path.name}", Body=path.read_bytes())
    with pytest.raises(AccessDeniedError):
        bucketpoint.load(f"s3://{bucket}/none", storage_options=options)
    if make is single:
        assert_same(bucketpoint.load(f"s3://{bucket}/hf", storage_options=options), STATE)
    else:
        with pytest.raises(CorruptDataError, match=f"are missing: {min(FILES)}"):
            bucketpoint.load(f"s3://{bucket}/hf", storage_options=options)


@pytest.mark.parametrize("name", ["data/ours", "__0_0.distcp"])
def test_refuses_safetensors_in_place_of_a_save_that_did_not_commit(place: str, tmp_path: Path, name: str) -> None:
    url = uploaded(single(tmp_path / "hf"), f"{place}/hf")
    store, prefix = open_store(url)
    path = keys.data_path(keys.new_token(), 0, "model", 0) if name == "data/ours" else name
    # A checkpoint below is no part of this one.
    store.put(keys.join(prefix, f"step-5/{path}"), [memoryview(b"data")])
    assert_same(bucketpoint.load(url), STATE)
    store.put(keys.join(prefix, path), [memoryview(b"data")])
    for call in (
        lambda: bucketpoint.load(url),
        lambda: open_checkpoint(url),
        lambda: dcp.load(blank(STATE), checkpoint_id=url, storage_reader=BucketReader(), no_dist=True),
    ):
        with pytest.raises((IncompleteCheckpointError, CheckpointException), match=r"model\.safetensors, and data of"):
            call()


def test_prefers_a_commit_to_safetensors_beside_it(tmp_path: Path) -> None:
    folder = str(single(tmp_path / "hf"))
    bucketpoint.save({"w": torch.ones(3)}, folder)
    assert_same(bucketpoint.load(folder), {"w": torch.ones(3)})
