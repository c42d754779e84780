"""`cp` makes whole checkpoints at other places, or none; what it copies loads there, and is checked on the way."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import bucketpoint.dcp.copy as copying
import bucketpoint.transfer.copy as transfer
from bucketpoint import BucketReader, BucketWriter
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME
from bucketpoint.checkpoint.verify import verify
from bucketpoint.dcp.copy import COPY_OPTIONS, Copied, CopyPlan, copy_checkpoint, plan_copy
from bucketpoint.errors import CommitConflictError, StoreError
from bucketpoint.format import keys
from bucketpoint.location import Location
from bucketpoint.retention import Keep, RetentionPolicy
from bucketpoint.stores import open_store
from bucketpoint.stores.local import LocalStore
from bucketpoint.stores.s3 import S3Store
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.checksum import crc32c
from cli.conftest import Program, budgets, save, state
from cli.test_verify import flip, place, replaced
from dcp.states import assert_same, blank
from kit.programs import run_program
from kit.servers import S3Server
from transfer.wrappers import CountingStore, FailingStore

SMALL = TransferOptions(part_bytes=5 << 20, single_put_bytes=5 << 20, max_inflight_bytes=10 << 20, connections=2)
"""The weights go up in three parts, the rest in one request each."""


def loads(url: str, value: float = 1.0) -> None:
    target = blank(state(value))
    dcp.load(target, checkpoint_id=url, storage_reader=BucketReader(), no_dist=True)
    assert_same(target, state(value))


def contents(url: str) -> dict[str, int]:
    store, prefix = open_store(url)
    above = f"{prefix}/" if prefix else ""
    return {info.key.removeprefix(above): info.size for info in store.list(above)}


def failing(plan: CopyPlan, call: str, number: int) -> FailingStore:
    """Let one request of a copy fail."""
    store = FailingStore(plan.store, lambda name, n: (name, n) == (call, number), lambda: StoreError("killed"))
    object.__setattr__(plan, "store", store)
    return store


def counting(plan: CopyPlan) -> CountingStore:
    store = CountingStore(plan.store)
    object.__setattr__(plan, "store", store)
    return store


def killed(source: str, target: str) -> CopyPlan:
    """Copy until two of three objects are there. Return the plan to continue."""
    plan = plan_copy(open_checkpoint(source), target)
    failing(plan, "put", 3)
    with pytest.raises(StoreError, match="killed"):
        copy_checkpoint(plan, TransferOptions(connections=1))
    again = plan_copy(open_checkpoint(source), target)
    assert len(again.there) == 2
    return again


def test_copies_a_folder_of_safetensors_whole_and_back(program: Program, tmp_path: Path) -> None:
    files = {"model.safetensors": b"w" * 20_000_000, "config.json": b"{}", "templates/tool.jinja": b"", ".hidden": b"1"}
    for name, data in files.items():
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).write_bytes(data)
    bucket, back = "memory://hub/model", tmp_path / "back"
    assert program("cp", str(tmp_path / "hub"), bucket, "--dry-run").out.startswith("would copy 4 files, 20.0 MB")
    assert contents(bucket) == {}
    for source, target in ((str(tmp_path / "hub"), bucket), (bucket, str(back))):
        assert program("cp", source, target, "--json").json["files"] == 4
    assert {str(path.relative_to(back)): path.read_bytes() for path in back.rglob("*") if path.is_file()} == files
    assert program("cp", bucket, str(back), "--json").json["error"]["kind"] == "CheckpointExistsError"
    assert program("cp", bucket, str(back), "--overwrite").code == 0


def test_leaves_no_former_index_over_the_files_of_a_copied_model(program: Program, tmp_path: Path) -> None:
    """Readers would load the former weights, though the copy was reported as whole."""
    for name in ("new/model.safetensors", "old/model.safetensors.index.json", "old/model-1.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"w")
    assert program("cp", str(tmp_path / "new"), str(tmp_path / "old"), "--overwrite").code == 0
    assert not (tmp_path / "old/model.safetensors.index.json").exists()
    save(str(tmp_path / "step-1"))
    hidden = program("cp", str(tmp_path / "new"), str(tmp_path / "step-1"), "--overwrite", "--json")
    assert hidden.json["error"]["kind"] == "CheckpointExistsError"
    refused = program("cp", str(tmp_path / "new"), str(tmp_path / "other"), "--verify")
    assert "--verify" in refused.err
    assert not (tmp_path / "other").exists()


def model_in(folder: Path, file: str, value: bytes) -> dict[str, bytes]:
    folder.mkdir()
    for name in (file, INDEX_NAME):
        (folder / name).write_bytes(value)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("known", [True, False])
def test_keeps_a_model_whose_copy_names_the_same_place(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """As a bucket under two endpoints, whose equality is not known."""
    if not known:
        monkeypatch.setattr(LocalStore, "identity", LocalStore.url)
    model = model_in(tmp_path / "model", "model-1.safetensors", b"w")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    done = program("cp", str(tmp_path / "model"), str(tmp_path / "link"), "--overwrite", "--json")
    assert done.json.get("error", {}).get("kind") == ("InvalidURLError" if known else None)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == model


@pytest.mark.parametrize(("file", "left"), [("model-1.safetensors", False), ("model-2.safetensors", True)])
def test_leaves_no_index_of_two_models_after_an_interrupted_copy(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, left: bool
) -> None:
    model_in(tmp_path / "new", file, b"new")
    old = model_in(tmp_path / "old", "model-1.safetensors", b"old")

    def interrupted(*given: Any, **options: Any) -> Any:
        raise StoreError("killed")

    monkeypatch.setattr(copying, "copy_objects", interrupted)
    assert program("cp", str(tmp_path / "new"), str(tmp_path / "old"), "--overwrite").code != 0
    index = tmp_path / "old" / INDEX_NAME
    assert (index.read_bytes() if index.exists() else None) == (old[INDEX_NAME] if left else None)
    monkeypatch.undo()
    assert program("cp", str(tmp_path / "new"), str(tmp_path / "old"), "--overwrite").code == 0
    assert index.read_bytes() == b"new"


@pytest.mark.parametrize("root", ["minio"], indirect=True)
def test_passes_over_markers_of_folders_that_consoles_make(root: str, program: Program, tmp_path: Path) -> None:
    """Such an object, empty and with a "/" at the end, is neither a file of a model nor another's content."""
    store, prefix = open_store(root)
    for key, data in (("model/", b""), ("model/model.safetensors", b"w"), ("target/", b""), ("target/new/", b"")):
        store.put(f"{prefix}/{key}", [memoryview(data)])
    assert program("cp", f"{root}/model", str(tmp_path / "hub"), "--json").json["files"] == 1
    save(str(tmp_path / "a"))
    assert program("cp", str(tmp_path / "a"), f"{root}/target").code == 0
    loads(f"{root}/target")


def test_does_not_copy_a_run_as_files_because_an_export_lies_beside_it(program: Program, tmp_path: Path) -> None:
    """The copy would be a run whose checkpoints were never committed there: those are copied one by one."""
    save(str(tmp_path / "run/step-1"))
    (tmp_path / "run/model.safetensors").write_bytes(b"w")
    done = program("cp", str(tmp_path / "run"), "memory://beside/run", "--yes", "--json")
    assert [copy["destination"] for copy in done.json["checkpoints"]] == ["memory://beside/run/step-1"]
    assert "model.safetensors" not in contents("memory://beside/run")


@pytest.mark.parametrize("there", ["same", "file", "memory"])
def test_copies_a_checkpoint_that_loads_and_is_pinned_where_it_lies(
    root: str, tmp_path: Path, program: Program, there: str
) -> None:
    source = f"{root}/a"
    save(source)
    target = {"same": f"{root}/b", "file": str(tmp_path / "b"), "memory": f"memory://cp/{tmp_path.name}{root[-9:]}"}[
        there
    ]
    done = program("cp", source, target, "--verify", "--json")
    assert done.code == 0, done.err
    assert done.json["server_side"] == (there == "same" and root.startswith(("s3", "gs")))
    assert done.json["verification"]["unchecked_bytes"] == {}
    assert done.json["verification"]["notes"] == []
    assert done.json["checked_bytes"] in (0, done.json["bytes"])
    assert bool(done.json["checked_bytes"]) != done.json["server_side"]
    loads(target)
    copied = open_checkpoint(target)
    assert copied.facts["copied_from"] == source
    assert set(contents(target)) == set(contents(source))
    if copied.store.capabilities.pinned_reads:
        assert copied.etags.keys() >= copied.by_object.keys()


def test_copies_from_file_to_s3_in_parts_within_the_budget(reached: S3Server, tmp_path: Path) -> None:
    save(str(tmp_path))
    saved = open_checkpoint(tmp_path)
    plan = plan_copy(saved, f"s3://{reached.make_bucket()}/x")
    store = counting(plan)
    done = copy_checkpoint(plan, SMALL)
    assert (store.calls["create_multipart"], store.calls["put_part"]) == (1, 3)
    assert done.checked_bytes == plan.nbytes
    loads(plan.url)


def test_copies_between_buckets_of_one_service_without_receiving_a_byte(
    reached: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (f"s3://{reached.make_bucket()}/x" for _ in range(2))
    save(a)
    saved = open_checkpoint(a)
    moved: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("read_into", "put_part"):
            patch.setattr(S3Store, name, lambda *_, name=name, **__: moved.append(name))
        done = copy_checkpoint(plan_copy(saved, b))
    assert done.inside
    assert moved == []
    loads(b)


def test_sends_the_bytes_through_where_the_service_may_not_copy(reached: S3Server) -> None:
    """The destination's credentials cannot read the source."""
    a, b = reached.make_bucket(), reached.make_bucket()
    save(f"s3://{a}/x")
    options = reached.limited_options(
        {"Effect": "Allow", "Action": "s3:*", "Resource": [f"arn:aws:s3:::{b}", f"arn:aws:s3:::{b}/*"]}
    )
    plan = plan_copy(open_checkpoint(f"s3://{a}/x"), Location.of(f"s3://{b}/x", options))
    assert plan.inside
    done = copy_checkpoint(plan)
    assert not done.inside
    assert done.checked_bytes == plan.nbytes
    loads(f"s3://{b}/x")


def test_refuses_what_is_there_and_overwrites_when_told_but_in_no_dry_run(root: str, program: Program) -> None:
    a, b = f"{root}/a", f"{root}/b"
    save(a, 1.0)
    save(b, 2.0)
    refused = program("cp", a, b, "--json")
    assert (refused.code, refused.json["error"]["kind"]) == (5, "CheckpointExistsError")
    before = contents(b)
    done = program("cp", a, b, "--overwrite", "--dry-run", "--json")
    assert done.code == 0
    assert (done.json["dry_run"], done.json["replaces"], done.json["objects"]) == (True, True, 3)
    assert program("cp", a, f"{root}/new", "--dry-run").code == 0
    assert (contents(b), contents(f"{root}/new")) == (before, {})
    loads(b, 2.0)
    assert program("cp", a, b, "--overwrite").code == 0
    loads(b, 1.0)
    # The data of the one that was replaced is gone.
    assert set(contents(b)) == set(contents(a))
    assert program("cp", a, f"{a}/", "--overwrite").code == 2
    loads(a)


def test_repairs_a_damaged_copy_and_leaves_its_objects_until_then(root: str, program: Program) -> None:
    save(f"{root}/a")
    assert program("cp", f"{root}/a", f"{root}/b").code == 0
    before = set(contents(f"{root}/b"))
    path, info = place(f"{root}/b", "model.large")
    replaced(f"{root}/b", path, flip(info.offset + 5000))
    assert program("verify", f"{root}/b").code == 1
    assert program("cp", f"{root}/a", f"{root}/b", "--overwrite", "--verify").code == 0
    loads(f"{root}/b")
    assert set(contents(f"{root}/b")) & before == {".metadata", ".bucketpoint.json"}


def test_copies_into_a_run_a_folder_and_behind_a_slash_by_the_name_of_the_source(
    root: str, program: Program, tmp_path: Path
) -> None:
    save(f"{root}/a/step-1")
    save(f"{root}/b/step-2")
    store, prefix = open_store(root)
    for words, target in [
        (["a", "1", "b"], "b/step-1"),
        (["a/step-1", "c/"], "c/step-1"),
        (["b", "latest", "c"], "c/step-2"),
    ]:
        place, *others = words
        done = program("cp", f"{root}/{place}", *others[:-1], f"{root}/{others[-1]}")
        assert (done.code, f"to {root}/{target}: " in done.out) == (0, True), done.err
        loads(f"{root}/{target}")
    assert [row["step"] for row in program("ls", f"{root}/c", "--json").json["checkpoints"]] == [1, 2]
    for empty in {tmp_path / "empty"} if root.startswith("file") else ():
        empty.mkdir()
        assert f"to {empty}/step-1: " in program("cp", f"{root}/a", "1", str(empty)).out
    store.put(keys.join(prefix, "d/notes.txt"), [memoryview(b"x")], crc32c=crc32c(b"x"))
    refused = program("cp", f"{root}/a/step-1", f"{root}/d")
    assert (refused.code, "a folder with other content: notes.txt" in refused.err) == (5, True)
    assert set(contents(f"{root}/d")) == {"notes.txt"}


@pytest.mark.parametrize("how", ["flipped", "table", "missing", "truncated", "of another writer"])
def test_refuses_to_copy_a_damaged_source(tmp_path: Path, program: Program, how: str) -> None:
    source, target = f"file://{tmp_path}/a", f"memory://cp/{tmp_path.name}-{how[:4]}"
    if how == "of another writer":
        dcp.save(state(), storage_writer=FileSystemWriter(tmp_path / "a"), no_dist=True)
    else:
        save(source)
    path, info = place(source, "model.large")
    file = tmp_path / "a" / path
    data = bytearray(file.read_bytes())
    if how in ("flipped", "table"):
        data[info.table_offset + 5 if how == "table" else info.offset + info.length - 2] ^= 1
    # In place: the inode, the size and the time stay, as with a disk that rots.
    status = file.stat()
    with file.open("r+b") as out:
        out.write(data)
        out.truncate({"truncated": 1000, "of another writer": len(data) - 1}.get(how, len(data)))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    if how == "missing":
        file.unlink()
    done = program("cp", source, target, "--json")
    assert done.code == 1
    assert done.json["error"]["kind"] == "CorruptDataError"
    assert done.json["error"]["key"] == path
    assert ".metadata" not in contents(target)


@pytest.mark.parametrize("old", [None, 2.0], ids=["fresh", "over an old one"])
@pytest.mark.parametrize("call", ["put", "put_part", "create_multipart", "complete_multipart"])
def test_leaves_what_was_there_after_a_failure_and_finishes_when_repeated(
    tmp_path: Path, old: float | None, call: str
) -> None:
    source = str(tmp_path / "a")
    save(source)
    number = 0
    while True:
        number += 1
        target = str(tmp_path / f"b{number}")
        if old is not None:
            save(target, old)
        plan = plan_copy(open_checkpoint(source), target, overwrite=True)
        store = failing(plan, call, number)
        try:
            copy_checkpoint(plan, SMALL)
        except StoreError:
            if old is None:
                assert not Path(target, ".metadata").exists()
            else:
                loads(target, old)
            copy_checkpoint(plan_copy(open_checkpoint(source), target, overwrite=True), SMALL)
            loads(target)
            continue
        loads(target)
        if store.calls[call] < number:
            break
    assert number > 1


def test_continues_a_copy_that_was_killed_where_it_stopped(tmp_path: Path) -> None:
    source, target = str(tmp_path / "a"), str(tmp_path / "b")
    save(source)
    again = killed(source, target)
    store = counting(again)
    assert len(again.there) == 2
    copy_checkpoint(again)
    # One object, the fence that keeps sweeps away from what was there, the metadata and its record.
    assert store.calls["put"] == 4
    loads(target)
    assert verify(open_checkpoint(target)).ok


@pytest.mark.parametrize(
    ("there", "overwrite"),
    [(None, []), (None, ["--overwrite"]), (3.0, ["--overwrite"])],
    ids=["over nothing", "told to overwrite nothing", "over an older one"],
)
def test_leaves_a_save_whole_that_commits_during_a_copy(
    reached: S3Server,
    tmp_path: Path,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    there: float | None,
    overwrite: list[str],
) -> None:
    source, target = str(tmp_path / "a"), f"s3://{reached.make_bucket()}/b"
    save(source, 1.0)
    if there is not None:
        save(target, there)
    original = copying.commit_copy

    def commit_copy(*given: Any, **named: Any) -> None:
        save(target, 2.0)
        original(*given, **named)

    monkeypatch.setattr(copying, "commit_copy", commit_copy)
    done = program("cp", source, target, "--json", *overwrite)
    assert done.json["error"]["kind"] == ("CheckpointExistsError" if there is None else "CommitConflictError")
    loads(target, 2.0)
    assert verify(open_checkpoint(target)).ok


def test_leaves_nothing_torn_by_a_sweep_beside_a_resumed_copy(tmp_path: Path, program: Program) -> None:
    """Objects of an interrupted copy are taken over, and are old enough for a sweep before the commit names them."""
    source, root = str(tmp_path / "a"), tmp_path / "run"
    target = str(root / "step-5")
    save(source)
    killed(source, target)
    for path in root.rglob("*.distcp"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    again = plan_copy(open_checkpoint(source), target)
    assert len(again.there) == 2
    assert len(program("gc", str(root), "--deep", "--json").json["objects"]) == 2
    with pytest.raises(CommitConflictError, match="nothing was committed"):
        copy_checkpoint(again)
    assert not Path(target, ".metadata").exists()
    assert program("cp", source, target).code == 0
    loads(target)


@pytest.mark.contract
def test_copies_the_checkpoint_of_another_writer_to_the_byte_and_into_a_run(tmp_path: Path, program: Program) -> None:
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path / "a"), no_dist=True)
    done = program("cp", str(tmp_path / "a"), str(tmp_path / "b"), "--verify")
    assert done.code == 0, done.err
    for name in (".metadata", "__0_0.distcp"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    target = blank(state())
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "b"), no_dist=True)
    assert_same(target, state())
    loads(str(tmp_path / "b"))
    run = str(tmp_path / "run")
    in_run(run, 5)
    assert program("cp", str(tmp_path / "a"), f"{run}/step-00000007", "--verify").code == 0
    assert [one["step"] for one in program("ls", run, "--json").json["checkpoints"]] == [5, 7]
    loads(f"{run}/step-00000007")


def test_overwrites_no_fixed_names_of_another_writer_under_a_checkpoint(tmp_path: Path, program: Program) -> None:
    dcp.save(state(1.0), storage_writer=FileSystemWriter(tmp_path / "a"), no_dist=True)
    dcp.save(state(2.0), storage_writer=FileSystemWriter(tmp_path / "b"), no_dist=True)
    done = program("cp", str(tmp_path / "a"), str(tmp_path / "b"), "--overwrite", "--json")
    assert done.code == 5
    assert "Delete the checkpoint" in done.json["error"]["remedy"]
    loads(str(tmp_path / "b"), 2.0)


def test_takes_options_for_each_side(minio: S3Server, moto: S3Server, tmp_path: Path) -> None:
    """Two services with other endpoints and keys, by the real program."""
    here, there = minio.make_bucket(), moto.make_bucket()
    save(f"s3://{here}/a", storage_options=minio.options)
    sides: list[str] = []
    for flag, server in (("--from-option", minio), ("--to-option", moto)):
        for name, value in (("key", server.key), ("secret", server.secret), ("endpoint_url", server.endpoint)):
            sides += [flag, f"{name}={value}"]
    program = "from bucketpoint.cli.app import main\nmain()"
    done = run_program(program, "cp", f"s3://{here}/a", f"s3://{there}/a", *sides)
    assert "compared with checksums" in done.stdout
    target: Any = blank(state())
    dcp.load(
        target, checkpoint_id=f"s3://{there}/a", storage_reader=BucketReader(storage_options=moto.options), no_dist=True
    )
    assert_same(target, state())


def test_holds_the_budget_for_what_comes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = budgets(monkeypatch, transfer)
    save(str(tmp_path / "a"))
    tight = TransferOptions(part_bytes=1 << 20, single_put_bytes=1 << 20, max_inflight_bytes=4 << 20, connections=4)
    copy_checkpoint(plan_copy(open_checkpoint(tmp_path / "a"), tmp_path / "b"), tight)
    assert 0 < pools[0].peak_bytes <= tight.max_inflight_bytes
    assert COPY_OPTIONS.max_inflight_bytes == 256 << 20


def test_copies_an_object_without_a_byte(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(0)}, storage_writer=FileSystemWriter(tmp_path / "a"), no_dist=True)
    copy_checkpoint(plan_copy(open_checkpoint(tmp_path / "a"), tmp_path / "b"))
    assert verify(open_checkpoint(tmp_path / "b")).ok


def test_decides_by_the_commit_where_the_destination_cannot_be_read(minio: S3Server, tmp_path: Path) -> None:
    """Without the right to list, a key that is not there is denied like one that is."""
    save(str(tmp_path / "a"))
    url = f"s3://{minio.make_bucket()}/x"
    writing = {"Effect": "Allow", "Action": ["s3:PutObject", "s3:AbortMultipartUpload"], "Resource": "arn:aws:s3:::*"}
    options = minio.limited_options(writing)
    copy_checkpoint(plan_copy(open_checkpoint(tmp_path / "a"), Location.of(url, options)))
    copied = open_checkpoint(Location.of(url, minio.options))
    assert verify(copied).ok
    with pytest.raises(StoreError):
        copy_checkpoint(plan_copy(open_checkpoint(tmp_path / "a"), Location.of(url, options)))
    assert open_checkpoint(Location.of(url, minio.options)).data == copied.data


class Planned:
    """What a planner of one's own may leave in the metadata."""


@pytest.mark.contract
def test_shows_checks_and_copies_metadata_that_needs_trust_when_told(tmp_path: Path, program: Program) -> None:
    class Planner(dcp.DefaultSavePlanner):
        def create_global_plan(self, plans: Any) -> Any:
            plans, metadata = super().create_global_plan(plans)
            metadata.planner_data = Planned()
            return plans, metadata

    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    dcp.save(state(), checkpoint_id=a, storage_writer=BucketWriter(), planner=Planner(), no_dist=True)
    assert program("show", a).code == 1
    for arguments in (["show", a], ["verify", a], ["cp", a, b, "--verify"], ["diff", a, b, "--values"]):
        done = program(*arguments, "--trusted")
        assert done.code == 0, done.err
    assert isinstance(open_checkpoint(b, trusted=True).metadata.planner_data, Planned)


def in_run(root: str, *steps: int) -> None:
    writer = BucketWriter(retention=RetentionPolicy(Keep(100)))
    for step in steps:
        dcp.save(state(step), checkpoint_id=f"{root}/step-{step}", storage_writer=writer, no_dist=True)
    assert writer.pruning is not None
    writer.pruning.drain()


def latest(root: str) -> str:
    return next(open_catalog(root).candidates()).folder


def test_records_a_copy_into_a_run_where_it_may_replace_a_step(root: str, program: Program) -> None:
    in_run(f"{root}/a", 10, 20)
    in_run(f"{root}/b", 5, 10)
    assert program("report", f"{root}/b", "20", "eval/loss=0.5").code == 0
    done = program("cp", f"{root}/a/step-20", f"{root}/b/step-20", "--verify", "--json")
    assert done.code == 0, done.err
    assert done.json["recorded_in"] == f"{root}/b"
    assert done.json["verification"]["notes"] == []
    listed = program("ls", f"{root}/b", "--json").json["checkpoints"]
    assert [(one["step"], one["metrics"]) for one in listed] == [(5, {}), (10, {}), (20, {"eval/loss": 0.5})]
    assert program("ls", f"{root}/b", "--all", "--json").json["attempts"] == []
    assert latest(f"{root}/b") == "step-20"
    # A folder that is no step, and a place without a catalog: one record alone would hide its neighbours.
    save(f"{root}/c/step-99")
    for there in (f"{root}/b/best", f"{root}/c/step-20"):
        assert "is recorded in the catalog" not in program("cp", f"{root}/a/step-20", there).out
        assert contents(there)[".bucketpoint.json"]
    assert latest(f"{root}/c") == "step-99"
    there = f"{root}/b/step-10"
    told = ("cp", f"{root}/a/step-10", there, "--overwrite")
    assert program(*told[:-1]).code == 5
    assert "gets a record of the copy" in program(*told, "--dry-run").out
    done = program(*told, "--verify")
    assert done.code == 0, done.out + done.err
    now = program("ls", f"{root}/b", "--json").json["checkpoints"]
    assert [new["step"] for old, new in zip(listed, now, strict=True) if new["token"] != old["token"]] == [10]
    loads(there, 10.0)


def test_copies_all_checkpoints_of_a_run_and_goes_on_where_it_stopped(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    in_run(run, 10, 20)
    save(f"{run}/step-30", 30.0)
    save(f"{run}/step-40", 40.0)
    assert program("rollback", run, "30", "--yes").code == 0
    monkeypatch.setattr("sys.stdin", io.StringIO())
    refused = program("cp", run, other)
    assert (refused.code, "pass --yes" in refused.err) == (2, True)
    assert program("cp", run, other, "--dry-run").out.count("would copy ") == 3
    assert contents(other) == {}
    assert program("cp", run, "20", f"{other}/step-20").code == 0
    done = program("cp", run, other, "--yes", "--verify")
    assert (done.code, done.out.count("is whole")) == (0, 2)
    assert done.out.endswith("\n1 checkpoint had been copied before\n")
    assert program("cp", run, other, "--yes", "--json").json["checkpoints"] == []
    for step in (10, 20, 30):
        loads(f"{other}/step-{step}", step)
    # Another save of a step is not taken for its copy.
    save(f"{run}/step-30", 31.0, overwrite=True)
    assert program("cp", run, other, "--yes").code == 5
    assert program("cp", run, other, "--yes", "--overwrite").code == 0
    loads(f"{other}/step-30", 31.0)


@pytest.mark.parametrize("during", [10, 20])
def test_copies_the_others_of_a_run_if_one_is_deleted_meanwhile(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch, during: int
) -> None:
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    in_run(run, 10, 20, 30)

    def copied(plan: CopyPlan, **kwargs: Any) -> Copied:
        if plan.saved.url.endswith(f"-{during}"):
            assert program("rm", f"{run}/step-20", "--yes").code == 0
        return copy_checkpoint(plan, **kwargs)

    monkeypatch.setattr(copying, "copy_checkpoint", copied)
    done = program("cp", run, other, "--yes", "--json")
    assert (done.code, done.json["deleted"], len(done.json["checkpoints"])) == (0, [f"{run}/step-20"], 2)
    for step in (10, 30):
        loads(f"{other}/step-{step}", step)
