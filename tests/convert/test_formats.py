"""Each format becomes each other one, value for value, whoever wrote it; and those whose format it is read it."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import types
import warnings
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

import bucketpoint
from bucketpoint import BucketWriter
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME, SINGLE_NAME
from bucketpoint.checkpoint.verify import verify
from bucketpoint.convert import ConvertOptions, plan_conversion
from bucketpoint.errors import BucketpointError, CheckpointExistsError, InvalidURLError, MismatchError
from convert.chunked import GridPlanner
from convert.conftest import contents, converted, load, names, state
from dcp.states import assert_same, blank, filled, same, varied
from kit.servers import S3Server

safetensors = pytest.importorskip("safetensors.torch")

GRIDS = [(1,), (3,), (1, 4), (2, 3)]


def ours(url: Any, value: Any, **options: Any) -> None:
    dcp.save(value, checkpoint_id=str(url), storage_writer=BucketWriter(), no_dist=True, **options)


@pytest.mark.contract
@pytest.mark.parametrize("single_file", [True, False])
def test_converts_what_torch_wrote_and_its_reader_loads_it(tmp_path: Path, single_file: bool) -> None:
    value = varied()
    writer = FileSystemWriter(str(tmp_path / "a"), single_file_per_rank=single_file)
    dcp.save(value, storage_writer=writer, no_dist=True)
    done = converted(tmp_path / "a", tmp_path / "b", object_bytes=4 << 20)
    assert done.objects > 2
    # All but what does not fill its storage, or not in its order.
    assert done.checked_bytes > 20_000_000
    assert_same(load(tmp_path / "b", value), value)
    assert verify(open_checkpoint(tmp_path / "b")).ok
    facts = open_checkpoint(tmp_path / "b").facts
    assert facts["converted_from"] == str(tmp_path / "a")
    target = blank(value)
    dcp.load(target, storage_reader=FileSystemReader(str(tmp_path / "b")), no_dist=True)
    assert_same(target, value)


def test_converts_from_a_bucket_by_fsspec_into_a_bucket(root: str) -> None:
    url, value = "memory://convert/theirs", state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(value, storage_writer=FsspecWriter(url), no_dist=True)
    converted(url, f"{root}/ours")
    assert_same(load(f"{root}/ours", value), value)


@pytest.mark.parametrize("strategy", ["round robin", "hex"])
def test_converts_what_s3torchconnector_wrote(minio_root: str, minio: S3Server, strategy: str) -> None:
    connector = pytest.importorskip("s3torchconnector.dcp", reason="the crt extra is not installed")
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import s3_prefix_strategy as known

    value = state()
    prefixes = {
        "round robin": lambda: known.RoundRobinPrefixStrategy(["shard1", "shard2"], epoch_num=3),
        "hex": known.HexPrefixStrategy,
    }
    writer = connector.S3StorageWriter(
        region=minio.region,
        path=f"{minio_root}/theirs",
        s3client_config=S3ClientConfig(force_path_style=True),
        prefix_strategy=prefixes[strategy](),
    )
    dcp.save(value, storage_writer=writer, no_dist=True)
    converted(f"{minio_root}/theirs", f"{minio_root}/ours")
    assert_same(load(f"{minio_root}/ours", value), value)


def test_reads_metadata_with_a_path_of_multi_storage_client_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"w": torch.ones(3)}
    dcp.save(value, storage_writer=FileSystemWriter(str(tmp_path / "a")), no_dist=True)
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    module = types.ModuleType("multistorageclient.pathlib")
    kind = type("MultiStoragePath", (), {"__module__": module.__name__})
    module.MultiStoragePath = kind  # type: ignore[attr-defined]
    metadata.storage_meta.checkpoint_id = there = kind()
    there.__dict__.update({"_path": "msc://profile/a", "_internal_path": PurePosixPath("/a")})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__.partition(".")[0], module)
        patch.setitem(sys.modules, module.__name__, module)
        (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    converted(tmp_path / "a", tmp_path / "b")
    assert_same(load(tmp_path / "b", value), value)
    found = open_checkpoint(tmp_path / "a").metadata.storage_meta
    assert found is not None
    assert os.fspath(found.checkpoint_id) == "msc://profile/a"  # type: ignore[arg-type]


MIXED = {
    "optim": {"state": {0: {"m": torch.ones(3)}, 1: {"m": torch.ones(2)}}, "odd": {2: 5, "3": 6}},
    "list": [{7: 1}],
}
AS_TEXT = {
    "optim": {"state": {"0": {"m": torch.ones(3)}, "1": {"m": torch.ones(2)}}, "odd": {"2": 5, "3": 6}},
    "list": [{"7": 1}],
}


@pytest.mark.parametrize("written", ["saved", "torch"])
def test_restores_integer_keys_that_are_known_from_a_file_and_from_ours(tmp_path: Path, written: str) -> None:
    at = tmp_path / ("a.pt" if written == "torch" else "a")
    if written == "torch":
        torch.save(MIXED, at)
    else:
        bucketpoint.save(MIXED, at)
    converted(at, tmp_path / "b.pt")
    assert same(torch.load(tmp_path / "b.pt"), MIXED)
    converted(at, tmp_path / "c", "bucketpoint", exclude=["optim.odd"])
    less = {"optim": {"state": MIXED["optim"]["state"]}, "list": MIXED["list"]}
    assert same(bucketpoint.load(tmp_path / "c"), less)
    converted(tmp_path / "c", tmp_path / "d.pt")
    assert same(torch.load(tmp_path / "d.pt"), less)


def test_names_keys_that_may_have_been_integers_where_the_source_notes_none(tmp_path: Path) -> None:
    dcp.save(MIXED, storage_writer=FileSystemWriter(str(tmp_path / "a")), no_dist=True)
    plan = plan_conversion(tmp_path / "a", tmp_path / "b.pt")
    for to in ("bucketpoint", "torch"):
        assert plan.source.text_keys(to) == ["list.0", "optim.odd", "optim.state"]
    assert plan.source.text_keys("safetensors") == []
    converted(tmp_path / "a", tmp_path / "b.pt")
    assert same(torch.load(tmp_path / "b.pt"), AS_TEXT)
    bucketpoint.save(MIXED, tmp_path / "noted")
    for source in ("b.pt", "noted"):
        assert plan_conversion(tmp_path / source, tmp_path / "c", to_format="torch").source.text_keys("torch") == []


def test_refuses_dcp_as_a_target_and_names_bucketpoint(tmp_path: Path) -> None:
    torch.save(MIXED, tmp_path / "a.pt")
    with pytest.raises(BucketpointError, match="dcp is not a target") as refused:
        plan_conversion(tmp_path / "a.pt", tmp_path / "b", to_format="dcp")
    assert "Use the format bucketpoint" in (refused.value.remedy or "")


@pytest.mark.contract
def test_converts_a_file_of_torch_save_to_ours_and_back(root: str, tmp_path: Path) -> None:
    value = varied()
    torch.save(value, tmp_path / "a.pt")
    converted(tmp_path / "a.pt", f"{root}/ours")
    assert_same(load(f"{root}/ours", value), value)
    converted(f"{root}/ours", f"{root}/back.pt")
    (tmp_path / "back.pt").write_bytes(contents(root, "back.pt"))
    with zipfile.ZipFile(tmp_path / "back.pt") as archive:
        assert archive.testzip() is None
    for mmap in (False, True):
        found = torch.load(tmp_path / "back.pt", weights_only=False, mmap=mmap)
        assert_same(found, value)
    assert type(found["ordered"]["a"]) is int
    # And by ranges of the file in the bucket.
    converted(f"{root}/back.pt", f"{root}/again")
    assert_same(load(f"{root}/again", value), value)


@pytest.mark.contract
@pytest.mark.parametrize("cuts", GRIDS, ids=str)
def test_joins_chunks_to_whole_tensors(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    value = {"model": {**state()["model"], "deep": filled((5, 4, 3, 2), torch.float64, seed=9)}}
    ours(tmp_path / "ours", value, planner=GridPlanner(*cuts))
    assert len(open_checkpoint(tmp_path / "ours").items) >= 6
    done = converted(tmp_path / "ours", tmp_path / "x.pt")
    assert_same(torch.load(tmp_path / "x.pt"), value)
    assert done.checked_bytes == sum(part.nbytes for part in value["model"].values())
    converted(tmp_path / "ours", tmp_path / "hf", "safetensors", prefix="model.")
    found = safetensors.load_file(tmp_path / "hf" / SINGLE_NAME)
    assert_same(found, value["model"])
    # And what was saved in chunks stays so where the format knows them.
    converted(tmp_path / "ours", tmp_path / "again", "bucketpoint")
    assert len(open_checkpoint(tmp_path / "again").items) == len(open_checkpoint(tmp_path / "ours").items)
    assert_same(load(tmp_path / "again", value), value)


@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_refuses_to_make_a_tensor_with_a_hole_whole(tmp_path: Path, to: str) -> None:
    writer = FileSystemWriter(str(tmp_path / "a"))
    dcp.save({"w": torch.ones(6, 4)}, storage_writer=writer, planner=GridPlanner(3), no_dist=True)
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["w"]
    gone = entry.chunks.pop(1)
    metadata.storage_data = {
        index: info for index, info in metadata.storage_data.items() if index.offset != gone.offsets
    }
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MismatchError, match="so it can be converted only"):
        converted(tmp_path / "a", tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("prefix", ["", "model."])
def test_converts_sharded_safetensors_and_back_from_bucket_to_bucket(root: str, tmp_path: Path, prefix: str) -> None:
    value = state()
    ours(f"{root}/ours", value)
    done = converted(f"{root}/ours", f"{root}/hf", "safetensors", prefix=prefix, shard_bytes=5_000)
    files = sorted(names(f"{root}/hf") - {INDEX_NAME})
    numbers = [f"{number:05d}-of-{done.objects:05d}" for number in range(1, done.objects + 1)]
    assert [re.fullmatch(r"model-[0-9a-f]{12}-(.*)\.safetensors", name)[1] for name in files] == numbers  # type: ignore[index]
    index = json.loads(contents(f"{root}/hf", INDEX_NAME))
    found: dict[str, torch.Tensor] = {}
    for name in files:
        part = safetensors.load(contents(f"{root}/hf", name))
        assert {key for key, file in index["weight_map"].items() if file == name} == part.keys()
        found.update(part)
    wanted = dict(value["model"])
    if not prefix:
        wanted = {f"model.{key}": tensor for key, tensor in wanted.items()}
        wanted["optim.state.large.step"] = value["optim"]["state"]["large"]["step"]
    assert_same(dict(sorted(found.items())), dict(sorted(wanted.items())))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    converted(f"{root}/hf", f"{root}/back", prefix=prefix)
    back = {"model": value["model"]}
    assert_same(load(f"{root}/back", back), back)


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    value = {f"dtype {dtype}": filled((3, 5), dtype) for dtype in (torch.float8_e5m2, torch.uint64, torch.complex64)}
    safetensors.save_file(value, tmp_path / "weights.safetensors")
    converted(tmp_path / "weights.safetensors", tmp_path / "ours", prefix="model.")
    wanted = {"model": value}
    assert_same(load(tmp_path / "ours", wanted), wanted)


def test_names_what_has_no_place_in_safetensors(tmp_path: Path) -> None:
    ours(tmp_path / "ours", state())
    plan = plan_conversion(
        tmp_path / "ours", tmp_path / "hf", to_format="safetensors", options=ConvertOptions(prefix="model.")
    )
    assert set(plan.layout.left_out) == {
        "optim.state.large.step",
        "optim.param_groups.0.lr",
        "optim.param_groups.0.params",
        "step",
    }
    with pytest.raises(MismatchError, match="no tensor that is to be written"):
        converted(tmp_path / "ours", tmp_path / "hf", "safetensors", prefix="modell.")
    for name in ("__metadata__", "\ud800"):
        torch.save({name: torch.ones(2)}, tmp_path / "named.pt")
        with pytest.raises(MismatchError, match=r"does not allow .* as the name"):
            converted(tmp_path / "named.pt", tmp_path / "hf", "safetensors")
    assert not (tmp_path / "hf").exists()


def test_keeps_sparse_tensors_as_they_are_between_checkpoints(tmp_path: Path) -> None:
    value = {"w": torch.eye(4).to_sparse(), "v": torch.ones(3)}
    ours(tmp_path / "a", value)
    converted(tmp_path / "a", tmp_path / "b", "bucketpoint")
    theirs, copied = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    for index, info in theirs.items:
        there = dict(copied.items)[index]
        assert (there.crc32c, there.length) == (info.crc32c, info.length)


def test_replaces_nothing_that_is_there_unless_told(tmp_path: Path) -> None:
    ours(tmp_path / "ours", state())
    ours(tmp_path / "others", {"v": torch.ones(3)})
    converted(tmp_path / "ours", tmp_path / "x.pt", "torch")
    before = (tmp_path / "x.pt").read_bytes()
    with pytest.raises(CheckpointExistsError):
        converted(tmp_path / "others", tmp_path / "x.pt", "torch")
    assert (tmp_path / "x.pt").read_bytes() == before
    converted(tmp_path / "ours", tmp_path / "again", "bucketpoint")
    with pytest.raises(CheckpointExistsError):
        converted(tmp_path / "x.pt", tmp_path / "again")
    other = {"v": torch.ones(3)}
    torch.save(other, tmp_path / "y.pt")
    converted(tmp_path / "y.pt", tmp_path / "again", overwrite=True)
    assert_same(load(tmp_path / "again", other), other)
    # What was replaced is gone.
    assert len(names(str(tmp_path / "again"))) == 3
    with pytest.raises(InvalidURLError, match="already"):
        converted(tmp_path / "again", tmp_path / "more")


def test_keeps_an_empty_tensor_empty_that_begins_beyond_its_storage(tmp_path: Path) -> None:
    value = {"w": torch.empty(3, 0, 3).transpose(0, 2)[2:]}
    assert value["w"].storage_offset()
    torch.save(value, tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "b.pt", "torch")
    assert_same(torch.load(tmp_path / "b.pt"), value)


@pytest.mark.parametrize(
    ("value", "zipped", "reason"),
    [
        (state(), False, r"older than torch 1\.6"),
        ([torch.ones(3)], True, "a list"),
        ({"a": {"b": 1}, "a.b": 2}, True, "duplicate"),
    ],
    ids=["of the old format", "of a list", "with one key twice"],
)
def test_refuses_a_file_whose_tensors_cannot_be_taken_apart(
    tmp_path: Path, value: Any, zipped: bool, reason: str
) -> None:
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(Exception, match=reason):
        converted(tmp_path / "a.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
