"""The catalog and the pruner on real stores, with checkpoints that a real writer saved and a real reader loads."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketReader, BucketWriter, TransferOptions
from bucketpoint.catalog.catalog import Catalog, open_catalog
from bucketpoint.catalog.deletion.prune import prune
from bucketpoint.catalog.deletion.state import undo
from bucketpoint.catalog.deletion.sweep import sweep
from bucketpoint.catalog.notes import lease, pin, unpin
from bucketpoint.catalog.records import adopt, read_record, write_metrics
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.catalog.snapshot import THIN
from bucketpoint.dcp import session
from bucketpoint.errors import TransientStoreError
from bucketpoint.format import keys
from bucketpoint.location import Location
from bucketpoint.retention import Entry, Row
from catalog import memory
from fsspec_backends import SERVED, backend
from services import Service
from transfer.wrappers import CountingStore

pytestmark = pytest.mark.contract

MIB = 1 << 20
PARTS = TransferOptions(part_bytes=5 * MIB, single_put_bytes=5 * MIB)


@pytest.fixture(params=["moto", "minio", "gcs", "local", "memory", *SERVED])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A run's root URL and its storage options."""
    if request.param in ("moto", "minio", "gcs"):
        service = Service.on(request.getfixturevalue(request.param))
        yield service.url("team/run"), {"storage_options": service.options}
    elif request.param == "local":
        yield f"{tmp_path}/run", {}
    elif request.param in SERVED:
        with backend(request.param, request, tmp_path) as found:
            yield found.root, {"fs": found.fs}
    else:
        fs = fsspec.filesystem("memory")
        yield f"memory://{tmp_path.name}/run", {}
        fs.rm(f"/{tmp_path.name}", recursive=True) if fs.exists(f"/{tmp_path.name}") else None


@pytest.fixture
def options(run: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return run[1]


@pytest.fixture
def catalog(run: tuple[str, dict[str, Any]]) -> Catalog:
    return open_catalog(Location.of(run[0], **run[1]))


def state(value: float, rows: int = 100) -> dict[str, Any]:
    return {"model": {"w": torch.full((rows, 100), value)}, "optim": {"m": torch.full((rows, 100), value)}, "epoch": 1}


def save(catalog: Catalog, step: int, options: dict[str, Any], *, rows: int = 100, **about: Any) -> str:
    writer = BucketWriter.of_run(None, SaveLog(catalog, **about), transfer=PARTS, **options)
    dcp.save(state(step, rows), checkpoint_id=catalog.url_of(step), storage_writer=writer, no_dist=True)
    return catalog.url_of(step)


def loaded(url: str, options: dict[str, Any], *parts: str) -> dict[str, Any]:
    target = {name: value for name, value in state(-1.0).items() if not parts or name in parts}
    dcp.load(target, checkpoint_id=url, storage_reader=BucketReader(**options), no_dist=True)
    return target


def drop(*steps: int, action: str = "delete") -> Any:
    return lambda rows: [memory.order(row.step, row.id, action) for row in rows if row.step in steps]


def keys_of(catalog: Catalog) -> list[str]:
    return [info.key for info in catalog.store.list(catalog.key(""))]


def sweep_markers(catalog: Catalog) -> None:
    """Three days later a sweep removes what a pruner cannot remove by a condition."""
    sweep(replace(catalog, now=time.time() + 72 * 3600))


def test_records_what_a_writer_saves_in_the_catalog_and_nowhere_else(catalog: Catalog, options: dict[str, Any]) -> None:
    log = SaveLog(catalog, metrics={"loss": 1.0})
    assert pickle.loads(pickle.dumps(log)).catalog.url == catalog.url
    save(catalog, 100, options, metrics={"eval/loss": 0.5}, git_sha="abc")
    save(catalog, 200, options)
    rows = catalog.snapshot().rows()
    assert [row.step for row in rows] == [100, 200]
    assert rows[0].metrics == {"eval/loss": 0.5}
    assert rows[0].groups["model"] > 40_000
    assert rows[0].bytes == sum(rows[0].groups.values())
    record = read_record(catalog, catalog.steps().checkpoints[0].key or "")
    assert record is not None
    assert (record.step, record.bytes, record.world_size, record.git_sha) == (100, rows[0].bytes, 1, "abc")
    assert not [key for key in keys_of(catalog) if key.endswith(".bucketpoint.json") or "__open__" in key]
    newest = next(catalog.candidates())
    assert loaded(catalog.url_of_folder(newest.folder), options)["model"]["w"][0, 0] == 200


def test_follows_a_checkpoint_from_save_to_deletion(catalog: Catalog, options: dict[str, Any]) -> None:
    for step in (100, 200, 300, 400):
        save(catalog, step, options)
    before = set(keys_of(catalog))
    identity = pin(catalog, 100, reason="paper", author="ann")
    lease(catalog, 200, "eval/1")
    done = prune(catalog, drop(100, 200, 300, 400), grace=3600, holder="me")
    assert [step for step, _ in done.buried] == [300]
    assert sorted(step for step, _ in done.refused) == [100, 200, 400]
    assert [row.step for row in catalog.snapshot().rows() if row.tombstone is None] == [100, 200, 400]
    assert undo(catalog, 300) == 1
    unpin(catalog, 100, identity)
    done = prune(catalog, drop(100, 300), grace=0, holder="me")
    assert sorted(step for step, _ in done.deleted) == [100, 300]
    assert done.failures == []
    sweep_markers(catalog)
    left = {key for key in keys_of(catalog) if "/notes/" not in key and "__tombstone__" not in key}
    assert left == {key for key in before if not any(name in key for name in ("step-100", "step-300"))}
    assert loaded(catalog.url_of(200), options)["optim"]["m"][0, 0] == 200


def test_loads_the_weights_of_a_thinned_checkpoint_and_has_no_optimizer(
    catalog: Catalog, options: dict[str, Any]
) -> None:
    save(catalog, 100, options, rows=2000)
    save(catalog, 200, options)
    full = catalog.snapshot().rows()[0]
    done = prune(catalog, drop(100, action=THIN), grace=0, holder="me")
    assert done.thinned == [(100, full.id)]
    row = catalog.snapshot().rows()[0]
    assert (row.kind, row.id, row.created) == ("weights", full.id, full.created)
    assert row.bytes == full.bytes - full.groups["optim"]
    assert not [key for key in keys_of(catalog) if "step-100/" in key and "-optim-" in key]
    target = {"model": {"w": torch.zeros(2000, 100)}, "epoch": 0}
    dcp.load(target, checkpoint_id=catalog.url_of(100), storage_reader=BucketReader(**options), no_dist=True)
    assert torch.equal(target["model"]["w"], torch.full((2000, 100), 100.0))
    assert target["epoch"] == 1
    with pytest.raises(dcp.CheckpointException):
        dcp.load(
            {"optim": {"m": torch.zeros(2000, 100)}},
            checkpoint_id=catalog.url_of(100),
            storage_reader=BucketReader(**options),
            no_dist=True,
        )


def test_adopts_checkpoints_of_a_plain_writer_and_of_torchs_own(catalog: Catalog, options: dict[str, Any]) -> None:
    writer = BucketWriter(**options)
    dcp.save(state(1.0), checkpoint_id=catalog.url_of(100), storage_writer=writer, no_dist=True)
    if options or catalog.url.startswith("memory"):
        pytest.skip("torch's own writer is shown on a folder")
    dcp.save(state(2.0), checkpoint_id=catalog.url_of(200), no_dist=True)
    assert adopt(catalog) == ["step-100", "step-200"]
    one, two = catalog.snapshot().rows()
    assert (one.kind, two.kind) == ("full", "full")
    assert two.bytes > 80_000
    assert two.created > one.created
    save(catalog, 300, options)
    assert "it cannot be thinned" in next(
        iter(prune(catalog, drop(200, action=THIN), grace=0, holder="me").refused.values())
    )
    assert len(prune(catalog, drop(100, 200), grace=0, holder="me").deleted) == 2
    assert not [key for key in keys_of(catalog) if "step-100/" in key or "step-200/" in key]


def test_keeps_all_reports_of_many_processes_at_once(catalog: Catalog, options: dict[str, Any]) -> None:
    save(catalog, 100, options)

    def tell(number: int) -> None:
        metrics = {f"m{number}": float(number), "shared": float(number)}
        write_metrics(catalog, 100, metrics, at=1_700_000_000 + number, token=None)
        pin(catalog, 100, reason=str(number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(tell, range(24)))
    snapshot = catalog.snapshot()
    assert snapshot.rows()[0].metrics == {**{f"m{n}": float(n) for n in range(24)}, "shared": 23.0}
    assert len(snapshot.notes.pins) == 24


def test_ends_with_three_pruners_at_once_where_one_does(catalog: Catalog) -> None:
    for step in range(1, 41):
        memory.save(catalog, step)
    foreign = catalog.key("backup-of-step-5/x")
    catalog.store.put(foreign, [memoryview(b"x")])

    def keep(rows: list[Row]) -> list[Entry]:
        return [memory.order(row.step, row.id) for row in rows if row.step % 10]

    def one(number: int) -> int:
        # Each believes that it has the lock, as after an expiry.
        return len(prune(catalog, keep, grace=0, holder="same").deleted)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(one, range(3)))
    prune(catalog, keep, grace=0, holder="same")
    assert [row.step for row in catalog.snapshot().rows()] == [10, 20, 30, 40]
    sweep_markers(catalog)
    left = {key.removeprefix(catalog.key("")).split("/")[0] for key in keys_of(catalog)}
    assert left == {"_bucketpoint", "backup-of-step-5", "step-10", "step-20", "step-30", "step-40"}
    assert not [key for key in keys_of(catalog) if "/notes/" in key or "__tombstone__" in key]


def test_sweeps_open_uploads_of_a_dead_attempt(
    catalog: Catalog, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not catalog.store.capabilities.multipart:
        pytest.skip("there are no multipart uploads here")
    save(catalog, 100, options)

    class Dies(CountingStore):
        """The process is killed while its uploads are open: none is completed, none is aborted."""

        def complete_multipart(self, *args: Any, **kwargs: Any) -> Any:
            raise TransientStoreError("killed")

        def abort_multipart(self, *args: Any, **kwargs: Any) -> None:
            pass

    original, made = session.open_store, list[Dies]()

    def opening(*args: Any, **kwargs: Any) -> tuple[Any, str]:
        store, prefix = original(*args, **kwargs)
        made.append(made[0] if made else Dies(store))
        return made[0], prefix

    monkeypatch.setattr(session, "open_store", opening)
    with pytest.raises(dcp.CheckpointException):
        save(catalog, 200, options, rows=20_000)
    monkeypatch.undo()
    paths = {"data/" + key.rpartition("data/")[2] for key in made[0].keys if "data/" in key}
    opened = {catalog.key(f"step-200/{path}") for path in paths}
    opened = {key for key in opened if any(catalog.store.list_multipart(key))}
    assert len(opened) == 2
    before = {key for key in keys_of(catalog) if "step-200" not in key}
    late = Catalog(catalog.url, catalog.store, catalog.prefix, catalog.template, now=4e9)
    # A young one is left alone.
    assert sweep(catalog).uploads == []
    assert set(sweep(late).uploads) == opened
    assert not [key for key in opened if any(catalog.store.list_multipart(key))]
    assert set(keys_of(catalog)) == before
    assert sweep(late).uploads == []


def test_sweeps_a_temporary_file_of_a_dead_save_in_a_local_folder(tmp_path: Path) -> None:
    catalog, path = open_catalog(str(tmp_path)), keys.data_path(keys.new_token(), 0, "model", 0)
    folder, _, name = path.rpartition("/")
    left = tmp_path / "step-200" / folder / f".bucketpoint-tmp-0123456789abcdef-{name}"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    assert sweep(catalog).uploads == []
    assert left.exists()
    swept = sweep(replace(catalog, now=4e9))
    assert swept.uploads == [catalog.key(f"step-200/{path}")]
    assert not left.parent.exists()
