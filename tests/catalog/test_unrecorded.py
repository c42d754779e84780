"""Checkpoints without a record, of plain writers and of torch: seen, restored, and deleted by no policy."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.prune import prune
from bucketpoint.catalog.deletion.remove import Removal, _identified, plan_removal, remove, rolled_back
from bucketpoint.catalog.deletion.sweep import SAFETY_AGE_S, sweep
from bucketpoint.catalog.deletion.worker import PruneWorker
from bucketpoint.catalog.notes import report
from bucketpoint.catalog.records import adopt
from bucketpoint.catalog.restore_candidates import restore_candidates, roll_back
from bucketpoint.catalog.run import survey
from bucketpoint.errors import CheckpointNotFoundError, CorruptDataError, InvalidURLError
from bucketpoint.format.record import DeletionMarker
from bucketpoint.retention import Entry, Keep, Prune, RetentionPolicy, Row
from catalog.memory import START, MemoryStore, died, memory_catalog, metadata_bytes, order, save


def save_plainly(catalog: Catalog, store: MemoryStore, step: int) -> None:
    """What a writer without a catalog leaves: data and `.metadata`."""
    data, objects = metadata_bytes(f"{step:012x}", 1)
    for path, body in {".metadata": data, **objects}.items():
        key = catalog.key(f"step-{step}/{path}")
        store.objects[key] = (body, hashlib.md5(body, usedforsecurity=False).hexdigest(), START + step)


def test_finds_the_newest_of_a_mixed_run_whoever_saved_it(store: MemoryStore, catalog: Catalog) -> None:
    for step in (1, 3, 5):
        save(catalog, step)
    for step in (2, 4, 6):
        save_plainly(catalog, store, step)
    assert [one.step for one in catalog.candidates()] == [6, 5, 4, 3, 2, 1]
    snapshot = catalog.with_unrecorded(catalog.snapshot())
    assert [one.step for one in snapshot.checkpoints] == [1, 2, 3, 4, 5, 6]
    assert [one.step for one in snapshot.unrecorded] == [2, 4, 6]
    # The rules decide on none of them.
    assert [row.step for row in snapshot.rows()] == [1, 3, 5]


def test_warns_of_a_restore_from_a_checkpoints_url_that_is_no_run(
    store: MemoryStore, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    policy = RetentionPolicy(Keep(latest=1))
    assert restore_candidates(catalog, policy, "latest", None) == []
    assert not caplog.records
    save_plainly(catalog, store, 1)
    below = replace(catalog, url=catalog.url_of(1), prefix=catalog.key("step-1"))
    assert restore_candidates(below, policy, "latest", None) == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"The URL is that of a checkpoint, not of a run [url={below.url}]")


def test_finds_checkpoints_without_records_by_a_listing_and_a_read_for_each(
    store: MemoryStore, catalog: Catalog
) -> None:
    for step in (1, 2, 3):
        save(catalog, step)
    store.calls.clear()
    survey(catalog)
    assert store.calls == {"list": 2, "list_folders": 1}
    save_plainly(catalog, store, 4)
    save_plainly(catalog, store, 5)
    store.calls.clear()
    survey(catalog)
    assert store.calls == {"list": 2, "list_folders": 1, "get": 2}
    store.calls.clear()
    assert next(catalog.candidates()).step == 5
    assert store.calls == {"list": 1, "list_folders": 1, "get": 1}


def test_finds_no_checkpoint_without_metadata_or_with_a_deletions_marker(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 1)
    store.objects[catalog.key("step-2/data/00/x")] = (b"x", "e", START)
    marker = DeletionMarker("0" * 12, START, "by the retention policy", (), ()).encode()
    store.objects[catalog.metadata_key("step-3")] = (marker, "e", START)
    assert [one.step for one in survey(catalog).checkpoints] == [1]
    assert [one.step for one in catalog.candidates()] == [1]


def test_deletes_nothing_that_has_no_record(store: MemoryStore, catalog: Catalog) -> None:
    for step in (1, 5):
        save(catalog, step)
    for step in (2, 4):
        save_plainly(catalog, store, step)
    there = survey(catalog).checkpoints
    done = prune(catalog, lambda rows: [order(one.step, one.id) for one in there[:-1]], grace=0, holder="me")
    assert [step for step, _ in done.deleted] == [1]
    assert [one.step for one in survey(catalog).checkpoints] == [2, 4, 5]


def test_discards_what_has_no_record_in_a_rollback(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 1)
    save_plainly(catalog, store, 4)
    save(catalog, 2)
    policy = RetentionPolicy(Keep(100), prune=Prune(when="manual", grace=timedelta(hours=1)))
    pruner = PruneWorker(catalog, policy)
    pruner.give_up(rolled_back(catalog, catalog.with_unrecorded(catalog.steps()), 2))
    pruner.after_commit(2)
    assert [one.step for one in catalog.candidates()] == [2, 1, 4]


def test_names_what_is_not_there(store: MemoryStore, catalog: Catalog) -> None:
    with pytest.raises(CheckpointNotFoundError, match="it has no objects") as caught:
        survey(catalog)
    assert caught.value.url == catalog.url
    store.objects[catalog.key("epoch-1/.metadata")] = (metadata_bytes("0" * 12)[0], "e", START)
    with pytest.raises(
        CheckpointNotFoundError, match=r"No folder of the run is named step-\{step\}; its folders are epoch-1"
    ):
        survey(catalog)
    store.objects[catalog.key(".metadata")] = (metadata_bytes("0" * 12)[0], "e", START)
    with pytest.raises(CheckpointNotFoundError, match="that of a checkpoint, not of a run"):
        survey(catalog)
    # A save that never committed is a trace of a run.
    store.objects[catalog.key("step-2/data/00/x")] = (b"x", "e", START)
    assert survey(catalog).checkpoints == ()


def test_keeps_metrics_of_what_has_no_record_in_a_sweep(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 1)
    save_plainly(catalog, store, 4)
    for step in (4, 7):
        report(catalog, step, {"loss": float(step)})
    store.now += SAFETY_AGE_S + 1
    # Step 7 was never saved.
    assert len(sweep(catalog, dry_run=True).notes) == 1
    assert len(sweep(catalog).notes) == 1
    adopt(catalog)
    assert {row.step: dict(row.metrics) for row in catalog.snapshot().rows()} == {1: {}, 4: {"loss": 4.0}}


def test_gives_up_nothing_for_an_unrecorded_target_that_is_not_whole(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 1)
    save_plainly(catalog, store, 2)
    save_plainly(catalog, store, 3)
    save(catalog, 4)
    store.objects[catalog.metadata_key("step-2")] = (b"\x80\x04nonsense", "e", START)
    store.delete([next(info.key for path, info in catalog.objects_of("step-3").items() if path != ".metadata")])
    before = dict(store.objects)
    for dry_run in (True, False):
        for step in (2, 3):
            with pytest.raises(CorruptDataError, match=f"Step {step} is not whole, so nothing was rolled back"):
                roll_back(catalog, step, grace=0, dry_run=dry_run)
    assert not catalog.snapshot().going()
    assert before.keys() <= store.objects.keys()


def test_records_nothing_that_is_deleted_while_it_is_adopted(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 1)
    for at in range(1, 12):
        save_plainly(catalog, store, 4)
        counted = itertools.count(1)

        def deletes(number: int, name: str, at: int = at, counted: Iterator[int] = counted) -> None:
            if next(counted) == at:
                remove(plan_removal_of(catalog, 4), holder="a person", force=True)

        store.between = deletes
        adopted = adopt(catalog)
        store.between = None
        there = catalog.metadata_info("step-4") is not None
        assert [one.step for one in catalog.steps().checkpoints] == ([1, 4] if there else [1]), at
        assert (adopted == ["step-4"]) == there, at
        if there:
            remove(plan_removal_of(catalog, 4), holder="a person", force=True)
            store.objects.pop(catalog.own_key("pruner.json"), None)


def plan_removal_of(catalog: Catalog, step: int) -> Removal:
    """As `plan_removal`, of a store in memory."""
    snapshot = catalog.with_unrecorded(catalog.snapshot())
    one = next(one for one in snapshot.checkpoints if one.step == step)
    return Removal(catalog, _identified(catalog, one) if one.key is None else one, 0)


def test_keeps_what_has_no_record_from_policies_after_a_save_over_it_dies(store: MemoryStore) -> None:
    def decide(rows: Sequence[Row]) -> list[Entry]:
        return [order(row.step, row.id) for row in rows[:-1]]

    catalog = memory_catalog(store)
    save(catalog, 1)
    save_plainly(catalog, store, 4)
    save(catalog, 9)
    assert died(store, 4, save, catalog, 4)
    for _ in range(2):
        done = prune(catalog, decide, grace=0, holder="me")
        assert 4 not in [step for step, _ in [*done.buried, *done.deleted]]
        store.now += SAFETY_AGE_S + 1
    sweep(catalog)
    assert [(one.step, one.key is None) for one in survey(catalog).checkpoints] == [(4, True), (9, False)]


def test_refuses_the_root_of_a_bucket_and_names_the_way() -> None:
    with pytest.raises(InvalidURLError, match="root of a bucket") as refused:
        plan_removal("s3://bucket")
    assert "delete .metadata, then data/" in (refused.value.remedy or "")
