"""The commit: how many requests it takes, what a lost answer means, and what a failure leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint.dcp.session as session
from bucketpoint import BucketWriter, CheckpointExistsError, CommitConflictError, TransferOptions
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.errors import AccessDeniedError, ObjectNotFoundError, PreconditionFailedError, TransientStoreError
from kit import FaultProxy, checkpoints
from kit.failures import failure_of
from services import Service, in_parts
from transfer.wrappers import CountingStore, FailingStore, wrap_stores

MIB = 1 << 20
SMALL_PARTS = TransferOptions(part_bytes=5 * MIB, connections=4, single_put_bytes=5 * MIB)
Wrap = Callable[[Callable[[Any], Any]], list[Any]]


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Wrap:
    """Put a wrapper around the store that writers and readers open from now on; returns the list of it."""
    return lambda make: wrap_stores(monkeypatch, make, once=True)


def asked(proxy: FaultProxy) -> Counter[str]:
    """The requests that arrived, by S3's names for them."""
    return Counter(one.request.kind for one in proxy.exchanges)


def save(service: Service, url: str, value: float = 1.0, **options: Any) -> None:
    checkpoints.save(url, value, service.writer(transfer=SMALL_PARTS, **options), elements=3 * MIB)


def loaded(service: Service, url: str) -> float:
    return checkpoints.load(url, service.reader(transfer=SMALL_PARTS), elements=3 * MIB)


@pytest.fixture
def old(service: Service) -> str:
    """The URL of a checkpoint of the value 1."""
    save(service, service.url("a"))
    return service.url("a")


class Interfering(CountingStore):
    """A store in which something happens before or after calls: each is told a call's name, key and options."""

    def __init__(self, inner: Any, before: Callable[..., None] | None, after: Callable[..., None] | None) -> None:
        super().__init__(inner)
        self._before, self._after = before, after

    def __getattr__(self, name: str) -> Any:
        passed = super().__getattr__(name)
        if not callable(passed):
            return passed

        def call(key: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._before is not None:
                self._before(name, key, kwargs)
            done = passed(key, *args, **kwargs)
            if self._after is not None:
                self._after(name, key, kwargs)
            return done

        return call


def test_takes_three_requests_besides_its_data_for_a_fresh_save(service: Service, proxy: FaultProxy) -> None:
    save(service.at(proxy.url), service.url("a"))
    # One PUT each for the small group, .metadata and the record, and one look at what is there.
    besides = Counter(service.requests_of_a_miss()) + Counter(PutObject=3 + 1)
    assert asked(proxy) == besides + Counter(service.requests_of_parts(2))


def test_adds_one_get_and_its_clean_up_for_an_overwrite(service: Service, old: str, proxy: FaultProxy) -> None:
    save(service.at(proxy.url), old, 2.0)
    besides = Counter(PutObject=3 + 1, GetObject=2, DeleteObjects=1)
    assert asked(proxy) == besides + Counter(service.requests_of_parts(2))
    assert loaded(service, old) == 2.0


def test_reads_only_the_metadata_and_its_ranges_in_a_load(service: Service, old: str, wrap: Wrap) -> None:
    stores = wrap(CountingStore)
    loaded(service, old)
    assert set(stores[0].calls) == {"get", "open_range"}
    assert stores[0].calls["get"] == 1
    assert stores[0].received <= 1.001 * (3 * MIB + 1000) * 4 + 10_000


@pytest.mark.parametrize("first", [1.0, None], ids=["over an old one", "fresh"])
def test_accepts_a_lost_answer_to_the_commit(service: Service, first: float | None, wrap: Wrap) -> None:
    url = service.url("a")
    if first is not None:
        save(service, url, first)

    def lose(name: str, key: Any, options: Any) -> None:
        # The store acts, the answer is lost, and the client's own retry is refused.
        if name == "put" and key.endswith(".metadata"):
            raise PreconditionFailedError("412", key=key)

    wrap(lambda inner: Interfering(inner, None, lose))
    save(service, url, 2.0)
    assert loaded(service, url) == 2.0


def test_reports_a_commit_by_another_job_in_between_and_leaves_it(service: Service, old: str, wrap: Wrap) -> None:
    raced: list[str] = []

    def save_by_another_job(name: str, key: Any, options: Any) -> None:
        if name == "get" and not raced:
            raced.append(key)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(session, "open_store", plain)
                save(service, old, 3.0)

    plain = session.open_store
    wrap(lambda inner: Interfering(inner, None, save_by_another_job))
    assert isinstance(failure_of(lambda: save(service, old, 2.0)), CommitConflictError)
    assert loaded(service, old) == 3.0


def test_reports_overwrite_false_before_anything_is_uploaded(service: Service, old: str, wrap: Wrap) -> None:
    stores = wrap(CountingStore)
    failure_of(lambda: save(service, old, 2.0, overwrite=False))
    assert dict(stores[0].calls) == {"get": 1}
    assert loaded(service, old) == 1.0


def test_refuses_the_commit_itself_under_overwrite_false(service: Service, old: str, wrap: Wrap) -> None:
    error = ObjectNotFoundError("the other job has not committed yet")
    wrap(lambda inner: FailingStore(inner, lambda name, n: name == "get" and n == 1, lambda: error))
    assert isinstance(failure_of(lambda: save(service, old, 2.0, overwrite=False)), CheckpointExistsError)


@in_parts
@pytest.mark.parametrize("operation", ["create_multipart", "put_part", "complete_multipart", "put"])
def test_leaves_the_old_checkpoint_loadable_if_an_overwrite_fails_anywhere(
    service: Service, old: str, operation: str, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = wrap(
        lambda inner: FailingStore(inner, lambda name, n: name == operation, lambda: TransientStoreError("gone"))
    )
    failure_of(lambda: save(service, old, 2.0))
    store = stores[0].inner
    for key in stores[0].keys:
        assert not [upload for upload in store.list_multipart(key) if upload.key == key]
    monkeypatch.undo()
    assert loaded(service, old) == 1.0


def test_overwrites_without_the_rights_to_delete_and_to_record(
    service: Service, old: str, wrap: Wrap, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str, key: Any, options: Any) -> None:
        if name == "delete" or (name == "put" and key.endswith(".json")):
            raise AccessDeniedError("no")

    wrap(lambda inner: Interfering(inner, refuse, None))
    save(service, old, 2.0)
    assert "was not deleted" in caplog.text
    assert "its catalog record was not written" in caplog.text
    assert loaded(service, old) == 2.0


def test_keeps_a_commit_although_the_callers_own_log_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SaveLog):
        def committed(self, *args: Any, **kwargs: Any) -> None:
            raise KeyError("no such table")

    catalog = open_catalog(str(tmp_path))
    dcp.save({"w": torch.ones(4)}, storage_writer=BucketWriter.of_run(catalog.url_of(1), Broken(catalog)), no_dist=True)
    assert "was not written (`bucketpoint gc ROOT --adopt` writes it): 'no such table'" in caplog.text
    assert catalog.metadata_info("step-1") is not None


@pytest.mark.parametrize("deleted_before", ["get", "put"])
def test_commits_an_overwrite_of_a_checkpoint_that_is_deleted_meanwhile(
    service: Service, old: str, deleted_before: str, wrap: Wrap
) -> None:
    """A pruner deletes the old one after the create-only PUT was refused, or after it was read to be replaced."""
    deleted: list[str] = []

    def prune(name: str, key: Any, options: Any) -> None:
        if name == deleted_before and (name == "get" or options.get("if_match")) and not deleted:
            deleted.append(key)
            service.delete(key)

    wrap(lambda inner: Interfering(inner, prune, None))
    save(service, old, 2.0)
    assert deleted == ["a/.metadata"]
    assert loaded(service, old) == 2.0


def test_replaces_no_checkpoint_that_may_not_be_read(service: Service, old: str, wrap: Wrap) -> None:
    wrap(lambda inner: FailingStore(inner, lambda name, n: name == "get", lambda: AccessDeniedError("no")))
    assert isinstance(failure_of(lambda: save(service, old, 2.0)), AccessDeniedError)


@pytest.mark.parametrize("lost", [False, True], ids=["answered at once", "sent again"])
def test_leaves_the_intent_of_a_commit_that_was_sent_again(tmp_path: Path, wrap: Wrap, lost: bool) -> None:
    """The first request may still arrive: a prune that finds the intent leaves the checkpoint alone."""
    catalog = open_catalog(str(tmp_path))
    first: list[str] = []

    def leave_unanswered(name: str, key: Any, options: Any) -> None:
        if name == "put" and key.endswith(".metadata") and not first:
            first.append(key)
            if lost:
                raise TransientStoreError("the store did not answer")

    wrap(lambda inner: Interfering(inner, leave_unanswered, None))
    writer = BucketWriter.of_run(catalog.url_of(1), SaveLog(catalog))
    dcp.save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)
    assert len(catalog.snapshot().finished) == (1 if lost else 0)
    assert len(catalog.snapshot().checkpoints) == 1
