"""A conversion is there whole or not at all, and goes on where it stopped."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import bucketpoint.convert.journal as notes
import bucketpoint.convert.pipeline as run
from bucketpoint import BucketWriter
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME
from bucketpoint.checkpoint.verify import verify
from bucketpoint.convert import ConvertOptions, plan_conversion, run_conversion
from bucketpoint.convert.journal import NAME
from bucketpoint.errors import (
    BucketpointError,
    CheckpointExistsError,
    CommitConflictError,
    CorruptDataError,
    StoreError,
)
from bucketpoint.stores import LocalStore
from convert.chunked import GridPlanner
from convert.conftest import ONE_BY_ONE, SMALL, behind, converted, killed, load
from dcp.states import assert_same, filled
from kit.damage import flip
from kit.killed_jobs import run_and_kill
from kit.plugin import MakeProxy
from kit.servers import S3Server
from kit.tally import Tally
from tiers import sampled
from transfer.wrappers import CountingStore

safetensors = pytest.importorskip("safetensors.torch")

KEPT = ConvertOptions(object_bytes=64 << 10, shard_bytes=64 << 10)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each object is noted as soon as it is there, and before the next."""
    monkeypatch.setattr(run, "_BATCH_BYTES", 1)
    monkeypatch.setattr(notes, "NOTE_BYTES", 1)


def layers(value: float = 1.0) -> dict[str, Any]:
    return {"model": {f"layer {n}": torch.full((1 << 14,), value + n) for n in range(3)}, "step": 3}


def source_of(path: Path, value: float = 1.0) -> Path:
    dcp.save(layers(value), storage_writer=FileSystemWriter(str(path)), no_dist=True)
    return path


def planned(source: Any, target: Any, to: str, store: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plan whose target is behind a wrapper."""
    with behind(monkeypatch, store):
        return plan_conversion(source, target, to_format=to, options=KEPT, transfer=ONE_BY_ONE)


def loads(target: Any, to: str) -> bool:
    """Whether a whole checkpoint is there. Raises if there is one that is not what it should be."""
    try:
        if to == "safetensors":
            plan_conversion(target, f"{target} as it is", from_format=to)
            return True
        open_checkpoint(target)
    except BucketpointError:
        return False
    assert_same(load(target, layers()), layers())
    return True


@pytest.mark.parametrize("to", ["bucketpoint", "safetensors"])
def test_leaves_nothing_wherever_it_fails_and_continues_in_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    source = source_of(tmp_path / "a")
    number, most = 0, 0
    while True:
        number += 1
        target = tmp_path / f"b{number}"
        store = killed(lambda name, n, number=number: name == "put" and n == number)
        plan = planned(source, target, to, store, monkeypatch)
        try:
            run_conversion(plan)
        except StoreError:
            committed = loads(target, to)
        else:
            assert loads(target, to)
            if plan.place.store.calls["put"] < number:
                break
            # The record, or what else comes after the commit: its failure is none of the conversion's.
            continue
        assert not committed
        again = planned(source, target, to, CountingStore, monkeypatch)
        most = max(most, len(again.there))
        done = run_conversion(again)
        assert done.skipped == len(again.there)
        assert again.place.store.sent < again.left_nbytes + 50_000
        assert loads(target, to)
        assert not (target / NAME).exists()
        if to != "safetensors":
            assert verify(open_checkpoint(target)).ok
    # Once all of the data was there and the commit alone was missing.
    assert number > len(plan.layout.objects) > 2
    assert most == len(plan.layout.objects)


@pytest.mark.parametrize("to", ["bucketpoint", "safetensors"])
def test_tidies_only_in_the_next_run_after_a_kill_behind_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    source, target = source_of(tmp_path / "a"), tmp_path / "b"
    # What is committed is committed, whether or not its journal can be removed.
    run_conversion(planned(source, target, to, killed(lambda name, n: name == "delete"), monkeypatch))
    assert loads(target, to)
    assert (target / NAME).exists()
    again = planned(source, target, to, CountingStore, monkeypatch)
    assert again.finished
    run_conversion(again, verify=True)
    assert again.place.store.calls["put"] == 0
    assert loads(target, to)
    assert not (target / NAME).exists()


def convert_alone(rank: int, world: int, environment: dict[str, str], source: Path, target: str, to: str) -> None:
    """The whole conversion, in a process that can be killed."""
    os.environ.update(environment)
    run._BATCH_BYTES = notes.NOTE_BYTES = 1
    run_conversion(plan_conversion(source, target, to_format=to, options=KEPT, transfer=ONE_BY_ONE))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("to", ["bucketpoint", "safetensors"])
def test_leaves_nothing_that_loads_after_a_kill_and_continues_in_the_next_run(
    tmp_path: Path, minio_root: str, minio: S3Server, fault_proxy: MakeProxy, bucketpoint_tally: Tally, to: str
) -> None:
    """SIGKILL after requests of a conversion into a bucket, and to it alone: nothing is there to tidy up."""
    source, proxy = source_of(tmp_path / "a"), fault_proxy(minio)
    commit = "/.metadata" if to == "bucketpoint" else "/model.safetensors.index.json"

    def alone(name: str, after: int | None) -> tuple[str, bool]:
        target = f"{minio_root}/{name}"
        return target, run_and_kill(proxy, 1, after, convert_alone, minio.at(proxy.url).env, source, target, to)

    whole, died = alone("undisturbed", None)
    assert not died
    assert loads(whole, to)
    count, most, committed = len(proxy.exchanges), 0, set()
    for number in [*sampled(range(3, count - 3), 2, seed=20261122), count - 3, count - 2, count - 1]:
        target, died = alone(f"{number}", number)
        assert died, number
        bucketpoint_tally.made(f"kills of a conversion to {to}")
        sent = [one.request.key for one in proxy.exchanges if one.request.method == "PUT"]
        committed.add(any(key.endswith(commit) for key in sent))
        assert loads(target, to) == any(key.endswith(commit) for key in sent), f"{number} of {count}: {sent}"
        again = plan_conversion(source, target, to_format=to, options=KEPT, transfer=ONE_BY_ONE)
        most = max(most, len(again.there))
        done = run_conversion(again, verify=True)
        assert done.skipped == len(again.there)
        assert loads(target, to)
        assert not [key for key in minio.keys(target.split("/")[2], f"there/{number}/") if key.endswith(NAME)]
    assert most >= 2
    assert committed == {False, True}


def test_distinguishes_an_index_of_somebody_else_from_the_end_of_a_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = source_of(tmp_path / "a"), tmp_path / "b"
    interrupted(source, target, "safetensors", monkeypatch)
    (target / INDEX_NAME).write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointExistsError):
        planned(source, target, "safetensors", CountingStore, monkeypatch)


def interrupted(source: Path, target: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave two objects of a conversion and their notes."""
    with pytest.raises(StoreError):
        run_conversion(planned(source, target, to, killed(lambda name, n: name == "put" and n > 5), monkeypatch))


@pytest.mark.parametrize("to", ["bucketpoint", "safetensors"])
def test_begins_again_for_another_source_or_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    pattern = "*.distcp" if to == "bucketpoint" else "*.safetensors"
    other, source, target = source_of(tmp_path / "other", 5.0), source_of(tmp_path / "a"), tmp_path / "b"
    interrupted(other, target, to, monkeypatch)
    left = set(target.rglob(pattern))
    assert len(left) == 2
    plan = planned(source, target, to, CountingStore, monkeypatch)
    assert plan.there == {}
    run_conversion(plan)
    assert loads(target, to)
    if to == "bucketpoint":
        # What the other one left is gone.
        assert not any(path.exists() for path in left)
    # And where somebody wrote over an object between two runs, that one is written again.
    target = tmp_path / "c"
    interrupted(source, target, to, monkeypatch)
    first = min(target.rglob(pattern))
    first.write_bytes(bytes(first.stat().st_size))
    plan = planned(source, target, to, CountingStore, monkeypatch)
    assert len(plan.there) == 1
    run_conversion(plan)
    assert loads(target, to)
    # Metadata that says something else of the same objects makes another source.
    interrupted(source, tmp_path / "d", to, monkeypatch)
    metadata = pickle.loads((source / ".metadata").read_bytes())
    infos = metadata.storage_data
    first_layer, second = (next(index for index in infos if index.fqn == f"model.layer {n}") for n in (0, 1))
    infos[first_layer], infos[second] = infos[second], infos[first_layer]
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    assert planned(source, tmp_path / "d", to, CountingStore, monkeypatch).there == {}


def test_keeps_two_conversions_to_one_place_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, target = source_of(tmp_path / "a"), source_of(tmp_path / "other", 5.0), tmp_path / "b"
    first = planned(one, target, "safetensors", CountingStore, monkeypatch)
    original = run._check_unchanged

    def between(*arguments: Any) -> None:
        monkeypatch.setattr(run, "_check_unchanged", original)
        converted(two, target, "safetensors", shard_bytes=KEPT.shard_bytes)
        original(*arguments)

    monkeypatch.setattr(run, "_check_unchanged", between)
    with pytest.raises(CommitConflictError, match="Another process wrote"):
        run_conversion(first)
    left = {name: part for file in target.glob("*.safetensors") for name, part in safetensors.load_file(file).items()}
    assert_same(left, {f"model.{name}": part for name, part in layers(5.0)["model"].items()})


@pytest.mark.parametrize("to", ["bucketpoint", "torch"])
def test_overwrites_nothing_that_is_saved_at_the_target_meanwhile(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """Even with `overwrite`: that was said of what was there before."""
    source, target = source_of(tmp_path / "a"), f"{root}/x.pt" if to == "torch" else f"{root}/b"
    converted(source_of(tmp_path / "older", 3.0), target, to)
    plan = plan_conversion(source, target, to_format=to, options=replace(KEPT, overwrite=True), transfer=ONE_BY_ONE)

    other = source_of(tmp_path / "other", 5.0)
    original = run._upload

    def upload(*given: Any) -> Any:
        monkeypatch.setattr(run, "_upload", original)
        converted(other, target, to, overwrite=True)
        return original(*given)

    monkeypatch.setattr(run, "_upload", upload)
    with pytest.raises(CommitConflictError):
        run_conversion(plan)
    converted(target, tmp_path / "back", "bucketpoint")
    assert_same(load(tmp_path / "back", layers(5.0)), layers(5.0))


@pytest.mark.parametrize("writer", ["ours", "theirs"])
@pytest.mark.parametrize("to", ["bucketpoint", "torch", "safetensors"])
def test_refuses_to_convert_a_damaged_source(tmp_path: Path, writer: str, to: str) -> None:
    value = {"model": {"w": filled((3, 1 << 18), torch.float32)}}
    source = tmp_path / "a"
    made = BucketWriter(str(source)) if writer == "ours" else FileSystemWriter(str(source))
    planner = GridPlanner(3) if writer == "ours" else None
    dcp.save(value, storage_writer=made, planner=planner, no_dist=True)
    (path,) = source.rglob("*.distcp")
    flip(path)
    target = tmp_path / ("x.pt" if to == "torch" else "b")
    with pytest.raises(CorruptDataError, match="damaged"):
        converted(source, target, to)
    assert not target.is_file()
    assert not list(target.glob("*.distcp")) or not (target / ".metadata").exists()


@pytest.mark.parametrize("to", ["bucketpoint", "torch"])
@pytest.mark.parametrize("pinned", [True, False], ids=["by a pinned read", "afterwards"])
def test_notices_a_source_that_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, pinned: bool
) -> None:
    monkeypatch.setattr(LocalStore, "capabilities", replace(LocalStore("/").capabilities, pinned_reads=pinned))
    path = tmp_path / "model.safetensors"
    safetensors.save_file({"w": torch.ones(1 << 18)}, path)
    target = tmp_path / ("x.pt" if to == "torch" else "b")
    plan = plan_conversion(path, target, transfer=SMALL)
    safetensors.save_file({"w": torch.zeros(1 << 18)}, path)
    with pytest.raises(CorruptDataError, match="changed during"):
        run_conversion(plan)
    assert not (tmp_path / "b" / ".metadata").exists()


@pytest.mark.parametrize("to", ["bucketpoint", "torch", "safetensors"])
def test_names_a_target_that_is_not_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    target = tmp_path / ("x.pt" if to == "torch" else "b")
    plan = plan_conversion(source_of(tmp_path / "a"), target, to_format=to, options=KEPT, transfer=SMALL)
    path = plan.layout.objects[-1].key
    there = target if to == "torch" else target / path

    def flipped(store: Any, key: str, offset: int, buffers: Any, **options: Any) -> None:
        if not flipping and str(there).endswith(key):
            flip(there)
            flipping.append(key)
        original(store, key, offset, buffers, **options)

    flipping: list[str] = []
    original = LocalStore.read_into
    monkeypatch.setattr(LocalStore, "read_into", flipped)
    assert run_conversion(plan, verify=True).damaged == [path]
