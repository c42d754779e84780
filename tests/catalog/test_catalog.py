"""What one listing tells: commits, attempts, metrics, pins and leases of a run, and of no other."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.catalog.catalog import Catalog, newest_folder
from bucketpoint.catalog.deletion.state import schedule_deletion, undo
from bucketpoint.catalog.notes import lease, note_restored, pin, reason_and_author, release, report, unpin
from bucketpoint.catalog.records import adopt, read_record, reconcile, write_metrics
from bucketpoint.catalog.run import templates_of
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.catalog.snapshot import CLOCKS_S
from bucketpoint.errors import BucketpointError, InvalidURLError, OtherRunError, PolicyError
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import CommitKey, StepTemplate
from bucketpoint.format.record import CommitRecord
from bucketpoint.retention import Layout
from catalog.memory import (
    START,
    MemoryStore,
    commit_without_a_record,
    died,
    memory_catalog,
    metadata_bytes,
    save,
    saved_run,
)

HOUR = 3600.0
names = st.text("abz/_-.% \N{FIRE}\N{LATIN SMALL LETTER A WITH DIAERESIS}", min_size=1, max_size=8)
affixes = st.text(st.characters(exclude_characters="{}/"), max_size=12)


def test_lists_a_commit_with_all_that_a_plan_needs(store: MemoryStore, catalog: Catalog) -> None:
    token = save(catalog, 100, metrics={"eval/loss": 1.25, "grad": math.nan}, git_sha="abc", config_hash="def")
    store.calls.clear()
    (row,) = catalog.snapshot().rows()
    assert (row.step, row.created, row.id, row.kind, row.bytes) == (100, START, token, "full", 20)
    assert row.groups == {"model": 10, "optim": 10}
    assert row.metrics["eval/loss"] == 1.25
    assert math.isnan(row.metrics["grad"])
    assert store.calls == {"list": 2}
    key = catalog.steps().checkpoints[0].key
    record = read_record(catalog, key or "")
    assert record is not None
    assert (record.step, record.kind, record.git_sha, record.config_hash) == (100, "full", "abc", "def")
    assert record.metrics["eval/loss"] == 1.25
    assert math.isnan(record.metrics["grad"])


def test_adds_three_small_requests_to_a_save(store: MemoryStore) -> None:
    save(memory_catalog(store), 1)
    # Two of data and the metadata; the intent and the record; the intent goes.
    assert store.calls == {"put": 3 + 2, "delete": 1}


@pytest.mark.parametrize("count", [1, 1000, 2500])
def test_restores_the_latest_with_a_listing_per_thousand_and_at_most_two_reads(
    store: MemoryStore, catalog: Catalog, count: int
) -> None:
    for step in range(count):
        name = CommitKey(step, START, f"{step:012x}", "full", "0" * 8, f"step-{step}").name()
        store.objects[catalog.own_key("steps", name)] = (b"", "e", START)
    store.objects[catalog.metadata_key(f"step-{count - 1}")] = (b"", "e", START)
    SaveLog(catalog).begin(catalog.url_of(count + 10), "0123456789ab")
    store.calls.clear()
    newest = next(catalog.candidates())
    assert newest.step == count - 1
    # The metadata of the attempt under way is looked for. The GET of the load comes next.
    assert store.calls == {"list": -(-(count + 1) // 1000), "list_folders": 1, "get": 1}


@pytest.mark.parametrize(("at", "there"), [(4, [100]), (5, [100, 200])], ids=["before the commit", "before the record"])
def test_restores_what_a_coordinator_has_committed_before_its_death(
    store: MemoryStore, catalog: Catalog, at: int, there: list[int]
) -> None:
    save(catalog, 100)
    assert died(store, at, save, catalog, 200)
    assert [one.step for one in catalog.steps().checkpoints] == [100]
    assert [one.step for one in catalog.candidates()] == there[::-1]
    healed = reconcile(catalog, catalog.snapshot())
    assert [row.step for row in healed.rows()] == there
    assert len(healed.attempts) == 2 - len(there)


def test_resumes_only_from_full_checkpoints_that_have_metadata(store: MemoryStore, catalog: Catalog) -> None:
    for step in (100, 200, 300):
        save(catalog, step)
    save(catalog, 400, kind="weights")
    del store.objects[catalog.metadata_key("step-300")]
    for folder in ("step-200", "step-500"):
        store.put(catalog.metadata_key(folder), [memoryview(b"")], crc32c=0)
    latest = catalog.latest()
    assert latest is not None
    assert latest.step == 100
    assert 400 not in [one.step for one in catalog.candidates()]


def test_separates_runs_that_share_a_root(store: MemoryStore) -> None:
    one, other = (replace(memory_catalog(store, f"{name}-step-{{step}}"), run=name) for name in ("a", "b"))
    save(one, 100)
    save(other, 200, metrics={"loss": 1.0})
    pin(other, 100)
    assert [row.step for row in one.snapshot().rows()] == [100]
    assert one.snapshot().rows()[0].metrics == {}
    assert not one.snapshot().rows()[0].pinned
    assert adopt(one) == []
    assert [found.folder for found in other.snapshot().checkpoints] == ["b-step-200"]


def test_refuses_a_url_outside_the_run_before_any_request(store: MemoryStore, catalog: Catalog) -> None:
    for url in (
        "memory://store/other/step-1",
        "memory://store/run/sub/step-1",
        "memory://store/run",
        "s3://x/run/step-1",
    ):
        with pytest.raises(InvalidURLError):
            SaveLog(catalog).begin(url, "0123456789ab")
    assert store.objects == {}


def test_adopts_folders_of_other_writers(store: MemoryStore, catalog: Catalog) -> None:
    for number, folder in enumerate(["step-100", "step-00000200", "backup-step-5", "step-300"]):
        data, _ = metadata_bytes(f"{number:012x}")
        store.put(catalog.key(f"{folder}/.metadata"), [memoryview(data)])
    store.put(catalog.key("step-400/__0_0.distcp"), [memoryview(b"x")])
    store.put(catalog.key("step-300/.metadata"), [memoryview(b"damaged")])
    assert adopt(catalog) == ["step-00000200", "step-100"]
    assert [row.step for row in catalog.snapshot().rows()] == [100, 200]
    assert adopt(catalog) == []


def test_rebuilds_a_lost_catalog_as_it_was(store: MemoryStore, catalog: Catalog) -> None:
    for step in (100, 200, 300):
        save(catalog, step, kind="weights" if step == 200 else "full", git_sha="abc", metrics={"loss": step / 100})
        store.now += 60

    def records() -> dict[str, CommitRecord]:
        return {key: CommitRecord.from_json(value[0]) for key, value in store.objects.items() if "/steps/" in key}

    before = records()
    assert all(record.host for record in before.values())
    for key in [key for key in store.objects if "_bucketpoint" in key]:
        del store.objects[key]
    assert adopt(catalog) == ["step-100", "step-200", "step-300"]
    # The host is no fact of the checkpoint.
    assert records() == {key: replace(record, host=None) for key, record in before.items()}
    assert [row.metrics for row in catalog.snapshot().rows()] == [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}]


def test_has_the_metrics_of_a_save_that_was_killed_before_its_record(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them a policy deletes the best checkpoint."""
    with monkeypatch.context() as killed_early:
        killed_early.setattr(SaveLog, "committed", lambda *_: None)
        save(catalog, 100, metrics={"loss": 1.0, "accuracy": 0.1})
    report(catalog, 100, {"accuracy": 0.5})
    reconcile(catalog, catalog.snapshot())
    (row,) = catalog.snapshot().rows()
    assert row.metrics == {"loss": 1.0, "accuracy": 0.5}


def test_counts_the_last_reported_value_of_a_metric(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 100, metrics={"loss": 3.0})
    write_metrics(catalog, 100, {"loss": 1.0, "eval/acc": 0.5}, at=START + 10, token=None)
    write_metrics(catalog, 100, {"loss": 2.0}, at=START + 5, token=None)
    (row,) = catalog.snapshot().rows()
    assert row.metrics == {"loss": 1.0, "eval/acc": 0.5}


@given(st.dictionaries(names, st.floats(), max_size=20))
def test_returns_any_metrics_as_they_were_reported(metrics: dict[str, float]) -> None:
    store = MemoryStore()
    catalog = memory_catalog(store)
    report(catalog, 7, metrics)
    found = {one.name: one.value for one in catalog.snapshot().notes.reports}
    assert {name: repr(value) for name, value in found.items()} == {
        name: repr(value) for name, value in metrics.items()
    }
    assert all(len(key.rsplit("/", 1)[1]) <= 240 for key in store.objects)


@pytest.mark.parametrize("name", ["", "x" * 121, "\N{FIRE}" * 11, "\udce9"])
def test_refuses_a_metric_without_a_usable_name(store: MemoryStore, name: str) -> None:
    with pytest.raises(BucketpointError):
        report(memory_catalog(store), 1, {name: 1.0})


def test_keeps_author_reason_and_end_of_a_pin(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 100)
    first = pin(catalog, 100, reason="the paper", author="ann")
    pin(catalog, 100, reason="until Monday", author="bob", expires=START + HOUR)
    there = catalog.snapshot().notes.pins
    assert sorted((*reason_and_author(catalog, one), one.expires) for one in there) == [
        ("the paper", "ann", None),
        ("until Monday", "bob", START + HOUR),
    ]
    assert unpin(catalog, 100, first) == 1
    assert catalog.snapshot().rows()[0].pinned
    store.now += 2 * HOUR
    # Who may not write knows no later time than those in the listing.
    assert catalog.snapshot().rows()[0].pinned
    assert not catalog.at_store_time().snapshot().rows()[0].pinned
    assert unpin(catalog, 100) == 1


def test_ends_a_lease_some_time_after_its_last_heartbeat(store: MemoryStore, catalog: Catalog) -> None:
    save(catalog, 100)
    lease(catalog, 100, "eval/1", seconds=600)
    store.now += 500
    lease(catalog, 100, "eval/1", seconds=600)
    store.now += 500
    assert catalog.snapshot().rows()[0].leased
    # The servers of one store may have clocks of their own.
    store.now += 100 + CLOCKS_S
    assert catalog.at_store_time().snapshot().rows()[0].leased
    store.now += 1
    assert not catalog.at_store_time().snapshot().rows()[0].leased
    lease(catalog, 100, "eval/1")
    release(catalog, 100, "eval/1")
    assert not catalog.snapshot().rows()[0].leased


@pytest.mark.parametrize("behind", [0.0, HOUR], ids=["the store's clock", "a clock behind"])
def test_holds_the_restored_checkpoint_until_a_newer_full_one(
    store: MemoryStore, catalog: Catalog, behind: float
) -> None:
    for step in (100, 200):
        save(catalog, step)
        store.now += 60
    job = replace(catalog, clock=lambda: store.now - behind)
    note_restored(job, 100)
    assert [row.restored_from for row in catalog.snapshot().rows()] == [True, False]
    store.now += 60
    save(job, 150, kind="weights")
    assert catalog.snapshot().rows()[0].restored_from
    store.now += 60
    save(job, 160)
    assert not any(row.restored_from for row in catalog.snapshot().rows())


# -- whose run it is --------------------------------------------------------------------------------------------------


def test_tells_one_of_two_runs_that_claim_the_same_folders_at_once() -> None:
    seen = set()
    for at in range(1, 30):
        store = MemoryStore()
        first, second = (replace(memory_catalog(store), run=name) for name in ("a", "b"))
        outcome: list[bool] = []

        def tries(catalog: Catalog, store: MemoryStore = store) -> bool:
            try:
                save(catalog, 100 if catalog.run == "a" else 200)
            except OtherRunError:
                return False
            return True

        def meanwhile(number: int, name: str, at: int = at, outcome=outcome, tries=tries, second=second) -> None:
            if number == at:
                outcome.append(tries(second))

        store.between = meanwhile
        mine = tries(first)
        store.between = None
        if not outcome:
            break
        assert mine != outcome[0]
        owner, other = (first, second) if mine else (second, first)
        seen.add(mine)
        assert len(owner.steps().checkpoints) == 1
        assert owner.steps().runs == {owner.run}
        with pytest.raises(OtherRunError):
            other.steps()
        with pytest.raises(OtherRunError):
            next(other.candidates())
        with pytest.raises(OtherRunError):
            replace(owner, run="").snapshot()
        # Tools look at any.
        assert len(replace(owner, run=None).steps().checkpoints) == 1
    assert seen == {True, False}


def test_lets_a_run_claim_again_after_dying_at_any_request() -> None:
    kills = 0
    for at, acts in itertools.product(range(1, 12), (False, True)):
        store = MemoryStore()
        catalog = replace(memory_catalog(store), run="a")
        kills += died(store, at, save, catalog, 100, acts=acts)
        save(catalog, 200)
        assert [one.step for one in catalog.steps().checkpoints][-1] == 200
        with pytest.raises(OtherRunError):
            save(replace(catalog, run="b"), 300)
    assert kills >= 10


def test_restores_a_checkpoint_with_a_tombstone_last() -> None:
    store, catalog = saved_run(100, 200, 300)
    one = catalog.steps().checkpoints[-1]
    schedule_deletion(catalog, one, "delete", due=store.now + 3600)
    assert [found.step for found in catalog.candidates()] == [200, 100, 300]
    undo(catalog, 300)
    assert [found.step for found in catalog.candidates()] == [300, 200, 100]


@pytest.mark.parametrize("recorded", [True, False])
def test_treats_a_save_over_a_discarded_checkpoint_as_the_newest(recorded: bool) -> None:
    store, catalog = saved_run(100, 200, 300)
    schedule_deletion(catalog, catalog.steps().checkpoints[-1], "delete", due=store.now + 3600)
    SaveLog(catalog).begin(catalog.url_of(300), keys.new_token())
    assert [found.step for found in catalog.candidates()] == [200, 100, 300]
    assert newest_folder(store, "run") == "step-200"
    save(catalog, 300) if recorded else commit_without_a_record(catalog, 300)
    assert [found.step for found in catalog.candidates()] == [300, 200, 100]
    assert newest_folder(store, "run") == "step-300"


@given(affixes, st.sampled_from(["", *(f":0{digits}d" for digits in range(1, 100))]), affixes, st.integers(0, 10**15))
def test_reads_a_layout_alike_in_policies_and_in_the_catalog(before: str, digits: str, after: str, step: int) -> None:
    text = f"{before}{{step{digits}}}{after}"
    try:
        template = StepTemplate(Layout(text).step_dir)
    except (InvalidURLError, PolicyError):
        return
    assert template.step_of(template.folder(step)) == step
    found = [one for one in templates_of(template.namespace) if one.step_of(template.folder(step)) == step]
    assert [one for one in found if one.namespace == template.namespace]
