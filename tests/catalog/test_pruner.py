"""Tombstone, grace, delete: what goes and what never does, what it costs, and who may interrupt it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion import lock as locks
from bucketpoint.catalog.deletion.lock import LOCK_SECONDS
from bucketpoint.catalog.deletion.prune import Decide, prune
from bucketpoint.catalog.deletion.state import GoneError, Pruned, undo
from bucketpoint.catalog.deletion.sweep import SAFETY_AGE_S, sweep
from bucketpoint.catalog.notes import lease, note_restored, pin, report
from bucketpoint.catalog.records import read_record
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.catalog.snapshot import CLOCKS_S, THIN
from bucketpoint.errors import AccessDeniedError, PreconditionFailedError
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import AttemptKey, CommitKey, NoteKey
from bucketpoint.format.index.ref import INDEX_GROUP
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.retention import Entry, Row
from catalog.memory import START, MemoryStore, died, memory_catalog, metadata_bytes, order, save, saved_run

HOUR = 3600.0


def drop(*steps: int, action: str = "delete") -> Decide:
    return lambda rows: [order(row.step, row.id, action) for row in rows if row.step in steps]


def keep_newest(rows: Sequence[Row]) -> list[Entry]:
    return [order(row.step, row.id) for row in rows[:-1]]


def run(catalog: Catalog, decide: Decide, grace: float = 0.0, holder: str = "test") -> Pruned:
    return prune(catalog, decide, grace=grace, holder=holder)


def in_folder(store: MemoryStore, step: int) -> list[str]:
    return [key for key in store.objects if key.startswith(f"run/step-{step}/")]


def left_of(store: MemoryStore, step: int) -> list[str]:
    return [key for key in store.objects if f"/step-{step}/" in key or f"{step:016d}" in key]


def steps_of(catalog: Catalog) -> list[int]:
    """What stays: it has no tombstone, or one that is void because somebody holds it."""
    rows = catalog.snapshot().rows()
    return [row.step for row in rows if row.tombstone != "delete" or row.pinned or row.leased or row.restored_from]


def test_keeps_what_is_ordered_until_the_grace_is_over_and_then_deletes_it(
    store: MemoryStore, catalog: Catalog
) -> None:
    for step in (100, 200):
        save(catalog, step, metrics={"loss": 1.0})
    done = run(catalog, drop(100), grace=HOUR)
    assert [step for step, _ in done.buried] == [100]
    assert steps_of(catalog) == [200]
    assert len(in_folder(store, 100)) == 3
    store.now += HOUR - 1
    assert run(catalog, drop()).deleted == []
    store.now += 1
    assert [step for step, _ in run(catalog, drop()).deleted] == [100]
    assert left_of(store, 100) == []
    assert len(left_of(store, 200)) == 3 + 1 + 1


class Data(set[str]):
    """All keys but the catalog's: the data that a trainer may not delete."""

    def __contains__(self, key: object) -> bool:
        return "/_bucketpoint/" not in str(key)


class Everything(set[str]):
    def __contains__(self, key: object) -> bool:
        return True


@pytest.mark.parametrize("action", ["delete", THIN])
def test_touches_no_commit_without_the_right_to_delete_data_and_still_undoes(
    store: MemoryStore, catalog: Catalog, action: str
) -> None:
    for step in (100, 200, 300):
        save(catalog, step)
    before = {key: store.objects[key] for key in [*in_folder(store, 100), *in_folder(store, 200)]}
    for refused in (Data(), Everything()):
        store.refused = refused
        with pytest.raises(AccessDeniedError, match="may not delete data") as refusal:
            run(catalog, drop(100, 200, action=action), holder=repr(refused))
        assert "role pruner" in str(refusal.value)
        # The first round wrote them, and gave the lock back to the second.
        assert ("carries out 2 tombstones" in str(refusal.value)) == isinstance(refused, Data)
        assert {key: store.objects[key] for key in [*in_folder(store, 100), *in_folder(store, 200)]} == before
    assert undo(catalog, 100) == 1
    store.refused = set()
    done = run(catalog, drop())
    assert [step for step, _ in [*done.deleted, *done.thinned]] == [200]
    assert steps_of(catalog) == ([100, 300] if action == "delete" else [100, 200, 300])


def test_deletes_the_metadata_before_anything_else(store: MemoryStore, pair: Catalog) -> None:
    seen: list[tuple[bool, bool, bool]] = []

    def look(number: int, name: str) -> None:
        keys = left_of(store, 100)
        state = (
            any("/steps/" in key and "__tombstone__" not in key for key in keys),
            any(key.endswith(".metadata") for key in keys),
            any("/data/" in key for key in keys),
        )
        if not seen or seen[-1] != state:
            seen.append(state)

    store.between = look
    run(pair, drop(100))
    assert seen == [(True, True, True), (True, False, True), (False, False, False)]


@pytest.mark.parametrize("acts", [False, True], ids=["before it acts", "after it has acted"])
def test_finishes_the_work_of_a_pruner_killed_at_any_request(acts: bool) -> None:
    for at in range(1, 100):
        store, catalog = saved_run(100, 200, 300)
        if not died(store, at, run, catalog, keep_newest, holder="first", acts=acts):
            break
        newest = next(catalog.candidates())
        assert newest.step == 300
        assert len(in_folder(store, 300)) == 3
        store.now += LOCK_SECONDS + 1
        run(catalog, keep_newest, holder="second")
        assert steps_of(catalog) == [300]
        assert [key for key in store.objects if "step-100/" in key or "step-200/" in key] == []
        assert [
            key for key in store.objects if "/notes/" in key or "__tombstone__" in key or key.endswith("pruner.json")
        ] == []
    assert at > 15


@pytest.mark.parametrize("hold", [pin, lambda c, s: lease(c, s, "eval"), note_restored], ids=["pin", "lease", "resume"])
def test_spares_what_somebody_takes_hold_of_during_the_grace(
    store: MemoryStore, pair: Catalog, hold: Callable[[Catalog, int], object]
) -> None:
    run(pair, drop(100), grace=HOUR)
    store.now += 1
    hold(pair, 100)
    assert steps_of(pair) == [100, 200]
    store.now += HOUR
    assert run(pair, drop()).deleted == []
    assert len(in_folder(store, 100)) == 3
    hold(pair, 100)
    for action in ("delete", "thin"):
        done = run(pair, drop(100, action=action))
        assert not done.buried
        assert next(iter(done.refused.values())) in ("it is pinned", "it is leased", "it is restored from")
    assert steps_of(pair) == [100, 200]


def test_restores_by_an_undo_within_the_grace_and_refuses_it_later(store: MemoryStore, pair: Catalog) -> None:
    run(pair, drop(100), grace=HOUR)
    assert undo(pair, 100) == 1
    assert undo(pair, 100) == 0
    assert steps_of(pair) == [100, 200]
    store.now += 2 * HOUR
    assert run(pair, drop()).deleted == []
    run(pair, drop(100), grace=HOUR)
    store.now += HOUR
    assert died(store, 12, run, pair, drop(), acts=True)
    with pytest.raises(GoneError):
        undo(pair, 100)
    store.now += LOCK_SECONDS
    assert [step for step, _ in run(pair, drop()).deleted] == [100]


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_undoes_wholly_or_not_at_all_if_an_undo_dies(store: MemoryStore, pair: Catalog, at: int) -> None:
    run(pair, drop(100), grace=HOUR)
    died(store, at, undo, pair, 100, acts=True)
    undone = steps_of(pair) == [100, 200]
    assert undone == (at >= 3)
    store.now += HOUR
    assert bool(run(pair, drop()).deleted) != undone


def test_refuses_to_delete_the_newest_by_step_and_by_time(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 300)
    store.now += 1
    save(catalog, 100)
    store.now += 1
    save(catalog, 200)
    done = run(catalog, drop(100, 200, 300))
    assert sorted(step for step, _ in done.deleted) == [100]
    assert sorted(step for step, _ in done.refused) == [200, 300]


def test_counts_no_newer_weights_as_a_checkpoint_to_resume_from(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 100)
    store.now += 1
    save(catalog, 200, kind="weights")
    assert run(catalog, drop(100)).deleted == []
    assert steps_of(catalog) == [100, 200]


def test_touches_nothing_that_was_committed_after_the_plan(store: MemoryStore, catalog: Catalog) -> None:
    first = save(catalog, 100)
    save(catalog, 200)

    def decide(rows: Sequence[Row]) -> list[Entry]:
        store.now += 1
        save(catalog, 100)
        save(catalog, 150)
        return [order(100, first), order(150, "0" * 12)]

    done = run(catalog, decide)
    assert done.deleted == []
    assert steps_of(catalog) == [100, 150, 200]
    assert done.refused[150, "0" * 12] == "it was committed or deleted after the plan was made"


@pytest.mark.parametrize("action", ["delete", THIN])
def test_respects_metadata_that_a_plain_writer_replaced(store: MemoryStore, pair: Catalog, action: str) -> None:
    run(pair, drop(100, action=action), grace=HOUR)
    another, content = metadata_bytes("f" * 12, created=store.now)
    written = {**content, ".metadata": another if action == THIN else b"unreadable"}
    for path, body in written.items():
        store.put(f"run/step-100/{path}", [memoryview(body)])
    store.now += HOUR
    done = run(pair, drop())
    assert (done.deleted, done.thinned) == ([], [])
    assert [step for step, _ in done.withdrawn] == [100]
    assert store.objects["run/step-100/.metadata"][0] == written[".metadata"]
    assert len(in_folder(store, 100)) == 5


def test_waits_for_a_save_under_way_in_the_folder(store: MemoryStore, pair: Catalog) -> None:
    run(pair, drop(100), grace=HOUR)
    store.now += HOUR
    assert died(store, 4, save, pair, 100)
    done = run(pair, drop())
    assert done.deleted == []
    assert "under way" in next(iter(done.refused.values()))
    assert undo(pair, 100) == 1
    run(pair, drop(100))
    # After the safety age it is dead, and holds nothing back.
    store.now += SAFETY_AGE_S + 1
    assert [step for step, _ in run(pair, drop()).deleted] == [100]


@pytest.mark.parametrize("damage", ["gone", "other"])
def test_deletes_nothing_while_the_newest_cannot_be_read(store: MemoryStore, pair: Catalog, damage: str) -> None:
    if damage == "gone":
        del store.objects["run/step-200/.metadata"]
    else:
        store.put("run/step-200/.metadata", [memoryview(b"garbage")])
    done = run(pair, drop(100))
    if damage == "gone":
        assert done.gone == [200]
        assert "newest" in next(iter(done.refused.values()))
    else:
        assert "step-200" in str(done.stopped)
    assert len(in_folder(store, 100)) == 3


def test_ignores_names_of_other_folders_in_a_catalog(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 5)
    before, token, mark = catalog.steps(), "0" * 12, "0" * 8
    for folder in ("step-5/../step-6", "..", "other-5", "step-6", "finetune/step-5"):
        tombstone = NoteKey(5, "tombstone", (token, "0" * 13, "delete", mark, folder))
        for key in (AttemptKey(5, token, folder), CommitKey(5, START, token, "full", mark, folder), tombstone):
            store.put(catalog.own_key("steps", key.name()), [])
    assert catalog.steps() == before


def test_touches_no_neighbours_and_no_runs_within(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 10)
    save(catalog, 20)
    inner = memory_catalog(store, prefix="run/step-10/finetune")
    save(inner, 1)
    right_here = memory_catalog(store, prefix="run/step-10")
    save(right_here, 2)
    foreign = [
        "run/step-100/x",
        "run/step-1/x",
        "run/backup-step-10/x",
        "run/step-10",
        "run/step-10.txt",
        "other/step-10/x",
    ]
    for key in foreign:
        store.put(key, [memoryview(b"x")])
    run(catalog, drop(10))
    assert steps_of(catalog) == [20]
    assert set(foreign) <= set(store.objects)
    assert steps_of(inner) == [1]
    assert inner.latest() is not None
    assert steps_of(right_here) == [2]
    assert [
        key for key in in_folder(store, 10) if "finetune" not in key and "step-2" not in key and "step-N" not in key
    ] == []


@pytest.mark.parametrize("action", ["delete", THIN])
def test_reports_a_key_that_cannot_be_deleted_and_tries_again(
    store: MemoryStore, catalog: Catalog, action: str
) -> None:
    token = save(catalog, 100)
    save(catalog, 200)
    (stuck,) = [key for key in in_folder(store, 100) if "optim" in key]
    store.refused = {stuck}
    done = run(catalog, drop(100, action=action))
    assert [failure.key for failure in done.failures] == [stuck]
    assert (done.deleted, done.thinned) == ([], [])
    assert steps_of(catalog) == ([200] if action == "delete" else [100, 200])
    store.refused = set()
    done = run(catalog, drop())
    assert [*done.deleted, *done.thinned] == [(100, token)]
    assert stuck not in store.objects
    assert len(left_of(store, 100)) == (0 if action == "delete" else 3)


def test_stops_the_second_of_two_pruners_until_the_lock_expires(store: MemoryStore, pair: Catalog) -> None:
    lock = locks.acquire(pair, "first")
    assert lock is not None
    assert "another pruner is running ('" in str(run(pair, drop(100), holder="second").stopped)
    store.now += 1
    assert locks.acquire(pair, "first") is not None
    store.now += LOCK_SECONDS
    assert run(pair, drop(100), holder="second").stopped is None
    assert [key for key in store.objects if key.endswith("pruner.json")] == []


def test_leaves_the_lock_of_another_after_losing_its_own(
    store: MemoryStore, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = locks.acquire(catalog, "first")
    assert lock is not None
    store.now += LOCK_SECONDS
    assert locks.acquire(catalog, "second") is not None
    monkeypatch.setattr(locks.Stopwatch, "seconds", lambda self: LOCK_SECONDS)
    locks.give_back(lock)
    assert locks.acquire(catalog, "third") is None


def test_records_a_commit_without_a_record_before_any_decision(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 100)
    store.now += 1
    assert died(store, 5, save, catalog, 200)
    seen: list[int] = []

    def decide(rows: Sequence[Row]) -> list[Entry]:
        seen.extend(row.step for row in rows)
        return keep_newest(rows)

    assert [step for step, _ in run(catalog, decide).deleted] == [100]
    assert seen == [100, 200]
    assert catalog.snapshot().attempts == ()


@pytest.mark.parametrize("action", ["delete", "thin"])
def test_keeps_a_checkpoint_whose_save_may_send_its_commit_again(
    store: MemoryStore, catalog: Catalog, action: str
) -> None:
    """It has lost the answer: were the checkpoint deleted, the second request would commit it without its data."""
    token = save(catalog, 100)
    save(catalog, 200)
    intent = catalog.own_key("steps", f"{100:016d}__open__{token}__step-100")
    store.put(intent, [memoryview(b"{}")])
    before = in_folder(store, 100)
    done = run(catalog, drop(100, action=action))
    assert "under way" in done.refused[100, token]
    assert in_folder(store, 100) == before
    assert intent in store.objects
    store.now += HOUR + 1
    done = run(catalog, drop())
    assert [step for step, _ in (done.deleted if action == "delete" else done.thinned)] == [100]
    assert intent not in store.objects


def test_keeps_a_checkpoint_whose_old_save_has_a_fence(store: MemoryStore, catalog: Catalog) -> None:
    """A save that took longer than an intent counts has written one, and removes it once it knows of its commit."""
    token = save(catalog, 100)
    save(catalog, 200)
    store.now += 2 * HOUR
    store.put(f"run/step-100/{keys.fence_path(token)}", [memoryview(b"{}")])
    done = run(catalog, drop(100))
    assert "fence" in done.refused[100, token]
    assert len(in_folder(store, 100)) == 4
    store.now += HOUR + 1
    assert [step for step, _ in run(catalog, drop()).deleted] == [100]
    assert left_of(store, 100) == []


def thinned(store: MemoryStore, step: int) -> tuple[set[str], str]:
    metadata = decode_metadata(store.objects[f"run/step-{step}/.metadata"][0])
    return {index.fqn for index in metadata.storage_data or {}}, vars(metadata)["bucketpoint"]["kind"]


def test_leaves_the_weights_in_a_thinning_and_says_so(store: MemoryStore, catalog: Catalog) -> None:
    token = save(catalog, 100, metrics={"loss": 1.0}, git_sha="abc")
    store.now += 1
    save(catalog, 200)
    index = f"run/step-100/{keys.data_path(token, 0, INDEX_GROUP, 0)}"
    store.put(index, [memoryview(b"x")])
    done = run(catalog, drop(100, action=THIN), grace=HOUR)
    assert steps_of(catalog) == [100, 200]
    store.now += HOUR
    done = run(catalog, drop())
    assert done.thinned == [(100, token)]
    assert thinned(store, 100) == ({"model.w"}, "weights")
    row = catalog.snapshot().rows()[0]
    assert (row.step, row.created, row.id, row.kind, row.bytes) == (100, START, token, "weights", 10)
    record = read_record(catalog, catalog.steps().checkpoints[0].key or "")
    assert record is not None
    assert (record.metrics, record.git_sha, record.kind) == ({"loss": 1.0}, "abc", "weights")
    assert index not in store.objects
    assert row.metrics == {"loss": 1.0}
    assert len(in_folder(store, 100)) == 2
    assert catalog.snapshot().notes.tombstones == ()
    assert len([key for key in store.objects if "/steps/" in key]) == 2
    # And then it can go.
    assert [step for step, _ in run(catalog, drop(100)).deleted] == [100]
    assert left_of(store, 100) == []


@pytest.mark.parametrize("acts", [False, True], ids=["before it acts", "after it has acted"])
def test_finishes_a_thinning_that_was_killed_at_any_request(acts: bool) -> None:
    for at in range(1, 100):
        store, catalog = saved_run(100)
        store.now += 1
        save(catalog, 200)
        if not died(store, at, run, catalog, drop(100, action=THIN), holder="first", acts=acts):
            break
        # What the metadata names is there at every moment.
        metadata = decode_metadata(store.objects["run/step-100/.metadata"][0])
        for info in (metadata.storage_data or {}).values():
            assert f"run/step-100/{info.relative_path}" in store.objects
        store.now += LOCK_SECONDS + 1
        run(catalog, drop(100, action=THIN) if at < 9 else drop(), holder="second")
        assert [row.kind for row in catalog.snapshot().rows()] == ["weights", "full"]
        assert thinned(store, 100) == ({"model.w"}, "weights")
        assert len(in_folder(store, 100)) == 2
    assert at > 10


def test_refuses_to_thin_what_others_wrote_in_one_object(store: MemoryStore, pair: Catalog) -> None:
    damaged = store.objects["run/step-100/.metadata"]
    store.objects["run/step-100/.metadata"] = (b"unreadable", *damaged[1:])
    done = run(pair, drop(100, action=THIN))
    assert "it cannot be thinned" in next(iter(done.refused.values()))
    assert pair.snapshot().notes.tombstones == ()


def test_sweeps_what_dead_attempts_left_once_they_are_old(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 100)
    kept = set(store.objects)
    # An overwrite, a new step, and one that has committed.
    for step, at in ((100, 3), (200, 3), (300, 4)):
        assert died(store, at, save, catalog, step, acts=True)
    store.create_multipart("run/step-200/" + keys.data_path("0123456789ab", 0, "model", 0))
    # That of another run within the folder, whose own sweep it is.
    store.create_multipart("run/step-200/finetune/step-1/" + keys.data_path("0123456789ab", 0, "model", 0))
    store.now += SAFETY_AGE_S - 1
    assert sweep(catalog).objects == []
    assert len(store.open_uploads) == 2
    store.now += 2
    before = dict(store.objects)
    told = sweep(catalog, dry_run=True)
    assert store.objects == before
    assert (len(told.objects), told.bytes, len(told.uploads), len(told.notes)) == (4, 40, 1, 3)
    swept = sweep(catalog)
    assert (swept.objects, swept.uploads, swept.notes) == (told.objects, told.uploads, told.notes)
    assert steps_of(catalog) == [100, 300]
    assert set(store.objects) == kept | set(left_of(store, 300))
    assert len(in_folder(store, 300)) == 3
    assert [one.key.split("/")[2] for one in store.open_uploads.values()] == ["finetune"]


def test_finds_uploads_by_their_exact_keys_where_nothing_else_does(store: MemoryStore, catalog: Catalog) -> None:

    store.bucket.lists_uploads = False
    log, url = SaveLog(catalog), catalog.url_of(100)
    paths = {rank: [keys.data_path(keys.new_token(), rank, "model", n) for n in range(3)] for rank in range(2)}
    log.begin(url, keys.new_token())
    for rank, mine in paths.items():
        log.uploading(url, mine[0].split("/")[2][:12], rank, mine)
        for path in mine:
            store.create_multipart(f"run/step-100/{path}")
    elsewhere = store.create_multipart("run/other")
    store.now += SAFETY_AGE_S + 1
    assert len(sweep(catalog).uploads) == 6
    assert set(store.open_uploads) == {elsewhere}
    assert store.objects == {}


def test_finds_what_no_intent_names_in_a_deep_sweep(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 100)
    token = save(catalog, 200)
    for key in [
        key for key in store.objects if key.endswith("step-200/.metadata") or (token in key and "/steps/" in key)
    ]:
        del store.objects[key]
    store.put("run/step-200/mine.txt", [memoryview(b"x")])
    store.put("run/step-300/__0_0.distcp", [memoryview(b"x")])
    store.now += SAFETY_AGE_S + 1
    assert sweep(catalog).objects == []
    assert len(sweep(catalog, deep=True).objects) == 2
    assert in_folder(store, 200) == ["run/step-200/mine.txt"]
    assert len(in_folder(store, 300)) == 1
    assert len(in_folder(store, 100)) == 3


def test_sweeps_notes_that_have_no_meaning_left(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 100)
    report(catalog, 50, {"loss": 1.0})
    report(catalog, 100, {"loss": 1.0})
    pin(catalog, 100, expires=START + 1)
    pin(catalog, 100)
    lease(catalog, 100, "eval", seconds=1)
    store.now += SAFETY_AGE_S + CLOCKS_S + 2
    assert len(sweep(catalog).notes) == 3
    assert sorted(key.split("__")[1] for key in store.objects if "/notes/" in key) == ["metrics", "pin"]


def test_continues_after_a_condition_that_fails(store: MemoryStore, catalog: Catalog) -> None:
    for step in (100, 200, 300):
        save(catalog, step)
    put = store.put

    def contested(key: str, *args: object, if_match: str | None = None, **more: object) -> object:
        if if_match is not None and f"{100:016d}" in key:
            raise PreconditionFailedError("somebody was faster", key=key)
        return put(key, *args, if_match=if_match, **more)  # type: ignore[arg-type]

    store.put = contested  # type: ignore[assignment,method-assign]
    assert [step for step, _ in run(catalog, keep_newest).deleted] == [200]


def test_leaves_the_tombstone_on_what_a_save_replaces(store: MemoryStore, pair: Catalog) -> None:
    run(pair, drop(100), grace=HOUR)
    # It dies: what was given up does not come back by it.
    SaveLog(pair).begin(pair.url_of(100), "0123456789ab")
    assert next(pair.candidates()).step == 200
    store.now += HOUR
    assert list(run(pair, drop()).refused.values()) == ["a save into its folder is under way"]
    save(pair, 100)
    assert [row.step for row in pair.snapshot().rows()] == [100, 200]
    assert [step for step, _ in run(pair, drop()).withdrawn] == [100]
    assert steps_of(pair) == [100, 200]


def test_accepts_a_save_over_a_step_that_a_dead_pruner_had_begun_with(store: MemoryStore, pair: Catalog) -> None:
    assert died(store, 12, run, pair, drop(100), holder="dead", acts=True)
    assert [one.begun for one in pair.snapshot().notes.tombstones] == [True]
    save(pair, 100)
    store.now += LOCK_SECONDS + 1
    run(pair, drop(), holder="other")
    assert steps_of(pair) == [100, 200]
    assert pair.snapshot().notes.tombstones == ()
