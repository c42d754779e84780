"""What others do between two requests of a pruner, an undo or a lock, and what a pruner does that is too late."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion import lock as locks
from bucketpoint.catalog.deletion.fence import AttemptFence, condemn
from bucketpoint.catalog.deletion.lock import LOCK_SECONDS
from bucketpoint.catalog.deletion.state import BEGUN, GoneError, state_of, undo
from bucketpoint.catalog.deletion.sweep import sweep
from bucketpoint.catalog.notes import pin
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.format import catalog_keys, keys
from bucketpoint.stopwatch import Stopwatch
from bucketpoint.stores import ObjectInfo
from catalog.memory import MemoryStore, died, memory_catalog, metadata_bytes, order, save, saved_run
from catalog.test_pruner import HOUR, drop, in_folder, left_of, run, steps_of


def states(store: MemoryStore) -> list[str]:
    """What the tombstones say."""
    bodies = [body for key, (body, _, _) in store.objects.items() if "__tombstone__" in key]
    return [state_of(body) if body else "undone" for body in bodies]


def once(store: MemoryStore, when: Callable[[str], bool], what: Callable[[], object]) -> list[str]:
    """Before the first request for which `when` is true, `what` happens. The list holds that request's name then."""
    seen: list[str] = []

    def meanwhile(number: int, name: str) -> None:
        if not seen and when(name):
            seen.append(name)
            what()

    store.between = meanwhile
    return seen


def before_request(store: MemoryStore, at: int, what: Callable[[], object]) -> list[str]:
    """Before the request number `at` from now, `what` happens."""
    counted = itertools.count(1)
    return once(store, lambda name: next(counted) == at, what)


def due_run() -> tuple[MemoryStore, Catalog]:
    """A run of two steps, of which the first has a tombstone that is due."""
    store, catalog = saved_run(100, 200)
    run(catalog, drop(100), grace=HOUR)
    store.now += HOUR
    return store, catalog


def release_lock(catalog: Catalog) -> None:
    """As if a quarter of an hour had passed for it, and for nothing else."""
    catalog.store.delete([catalog.own_key("pruner.json")])


def test_keeps_or_refuses_a_pin_set_while_a_pruner_runs() -> None:
    held = lost = 0
    for at in range(1, 60):
        store, catalog = due_run()
        outcome: list[bool] = []

        def pins(catalog: Catalog = catalog, outcome: list[bool] = outcome) -> None:
            try:
                pin(catalog, 100)
                outcome.append(True)
            except GoneError:
                outcome.append(False)

        before_request(store, at, pins)
        run(catalog, drop())
        store.between = None
        if not outcome:
            break
        there = len(in_folder(store, 100)) == 3
        if outcome == [True] and steps_of(catalog) == [100, 200]:
            assert there
            held += 1
        elif outcome == [False]:
            lost += 1
        else:
            # The tombstone and all else was gone when the pin came: it is a pin of a step that is not there.
            assert steps_of(catalog) == [200]
            assert not there
    assert held >= 4
    assert lost >= 4


def test_sees_a_save_that_begins_before_the_claim_at_any_moment() -> None:
    spared = 0
    for at in range(1, 60):
        store, catalog = due_run()
        claimed_first: list[bool] = []

        def begins(store: MemoryStore = store, catalog: Catalog = catalog, first: list[bool] = claimed_first) -> None:
            bodies = [store.objects[key][0] for key in store.objects if "__tombstone__" in key]
            first.append(any(b"begun" in body for body in bodies) or not bodies)
            # It does not say that it overwrites, as a plain writer would not.
            SaveLog(catalog).begin(catalog.url_of(100), "0123456789ab")

        before_request(store, at, begins)
        run(catalog, drop())
        if not claimed_first:
            break
        if claimed_first == [False]:
            assert len(in_folder(store, 100)) == 3
            spared += 1
    assert spared >= 5


def test_keeps_a_pin_whose_author_died_before_it_withdrew_the_tombstone(store: MemoryStore, pair: Catalog) -> None:
    run(pair, drop(100), grace=HOUR)
    assert died(store, 2, pin, pair, 100)
    assert states(store) == ["waiting"]
    store.now += HOUR
    done = run(pair, drop())
    assert done.deleted == []
    assert [step for step, _ in done.withdrawn] == [100]
    assert len(in_folder(store, 100)) == 3


def test_keeps_what_has_become_the_newest_during_the_grace(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 100)
    token = save(catalog, 200)
    run(catalog, drop(100), grace=HOUR)
    # By hand, record and all.
    store.delete([key for key in store.objects if "step-200" in key or token in key])
    store.now += HOUR
    assert run(catalog, drop()).deleted == []
    assert steps_of(catalog) == [100]
    assert len(in_folder(store, 100)) == 3


def test_gives_an_expired_lock_to_one_of_two_that_take_it_over(store: MemoryStore, catalog: Catalog) -> None:
    assert locks.acquire(catalog, "first") is not None
    store.now += LOCK_SECONDS
    taken: list[locks.Lock | None] = []
    names: list[str] = []

    def when(name: str) -> bool:
        names.append(name)
        # The first one is refused, as there is a lock; the second asks for the store's time; the third takes it over.
        return names.count("put") == 3

    once(store, when, lambda: taken.append(locks.acquire(catalog, "third")))
    assert locks.acquire(catalog, "second") is None
    assert taken[0] is not None
    store.between = None
    assert locks.acquire(catalog, "fourth") is None
    assert locks.acquire(catalog, "third") is not None


def test_recognises_a_step_saved_anew_by_its_token_where_a_store_has_no_etags(
    store: MemoryStore, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = store.put

    def untold(key: str, *arguments: Any, **more: Any) -> ObjectInfo:
        info = put(key, *arguments, **more)
        return dataclasses.replace(info, etag=None) if key.endswith(".metadata") else info

    monkeypatch.setattr(store, "put", untold)
    save(catalog, 100)
    save(catalog, 200)
    run(catalog, drop(100), grace=HOUR)
    (stone,) = catalog.snapshot().notes.tombstones
    assert stone.mark == catalog_keys.UNKNOWN
    store.now += 1
    second = save(catalog, 100)
    store.now += HOUR
    done = run(catalog, drop())
    assert done.deleted == []
    assert [step for step, _ in done.withdrawn] == [100]
    assert second in [row.id for row in catalog.snapshot().rows()]


def test_restores_or_refuses_in_an_undo_after_the_death_of_a_pruner() -> None:
    """The pruner acts before each request of the undo in turn, and dies before or after it has deleted anything."""
    undone = refused = 0
    for at in range(1, 6):
        for dies in range(4, 20):
            store, catalog = due_run()

            def prunes(store: MemoryStore = store, catalog: Catalog = catalog, dies: int = dies) -> None:
                died(store, dies, run, catalog, drop(), holder="dead", acts=True)

            before_request(store, at, prunes)
            before = len(in_folder(store, 100))
            try:
                undo(catalog, 100)
            except GoneError:
                refused += 1
                continue
            finally:
                store.between = None
            release_lock(catalog)
            if before == 3 and not left_of(store, 100):
                continue  # the pruner was through: there is nothing to bring back, and the next load says so
            assert len(in_folder(store, 100)) == 3
            assert run(catalog, drop()).deleted == []
            assert steps_of(catalog) == [100, 200]
            undone += 1
    assert undone >= 5
    assert refused >= 5


def test_puts_back_its_own_tombstone_and_no_other(store: MemoryStore, pair: Catalog) -> None:
    """Where a save is under way, the claim is taken back. Meanwhile that save may be over, and another pruner at it."""
    run(pair, drop(100), grace=HOUR)
    store.now += HOUR
    assert died(store, 4, save, pair, 100)
    claimed: list[int] = []

    def when(name: str) -> bool:
        # The first put after the claim is the one that takes it back.
        if name == "put" and states(store) == [BEGUN]:
            claimed.append(1)
        return len(claimed) == 1 and name == "put"

    def another() -> None:
        store.delete([one.key for one in pair.snapshot().attempts])
        release_lock(pair)
        died(store, 15, run, pair, drop(), holder="another", acts=True)

    seen = once(store, when, another)
    run(pair, drop(), holder="late")
    assert seen == ["put"]
    records = [key for key in left_of(store, 100) if "/steps/" in key and "__tombstone__" not in key]
    assert len(in_folder(store, 100)) < 3 or not records
    assert states(store) == [BEGUN]
    with pytest.raises(GoneError):
        undo(pair, 100)


def test_removes_what_a_dead_undo_has_left_with_the_next_prune(store: MemoryStore, pair: Catalog) -> None:
    run(pair, drop(100), grace=HOUR)
    assert died(store, 4, undo, pair, 100)
    assert states(store) == ["undone"]
    assert run(pair, drop()).deleted == []
    assert states(store) == []
    assert steps_of(pair) == [100, 200]


def test_begins_nothing_once_its_lock_has_expired(
    store: MemoryStore, pair: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:

    def sleeps() -> None:
        store.now += LOCK_SECONDS + 1
        monkeypatch.setattr(locks.Lock, "holds", False)

    assert once(store, lambda name: states(store) == [BEGUN], sleeps) == []
    assert run(pair, drop(100)).deleted == []
    store.between = None
    monkeypatch.undo()
    assert len(in_folder(store, 100)) == 3
    assert [step for step, _ in run(pair, drop(), holder="next").deleted] == [100]


def test_deletes_both_records_of_a_step_that_was_saved_twice(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 100)
    store.now += 1
    save(catalog, 100)
    save(catalog, 200)
    assert len(catalog.snapshot().superseded) == 1
    assert [step for step, _ in run(catalog, drop(100)).deleted] == [100]
    assert left_of(store, 100) == []


def test_gives_no_second_tombstone(store: MemoryStore, catalog: Catalog) -> None:
    token = save(catalog, 100)
    save(catalog, 200)
    for _ in range(2):
        run(catalog, lambda rows: [order(100, token)], grace=HOUR)
        store.now += 60
    (stone,) = catalog.snapshot().notes.tombstones
    assert stone.due == store.now - 120 + HOUR


def test_leaves_metadata_that_is_replaced_while_it_is_thinned(store: MemoryStore, pair: Catalog) -> None:
    """By a plain writer, which writes neither an intent nor a record, between the reading and the condition."""
    another, content = metadata_bytes("f" * 12, created=store.now)
    names: list[str] = []

    def when(name: str) -> bool:
        names.append(name)
        # The claim was the last put: the next one is that of the metadata.
        return name == "put" and states(store) == [BEGUN] and names.count("put") >= 4

    def saves() -> None:
        for path, body in content.items():
            store.put(f"run/step-100/{path}", [memoryview(body)])
        store.put("run/step-100/.metadata", [memoryview(another)])

    seen = once(store, when, saves)
    done = run(pair, drop(100, action="thin"))
    assert seen == ["put"]
    assert done.thinned == []
    assert "replaced" in next(iter(done.refused.values()))
    assert store.objects["run/step-100/.metadata"][0] == another
    assert all(f"run/step-100/{path}" in store.objects for path in content)


def test_makes_no_record_in_a_resumed_thinning_of_what_another_pruner_deletes() -> None:
    """The second one's lock had expired. A record of nothing would be there for ever, once it is pinned."""

    def thinned_but_for_the_objects() -> tuple[MemoryStore, Catalog]:
        store, catalog = saved_run(100, 200)
        for at in range(1, 40):
            died(store, at, run, catalog, drop(100, action="thin"), acts=True)
            release_lock(catalog)
            if [one.kind for one in catalog.steps().checkpoints] == ["weights", "full"]:
                assert catalog.steps().notes.tombstones
                return store, catalog
        raise AssertionError("it was never thinned")

    deleted = 0
    for at in range(1, 30):
        store, catalog = thinned_but_for_the_objects()

        def deletes(catalog: Catalog = catalog) -> None:
            release_lock(catalog)
            run(catalog, drop(100), holder="another")

        seen = before_request(store, at, deletes)
        run(catalog, drop())
        store.between = None
        there = [step for step in (100, 200) if catalog.metadata_info(f"step-{step}") is not None]
        assert [one.step for one in catalog.steps().checkpoints] == there
        deleted += bool(seen) and there == [200]
    assert deleted > 5


def test_removes_the_tombstone_of_a_waiting_thinning_with_a_deletion(store: MemoryStore, pair: Catalog) -> None:
    run(pair, drop(100, action="thin"), grace=HOUR)
    assert [step for step, _ in run(pair, drop(100)).deleted] == [100]
    assert states(store) == []
    assert undo(pair, 100) == 0


def test_keeps_a_fence_that_was_renewed_since_the_sweeps_listing(store: MemoryStore) -> None:
    path = keys.data_path("abcabcabcabc", 0, "model", 0)
    store.put(f"x/{path}", [memoryview(b"data")])
    fence = AttemptFence(store, "x", Stopwatch(), {path: 4})  # type: ignore[arg-type]
    fence.take()
    listed = store.head(f"x/{keys.fence_path('abcabcabcabc')}")
    fence.take()
    assert not condemn(store, "x", "abcabcabcabc", listed)  # type: ignore[arg-type]


def test_lets_two_copies_of_one_checkpoint_hold_its_fence(store: MemoryStore) -> None:
    path = keys.data_path("abcabcabcabc", 0, "model", 0)
    store.put(f"x/{path}", [memoryview(b"data")])
    for _ in range(2):
        AttemptFence(store, "x", Stopwatch(), {path: 4}).take()  # type: ignore[arg-type]


def test_keeps_what_another_rank_has_sent_long_before_an_upload(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 100)
    sent = keys.data_path("aaaaaaaaaaaa", 0, "model", 0)
    store.put(f"run/step-200/{sent}", [memoryview(b"data")])
    store.now += 0.9 * HOUR
    store.create_multipart(f"run/step-200/{keys.data_path('bbbbbbbbbbbb', 1, 'model', 0)}")
    store.now += 0.9 * HOUR
    assert sweep(catalog, older_than=HOUR, deep=True).objects == []


@pytest.mark.parametrize(
    ("folder", "template", "prefix"),
    [
        ("b-step-200", "b-step-{step}", "run"),
        ("a-step-100/finetune/step-200", "step-{step}", "run/a-step-100/finetune"),
    ],
)
def test_deletes_nothing_of_another_run_that_a_tombstone_names(
    store: MemoryStore, folder: str, template: str, prefix: str
) -> None:
    mine, others = memory_catalog(store, "a-step-{step}"), memory_catalog(store, template, prefix)
    save(mine, 100)
    save(mine, 300)
    token = save(others, 200)
    pin(others, 200)
    # Anybody may name a key: this one has the right mark and token.
    mark = catalog_keys.mark_of(store.head(mine.metadata_key(folder)).etag)
    fields = (token, catalog_keys.milliseconds(store.now), "delete", mark, folder)
    note = catalog_keys.NoteKey(200, catalog_keys.TOMBSTONE, fields)
    store.put(mine.own_key(catalog_keys.STEPS, note.name()), [memoryview(b'{"state": "waiting"}')])
    assert run(mine, drop()).deleted == []
    assert len(others.objects_of("step-200" if prefix != "run" else folder)) == 3


@pytest.mark.parametrize(
    "expires", ["2e9", "NaN", "Infinity", "-Infinity", "1e400", "9" * 400, '"soon"', "true", "x" * 100_000]
)
def test_ends_a_lock_by_the_stores_time_whatever_it_says(store: MemoryStore, catalog: Catalog, expires: str) -> None:
    store.put(catalog.own_key("pruner.json"), [memoryview(f'{{"expires": {expires}, "holder": "x"}}'.encode())])
    assert "another pruner" in locks.held_by(catalog)
    assert "its lock expires at 22:28:20 UTC" in locks.held_by(catalog)
    assert locks.acquire(catalog, "mine") is None
    store.now += LOCK_SECONDS
    assert locks.acquire(catalog, "mine") is not None


def test_finds_uploads_of_a_save_that_begins_during_a_sweep_with_the_next(store: MemoryStore, catalog: Catalog) -> None:
    store.bucket.lists_uploads = False
    save(catalog, 100)
    log, url, token = SaveLog(catalog), catalog.url_of(200), keys.new_token()
    path = keys.data_path(token, 0, "model", 0)
    listings: list[str] = []

    def after_the_intents(name: str) -> bool:
        listings.extend([name] if name == "list" else [])
        return len(listings) == 3

    def begin() -> None:
        log.begin(url, token)
        log.uploading(url, token, 0, [path])

    seen = once(store, after_the_intents, begin)
    sweep(catalog)
    assert seen == ["list"]
    store.between = None
    # And dies.
    store.create_multipart(f"run/step-200/{path}")
    store.now += 49 * HOUR
    assert sweep(catalog).uploads == [f"run/step-200/{path}"]
    assert store.open_uploads == {}
