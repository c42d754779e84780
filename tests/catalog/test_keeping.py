"""A plain writer with a policy: what it saves is recorded and pruned, on real stores and by every way through DCP."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bucketpoint import BucketWriter, S3Writer, async_save
from bucketpoint.catalog.catalog import Catalog, open_catalog
from bucketpoint.catalog.deletion import worker as pruning
from bucketpoint.catalog.deletion.worker import worker_of
from bucketpoint.catalog.records import read_record
from bucketpoint.catalog.run import open_run
from bucketpoint.errors import AccessDeniedError, InvalidURLError, PolicyError
from bucketpoint.format import catalog_keys
from bucketpoint.location import Location, parent_and_name
from bucketpoint.retention import Keep, Layout, MaxDelete, Prune, RetentionPolicy
from bucketpoint.stores.local import LocalStore
from dcp.ranks import Ranks
from services import S3_AND_GCS, Service

pytestmark = pytest.mark.contract

WAIT_S = 240
"""Against hangs only."""


def policy(latest: int = 2, **more: Any) -> RetentionPolicy:
    prune = more.pop("prune", Prune(grace=timedelta(0), max_delete=MaxDelete(fraction=1.0)))
    return RetentionPolicy(Keep(latest), prune=prune, **more)


YAML = "version: 1\nkeep: {latest: 2}\nprune: {grace: 0s, max_delete: {fraction: 1.0}}\n"


def state(step: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((100,), float(step))},
        "optim": {"m": torch.full((100,), step + 0.5)},
        "step": step,
    }


def save(writer: BucketWriter, *urls: str) -> None:
    for url in urls:
        # Another state for each URL: one that stands still is reported.
        dcp.save(state(sum(url.encode())), checkpoint_id=url, storage_writer=writer, no_dist=True)


def steps_of(catalog: Catalog) -> list[int]:
    return [one.step for one in catalog.steps().checkpoints]


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    file = tmp_path / "policy.yaml"
    file.write_text(YAML)
    return file


def test_records_and_prunes_saves_of_a_writer_with_a_policy(
    service: Service, policy_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = service.url("team/run")
    writer = service.writer(root, retention=policy_file)
    assert writer.pruning is None
    for step in (10, 20, 30, 40):
        save(writer, f"{root}/step-{step}")
        assert writer.pruning is not None
        assert writer.pruning.drain(WAIT_S)
    assert writer.pruning.failure is None
    catalog = open_catalog(Location.of(root, service.options))
    assert steps_of(catalog) == [30, 40]
    snapshot = catalog.snapshot()
    assert snapshot.attempts + snapshot.finished + snapshot.notes.tombstones == ()
    left = {key.removeprefix("team/run/").split("/")[0] for key in service.listed()}
    assert left == {"_bucketpoint", "step-30", "step-40"}
    assert not [key for key in service.listed() if key.endswith(".bucketpoint.json")]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_warns_once_of_a_folder_that_is_no_step_and_does_not_record_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = BucketWriter(retention=policy())
    save(writer, f"{tmp_path}/run/step-1", f"{tmp_path}/run/final", f"{tmp_path}/run/export", f"{tmp_path}/run/step-2")
    assert (tmp_path / "run/final/.bucketpoint.json").exists()
    assert steps_of(open_catalog(str(tmp_path / "run"))) == [1, 2]
    assert [r.getMessage() for r in caplog.records if "gets no record" in r.getMessage()] == [
        f"{tmp_path}/run/final is saved, but gets no record and is not pruned, because it is not a step of a run, "
        "whose folders are named step-{step}"
    ]


def test_takes_the_run_from_the_policys_root_and_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = f"{tmp_path}/run"
    writer = BucketWriter(retention=policy(1, root=f"file://{root}/", layout=Layout("s{step:04d}")))
    # The same place, written in another way; and a place that is not the policy's.
    save(writer, f"{root}/s0001", f"{tmp_path}/other/s0002", f"{root}/step-3")
    assert steps_of(open_catalog(root, template="s{step}")) == [1]
    assert not (tmp_path / "other/_bucketpoint").exists()
    assert "not a step of the run at file://" in caplog.text


def test_records_and_prunes_each_run_of_a_writer_whose_policy_has_no_root(tmp_path: Path) -> None:
    writer = BucketWriter(retention=policy(1))
    for name in ("a", "b"):
        for step in (1, 2):
            save(writer, f"{tmp_path}/{name}/step-{step}")
        assert writer.pruning is not None
        writer.pruning.drain()
    assert [steps_of(open_catalog(f"{tmp_path}/{name}")) for name in ("a", "b")] == [[2], [2]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("version: 1\nkeep: {latest: 0}\n", ":2:16: keep.latest"),
        ("version: 1\nkeep: {latest: 2}\nlayout: {step_dir: '" + "x" * 60 + "{step}'}\n", "layout.step_dir"),
        ("version: 1\nkeep: {latest: 2}\nrun: 'a/b'\n", ":3:6: run"),
    ],
)
def test_refuses_a_wrong_policy_when_the_writer_is_made(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(PolicyError) as raised:
        BucketWriter(retention=file)
    assert f"{file}" in str(raised.value)
    assert told in str(raised.value)
    with pytest.raises(PolicyError, match="cannot be read") as raised:
        BucketWriter(retention=tmp_path / "nowhere.yaml")
    assert str(raised.value).endswith(f"[file={tmp_path}/nowhere.yaml]")


def test_refuses_a_root_that_is_not_the_policys(tmp_path: Path) -> None:
    with pytest.raises(InvalidURLError):
        S3Writer(retention=policy(root=str(tmp_path)))


def test_records_without_pruning_under_a_policy_that_prunes_by_hand(tmp_path: Path) -> None:
    writer = BucketWriter(retention=policy(1, prune=Prune(when="manual")))
    save(writer, *(f"{tmp_path}/run/step-{step}" for step in (1, 2, 3)))
    assert writer.pruning is not None
    assert writer.pruning.drain()
    assert writer.pruning.last is None
    assert steps_of(open_catalog(f"{tmp_path}/run")) == [1, 2, 3]


def test_reports_a_store_that_refuses_deletion_and_saves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(store: Any, keys: Any) -> Any:
        raise AccessDeniedError("may not delete", url=store.url)

    monkeypatch.setattr(LocalStore, "delete", refuse)
    writer = BucketWriter(retention=policy(1))
    for step in (1, 2, 3):
        save(writer, f"{tmp_path}/run/step-{step}")
        assert writer.pruning is not None
        writer.pruning.drain()
    assert isinstance(writer.pruning.failure, AccessDeniedError)
    assert "pruning failed" in caplog.text
    assert steps_of(open_catalog(f"{tmp_path}/run")) == [1, 2, 3]


def test_survives_a_fault_of_our_own_in_save_and_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [True]

    def breaks(*args: Any, **more: Any) -> Any:
        if broken:
            raise ZeroDivisionError
        return original(*args, **more)

    original = pruning.prune_by
    monkeypatch.setattr(pruning, "prune_by", breaks)
    writer = BucketWriter(retention=policy(1))
    save(writer, f"{tmp_path}/run/step-1")
    assert writer.pruning is not None
    writer.pruning.drain()
    assert "ZeroDivisionError" in str(writer.pruning.failure)
    broken.clear()
    save(writer, f"{tmp_path}/run/step-2")
    writer.pruning.drain()
    assert writer.pruning.failure is None
    assert steps_of(open_catalog(f"{tmp_path}/run")) == [2]


def test_makes_one_worker_for_many_writers(tmp_path: Path) -> None:
    workers = set()
    for step in (1, 2, 3):
        writer = BucketWriter(f"{tmp_path}/run/step-{step}", retention=policy())
        dcp.save(state(step), storage_writer=writer, no_dist=True)
        again = pickle.loads(pickle.dumps(writer))
        save(again, f"{tmp_path}/run/step-{step}")
        workers |= {writer.pruning, again.pruning}
    assert len(workers) == 1
    catalog = open_run(policy(), f"{tmp_path}/run")
    worker = worker_of(catalog, policy())
    assert workers == {worker}
    assert pickle.loads(pickle.dumps(worker)) is worker
    worker.drain()


@pytest.mark.parametrize(
    ("url", "split"),
    [
        ("s3://bucket/run/step-5", ("s3://bucket/run", "step-5")),
        ("s3://bucket/run/step-5//", ("s3://bucket/run", "step-5")),
        ("s3://bucket/step-5", ("s3://bucket", "step-5")),
        ("s3://step-5", None),
        ("step-5", (".", "step-5")),
        ("/step-5", None),
        ("file:///step-5", None),
        ("/data/step-5", ("/data", "step-5")),
        ("memory://step-5", None),
        ("", None),
    ],
)
def test_takes_what_is_above_the_folder_as_the_run(url: str, split: tuple[str, str] | None) -> None:
    assert parent_and_name(url) == split


# -- every way through DCP --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def async_saves(rank: int, world: int, root: str, options: dict[str, Any], executor: str) -> Any:
    writer = BucketWriter(retention=policy(), storage_options=options)
    for step in (10, 20, 30):
        handle = async_save(
            {"model": {"w": torch.full((100,), float(step)), f"own{rank}": torch.ones(3)}},
            checkpoint_id=f"{root}/step-{step}",
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType[executor],
        )
        handle.result(WAIT_S)
    if writer.pruning is not None:
        writer.pruning.drain(WAIT_S)
    writer.close()
    return writer.pruning is not None and writer.pruning.last is not None


@pytest.mark.parametrize("service", S3_AND_GCS, indirect=True)
@pytest.mark.parametrize("executor", ["THREAD", "PROCESS"])
def test_keeps_what_the_policy_says_in_a_job_that_saves_beside_training(
    two_ranks: Ranks, service: Service, executor: str
) -> None:
    root = service.url("run")
    # Rank 0 alone prunes; a checkpoint process does so by itself, so that its parent has nothing to say.
    has = two_ranks.run(async_saves, root, service.options, executor)
    assert has == [executor == "THREAD", False]
    catalog = open_catalog(Location.of(root, service.options))
    assert eventually(lambda: steps_of(catalog) == [20, 30])
    record = read_record(catalog, catalog.steps().checkpoints[-1].key or "")
    assert record is not None
    assert record.world_size == 2


# -- whose run it is --------------------------------------------------------------------------------------------------


def test_reads_names_of_runs_back_from_their_keys() -> None:
    for name in ("a", "llama-8b.v2_final", "0"):
        assert catalog_keys.run_of(catalog_keys.encode([catalog_keys.RUN, name])) == name
    for other in ("run", "run__", "run__a__b", "0000000000000001__run__a", "steps__a"):
        assert catalog_keys.run_of(other) is None
