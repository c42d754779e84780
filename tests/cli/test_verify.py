"""`verify` finds every byte that is not what was saved, on every store, and says what it could not compare."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemWriter

import bucketpoint.checkpoint.verify as module
from bucketpoint import BucketReader, BucketWriter
from bucketpoint.checkpoint.checksums import ObjectCheck, Region
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import Verification, verify
from bucketpoint.format.pickles.metadata_vocabulary import trailer
from bucketpoint.retention import Keep, Prune, RetentionPolicy
from bucketpoint.stores import open_store
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.checksum import crc32c
from cli.conftest import Program, budgets, save, state
from transfer.wrappers import CountingStore

TIGHT = TransferOptions(max_inflight_bytes=4 << 20, connections=4)
"""Pieces of 1 MiB: blocks and frames come in several of them."""


def replaced(url: str, path: str, change: Callable[[bytearray], Any]) -> None:
    """Change an object behind everybody's back."""
    store, prefix = open_store(url)
    key = f"{prefix}/{path}" if prefix else path
    data = bytearray(store.get(key)[0])
    change(data)
    store.put(key, [memoryview(data)])


def flip(at: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at] ^= 0x10

    return change


def place(url: str, fqn: str) -> tuple[str, Any]:
    saved = open_checkpoint(url)
    return next((info.path, info) for index, info in saved.items if index.fqn == fqn)


def kinds(found: Verification) -> set[str]:
    return {one.kind for one in found.damage}


def test_compares_every_byte_of_a_whole_checkpoint(root: str, program: Program) -> None:
    save(f"{root}/a")
    done = program("verify", f"{root}/a", "--progress", "--json")
    assert done.code == 0, done.err
    assert (done.json["schema"], done.json["command"], done.json["ok"]) == (2, "verify", True)
    assert done.json["damage"] == []
    assert done.json["unchecked_bytes"] == {}
    assert done.json["notes"] == []
    assert done.json["read_bytes"] == done.json["checked_bytes"] > 12 << 20
    assert " is whole: " in (said := program("verify", f"{root}/a").out)
    assert said.endswith(" read, all compared with a checksum\n")


def test_finds_and_names_a_flipped_byte_wherever_it_is(root: str, program: Program) -> None:
    url = f"{root}/a"
    save(url)
    path, info = place(url, "model.large")
    other, optimizer = place(url, "optim.large")
    item_path, item = place(url, "step")
    payload = info.offset + info.payload_offset
    for fqn, there, at in [
        ("model.large", path, info.offset + 40),  # in the header
        ("model.large", path, payload),
        ("model.large", path, payload + info.payload_nbytes - 1),
        ("model.large", path, info.offset + info.length - 2),  # in the trailer
        ("model.large", path, info.table_offset + 5),
        ("step", item_path, item.offset + item.length // 2),
        ("optim.large", other, optimizer.offset + optimizer.payload_offset + 77),
    ]:
        replaced(url, there, flip(at))
        done = program("verify", url, "--json")
        assert done.code == 1
        wrong = [one for one in done.json["damage"] if one["kind"] == "checksum"]
        assert [(one["item"], one["object"]) for one in wrong] == [(fqn, there)]
        assert wrong[0]["start"] <= at < wrong[0]["stop"]
        assert f"DAMAGED {fqn} ({there} bytes " in program("verify", url).out
        replaced(url, there, flip(at))


def test_names_every_damage_of_one_run_and_the_lost_items_of_a_truncated_object(root: str, program: Program) -> None:
    url = f"{root}/a"
    save(url)
    (large, info), (optimizer, _), (step, _) = (place(url, fqn) for fqn in ("model.large", "optim.large", "step"))
    store, prefix = open_store(url)
    replaced(url, large, flip(info.offset + info.payload_offset))
    replaced(url, optimizer, lambda data: data.__delitem__(slice(len(data) // 2, None)))
    store.delete([f"{prefix}/{step}" if prefix else step])
    done = program("verify", url, "--json")
    assert done.code == 1
    named = {(one["kind"], one["object"], one["item"]) for one in done.json["damage"]}
    assert {kind for kind, path, _ in named if path == optimizer} <= {"wrong-size", "replaced-object", "checksum"}
    whole = [("wrong-size", optimizer, None), ("wrong-size", optimizer, "optim.large")]
    assert {*whole, ("checksum", large, "model.large")} <= named
    assert ("missing-object", step) in {(kind, path) for kind, path, _ in named}


def test_names_an_object_put_back_with_the_same_bytes_where_a_load_would_refuse(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a"
    save(url)
    path, _ = place(url, "model.large")
    replaced(url, path, lambda data: None)
    assert kinds(verify(open_checkpoint(url))) == {"replaced-object"}
    # As its copy, which has other ETags.
    moved = open_checkpoint(url)
    moved.facts["endpoint"] = "elsewhere"
    assert verify(moved).ok


@pytest.mark.parametrize("recorded", ["beside", "in a catalog"])
def test_finds_damage_of_the_metadata_by_the_record(root: str, program: Program, recorded: str) -> None:
    url = f"{root}/step-1"
    save(url) if recorded == "beside" else in_run(root, state())
    assert program("verify", url, "--json").json["notes"] == []
    data = open_checkpoint(url).data
    # Within a string that nothing is compared with, the metadata still decodes. With one flipped bit in the name of
    # bucketpoint's own part, it looks like another writer's.
    for at in (data.index(torch.__version__.partition("+")[0].encode()), data.index(b"\x0bbucketpoint\x94") + 3):
        replaced(url, ".metadata", flip(at))
        done = program("verify", url, "--json")
        assert (done.code, done.json["error"]["kind"]) == (1, "MetadataError")
        # Without its trailer, as versions before 0.3 write it, only the record has a checksum of the metadata.
        replaced(url, ".metadata", lambda now: now.__delitem__(slice(-len(trailer(0)), None)))
        done = program("verify", url, "--json")
        assert (done.code, {one["kind"] for one in done.json["damage"]}) == (1, {"metadata"})
        replaced(url, ".metadata", lambda now: now.__setitem__(slice(None), data))


def test_verifies_every_checkpoint_below_a_url(root: str, program: Program) -> None:
    for name in ("run/step-1", "run/step-2", "other/deep/step-3"):
        save(f"{root}/{name}")
    done = program("verify", root, "--all", "--json")
    assert done.code == 0, done.out
    urls = [f"{root}/other/deep/step-3", f"{root}/run/step-1", f"{root}/run/step-2"]
    assert [one["url"] for one in done.json["checkpoints"]] == urls
    replaced(f"{root}/run/step-1", ".metadata", lambda data: data.__delitem__(slice(100, None)))
    path, info = place(f"{root}/run/step-2", "model.large")
    replaced(f"{root}/run/step-2", path, flip(info.offset + 5000))
    done = program("verify", root, "--all", "--json")
    assert done.code == 1
    found = {one["url"]: one for one in done.json["checkpoints"]}
    assert found[urls[0]]["damage"] == []
    assert found[urls[1]]["error"]["kind"] == "MetadataError"
    assert "checksum" in {one["kind"] for one in found[urls[2]]["damage"]}
    assert f"1 of 3 checkpoints below {root} is whole" in program("verify", root, "--all").out
    assert program("verify", f"{root}/nothing", "--all").code == 3
    assert "; --all verifies every checkpoint below the URL\n" in program("verify", root).err


def test_reports_no_damage_for_a_missing_or_older_record(root: str, program: Program) -> None:
    save(f"{root}/a")
    save(f"{root}/b")
    store, prefix = open_store(root)
    keys = [f"{prefix}/{name}/.bucketpoint.json".lstrip("/") for name in "ab"]
    store.put(keys[0], [memoryview(store.get(keys[1])[0])])
    store.delete([keys[1]])
    assert "another save" in program("verify", f"{root}/a").out
    assert "no commit record" in program("verify", f"{root}/b").out


@pytest.mark.contract
@pytest.mark.parametrize("crc", [True, False], ids=["with zip checksums", "without"])
def test_checks_what_can_be_checked_of_another_writer(tmp_path: Path, crc: bool) -> None:
    torch.serialization.set_crc32_options(crc)
    try:
        dcp.save(state(), storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    found = verify(open_checkpoint(tmp_path), TIGHT)
    assert found.ok
    assert bool(found.checked_bytes) == crc
    assert found.unchecked == ({} if crc else {"its writer recorded no checksum": found.read_bytes})
    path, info = place(str(tmp_path), "model.large")
    replaced(str(tmp_path), path, flip(info.offset + info.length // 2))
    assert kinds(verify(open_checkpoint(tmp_path), TIGHT)) == ({"checksum"} if crc else set())
    (tmp_path / path).unlink()
    assert kinds(verify(open_checkpoint(tmp_path), TIGHT)) == {"missing-object"}


def test_reads_each_byte_once_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = budgets(monkeypatch, module)
    save(str(tmp_path))
    saved = open_checkpoint(tmp_path)
    store = CountingStore(saved.store)
    object.__setattr__(saved, "store", store)
    found = verify(saved, TIGHT)
    assert found.ok
    tables = sum(info.table_nbytes for _, info in saved.items)
    assert found.read_bytes == sum(info.length for _, info in saved.items) + tables
    # The tables of checksums come first, as they tell what the blocks are compared with.
    assert 0 < tables == store.received - found.read_bytes
    assert 0 < pools[0].peak_bytes <= TIGHT.max_inflight_bytes


def test_names_a_chunk_without_data(tmp_path: Path) -> None:
    save(str(tmp_path))
    saved = open_checkpoint(tmp_path)
    assert saved.metadata.storage_data is not None
    lost = next(index for index in saved.metadata.storage_data if index.fqn == "model.large")
    del saved.metadata.storage_data[lost]
    found = verify(saved)
    assert [(one.kind, one.item) for one in found.damage] == [("missing-item", "model.large")]
    assert "no item uses these bytes" in found.unchecked


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_finds_exactly_the_regions_that_differ_whatever_the_pieces(data: st.DataObject) -> None:
    content = bytes(data.draw(st.binary(min_size=1, max_size=300)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(content)), max_size=8)) | {0, len(content)})
    regions = [
        Region(low, high, crc32c(memoryview(content[low:high])), "x", "payload")
        for low, high in itertools.pairwise(cuts)
        if data.draw(st.booleans())
    ]
    seen = bytearray(content)
    flips = data.draw(st.sets(st.integers(0, len(content) - 1), max_size=3))
    for at in flips:
        seen[at] ^= 1
    check = ObjectCheck(regions)
    step = data.draw(st.integers(1, len(content)))
    pieces = [(at, memoryview(seen)[at : at + step]) for at in range(0, len(content), step)]
    for at, view in data.draw(st.permutations(pieces)):
        check.note(at, view)
    assert check.wrong() == [region for region in regions if any(region.start <= at < region.stop for at in flips)]


def in_run(root: str, content: dict[str, Any], step: int = 1) -> str:
    writer = BucketWriter(retention=RetentionPolicy(Keep(100), prune=Prune(when="manual")))
    url = f"{root}/step-{step}"
    dcp.save(content, checkpoint_id=url, storage_writer=writer, no_dist=True)
    return url


def test_learns_from_a_record_in_the_catalog_of_metadata_that_was_put_back(root: str, program: Program) -> None:
    first, second = in_run(root, state(1.0), 1), in_run(root, state(1.0), 2)
    store, prefix = open_store(second)
    theirs = store.get(f"{prefix}/.metadata" if prefix else ".metadata")[0]
    replaced(first, ".metadata", lambda data: (data.clear(), data.extend(theirs)))
    done = program("verify", first, "--json")
    assert done.json["notes"] == [
        ".metadata was not compared with a record: there is no commit record beside it, and the commit record in a "
        "catalog above it belongs to another save"
    ]


MANY = {"model": {f"w{n}": torch.full((2,), float(n)) for n in range(900)}}


@pytest.mark.parametrize("how", ["whole", "flipped", "shorter", "gone"])
def test_checks_the_index(root: str, program: Program, how: str) -> None:
    url = in_run(root, MANY)
    index = open_checkpoint(url).index
    assert index is not None
    if how == "flipped":
        replaced(url, index.path, flip(index.size // 2))
    elif how == "shorter":
        replaced(url, index.path, lambda data: data.pop())
    elif how == "gone":
        store, prefix = open_store(url)
        store.delete([f"{prefix}/{index.path}" if prefix else index.path])
    done = program("verify", url, "--json")
    found = [(one["kind"], one["object"]) for one in done.json["damage"]]
    kinds = {"flipped": "checksum", "shorter": "wrong-size", "gone": "missing-object"}
    assert found == ([(kinds[how], index.path)] if how in kinds else [])
    assert done.code == (1 if found else 0)
    # It is none of the data, and loads do without it.
    target = {"model": {name: torch.zeros(2) for name in MANY["model"]}}
    dcp.load(target, checkpoint_id=url, storage_reader=BucketReader(), no_dist=True)
    assert target["model"]["w7"].tolist() == [7, 7]
    # A copy has no index, and names none.
    if how == "whole":
        assert program("cp", url, f"{root}/copy", "--verify").code == 0
        assert open_checkpoint(f"{root}/copy").index is None
