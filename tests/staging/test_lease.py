"""A staged state's memory is its own until its save has ended, failed or been dropped; saves go in order."""

from __future__ import annotations

import copy
import gc
import math
import threading
import weakref
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.staging import AsyncStager

from bucketpoint.errors import StagingError
from bucketpoint.staging import Lease, StagedState, Stager, StagingOptions, current_lease, take_turn
from bucketpoint.staging import pool as pool_module
from bucketpoint.staging import stager as stager_module
from staging.helpers import Beside, Upload, both_kinds, finished, memory_of, sync_and_async
from transfer.helper.orders import wait_until

waiting = pytest.mark.parametrize("when_busy", ["wait", "double_buffer", "error"])


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error policy forgives a save that ends within a second. Here it is quicker to lose patience."""
    monkeypatch.setattr(pool_module, "GRACE_S", 0.1)
    monkeypatch.setattr(stager_module, "GRACE_S", 0.1)


def state(step: float = 0, size: int = 64) -> dict[str, Any]:
    return {"w": torch.full((size,), float(step))}


def values(staged: StagedState) -> set[float]:
    # By key: items() would make this thread its reader.
    return set(staged["w"].tolist())


def uploading(staged: StagedState) -> Upload:
    upload = Upload(staged)
    assert upload.reads.wait(60)
    return upload


# -- while a save reads -----------------------------------------------------------------------------------------------


@sync_and_async
def test_waits_by_default_with_the_next_save_for_the_one_that_reads(beside: bool) -> None:
    stager = Stager(StagingOptions(use_async_staging=beside))
    first = finished(stager.stage(state(1)))
    address = memory_of(first)
    upload = uploading(first)
    del first
    second = Beside(lambda: finished(stager.stage(state(2))))
    assert second.is_blocked()
    upload.finish()
    staged = second.outcome.result(60)
    assert memory_of(staged) == address
    assert values(staged) == {2}


@sync_and_async
def test_copies_at_once_by_double_buffering_and_waits_with_the_third_save(beside: bool) -> None:
    stager = Stager(StagingOptions(when_busy="double_buffer", use_async_staging=beside))
    first = finished(stager.stage(state(1)))
    uploads = [uploading(first)]
    second = finished(stager.stage(state(2)))
    assert memory_of(first) != memory_of(second)
    uploads.append(Upload(second))
    third = Beside(lambda: finished(stager.stage(state(3))))
    assert third.is_blocked()
    assert (values(first), values(second)) == ({1}, {2})
    address = memory_of(first)
    del first
    uploads[0].finish()
    staged = third.outcome.result(60)
    assert memory_of(staged) == address
    assert (values(second), values(staged)) == ({2}, {3})
    uploads[1].finish()


def test_forgives_a_save_that_is_about_to_end_under_the_error_policy() -> None:
    stager = Stager(StagingOptions(when_busy="error"))
    upload = uploading(finished(stager.stage(state(1))))
    threading.Timer(0.02, upload.go_on.set).start()
    assert values(finished(stager.stage(state(2)))) == {2}


# -- the ends of a lease ----------------------------------------------------------------------------------------------


@waiting
@sync_and_async
def test_lets_the_next_have_the_memory_of_a_staged_state_that_is_dropped(when_busy: Any, beside: bool) -> None:
    stager = Stager(StagingOptions(when_busy=when_busy, use_async_staging=beside, unread_timeout_s=math.inf))
    addresses = {memory_of(finished(stager.stage(state(step)))) for step in range(3)}
    assert len(addresses) == 1


def test_lets_the_next_have_the_memory_of_a_future_that_is_dropped_unread() -> None:
    stager = Stager(StagingOptions(use_async_staging=True, unread_timeout_s=math.inf))
    for step in range(3):
        stager.stage(state(step))
    assert values(finished(stager.stage(state(9)))) == {9}


def test_lets_the_next_have_the_memory_of_a_future_cancelled_before_the_copy() -> None:
    stager = Stager(StagingOptions(use_async_staging=True, when_busy="double_buffer", unread_timeout_s=math.inf))
    # The first copy holds the only worker for some milliseconds.
    futures = [stager.stage(state(step, 1 << 20)) for step in range(2)]
    assert isinstance(futures[1], Future)
    assert futures[1].cancel()
    first = finished(futures[0])
    assert values(finished(stager.stage(state(9, 1 << 20)))) == {9}
    assert values(first) == {0}


def test_refuses_to_save_a_state_again_whose_save_has_ended() -> None:
    stager = Stager()
    first = finished(stager.stage(state(1)))
    uploading(first).finish()
    with pytest.raises(StagingError, match="has been saved"):
        first.items()


def test_lets_the_thread_that_staged_save_and_stage_again() -> None:
    """As a plain loop of `dcp.save(stager.stage(state))` does."""
    stager = Stager(StagingOptions(unread_timeout_s=math.inf))
    addresses = set()
    for step in range(3):
        staged = finished(stager.stage(state(step)))
        # Reading by key begins no save.
        assert values(staged) == {step}
        assert not staged.lease.begun
        assert dict(staged.items()).keys() == {"w"}
        assert staged.lease.begun
        take_turn("own save")
        assert values(staged) == {step}
        addresses.add(memory_of(staged))
    assert len(addresses) == 1


def test_lets_go_of_the_last_save_on_a_thread_that_goes_on_to_another() -> None:
    stager = Stager(StagingOptions(when_busy="double_buffer"))
    first, second = finished(stager.stage(state(1))), finished(stager.stage(state(2)))

    def saves_both() -> bool:
        first.items()
        assert current_lease() is first.lease
        second.items()
        assert current_lease() is second.lease
        return first.lease.ended and not second.lease.ended

    assert Beside(saves_both).outcome.result(60)
    assert second.lease.ended


@sync_and_async
@both_kinds
def test_keeps_nothing_of_the_source_alive_by_the_copy(shared: bool, beside: bool) -> None:
    source = torch.ones(64)
    gone = weakref.ref(source)
    staged = finished(Stager(StagingOptions(use_shared_memory=shared, use_async_staging=beside)).stage({"w": source}))
    del source

    def let_go() -> bool:
        gc.collect()
        return gone() is None

    # The worker lets go of its job a moment after the future is done.
    wait_until(let_go)
    assert values(staged) == {1}


# -- states that nobody saves -----------------------------------------------------------------------------------------


@waiting
@sync_and_async
def test_stops_blocking_by_a_held_state_that_is_never_saved_and_keeps_its_values(
    when_busy: Any, beside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stager = Stager(StagingOptions(when_busy=when_busy, use_async_staging=beside, unread_timeout_s=0.2))
    held = [finished(stager.stage(state(step))) for step in range(2 if when_busy == "double_buffer" else 1)]
    held_at = {memory_of(staged) for staged in held}
    threading.Event().wait(0.2)
    for step in range(10, 13):
        staged = finished(stager.stage(state(step)))
        assert memory_of(staged) not in held_at
        assert values(staged) == {step}
        del staged
    assert [values(staged) for staged in held] == [{step} for step in range(len(held))]
    assert when_busy == "error" or "has not been saved" in caplog.text
    newer = finished(stager.stage(state(13)))
    # They can still be saved.
    uploading(held[0]).finish()
    assert values(newer) == {13}
    del newer
    stager.close()
    assert [values(staged) for staged in held] == [{step} for step in range(len(held))]


def test_waits_for_a_save_that_has_begun_beyond_the_deadline() -> None:
    stager = Stager(StagingOptions(unread_timeout_s=0.1))
    upload = uploading(finished(stager.stage(state(1))))
    second = Beside(lambda: finished(stager.stage(state(2))))
    assert second.is_blocked(0.7)
    upload.finish()
    assert values(second.outcome.result(60)) == {2}


# -- closing ----------------------------------------------------------------------------------------------------------


def test_waits_in_close_for_the_saves_under_way() -> None:
    stager = Stager(StagingOptions(when_busy="double_buffer"))
    first, second = (Upload(finished(stager.stage(state(step)))) for step in range(2))
    assert first.reads.wait(60)
    closing = Beside(stager.close)
    assert closing.is_blocked()
    first.finish()
    assert second.reads.wait(60)
    assert closing.is_blocked()
    second.finish()
    closing.outcome.result(60)
    assert stager.staged_bytes == 0


def test_waits_in_close_for_the_copies_under_way() -> None:
    stager = Stager(StagingOptions(use_async_staging=True))
    future = stager.stage(state(1, 1 << 20))
    assert isinstance(future, Future)
    held: list[StagedState] = []
    future.add_done_callback(lambda done: held.append(done.result()))
    del future
    closing = Beside(stager.close)
    wait_until(lambda: held)
    assert values(held[0]) == {1}
    held.clear()
    closing.outcome.result(60)


@pytest.mark.parametrize("call", ["stage", "prefault"])
def test_refuses_after_a_stager_is_closed_once_or_twice(call: str) -> None:
    Stager().close()
    with Stager() as stager:
        finished(stager.stage(state(1)))
    stager.close()
    assert stager.staged_bytes == 0
    with pytest.raises(StagingError, match="closed"):
        getattr(stager, call)(state(2))


def test_waits_in_synchronize_staging_for_the_copy_and_raises_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    stager = Stager(StagingOptions(use_async_staging=True))
    assert isinstance(stager, AsyncStager)
    assert stager.should_synchronize_after_execute
    stager.synchronize_staging()
    future = stager.stage(state(1, 1 << 20))
    stager.synchronize_staging()
    assert isinstance(future, Future)
    assert future.done()
    del future
    monkeypatch.setattr(stager_module, "run_copies", mock.Mock(side_effect=RuntimeError("an ECC error")))
    failing = stager.stage(state(2, 1 << 20))
    with pytest.raises(StagingError, match="an ECC error"):
        stager.synchronize_staging()
    monkeypatch.undo()
    assert values(finished(stager.stage(state(3, 1 << 20)))) == {3}
    assert failing is not None


@sync_and_async
@pytest.mark.parametrize("failure", [RuntimeError("device lost"), KeyboardInterrupt()])
def test_gives_its_memory_back_after_a_copy_that_fails(
    monkeypatch: pytest.MonkeyPatch, beside: bool, failure: BaseException
) -> None:
    stager = Stager(StagingOptions(use_async_staging=beside, unread_timeout_s=math.inf))
    with monkeypatch.context() as patch:
        patch.setattr(stager_module, "run_copies", mock.Mock(side_effect=failure))
        with pytest.raises((StagingError, KeyboardInterrupt)) as caught:
            finished(stager.stage(state(1)))
    assert caught.value is failure or caught.value.__cause__ is failure
    assert values(finished(stager.stage(state(2)))) == {2}


# -- the order of saves -----------------------------------------------------------------------------------------------


def test_waits_on_the_thread_that_staged_both_when_it_takes_its_turn() -> None:
    stager = Stager(StagingOptions(when_busy="double_buffer"))
    order: list[str] = []
    uploads: list[Upload] = []
    begun = threading.Event()

    def trains() -> None:
        uploads.append(uploading(finished(stager.stage(state(1)))))
        second = finished(stager.stage(state(2)))
        second.items()
        begun.set()
        take_turn("second")
        order.append("second")

    training = Beside(trains)
    assert begun.wait(60)
    assert training.is_blocked()
    order.append("first ended")
    uploads[0].finish()
    training.outcome.result(60)
    assert order == ["first ended", "second"]


def test_saves_by_different_stagers_in_the_order_of_staging() -> None:
    staged = [finished(Stager().stage(state(step))) for step in range(3)]
    uploads = [Upload(one) for one in reversed(staged)][::-1]
    del staged
    for place, upload in enumerate(uploads):
        assert upload.reads.wait(60)
        assert not any(later.reads.is_set() for later in uploads[place + 1 :])
        upload.finish()


def test_waits_in_a_plain_save_for_what_the_same_thread_has_staged() -> None:
    go_on = threading.Event()
    uploads: list[Upload] = []

    def trains() -> None:
        uploads.append(uploading(finished(Stager().stage(state(1)))))
        go_on.set()
        take_turn("a plain save")

    training = Beside(trains)
    assert go_on.wait(60)
    assert training.is_blocked()
    uploads[0].finish()
    training.outcome.result(60)


@pytest.mark.parametrize("before", [False, True], ids=["after the last is staged", "before"])
def test_holds_the_order_when_the_save_between_two_is_dropped(before: bool) -> None:
    staged = [finished(Stager().stage(state(step))) for step in (1, 2)]
    first = uploading(staged[0])
    if before:
        staged.pop()
    newest = finished(Stager().stage(state(3)))
    del staged[1:]
    last = Upload(newest)
    assert not last.reads.wait(0.1)
    first.finish()
    assert last.reads.wait(60)
    last.finish()


def test_ends_the_wait_for_a_save_that_is_never_begun() -> None:
    stager = Stager(StagingOptions(when_busy="double_buffer", unread_timeout_s=0.2))
    held, second = finished(stager.stage(state(1))), finished(stager.stage(state(2)))
    uploading(second).finish()
    assert values(held) == {1}


def test_stages_on_two_threads_without_waits_for_each_others_turn() -> None:
    mine = uploading(finished(Stager().stage(state(1))))

    def theirs() -> set[float]:
        staged = finished(Stager().stage(state(2)))
        staged.items()
        take_turn("theirs")
        return values(staged)

    assert Beside(theirs).outcome.result(60) == {2}
    mine.finish()


# -- what is left behind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [False, True], ids=["dropped", "saved"])
def test_limits_the_number_of_leases(saved: bool) -> None:
    stager = Stager(StagingOptions(when_busy="double_buffer"))
    held = None if saved else finished(stager.stage(state(0)))
    leases: list[weakref.ref[Lease]] = []
    for step in range(100):
        staged = finished(stager.stage(state(step)))
        leases.append(weakref.ref(staged.lease))
        upload = Upload(staged) if saved else None
        del staged
        if upload is not None:
            upload.finish()
    del upload
    gc.collect()
    assert sum(lease() is not None for lease in leases) <= 2
    assert held is None or values(held) == {0}


# -- copies and other processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, dict])
def test_makes_plain_dicts_of_copies_of_a_staged_state(make: Any) -> None:
    copied = make(finished(Stager().stage({"w": torch.ones(2), "n": {"step": 1}})))
    assert type(copied) is dict
    assert copied["n"] == {"step": 1}


def test_sends_a_staged_state_over_the_same_memory_with_a_lease_of_that_process() -> None:
    stager = Stager()
    staged = finished(stager.stage(state(1)))
    received = ForkingPickler.loads(ForkingPickler.dumps(staged))
    assert received.lease is not staged.lease
    assert not received.lease.abandoned
    received["w"].fill_(7)
    assert values(staged) == {7}
    assert staged.lease.begun


def test_uses_private_memory_that_crosses_for_no_other_state() -> None:
    """Torch moves it to shared memory under the tensors."""
    stager = Stager(StagingOptions(use_shared_memory=False))
    staged = finished(stager.stage(state(1)))
    received = ForkingPickler.loads(ForkingPickler.dumps(staged))
    assert stager.staged_bytes == 0
    finished(stager.stage(state(2)))
    assert set(received["w"].tolist()) == {1}
