"""Records and what is committed, where the two have come apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.fence import MIN_SWEEP_AGE_S
from bucketpoint.catalog.deletion.prune import prune
from bucketpoint.catalog.deletion.sweep import sweep
from bucketpoint.catalog.notes import pin
from bucketpoint.catalog.records import reconcile
from catalog.memory import MemoryStore, save
from catalog.test_pruner import drop

FIRST, SECOND = "f" * 12, "0" * 12
"""Tokens: the order of the second is before the first's."""


def saved_twice(store: MemoryStore, catalog: Catalog, clock_s: float) -> None:
    """The second time by a job whose clock is so far ahead."""
    other = replace(catalog, clock=lambda: store.now + clock_s)
    for step in (100, 200):
        save(catalog, step, token=FIRST)
        store.now += 60
        save(other, step, token=SECOND)
    store.now += 60


@pytest.mark.parametrize("clock_s", [0.0, -60.0, -3600.0], ids=["right", "a minute behind", "an hour behind"])
def test_takes_the_later_save_of_a_step_whatever_the_clocks_say(
    store: MemoryStore, catalog: Catalog, clock_s: float
) -> None:
    saved_twice(store, catalog, clock_s)
    assert len(catalog.steps().superseded) == 2
    store.calls.clear()
    healed = reconcile(catalog, catalog.snapshot())
    assert [(one.step, one.id) for one in healed.checkpoints] == [(100, SECOND), (200, SECOND)]
    # Where the clocks agree it costs nothing.
    assert store.calls["get"] == (0 if clock_s == 0 else 2)
    store.calls.clear()
    assert reconcile(catalog, healed) == healed
    assert sum(store.calls.values()) == 0


def test_takes_the_later_of_two_saves_in_one_second_though_the_stores_clock_lags(
    store: MemoryStore, catalog: Catalog
) -> None:
    # S3 tells whole seconds.
    save(catalog, 100, token=FIRST)
    save(replace(catalog, clock=lambda: store.now - 0.1), 100, token=SECOND)
    store.now += MIN_SWEEP_AGE_S + 1
    sweep(catalog, older_than=MIN_SWEEP_AGE_S, deep=True)
    assert [one.id for one in reconcile(catalog, catalog.snapshot()).checkpoints] == [SECOND]


@pytest.mark.parametrize("clock_s", [-60.0, -3600.0])
def test_sweeps_and_prunes_a_step_that_was_saved_twice_like_any_other(
    store: MemoryStore, catalog: Catalog, clock_s: float
) -> None:
    saved_twice(store, catalog, clock_s)
    store.now += MIN_SWEEP_AGE_S + 1
    sweep(catalog, older_than=MIN_SWEEP_AGE_S, deep=True)
    assert [one.id for one in catalog.steps().checkpoints] == [SECOND, SECOND]
    done = prune(catalog, drop(100), grace=0.0, holder="me")
    assert (done.stopped, done.deleted) == (None, [(100, SECOND)])
    assert [key for key in store.objects if "step-100" in key] == []
    assert [row.step for row in catalog.snapshot().rows()] == [200]


def test_removes_a_pinned_record_without_metadata_in_a_deep_sweep(store: MemoryStore, catalog: Catalog) -> None:
    for step in (100, 200):
        save(catalog, step)
    for key in [key for key in store.objects if key.startswith("run/step-100/")]:
        del store.objects[key]
    pin(catalog, 100)
    assert prune(catalog, drop(100), grace=0.0, holder="me").deleted == []
    assert [row.step for row in catalog.snapshot().rows()] == [100, 200]

    would = sweep(catalog, deep=True, dry_run=True)
    assert sweep(catalog, deep=True).notes == would.notes
    assert [row.step for row in catalog.snapshot().rows()] == [200]
