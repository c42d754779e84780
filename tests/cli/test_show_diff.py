"""`show` says what a checkpoint is, `diff` where two differ; both read `.metadata` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemWriter

import bucketpoint.location as module
from bucketpoint import BucketWriter, __version__
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.summary import _whole_crc
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.transfer.checksum import crc32c
from cli.conftest import Program, save, state
from transfer.wrappers import CountingStore


def written(url: str, content: dict[str, Any]) -> None:
    dcp.save(content, checkpoint_id=url, storage_writer=BucketWriter(), no_dist=True)


def test_shows_what_a_checkpoint_is(root: str, program: Program) -> None:
    save(f"{root}/a")
    found = program("show", f"{root}/a", "--json").json
    saved = open_checkpoint(f"{root}/a")
    assert found["url"] == f"{root}/a"
    assert (found["writer"], found["world_size"], found["bucketpoint"]) == ("bucketpoint", 1, __version__)
    assert found["token"] == saved.facts["token"]
    assert found["torch"] == torch.__version__
    assert (found["objects"], found["items"], found["keys"], found["tensors"]) == (3, 5, 5, 4)
    tables = sum(info.table_nbytes for _, info in saved.items)
    assert found["bytes"] == sum(found["groups"].values()) == sum(info.length for _, info in saved.items) + tables
    assert set(found["groups"]) == {"model", "optim", "other"}
    assert found["dtypes"]["bfloat16"] == {"tensors": 1, "bytes": 60}
    assert [entry["key"] for entry in found["largest"]][:2] == ["model.large", "optim.large"]
    assert "entries" not in found
    entries = program("show", f"{root}/a", "--tensors", "--json").json["entries"]
    keys = ["model.empty", "model.large", "model.small", "optim.large", "step"]
    assert [entry["key"] for entry in entries] == keys
    text = program("show", f"{root}/a").out
    assert "model.large" in text
    assert "12.6 MB" in text


def test_reads_one_object_to_show(tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    save(str(tmp_path))
    stores: list[CountingStore] = []
    original = module.open_store

    def opened(*args: Any, **kwargs: Any) -> Any:
        store, prefix = original(*args, **kwargs)
        stores.append(CountingStore(store))
        return stores[-1], prefix

    monkeypatch.setattr(module, "open_store", opened)
    assert program("show", str(tmp_path), "--tensors").code == 0
    assert dict(stores[0].calls) == {"get": 1}


def test_tells_of_another_writer_what_there_is_and_calls_no_values_equal(tmp_path: Path, program: Program) -> None:
    save(str(tmp_path / "a"))
    dcp.save(state(2.0), storage_writer=FileSystemWriter(tmp_path / "b"), no_dist=True)
    found = program("show", str(tmp_path / "b"), "--json").json
    assert (found["writer"], found["world_size"], found["token"]) == ("other", None, None)
    assert (found["objects"], found["tensors"]) == (1, 4)
    assert set(found["groups"]) == {"model", "optim", "other"}
    done = program("diff", str(tmp_path / "a"), str(tmp_path / "b"), "--values", "--json")
    assert done.code == 0
    assert (done.json["values"]["equal"], len(done.json["values"]["unknown"])) == (0, 5)


@pytest.mark.parametrize(
    ("left", "says"),
    [
        ([".metadata"], "There is 1 object here but no .metadata"),
        (["deep/.metadata", "deep/data"], "newest checkpoints below it: deep"),
        (
            [f"step-{n}/.metadata" for n in (1000, 7, 500, 2000, 8, 900, 600)],
            "below it: step-500, step-600, step-900, step-1000, step-2000\n",
        ),
        (["__0.metadata"], "saved without collectives"),
    ],
    ids=["interrupted", "a root", "a run", "without collectives"],
)
def test_distinguishes_what_is_no_checkpoint(tmp_path: Path, program: Program, left: list[str], says: str) -> None:
    for name in left if left != [".metadata"] else ["data/x"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    done = program("show", str(tmp_path))
    assert done.code == 3
    assert says in done.err


def test_names_each_kind_of_difference(tmp_path: Path, program: Program) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    alike = {"same": torch.ones(4), "optimizer": {"state": {"exp_avg": torch.ones(60)}}}
    ours = {"only": torch.ones(3), "kind": torch.ones(2), "size": torch.ones(5), "value": torch.ones(6)}
    theirs = {"new": 5, "kind": torch.ones(2).half(), "size": torch.ones(6), "value": torch.zeros(6)}
    written(a, {**alike, **ours})
    written(b, {**alike, **theirs})
    done = program("diff", a, b, "--values", "--json")
    assert done.code == 1
    assert [entry["key"] for entry in done.json["only_a"]] == ["only"]
    assert [entry["key"] for entry in done.json["only_b"]] == ["new"]
    assert {one["key"] for one in done.json["changed"]} == {"kind", "size"}
    values = done.json["values"]
    assert (values["differ"], values["equal"], values["unknown"]) == (["value"], 2, [])
    assert values["groups"]["model"] == {"keys": 2, "bytes": 40, "differing_keys": 1, "differing_bytes": 24}
    assert program("diff", a, b, "--json").json["values"] is None
    text = program("diff", a, b, "--values").out.splitlines()
    assert text[2] == "- 1 only in A, + 1 only in B, ! 2 changed, ~ 1 with different values"
    assert [line[:1] for line in text[3:8]] == ["-", "+", "!", "!", "~"]
    assert text[8:] == ["optim: equal, 240 B in 1 key", "model: 24 B of 40 B differ, in 1 of 2 keys"]
    assert "optim: " not in program("diff", a, b).out
    same = program("diff", a, a, "--values", "--json")
    assert (same.code, same.json["ok"]) == (0, True)
    assert (same.json["values"]["differ"], same.json["values"]["equal"], same.json["values"]["unknown"]) == ([], 6, [])


@settings(max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 3), st.randoms(use_true_random=False))
def test_computes_one_checksum_of_a_tensor_however_its_rows_were_cut(
    cuts: list[int], columns: int, random: Any
) -> None:
    rows = sum(cuts)
    data = bytes(random.randrange(256) for _ in range(rows * columns))
    items, at = [], 0
    for size in cuts:
        piece = data[at * columns : (at + size) * columns]
        info = ItemInfo("p", 0, 9, None, 0, len(piece), crc32c(memoryview(piece)))
        items.append(((at, 0), (size, columns), info))
        at += size
    random.shuffle(items)
    # Two empty chunks at one row are the same place; DCP has none such.
    assert _whole_crc((rows, columns), sorted(items, key=lambda item: item[1])) == crc32c(memoryview(data))
    if len(cuts) > 1 and items[0][1][0]:
        assert _whole_crc((rows, columns), items[1:]) is None


def test_has_no_checksum_for_a_tensor_cut_by_columns() -> None:
    info = ItemInfo("p", 0, 9, None, 0, 4, 7)
    assert _whole_crc((2, 4), [((0, 0), (2, 2), info), ((0, 2), (2, 2), info)]) is None
