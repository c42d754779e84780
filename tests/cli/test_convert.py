"""`bucketpoint convert`: what it says, what it ends with, and the errors that a person makes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemWriter

from bucketpoint.convert import pipeline
from bucketpoint.convert.detect import open_object
from bucketpoint.errors import InvalidURLError
from bucketpoint.location import Location
from bucketpoint.stores import LocalStore
from cli.conftest import Program
from convert.conftest import load, names, state
from dcp.states import assert_same


def test_says_what_it_does_and_does_it(root: str, program: Program, tmp_path: Path) -> None:
    value = state()
    dcp.save(value, storage_writer=FileSystemWriter(str(tmp_path / "a")), no_dist=True)
    done = program("convert", str(tmp_path / "a"), f"{root}/b", "--dry-run", "--json")
    assert done.code == 0, done.err
    document = done.json
    assert document["dry_run"] is True
    assert document["checked_bytes"] is None
    assert names(root) == set()
    done = program("convert", str(tmp_path / "a"), f"{root}/b", "--verify", "--json", "--no-progress")
    assert done.code == 0, done.err
    said = done.json
    assert {**document, "dry_run": False, "committed": True} == {**said, "checked_bytes": None, "verification": None}
    assert (said["from"], said["to"], said["tensors"]) == ("dcp", "bucketpoint", 6)
    assert said["verification"] == {"read_bytes": said["bytes"], "damaged": []}
    assert_same(load(f"{root}/b", value), value)
    exported = ["--to", "safetensors", "--prefix", "model.", "--verify"]
    done = program("convert", f"{root}/b", str(tmp_path / "hf"), *exported)
    assert done.code == 0, done.err
    for text in ("bucketpoint to safetensors", "left out", "0 objects damaged"):
        assert text in done.out


def test_reports_what_is_left_out(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({f"w{n}": torch.ones(3) for n in range(3)} | {"wide": torch.ones(1, dtype=torch.complex128)}, "a.pt")
    arguments = ["convert", "a.pt", "hf", "--to", "safetensors", "--exclude", "w[12]", "--exclude", "wide"]
    for planned in (["--dry-run", "--json"], ["--json"]):
        document = program(*arguments, *planned).json
        assert (document["excluded"], document["left_out"], document["tensors"]) == (["w1", "w2", "wide"], [], 1)
    Path("hf/model.safetensors").unlink()
    assert "  left out by --exclude: w1, w2, wide\n" in program(*arguments).out


def test_reports_keys_that_are_no_integers_afterwards(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"optim": {"state": {0: torch.ones(3)}}}, "a.pt")
    assert "keys" not in program("convert", "a.pt", "a").out
    dcp.save({"optim": {"state": {0: torch.ones(3)}}}, storage_writer=FileSystemWriter("b"), no_dist=True)
    said = program("convert", "b", "b.pt", "--dry-run").out
    reason = "because the source does not record integer keys"
    assert f"  keys that look like integers are text, {reason}, in: optim.state\n" in said
    assert program("convert", "b", "b.pt", "--json").json["text_keys"] == ["optim.state"]


def test_writes_the_file_that_the_target_names_or_refuses(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.ones(3), "v": torch.ones(3)}}, "a.pt")
    assert program("convert", "a.pt", "b.safetensors", "--prefix", "model").code == 0
    with safe_open("b.safetensors", "pt") as file:
        assert set(file.keys()) == {"v", "w"}
    assert program("convert", "b.safetensors", "c.pt", "--prefix", "model").code == 0
    assert torch.load("c.pt")["model.w"].tolist() == [1, 1, 1]
    for code, said, arguments in [
        (5, "it has a b.safetensors", ["b.safetensors"]),
        (2, "more bytes than one file may have: 1", ["c.safetensors", "--max-shard-size", "1"]),
        (2, "has the name of a file of torch, and --to is bucketpoint", ["c.pt", "--to", "bucketpoint"]),
        (2, "has the name of a file of safetensors, and --to is torch", ["c.safetensors", "--to", "torch"]),
        (2, "has the name of a file of another format", ["c.npz"]),
    ]:
        done = program("convert", "a.pt", *arguments)
        assert (done.code, said in done.err) == (code, True), done.err
    assert not Path("c.safetensors").exists()


@pytest.mark.parametrize("target", ["b", "b.pt"])
def test_says_in_a_dry_run_that_it_would_replace(program: Program, tmp_path: Path, target: str) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    arguments = ["convert", str(tmp_path / "a.pt"), str(tmp_path / target), "--overwrite"]
    for replaces in (False, True):
        document = program(*arguments, "--dry-run", "--json").json
        assert (document["replaces"], "REPLACES" in program(*arguments, "--dry-run").out) == (replaces, replaces)
        assert program(*arguments, "--json").json["replaces"] is replaces


def test_exits_with_the_code_of_damage_for_a_damaged_target(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    monkeypatch.setattr(pipeline, "_sent", lambda entry, uploaded: 1)
    done = program("convert", str(tmp_path / "a.pt"), str(tmp_path / "b"), "--verify")
    assert done.code == 1
    assert "DAMAGED" in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere", "out"], 3, "CheckpointNotFoundError"),
        (["nowhere.pt", "out", "--from", "torch"], 3, "CheckpointNotFoundError"),
        (["ours", "out"], 2, "InvalidURLError"),
        (["ours", "theirs", "--to", "bucketpoint"], 5, "CheckpointExistsError"),
        (["theirs", "theirs"], 5, "CheckpointExistsError"),
        (["evil", "out"], 1, "UnsafeDataError"),
        (["msc://profile/x", "out"], 2, "pip install multi-storage-client"),
        (["rubbish", "out"], 1, "MetadataError"),
        (["modell.pt", "out"], 3, "There is no file at this URL (a local path)"),
        (["model.safetensors", "out"], 3, "There is no file at this URL (a local path)"),
        (["theirs", "out", "--prefix", "model."], 2, "--prefix is only for safetensors"),
        (["theirs", "out", "--exclude", "modle"], 2, "MismatchError"),
    ],
)
def test_exits_with_a_code_for_each_mistake(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "multistorageclient"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "multistorageclient", None)
    # fsspec keeps the classes that it has imported.
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "msc", raising=False)
    dcp.save(state(), storage_writer=FileSystemWriter("theirs"), no_dist=True)
    assert program("convert", "theirs", "ours").code == 0
    torch.save({"x": pytest.raises}, "evil")
    Path("rubbish").write_bytes(b"rubbish")
    done = program("convert", *arguments, "--json")
    assert (done.code, said in str(done.json["error"])) == (code, True), done.out
    assert not Path("out").exists()


def test_splits_a_path_or_url_into_root_and_key(tmp_path: Path) -> None:
    for url, root, key in [
        ("/a/b/c.pt", "/a/b", "c.pt"),
        ("/c.pt", "/", "c.pt"),
        ("file:///a/b.pt", "/a", "b.pt"),
        ("c.pt", str(Path.cwd()), "c.pt"),
    ]:
        store, found = open_object(Location.of(url))
        assert isinstance(store, LocalStore)
        assert (store.root, found) == (root, key)
    store, found = open_object(Location.of("s3://bucket/a/c.pt"))
    assert (store.url, found) == ("s3://bucket", "a/c.pt")
    for url in ("s3://bucket", "/a/..", "."):
        with pytest.raises(InvalidURLError):
            open_object(Location.of(url))
