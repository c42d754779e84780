"""Pruners and sweeps beside saves, on real servers: what was committed and acknowledged stays whole.

Others act where a save calls its progress callback, which is when its data are there and nothing is committed yet, or
right after a listing that a pruner acts on.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from bucketpoint.catalog.catalog import Catalog, open_catalog
from bucketpoint.catalog.deletion.prune import prune
from bucketpoint.catalog.deletion.sweep import sweep
from bucketpoint.catalog.records import adopt
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.format import keys
from bucketpoint.location import Location
from bucketpoint.retention import Entry
from bucketpoint.stores import ObjectInfo
from catalog.memory import order
from kit.servers import S3Server
from services import Service

HOUR = 3600.0


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000,), value)}, "optim": {"m": torch.full((1000,), value)}}


@dataclasses.dataclass
class Run:
    """A run in an empty bucket."""

    service: Service
    root: str

    @property
    def catalog(self) -> Catalog:
        return open_catalog(Location.of(self.root, self.service.options))

    def url(self, folder: str) -> str:
        return f"{self.root}/{folder}"

    def save(self, step: int, value: float) -> None:
        """A save that the catalog records."""
        self.save_plainly(f"step-{step}", value, log=SaveLog(self.catalog))

    def save_plainly(
        self, folder: str, value: float, meanwhile: Callable[[], object] | None = None, **arguments: Any
    ) -> None:
        """A save of a writer that knows nothing of the catalog; `meanwhile` happens before it commits."""
        done: list[object] = []

        def progress(event: Any) -> None:
            if meanwhile is not None and event.finished:
                done.append(event)
                meanwhile()

        writer = self.service.writer(progress=progress, **arguments)
        dcp.save(state_of(value), checkpoint_id=self.url(folder), storage_writer=writer, no_dist=True)
        assert bool(done) == (meanwhile is not None)

    def loaded(self, folder: str) -> set[float]:
        """All values that a load of the whole state gets."""
        state = state_of(-1.0)
        dcp.load(state, checkpoint_id=self.url(folder), storage_reader=self.service.reader(), no_dist=True)
        return {*state["model"]["w"].tolist(), *state["optim"]["m"].tolist()}

    def sweep_later(self, hours: float, **how: Any) -> list[str]:
        """Sweep so many hours from now, by the store's clock. Returns what went."""
        later = dataclasses.replace(self.catalog, now=time.time() + hours * HOUR)
        return sweep(later, older_than=HOUR, **how).objects


def drop_first(rows: Any) -> list[Entry]:
    return [order(row.step, row.id) for row in rows if row.step == 1]


@pytest.fixture
def run(service: Service) -> Run:
    return Run(service, service.url("run"))


class Paused:
    """A store whose user sleeps after the first listing below a prefix, while something else happens."""

    def __init__(self, store: Any, prefix: str, meanwhile: Callable[[], object]) -> None:
        self._store = store
        self._prefix = prefix
        self._meanwhile: Callable[[], object] | None = meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, prefix: str, **how: Any) -> Iterator[ObjectInfo]:
        found = list(self._store.list(prefix, **how))
        if prefix == self._prefix and self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
        return iter(found)


# fake-gcs-server deletes whatever a condition says; before it stands what does as GCS documents.
@pytest.mark.parametrize("service", ["minio", "gcs_xml"], indirect=True)
def test_deletes_nothing_committed_while_a_pruner_slept_since_its_listing(run: Run) -> None:
    run.save(1, 1.0)
    run.save(2, 2.0)
    catalog = run.catalog
    store = Paused(catalog.store, catalog.key("step-1/"), lambda: run.save_plainly("step-1", 3.0))
    paused = dataclasses.replace(catalog, store=store)
    done = prune(paused, drop_first, grace=0.0, holder="test")
    assert done.deleted == []
    assert run.loaded("step-1") == {3.0}


@pytest.mark.parametrize("before", [False, True], ids=["fresh", "over a checkpoint"])
@pytest.mark.parametrize("deep", [False, True], ids=["by its intent", "deep"])
def test_stops_a_save_or_the_sweep_that_takes_it_for_dead(
    run: Run, before: bool, deep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before:
        run.save(1, 1.0)
    real = time.time

    def hours_later() -> None:
        assert run.sweep_later(2, deep=deep)
        monkeypatch.setattr(time, "time", lambda: real() + 2 * HOUR)

    log = {} if deep else {"log": SaveLog(run.catalog)}
    with pytest.raises(dcp.CheckpointException) as failed:
        run.save_plainly("step-1", 3.0, hours_later, **log)
    monkeypatch.setattr(time, "time", real)
    (error,) = [one for one, _ in failed.value.failures.values()]
    assert "A sweep deleted data of this save" in str(error)
    if before:
        assert run.loaded("step-1") == {1.0}
    run.save_plainly("step-1", 4.0)
    assert run.loaded("step-1") == {4.0}


def test_commits_a_save_of_hours_that_no_sweep_met_and_leaves_no_fence(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    run.save_plainly("step-1", 3.0, lambda: monkeypatch.setattr(time, "time", lambda: real() + 2 * HOUR))
    monkeypatch.setattr(time, "time", real)
    assert run.loaded("step-1") == {3.0}
    assert [key for key in run.service.listed() if "fences" in key] == []


def test_removes_a_checkpoint_named_by_torchs_writer_whole_and_nothing_else(run: Run, tmp_path: Path) -> None:
    dcp.save(state_of(1.0), storage_writer=FileSystemWriter(str(tmp_path / "a")), no_dist=True)
    for path in (tmp_path / "a").iterdir():
        run.service.write(f"run/step-1/{path.name}", path.read_bytes())
    run.save(2, 2.0)
    assert adopt(run.catalog) == ["step-1"]
    run.service.write("run/step-1/__7_7.distcp", b"not named by it")
    done = prune(run.catalog, drop_first, grace=0.0, holder="test")
    assert [step for step, _ in done.deleted] == [1]
    left = [key for key in run.service.listed("run/step-1/") if not key.endswith("/.metadata")]
    assert left == ["run/step-1/__7_7.distcp"]


def test_sweeps_the_open_upload_of_a_dead_plain_save_where_uploads_are_listed(versitygw: S3Server) -> None:
    service = Service.on(versitygw)
    run = Run(service, service.url("run"))
    run.save(2, 2.0)
    store = run.catalog.store
    key = keys.data_path(keys.new_token(), 0, "model", 0)
    store.create_multipart(f"run/step-1/{key}")
    store.create_multipart(f"run/step-1/finetune/step-3/{key}")
    store.create_multipart(f"elsewhere/step-1/{key}")
    later = dataclasses.replace(run.catalog, now=time.time() + 2 * HOUR)
    assert sweep(later, older_than=HOUR).uploads == [f"run/step-1/{key}"]
    left = sorted(one.key for one in store.list_multipart(""))
    assert left == [f"elsewhere/step-1/{key}", f"run/step-1/finetune/step-3/{key}"]
