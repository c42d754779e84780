"""Sources that are no checkpoint: the error names what lies there and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME, SINGLE_NAME
from bucketpoint.convert import plan_conversion
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, MetadataError
from bucketpoint.format.safetensors_header import TensorEntry, encode_header

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html><html>Sign in</html>"


def index(folder: Path, **files: str) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": files}))


def refusal(url: Path) -> BucketpointError:
    with pytest.raises(BucketpointError) as refused:
        plan_conversion(url, url.parent / "out")
    return refused.value


@pytest.mark.parametrize("name", [SINGLE_NAME, INDEX_NAME, ".metadata", "model.bin", "part.safetensors"])
@pytest.mark.parametrize(
    ("content", "what", "remedy"),
    [
        (POINTER, "Git LFS pointer", "git lfs pull"),
        (PAGE, "web or XML page", "Download"),
        (b"", "is empty", "Download"),
    ],
)
def test_names_what_a_file_is_in_place_of_its_data(
    tmp_path: Path, name: str, content: bytes, what: str, remedy: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_bytes(content)
    if name == "part.safetensors":
        index(tmp_path / "a", w=name)
    error = refusal(tmp_path / "a" / name if name == "model.bin" else tmp_path / "a")
    assert isinstance(error, MetadataError)
    assert what in error.message
    assert error.key == name
    assert remedy in (error.remedy or "")


@pytest.mark.parametrize("source", ["auto", "torch", "safetensors"])
def test_names_the_files_of_a_folder_and_the_url_to_pass(tmp_path: Path, source: str) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointNotFoundError, match=r"but pytorch_model\.bin") as refused:
        plan_conversion(tmp_path, tmp_path / "out", from_format=source)
    assert refused.value.remedy == (
        f"`bucketpoint convert {tmp_path}/pytorch_model.bin TARGET` reads files of torch.save and safetensors"
    )
    (tmp_path / "pytorch_model-00002.bin").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"pytorch_model\.bin") as refused:
        plan_conversion(tmp_path, tmp_path / "out", from_format=source)
    assert "safetensors with an index" in (refused.value.remedy or "")


@pytest.mark.parametrize(
    ("held", "files", "named", "remedy"),
    [
        (["w", "v"], {"w": "one"}, "v of one.safetensors", "from one save"),
        (["w"], {"w": "one", "v": "one"}, "names one.safetensors", "from one save"),
        (
            ["w"],
            {"w": "one", "v": "two", "u": "three"},
            "three.safetensors, two.safetensors",
            "missing files beside the index",
        ),
    ],
    ids=["more tensors", "fewer tensors", "fewer files"],
)
def test_names_what_an_index_and_its_files_differ_in(
    tmp_path: Path, held: list[str], files: dict[str, str], named: str, remedy: str
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    entries = [TensorEntry(name, torch.uint8, (8,), 8 * at) for at, name in enumerate(held)]
    (folder / "one.safetensors").write_bytes(encode_header(entries) + bytes(8 * len(held)))
    index(folder, **{name: f"{file}.safetensors" for name, file in files.items()})
    error = refusal(folder)
    assert named in error.message
    assert remedy in (error.remedy or "")
