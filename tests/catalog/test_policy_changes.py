"""Tombstones of a policy while it, or a metric, changes: what the policy keeps by now loses its tombstone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.lock import LOCK_SECONDS
from bucketpoint.catalog.deletion.prune import Round, prune_by
from bucketpoint.catalog.deletion.remove import bury_discards, rolled_back
from bucketpoint.catalog.deletion.state import schedule_deletion
from bucketpoint.catalog.notes import report
from bucketpoint.catalog.records import process_name
from bucketpoint.catalog.restore_candidates import restore_candidates
from bucketpoint.retention import Best, EverySteps, Keep, MaxDelete, Prune, RetentionPolicy
from catalog.memory import MemoryStore, died, memory_catalog, save

DAY = 86400.0
LATEST = Keep(1)
LOSS = Keep(1, best=[Best("loss", "min")])
WEIGHTS = Keep(1, every=[EverySteps(100, thin="weights")])


@pytest.fixture
def catalog(store: MemoryStore) -> Catalog:
    catalog = memory_catalog(store)
    for step in (100, 200, 300):
        save(catalog, step)
        store.now += 60
    return catalog


def policy(keep: Keep, count: int = 20) -> RetentionPolicy:
    return RetentionPolicy(keep, prune=Prune(grace=timedelta(days=1), max_delete=MaxDelete(count, 1.0)))


def run(catalog: Catalog, keep: Keep, **more: Any) -> Round:
    return prune_by(catalog, policy(keep), holder=process_name(), **more)


def steps(names: list[tuple[int, str]]) -> list[int]:
    return sorted(step for step, _ in names)


def there(catalog: Catalog) -> dict[int, str]:
    return {checkpoint.step: checkpoint.kind for checkpoint in catalog.snapshot().checkpoints}


def waiting(catalog: Catalog) -> set[str]:
    return {stone.key for stone in catalog.snapshot().notes.tombstones}


def a_day_later(store: MemoryStore) -> None:
    store.now += DAY + 1


@pytest.mark.parametrize(
    ("looser", "kept"),
    [(Keep(5), [100, 200]), (Keep(1, steps=[100]), [100]), (Keep(1, within=timedelta(1)), [100, 200])],
)
def test_withdraws_tombstones_of_an_earlier_policy_if_the_new_one_keeps_more(
    store: MemoryStore, catalog: Catalog, looser: Keep, kept: list[int]
) -> None:
    assert steps(run(catalog, LATEST).done.buried) == [100, 200]
    store.now += 60
    assert steps(run(catalog, looser).done.withdrawn) == kept
    a_day_later(store)
    run(catalog, looser)
    assert list(there(catalog)) == [*kept, 300]


def test_moves_the_deletion_to_the_former_best_after_a_late_metric(store: MemoryStore, catalog: Catalog) -> None:
    report(catalog, 200, {"loss": 0.5})
    assert steps(run(catalog, LOSS).done.buried) == [100]
    report(catalog, 100, {"loss": 0.1})
    assert [one.step for one in restore_candidates(catalog, policy(LOSS), "best", None)] == [100, 200]
    # As late as can be: the tombstone is due, and no pruner has begun with it.
    a_day_later(store)
    done = run(catalog, LOSS).done
    assert (steps(done.withdrawn), steps(done.buried), done.deleted) == ([100], [200], [])
    a_day_later(store)
    assert steps(run(catalog, LOSS).done.deleted) == [200]
    assert list(there(catalog)) == [100, 300]


def test_ranks_checkpoints_that_are_saved_while_a_prune_lists(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, snapshot = {400: 0.1, 500: 0.2}, Catalog.snapshot

    def slowly(self: Catalog) -> Any:
        listed = Catalog.listed

        def and_then_save(self: Catalog, where: str, first: str = "") -> Any:
            found = listed(self, where, first)
            monkeypatch.setattr(Catalog, "listed", listed)
            while losses:
                step, loss = losses.popitem()
                save(catalog, step)
                report(catalog, step, {"loss": loss})
            return found

        monkeypatch.setattr(Catalog, "listed", and_then_save)
        return snapshot(self)

    monkeypatch.setattr(Catalog, "snapshot", slowly)
    report(catalog, 100, {"loss": 0.9})
    assert steps(run(catalog, LOSS).done.buried) == [200]


def test_leaves_tombstones_as_they_are_under_the_same_policy(store: MemoryStore, catalog: Catalog) -> None:
    first = prune_by(catalog, policy(LATEST, count=1), holder="a")
    assert (bool(first.verdict), steps(first.done.buried)) == (False, [100])
    before = waiting(catalog)
    again = prune_by(catalog, policy(LATEST, count=1), holder="a")
    assert (bool(again.verdict), steps(again.done.buried)) == (True, [200])
    assert again.verdict is not None
    assert "deletes or thins 1 of 2 checkpoints" in again.verdict.why
    assert before < waiting(catalog)
    both = waiting(catalog)
    store.now += 60
    last = prune_by(catalog, policy(LATEST, count=1), holder="b")
    assert bool(last.verdict)
    assert (last.done.buried, last.done.withdrawn, waiting(catalog)) == ([], [], both)
    a_day_later(store)
    assert steps(prune_by(catalog, policy(LATEST, count=1), holder="b").done.deleted) == [100, 200]


def test_deletes_what_a_rollback_gave_up_whatever_the_policy_keeps(store: MemoryStore, catalog: Catalog) -> None:
    run(catalog, LATEST)
    save(catalog, 110)
    # 200 has a tombstone of the policy already: that alone would be withdrawn.
    discards = rolled_back(catalog, catalog.snapshot(), 110)
    done = bury_discards(catalog, discards, due=store.now + DAY)
    assert [one.checkpoint.step for one in done.buried] == [200, 300]
    assert steps(run(catalog, Keep(5)).done.withdrawn) == [100]
    a_day_later(store)
    assert steps(run(catalog, Keep(5)).done.deleted) == [200, 300]
    assert list(there(catalog)) == [100, 110]


def test_keeps_a_tombstone_that_names_no_author_in_force(store: MemoryStore, catalog: Catalog) -> None:
    oldest = catalog.snapshot().checkpoints[0]
    schedule_deletion(catalog, oldest, "delete", due=store.now + DAY)
    assert run(catalog, Keep(5)).done.withdrawn == []
    a_day_later(store)
    assert steps(run(catalog, Keep(5)).done.deleted) == [100]


def test_finishes_a_deletion_that_has_begun_whatever_the_policy_keeps(store: MemoryStore, catalog: Catalog) -> None:
    run(catalog, LATEST)
    a_day_later(store)
    for at in range(1, 40):
        assert died(store, at, run, catalog, LATEST, acts=True)
        if any(stone.begun for stone in catalog.snapshot().notes.tombstones):
            break
        store.now += LOCK_SECONDS + 1
    begun = {stone.step for stone in catalog.snapshot().notes.tombstones if stone.begun}
    assert begun == {100}
    store.now += LOCK_SECONDS + 1
    done = run(catalog, Keep(5)).done
    assert (steps(done.withdrawn), steps(done.deleted)) == ([200], [100])
    assert there(catalog) == {200: "full", 300: "full"}


def test_withdraws_a_waiting_thinning_and_thins_instead_of_deleting(store: MemoryStore, catalog: Catalog) -> None:
    assert steps(run(catalog, WEIGHTS).done.buried) == [100, 200]
    assert steps(run(catalog, Keep(2)).done.withdrawn) == [200]
    assert {stone.action for stone in catalog.snapshot().notes.tombstones if stone.step == 100} == {"delete", "thin"}
    done = run(catalog, WEIGHTS).done
    assert (steps(done.withdrawn), steps(done.buried)) == ([100], [200])
    a_day_later(store)
    assert steps(run(catalog, WEIGHTS).done.thinned) == [100, 200]
    assert there(catalog) == {100: "weights", 200: "weights", 300: "full"}


def test_spares_one_with_a_tombstone_if_another_checkpoint_is_set_aside(store: MemoryStore, catalog: Catalog) -> None:
    assert steps(run(catalog, Keep(2)).done.buried) == [100]
    schedule_deletion(catalog, catalog.snapshot().checkpoints[-1], "delete", due=store.now, reason="damaged")
    done = run(catalog, Keep(2)).done
    assert (steps(done.withdrawn), steps(done.deleted)) == ([100], [300])
