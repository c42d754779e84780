"""Exports to safetensors by several ranks or machines: each writes some of the files, and the index comes last."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bucketpoint
import bucketpoint.convert.journal as notes
import bucketpoint.convert.pipeline as run
from bucketpoint import BucketWriter
from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME, SINGLE_NAME
from bucketpoint.convert import ConvertOptions, ConvertPlan, export_safetensors, plan_conversion, run_conversion
from bucketpoint.convert.export import refuse_export
from bucketpoint.convert.journal import name_of
from bucketpoint.convert.target import share_of
from bucketpoint.errors import (
    BucketpointError,
    CheckpointExistsError,
    CommitConflictError,
    InvalidURLError,
    MismatchError,
    StoreError,
)
from bucketpoint.format.item_names import renaming
from bucketpoint.stores.local import LocalStore
from bucketpoint.transfer import ObjectSource, Segment
from convert.conftest import ONE_BY_ONE, SMALL, behind, contents, killed, names
from dcp.conftest import four_ranks, two_ranks  # noqa: F401
from dcp.ranks import Ranks
from dcp.states import assert_same, filled
from kit.killed_jobs import run_and_kill
from kit.plugin import MakeProxy
from kit.servers import S3Server
from kit.tally import Tally
from tiers import sampled

safetensors = pytest.importorskip("safetensors.torch")

WEIGHTS = {
    "embed.weight": filled((64, 256), torch.bfloat16, seed=1),
    "layers.0.wq": filled((128, 64), torch.float32, seed=2),
    "layers.1.wq": filled((128, 64), torch.float32, seed=3),
    "layers.1.scale": torch.tensor(2.5),
    "output.weight": filled((256, 64), torch.bfloat16, seed=4),
}
SHARD_BYTES = 33_000
RENAMED = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{}.wq": "model.layers.{}.q_proj",
    "layers.1.scale": None,
}
EXPECTED = {
    "model.embed_tokens.weight": WEIGHTS["embed.weight"],
    "model.layers.0.q_proj": WEIGHTS["layers.0.wq"],
    "model.layers.1.q_proj": WEIGHTS["layers.1.wq"],
    "output.weight": WEIGHTS["output.weight"],
}


def saved(folder: Path) -> str:
    state = {"model": WEIGHTS, "optim": {"m": torch.ones(99)}, "step": 3}
    dcp.save(state, storage_writer=BucketWriter(str(folder)), no_dist=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.model").write_bytes(b"tokens")
    (folder / "notes.md").write_text("not needed")
    return str(folder)


def loaded(folder: str) -> dict[str, torch.Tensor]:
    """Load what the index names, or the single file, as other libraries do."""
    if INDEX_NAME not in names(folder):
        return dict(safetensors.load(contents(folder, SINGLE_NAME)))
    weight_map = json.loads(contents(folder, INDEX_NAME))["weight_map"]
    files = {name: safetensors.load(contents(folder, name)) for name in set(weight_map.values())}
    assert {key for file in files.values() for key in file} == set(weight_map)
    return {key: files[name][key] for key, name in weight_map.items()}


def all_files(folder: str) -> dict[str, bytes]:
    return {name: contents(folder, name) for name in sorted(names(folder))}


def export_on_rank(rank: int, world: int, url: str, target: str, shard_bytes: int) -> tuple[int, int]:
    done = export_safetensors(url, target, prefix="model", names=RENAMED, shard_bytes=shard_bytes, transfer=SMALL)
    return done.objects, done.nbytes


def sharded_save(rank: int, world: int, url: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    placed = {
        name: distribute_tensor(tensor, mesh, [Shard(number % 2 if tensor.dim() == 2 else 0)])
        if tensor.dim()
        else tensor
        for number, (name, tensor) in enumerate(WEIGHTS.items())
    }
    dcp.save({"model": placed}, checkpoint_id=url, storage_writer=BucketWriter())


def in_environment(rank: int, world: int, environment: dict[str, str], function: Any, *args: Any) -> Any:
    os.environ.update(environment)
    return function(rank, world, *args)


@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, 1 << 30])
def test_exports_a_sharded_checkpoint_on_all_ranks(
    minio_root: str,
    minio: S3Server,
    four_ranks: Ranks,  # noqa: F811
    tmp_path: Path,
    shard_bytes: int,
) -> None:
    four_ranks.run(in_environment, dict(minio.env), sharded_save, f"{minio_root}/ours")

    def exported(target: str) -> list[Any]:
        return four_ranks.run(export_on_rank, f"{minio_root}/ours", target, shard_bytes)

    written = exported(f"{minio_root}/hf")
    assert_same(loaded(f"{minio_root}/hf"), EXPECTED)
    if shard_bytes > SHARD_BYTES:
        assert names(f"{minio_root}/hf") == {SINGLE_NAME}
        noted = {"format": "pt", "bucketpoint": 64 * "0"}
        safetensors.save_file(EXPECTED, tmp_path / "theirs", metadata=noted)
        assert len(contents(f"{minio_root}/hf", SINGLE_NAME)) == (tmp_path / "theirs").stat().st_size
    else:
        assert len(written) == sum(objects > 0 for objects, _ in written) == 4
        assert max(nbytes for _, nbytes in written) < 1.1 * min(nbytes for _, nbytes in written)
    assert_same(bucketpoint.load(f"{minio_root}/hf"), EXPECTED)
    before = all_files(f"{minio_root}/hf")
    # The export is whole already, so that a second one has nothing to do.
    exported(f"{minio_root}/hf")
    assert all_files(f"{minio_root}/hf") == before


def test_is_read_by_torch_and_carries_the_small_files(tmp_path: Path) -> None:
    done = export_safetensors(
        saved(tmp_path / "ours"), tmp_path / "hf", None, RENAMED.get, SHARD_BYTES, prefix="model", exclude="*.scale"
    )
    assert done.committed
    assert set(loaded(str(tmp_path / "hf"))) == {name for name in RENAMED.values() if name and "{" not in name}
    done = export_safetensors(
        saved(tmp_path / "ours2"), tmp_path / "hf2", names=RENAMED, shard_bytes=SHARD_BYTES, prefix="model"
    )
    target = {name: torch.zeros_like(tensor) for name, tensor in EXPECTED.items()}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path / "hf2")), no_dist=True)
    assert_same(target, EXPECTED)
    others = {name for name in names(str(tmp_path / "hf2")) if not name.startswith("model")}
    assert others == {"config.json", "tokenizer.model"}


def test_replaces_former_weights_only_if_told_to(tmp_path: Path) -> None:
    ours, target = saved(tmp_path / "ours"), str(tmp_path / "hf")
    for shard_bytes, files in ((SHARD_BYTES, 5), (1 << 30, 1), (SHARD_BYTES, 5)):
        if os.path.exists(target):
            with pytest.raises(CheckpointExistsError):
                export_safetensors(ours, target, names=RENAMED, shard_bytes=shard_bytes, prefix="model")
        export_safetensors(ours, target, names=RENAMED, shard_bytes=shard_bytes, prefix="model", overwrite=True)
        assert sum(name.startswith("model") for name in names(target)) == files
        assert_same(loaded(target), EXPECTED)


def test_refuses_two_tensors_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="Two tensors get the name 'w'"):
        export_safetensors(saved(tmp_path / "ours"), tmp_path / "hf", names=lambda name: "w", prefix="model")
    assert not (tmp_path / "hf").exists()


def test_balances_files_by_bytes() -> None:
    objects = [
        ObjectSource(f"{n}", [Segment(size, memoryview(bytes(size)))]) for n, size in enumerate((5, 9, 4, 4, 1, 3))
    ]
    shares = [share_of(objects, (worker, 3)) for worker in range(3)]
    assert [[entry.nbytes for entry in share] for share in shares] == [[9], [5, 1, 3], [4, 4]]
    assert share_of(objects[:1], (2, 3)) == []


def _failing(rank: int, world: int, url: str, target: str, how: str) -> str:
    """The error with which an export ends on this rank."""
    try:
        if how == "before" and rank == 0:
            refuse_export(ValueError("no tokenizer"))
        url = f"{url}-missing" if how == "missing" and rank > 0 else url
        export_on_rank(rank, world, url, target, SHARD_BYTES + rank * (how == "disagreeing"))
    except BucketpointError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("how", "said"),
    [("before", "no tokenizer"), ("missing", "CheckpointNotFoundError"), ("disagreeing", "RanksDisagreeError")],
)
def test_raises_on_all_ranks_what_one_fails_with(
    tmp_path: Path,
    two_ranks: Ranks,  # noqa: F811
    how: str,
    said: str,
) -> None:
    found = two_ranks.run(_failing, saved(tmp_path / "ours"), str(tmp_path / "hf"), how)
    assert [said in text for text in found] == [True, True], found
    assert not list(tmp_path.glob("hf/*.safetensors*"))


# -- kills ------------------------------------------------------------------------------------------------------------


def convert_share(
    source: str, target: Any, worker: tuple[int, int], monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> bool:
    """Carry out the share of a worker, whose request `fails_at` fails with all after it. Returns if it committed."""
    calls = [0]

    def fails(name: str, _: int) -> bool:
        calls[0] += name in ("put", "delete")
        return fails_at > 0 and calls[0] >= fails_at

    with behind(monkeypatch, killed(fails)):
        plan = plan_conversion(
            source,
            target,
            to_format="safetensors",
            options=ConvertOptions("model", SHARD_BYTES, names=RENAMED),
            transfer=ONE_BY_ONE,
            worker=worker,
        )
    return run_conversion(plan).committed


def test_leaves_no_index_before_all_files_wherever_workers_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_BATCH_BYTES", 1)
    monkeypatch.setattr(notes, "NOTE_BYTES", 1)
    source = saved(tmp_path / "ours")
    whole = str(tmp_path / "whole")
    assert [convert_share(source, whole, (i, 2), monkeypatch, 0) for i in range(2)] == [False, True]
    expected = all_files(whole)
    assert not [name for name in expected if name.startswith(".")]
    assert_same(loaded(whole), EXPECTED)
    for number in range(1, 14):
        target = str(tmp_path / f"hf{number}")
        for worker in ((0, 2), (1, 2)):
            with contextlib.suppress(StoreError):
                convert_share(source, target, worker, monkeypatch, number)
        if INDEX_NAME in names(target):
            assert_same(loaded(target), EXPECTED)
        for worker in ((1, 2), (0, 2)):
            convert_share(source, target, worker, monkeypatch, 0)
        assert all_files(target) == expected, number


def export_alone(rank: int, world: int, environment: dict[str, str], source: str, target: str) -> None:
    """The whole export, in a process that can be killed."""
    os.environ.update(environment)
    run._BATCH_BYTES = notes.NOTE_BYTES = 1
    export_safetensors(
        source, target, names=RENAMED, shard_bytes=SHARD_BYTES, prefix="model", transfer=ONE_BY_ONE, deadline_s=20
    )
    assert dist.get_world_size() == world


@pytest.mark.timeout(1200)
def test_names_no_file_that_is_not_whole_after_a_kill_of_all_ranks(
    tmp_path: Path, minio_root: str, minio: S3Server, fault_proxy: MakeProxy, bucketpoint_tally: Tally
) -> None:
    source, proxy = saved(tmp_path / "a"), fault_proxy(minio)

    def together(name: str, after: int | None) -> tuple[str, bool]:
        target = f"{minio_root}/{name}"
        return target, run_and_kill(proxy, 2, after, export_alone, minio.at(proxy.url).env, source, target)

    whole, died = together("undisturbed", None)
    assert not died
    expected, count = all_files(whole), len(proxy.exchanges)
    assert_same(loaded(whole), EXPECTED)
    for number in [*sampled(range(3, count - 3), 2, seed=20261126), count - 2, count - 1]:
        target, died = together(f"{number}", number)
        assert died, number
        bucketpoint_tally.made("kills of an export by two ranks")
        if INDEX_NAME in names(target):
            assert_same(loaded(target), EXPECTED)
        again, died = together(f"{number}", None)
        assert not died
        assert all_files(again) == expected, f"{number} of {count}"


def _saved(folder: Path, value: float) -> str:
    """Save two tensors of this value below a folder. Return the URL of the checkpoint."""
    url = str(folder / f"run-{value}" / "step-1")
    bucketpoint.save({name: torch.full((1000,), value) for name in ("a", "b")}, url)
    return url


def _planned(source: str, target: str, shard_bytes: int = 4000, worker: tuple[int, int] | None = None) -> ConvertPlan:
    options = ConvertOptions(shard_bytes=shard_bytes)
    return plan_conversion(source, target, to_format="safetensors", options=options, worker=worker)


ONES = {name: torch.ones(1000) for name in ("a", "b")}


def test_writes_a_lost_file_again_and_deletes_no_source_of_its_own(tmp_path: Path) -> None:
    url, model = _saved(tmp_path, 1.0), tmp_path / "model"
    export_safetensors(url, model, shard_bytes=4000)
    next(model.glob("model-*-00002-of-00002.safetensors")).unlink()
    with pytest.raises(CheckpointExistsError):
        export_safetensors(url, model, shard_bytes=4000)
    export_safetensors(url, model, shard_bytes=4000, overwrite=True)
    (tmp_path / "link").symlink_to(model)
    before = all_files(str(model))
    for same in (model, tmp_path / "link"):
        with pytest.raises(InvalidURLError):
            export_safetensors(str(model), str(same), overwrite=True)
    assert all_files(str(model)) == before


SIZES = [(4000, 4000), (4000, 1 << 20), (1 << 20, 4000), (1 << 20, 1 << 20)]


@pytest.mark.parametrize(("one", "two"), SIZES)
def test_rewrites_a_source_that_the_target_names_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: int, two: int
) -> None:
    """As a bucket under two endpoints, whose equality bucketpoint cannot know."""
    monkeypatch.setattr(LocalStore, "identity", LocalStore.url)
    model, link = tmp_path / "model", tmp_path / "link"
    export_safetensors(_saved(tmp_path, 1.0), model, shard_bytes=one)
    link.symlink_to(model)
    export_safetensors(model, link, shard_bytes=two, overwrite=True)
    assert_same(loaded(str(model)), ONES)
    assert len(names(str(model))) == (3 if two == 4000 else 1)


@pytest.mark.parametrize(("one", "two"), SIZES)
def test_keeps_former_or_new_weights_wherever_an_overwrite_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: int, two: int
) -> None:
    former, new, killed_at, calls = _saved(tmp_path, 2.0), _saved(tmp_path, 1.0), -1, [0]
    while calls[0] > killed_at:
        killed_at, calls, model = killed_at + 1, [0], str(tmp_path / f"model-{killed_at}")
        export_safetensors(former, model, shard_bytes=one)

        def fails(name: str, _: int, calls: list[int] = calls, most: int = killed_at) -> bool:
            calls[0] += name in ("put", "delete")
            return calls[0] > most

        with contextlib.suppress(StoreError), behind(monkeypatch, killed(fails)):
            export_safetensors(new, model, shard_bytes=two, overwrite=True, transfer=ONE_BY_ONE)
        value = loaded(model)["a"][0].item()
        assert_same(loaded(model), {name: torch.full((1000,), value) for name in ONES})
        assert_same(bucketpoint.load(model), loaded(model))
        export_safetensors(new, model, shard_bytes=two, overwrite=True)
        assert_same(loaded(model), ONES)
        assert len(names(model)) == (3 if two == 4000 else 1)


def test_replaces_an_index_of_many_names_in_a_store_without_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, model = str(tmp_path / "many"), str(tmp_path / "model")
    bucketpoint.save({f"{number:0200}": torch.full((1,), number) for number in range(1000)}, url)
    able = replace(LocalStore(url).capabilities, conditional_put=False)
    monkeypatch.setattr(LocalStore, "capabilities", able)
    for shard_bytes in (2000, 4000):
        export_safetensors(url, model, shard_bytes=shard_bytes, overwrite=True)
        assert len(contents(model, INDEX_NAME)) > 200_000


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "one of two workers"])
def test_replaces_no_file_of_an_export_that_commits_during_another(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    model, two = f"{root}/model", _saved(tmp_path, 2.0)
    if shared:
        assert not run_conversion(_planned(two, model, worker=(1, 2))).committed
    first = _planned(_saved(tmp_path, 1.0), model)

    def commits(name: str, number: int) -> bool:
        # After the journal's first note, while the PUT of a file is under way.
        if (name, number) == ("put", 2):
            run_conversion(first)
        return False

    with behind(monkeypatch, killed(commits)):
        second = _planned(two, model, worker=(0, 2) if shared else None)
    with pytest.raises(CommitConflictError):
        run_conversion(second)
    # Nothing of the second is left: other readers may read all files of a folder.
    assert names(model) - {name_of((1, 2))} == {INDEX_NAME, *(entry.key for entry in first.layout.objects)}
    assert_same(loaded(model), ONES)
    assert_same(bucketpoint.load(model), ONES)


@pytest.mark.parametrize(("one", "two"), [(1 << 20, 1 << 20), (4000, 1 << 20), (1 << 20, 4000), (4000, 4000)])
def test_leaves_the_weights_of_the_export_that_ends_first(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: int, two: int
) -> None:
    model, original = f"{root}/model", run._upload
    first, second = _planned(_saved(tmp_path, 1.0), model, one), _planned(_saved(tmp_path, 2.0), model, two)

    def upload(*given: Any) -> Any:
        monkeypatch.setattr(run, "_upload", original)
        run_conversion(first)
        return original(*given)

    monkeypatch.setattr(run, "_upload", upload)
    with pytest.raises(CommitConflictError):
        run_conversion(second)
    assert names(model) - {INDEX_NAME} == {entry.key for entry in first.layout.objects}
    assert_same(loaded(model), ONES)


@pytest.mark.parametrize("shard_bytes", [4000, 1 << 20])
def test_recognises_an_export_that_was_finished_before(tmp_path: Path, shard_bytes: int) -> None:
    url, model = _saved(tmp_path, 1.0), str(tmp_path / "model")
    run_conversion(_planned(url, model, shard_bytes))
    before = all_files(model)
    again = _planned(url, model, shard_bytes)
    assert (again.finished, again.left_nbytes) == (True, 0)
    done = run_conversion(again, verify=True)
    assert (done.committed, list(done.damaged)) == (True, [])
    assert all_files(model) == before
    with pytest.raises(CheckpointExistsError):
        _planned(_saved(tmp_path, 2.0), model, shard_bytes)
    # Truncated, it is another file.
    path = Path(model, again.layout.objects[0].key)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointExistsError):
        _planned(url, model, shard_bytes)


def test_copies_small_files_whose_names_come_after_a_thousand_others(tmp_path: Path) -> None:
    url, model = _saved(tmp_path, 1.0), tmp_path / "model"
    for number in range(1000):
        (Path(url) / "data" / str(number)).touch()
    (Path(url) / "tokenizer.json").write_text("{}")
    export_safetensors(url, model)
    assert (model / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["{} {}", "{layer}", 5])
def test_names_the_entry_of_a_mapping_that_does_not_fit(name: Any) -> None:
    with pytest.raises(BucketpointError, match=r"new name of layers\.0"):
        renaming({"layers.{}": name})("layers.0")
