"""`bucketpoint convert`: what it says, what it ends with, and the errors that a person makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from bucketpoint.cli.app import run
from bucketpoint.convert import CONVERT_OPTIONS
from bucketpoint.convert.detect import open_object, open_source
from bucketpoint.errors import InvalidURLError
from bucketpoint.stores import LocalStore
from convert.conftest import load, names, state
from dcp.states import assert_same


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["convert", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture(params=["file", "minio", "gcs", "memory"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    if request.param == "file":
        return f"{tmp_path}/there"
    if request.param == "memory":
        return f"memory://convert/{tmp_path.name}-{id(tmp_path)}"
    server = request.getfixturevalue(request.param)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return f"{'gs' if request.param == 'gcs' else 's3'}://{server.make_bucket()}/there"


def test_what_it_says_and_does(anywhere: str, program: Any, tmp_path: Path) -> None:
    value = state()
    dcp.save(value, storage_writer=FileSystemWriter(str(tmp_path / "a")), no_dist=True)
    code, out, err = program(tmp_path / "a", f"{anywhere}/b", "--dry-run", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["dry_run"] is True
    assert document["checked_bytes"] is None
    assert names(anywhere) == set()
    code, out, err = program(tmp_path / "a", f"{anywhere}/b", "--verify", "--json", "--no-progress")
    assert code == 0, err
    said = json.loads(out)
    assert {**document, "dry_run": False} == {**said, "checked_bytes": None, "verification": None}
    assert (said["from"], said["to"], said["tensors"]) == ("dcp", "bucketpoint", 6)
    assert said["verification"] == {"read_bytes": said["bytes"], "damaged": []}
    assert_same(load(f"{anywhere}/b", value), value)
    code, out, err = program(f"{anywhere}/b", tmp_path / "hf", "--to", "safetensors", "--prefix", "model.", "--verify")
    assert code == 0, err
    assert "bucketpoint to safetensors" in out
    assert "left out" in out
    assert "0 objects damaged" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere", "out"], 3, "CheckpointNotFoundError"),
        (["nowhere.pt", "out", "--from", "torch"], 3, "CheckpointNotFoundError"),
        (["ours", "out"], 2, "InvalidURLError"),
        (["ours", "theirs", "--to", "dcp"], 5, "CheckpointExistsError"),
        (["theirs", "theirs"], 5, "CheckpointExistsError"),
        (["evil", "out"], 1, "UnsafeDataError"),
        (["msc://profile/x", "out"], 2, "InvalidURLError"),
        (["rubbish", "out"], 1, "MetadataError"),
    ],
)
def test_errors_of_a_person(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save(state(), storage_writer=FileSystemWriter("theirs"), no_dist=True)
    assert program("theirs", "ours")[0] == 0
    torch.save({"x": pytest.raises}, "evil")
    Path("rubbish").write_bytes(b"rubbish")
    found, out, _ = program(*arguments, "--json")
    assert (found, json.loads(out)["error"]["kind"]) == (code, said)
    assert not Path("out").exists()


def test_a_package_that_is_missing_is_named() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(InvalidURLError, match="pip install multi-storage-client"):
        open_source("msc://profile/x", transfer=CONVERT_OPTIONS)


@pytest.mark.parametrize("size", ["0", "5XB", "GB", "-1", "1.5GB"])
def test_a_shard_size_that_is_none_is_a_usage_error(program: Any, size: str) -> None:
    assert program("a", "b", "--max-shard-size", size)[0] == 2


def test_the_way_to_an_object(tmp_path: Path) -> None:
    for url, root, key in [
        ("/a/b/c.pt", "/a/b", "c.pt"),
        ("/c.pt", "/", "c.pt"),
        ("file:///a/b.pt", "/a", "b.pt"),
        ("c.pt", str(Path.cwd()), "c.pt"),
    ]:
        store, found = open_object(url, storage_options=None, fs=None)
        assert isinstance(store, LocalStore)
        assert (store.root, found) == (root, key)
    store, found = open_object("s3://bucket/a/c.pt", storage_options=None, fs=None)
    assert (store.url, found) == ("s3://bucket", "a/c.pt")
    for url in ("s3://bucket", "/a/..", "."):
        with pytest.raises(InvalidURLError):
            open_object(url, storage_options=None, fs=None)
