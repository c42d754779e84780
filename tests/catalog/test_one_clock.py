"""One clock, the store's: what a machine's own clock says makes nothing old. And a record is of a commit."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from tests.simulation.bucket import Bucket

from bucketpoint.catalog import notes
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.prune import future_lines, prune, prune_by
from bucketpoint.catalog.deletion.sweep import sweep
from bucketpoint.catalog.observer import Observer
from bucketpoint.catalog.records import reconcile
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import NoteKey
from bucketpoint.retention import Best, Keep, Prune, RetentionPolicy
from catalog.memory import MemoryStore, commit_without_a_record, memory_catalog, save
from catalog.test_pruner import drop

HOUR = 3600.0
WRONG = pytest.mark.parametrize("wrong", [-50 * HOUR, 61 * 60, 50 * HOUR])


@pytest.fixture(params=[True, False])
def store(request: pytest.FixtureRequest) -> MemoryStore:
    """A store whose replies to writes contain the object's time, and one where they do not, as those of S3."""
    return MemoryStore(dates_writes=request.param)


def policy(*, grace: float = 0.0, latest: int = 1, best: int = 0, within: timedelta | None = None) -> RetentionPolicy:
    ranks = [Best("loss", "min", best)] if best else []
    return RetentionPolicy(Keep(latest=latest, best=ranks, within=within), prune=Prune(grace=timedelta(seconds=grace)))


def steps(catalog: Catalog) -> list[int]:
    return [checkpoint.step for checkpoint in catalog.with_unrecorded(catalog.snapshot()).checkpoints]


def by_clock(catalog: Catalog, store: MemoryStore, wrong: float) -> Catalog:
    return replace(catalog, clock=lambda: store.now + wrong)


@WRONG
def test_keeps_leases_and_graces_whatever_the_pruners_clock_says(
    store: MemoryStore, catalog: Catalog, wrong: float
) -> None:
    for step in (100, 200, 300):
        save(catalog, step)
    notes.lease(catalog, 100, "reader", seconds=600)
    pruner = by_clock(catalog, store, wrong)
    prune_by(pruner, policy(grace=24 * HOUR), holder="one")
    store.now += 23 * HOUR
    notes.lease(catalog, 100, "reader", seconds=600)
    assert prune_by(pruner, policy(grace=24 * HOUR), holder="one").done.deleted == []
    store.now += HOUR
    assert [step for step, _ in prune_by(catalog, policy(grace=24 * HOUR), holder="two").done.deleted] == [200]
    assert steps(catalog) == [100, 300]


@WRONG
def test_sweeps_by_the_stores_time(store: MemoryStore, catalog: Catalog, wrong: float) -> None:
    save(catalog, 100)
    token = keys.new_token()
    SaveLog(catalog).begin(catalog.url_of(200), token)
    store.put("run/step-200/" + keys.data_path(token, 0, "model", 0), [memoryview(b"x")])
    sweeper = by_clock(catalog, store, wrong)
    store.now += HOUR - 1
    assert sweep(sweeper, older_than=HOUR, deep=True).objects == []
    store.now += 2
    assert len(sweep(sweeper, older_than=HOUR, deep=True).objects) == 1


@WRONG
def test_shows_a_save_as_dead_by_the_stores_times_alone(store: MemoryStore, catalog: Catalog, wrong: float) -> None:
    SaveLog(catalog).begin(catalog.url_of(100), keys.new_token())
    seen = Observer(by_clock(catalog, store, wrong)).look()
    assert [save.is_live(seen.snapshot.taken) for save in seen.attempts] == [True]
    store.now += 49 * HOUR
    save(catalog, 200)
    seen = Observer(by_clock(catalog, store, wrong)).look()
    assert [save.is_live(seen.snapshot.taken) for save in seen.attempts] == [False]


def test_ages_nothing_in_a_store_without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, real = memory_catalog(MemoryStore(dates_writes=False)), Bucket.info
    monkeypatch.setattr(Bucket, "info", lambda self, key: replace(real(self, key), modified=None))
    for step in (100, 200, 300):
        save(catalog, step)
    SaveLog(catalog).begin(catalog.url_of(400), keys.new_token())
    late = replace(catalog, clock=lambda: 4e9)
    notes.lease(catalog, 100, "reader", seconds=1)
    assert prune_by(late, policy(grace=60), holder="one").done.deleted == []
    assert prune_by(late, policy(grace=60), holder="one").done.deleted == []
    assert sweep(late, deep=True).notes == []
    # Without a grace the tombstone is due at once.
    assert [step for step, _ in prune(late, drop(200), grace=0.0, holder="two").deleted] == []


def test_names_a_record_from_the_future_and_ages_no_other_by_it(store: MemoryStore, catalog: Catalog) -> None:
    save(by_clock(catalog, store, 48 * HOUR), 100)
    for step in (200, 300, 400):
        store.now += 60
        save(catalog, step)
    done = prune_by(catalog, policy(within=timedelta(hours=6)), holder="one").done
    assert steps(catalog) == [100, 200, 300, 400]
    (line,) = future_lines(done.ahead)
    assert "step 100" in line
    assert "48.0 h ahead" in line


@pytest.mark.parametrize("what", ["", ".metadata"])
def test_ignores_what_something_else_removed(store: MemoryStore, catalog: Catalog, what: str) -> None:
    for step, loss in ((100, 5.0), (200, 1.0), (300, 2.0), (400, 4.0), (500, 6.0)):
        save(catalog, step, metrics={"loss": loss})
        store.now += 1
    for step in (200, 400):
        store.delete([key for key in store.objects if key.startswith(f"run/step-{step}/{what}")])
    done = prune_by(catalog, policy(latest=2, best=1), holder="one").done
    assert done.gone == [200, 400]
    assert [step for step, _ in done.deleted] == [100]
    sweep(catalog, deep=True)
    assert [checkpoint.step for checkpoint in catalog.snapshot().checkpoints] == [300, 500]


def test_ignores_what_another_writer_replaced_for_the_recorded_commit(store: MemoryStore, catalog: Catalog) -> None:
    for step, loss in ((100, 2.0), (200, 1.0), (300, 3.0)):
        save(catalog, step, metrics={"loss": loss})
    other = memory_catalog(store, prefix="other")
    save(other, 200)
    store.objects["run/step-200/.metadata"] = store.objects["other/step-200/.metadata"]
    done = prune_by(catalog, policy(best=1), holder="one").done
    assert (done.gone, done.deleted) == ([200], [])
    assert steps(catalog) == [100, 200, 300]


def test_makes_new_records_once_for_a_run_that_was_moved(store: MemoryStore, catalog: Catalog) -> None:
    for step in (100, 200, 300, 400):
        save(catalog, step)
    for key, (data, etag, _) in list(store.objects.items()):
        store.objects[key] = data, f"moved-{etag}", store.now
    done = prune_by(catalog, policy(latest=2), holder="one").done
    assert sorted(step for step, _ in done.deleted) == [100, 200]
    assert (done.withdrawn, done.gone) == ([], [])
    save(catalog, 500)
    writes = store.calls["put"]
    assert [step for step, _ in prune_by(catalog, policy(latest=2), holder="one").done.deleted] == [300]
    # The record of what was the newest before, the lock, the tombstone, its claim.
    assert store.calls["put"] - writes == 4


@pytest.mark.parametrize("how", ["save", "report"])
def test_binds_metrics_to_one_commit(store: MemoryStore, catalog: Catalog, how: str) -> None:
    save(catalog, 100, metrics={"loss": 0.5})
    save(catalog, 200, **({"metrics": {"loss": 0.1}} if how == "save" else {}))
    if how == "report":
        notes.report(catalog, 200, {"loss": 0.1})
    store.now += 1
    save(catalog, 200)
    save(catalog, 300, metrics={"loss": 0.8})
    assert [row.metrics for row in catalog.snapshot().rows()] == [{"loss": 0.5}, {}, {"loss": 0.8}]
    assert [step for step, _ in prune_by(catalog, policy(best=1), holder="one").done.deleted] == [200]


@pytest.mark.parametrize("clocks", [(50 * HOUR, 0.0), (0.0, -50 * HOUR)])
def test_counts_the_later_report_of_a_metric_whatever_the_clocks_say(
    store: MemoryStore, catalog: Catalog, clocks: tuple[float, float]
) -> None:
    save(catalog, 200)
    for ahead, value in zip(clocks, (9.0, 0.1), strict=True):
        store.now += 1
        notes.report(by_clock(catalog, store, ahead), 200, {"loss": value})
    assert [row.metrics for row in catalog.snapshot().rows()] == [{"loss": 0.1}]


def test_keeps_what_a_job_with_a_clock_behind_reports_before_its_save_in_a_sweep(
    store: MemoryStore, catalog: Catalog
) -> None:
    notes.report(by_clock(catalog, store, -50 * HOUR), 200, {"loss": 0.1})
    sweep(catalog)
    assert catalog.snapshot().metric_names() == {"loss"}


def test_reports_metrics_of_the_present_commit_though_its_record_is_late(store: MemoryStore, catalog: Catalog) -> None:
    first = save(catalog, 200)
    SaveLog(catalog).begin(catalog.url_of(200), keys.new_token())
    notes.report(catalog, 200, {"loss": 0.1})
    assert [report.token for report in catalog.snapshot().notes.reports] == [first]
    second = commit_without_a_record(catalog, 200)
    store.now += 1
    notes.report(catalog, 200, {"loss": 0.2})
    assert {report.token for report in catalog.snapshot().notes.reports} == {first, second}
    save(catalog, 300)
    store.calls.clear()
    notes.report(catalog, 300, {"loss": 0.1})
    # Nothing is asked where no save is under way.
    assert store.calls == {"list": 2, "put": 1}


def test_counts_a_commit_without_a_record_from_the_stores_time(store: MemoryStore, catalog: Catalog) -> None:
    for step in (100, 200, 300):
        save(catalog, step)
        store.now += HOUR
    # The coordinator was killed before it recorded the newest checkpoint.
    token = commit_without_a_record(by_clock(catalog, store, -50 * HOUR), 200)
    assert [step for step, _ in prune_by(catalog, policy(), holder="one").done.deleted] == [100]
    assert {(row.step, row.id, row.created) for row in catalog.snapshot().rows()} >= {(200, token, store.now)}


def test_keeps_the_time_of_the_source_for_a_copy_without_a_record(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 300)
    commit_without_a_record(by_clock(catalog, store, -50 * HOUR), 200, copied_from="memory://store/run/step-100")
    assert [row.created for row in reconcile(catalog, catalog.snapshot()).rows()] == [store.now - 50 * HOUR, store.now]


def test_ranks_the_present_commit_though_its_job_has_a_clock_behind(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 200)
    notes.report(catalog, 200, {"loss": 0.1})
    store.now += 1
    token = save(by_clock(catalog, store, -50 * HOUR), 200)
    notes.report(catalog, 200, {"loss": 0.9})
    assert token in [report.token for report in catalog.snapshot().notes.reports]
    # Before any prune: a restore of the best one and a dry run of a policy read this.
    assert [(row.id, row.metrics) for row in catalog.snapshot().rows()] == [(token, {"loss": 0.9})]


def test_counts_metrics_of_version_0_2_and_of_steps_not_saved_yet(store: MemoryStore, catalog: Catalog) -> None:
    notes.report(catalog, 100, {"loss": 0.5})
    note = NoteKey(200, "metrics", ("1700000000000", "loss", "0.25"))
    store.put(catalog.own_key("notes", note.name()), [])
    save(catalog, 100)
    save(catalog, 200)
    assert [row.metrics["loss"] for row in catalog.snapshot().rows()] == [0.5, 0.25]


def test_shows_a_dead_save_without_the_objects_of_the_next(store: MemoryStore, catalog: Catalog) -> None:
    dead = keys.new_token()
    SaveLog(catalog).begin(catalog.url_of(100), dead)
    store.put("run/step-100/" + keys.data_path(dead, 0, "model", 0), [memoryview(b"abc")])
    store.now += 60
    rank = keys.new_token()
    path = keys.data_path(rank, 1, "model", 0)
    save(catalog, 100)
    # Another rank of the save that succeeded has a token of its own.
    store.put(f"run/step-100/{path}", [memoryview(b"0" * 1000)])
    store.put("run/step-100/.metadata", [memoryview(store.objects["run/step-100/.metadata"][0] + path.encode())])
    (seen,) = Observer(catalog).look().attempts
    assert (seen.token, seen.objects, seen.bytes) == (dead, 1, 3)
