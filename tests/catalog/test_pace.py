"""A pruner beside training rests after each request, and not where somebody waits for it. Counted, never timed."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.deletion.delete import put_marker
from bucketpoint.catalog.deletion.worker import (
    LONGEST_REST_S,
    PAGE,
    REST_AT_MOST_S,
    RESTS,
    PruneWorker,
    Throttle,
    counted,
)
from bucketpoint.errors import TransientStoreError
from bucketpoint.format.record import DeletionMarker
from bucketpoint.retention import Keep, MaxDelete, Prune, RetentionPolicy
from bucketpoint.stores import Capabilities, proven_deletes
from catalog.memory import MemoryStore, memory_catalog, save
from kit.programs import run_program

POLICY = RetentionPolicy(Keep(1), prune=Prune(grace=timedelta(0), max_delete=MaxDelete(fraction=1.0)))
WAIT_S = 240
"""Against hangs only."""


class Time:
    """A clock that passes by a fixed time for each request that a store answers, and by the rests."""

    def __init__(self, request_s: float) -> None:
        self.now = 0.0
        self.rests: list[float] = []
        self.store = MemoryStore()
        self.store.between = self._request
        self.request_s = request_s
        self.pace = Throttle(clock=lambda: self.now, wait=self._rest)

    def paced(self) -> Any:
        return counted(self.store, lambda *_: self.pace.rest())  # type: ignore[arg-type]

    def _request(self, number: int, name: str) -> None:
        self.now += self.request_s

    def _rest(self, seconds: float) -> None:
        self.now += seconds
        self.rests.append(seconds)


def test_rests_after_each_request_for_a_multiple_of_its_time() -> None:
    time = Time(0.01)
    store: Any = time.paced()
    assert store.url == time.store.url
    time.pace.begin()
    store.put("a", [])
    store.head("a")
    assert [one.key for one in store.list("")] == ["a"]
    assert time.rests == pytest.approx([RESTS * 0.01] * 3)
    time.request_s = 60.0
    store.head("a")
    assert time.rests[-1] == LONGEST_REST_S


def test_paces_long_listings_and_deletions_by_the_page() -> None:
    time = Time(0.001)
    store: Any = time.paced()
    many = [f"{number:05}" for number in range(3 * PAGE)]
    for key in many:
        time.store.put(key, [])
    time.pace.begin()
    assert len(list(store.list(""))) == 3 * PAGE
    assert (time.store.calls["list"], len([rest for rest in time.rests if rest])) == (3, 3)
    time.rests.clear()
    assert store.delete(many) == []
    assert (time.store.calls["delete"], len(time.rests)) == (3, 3)
    assert store.delete([]) == []
    assert time.store.calls["delete"] == 3


def test_bounds_the_rests_of_one_round() -> None:
    time = Time(1000.0)
    store: Any = time.paced()
    for _ in range(2):
        time.rests.clear()
        time.pace.begin()
        for _ in range(int(REST_AT_MOST_S / LONGEST_REST_S) + 50):
            store.put("a", [])
        assert sum(time.rests) == pytest.approx(REST_AT_MOST_S)
        assert len(time.rests) == pytest.approx(REST_AT_MOST_S / LONGEST_REST_S)


def test_rests_as_often_as_it_asks_until_somebody_waits() -> None:
    time = Time(0.01)
    catalog = memory_catalog(time.store)
    for step in (100, 200, 300):
        save(catalog, step)
    resting, go_on = threading.Event(), threading.Event()

    def rest(seconds: float) -> None:
        time._rest(seconds)
        if len(time.rests) == 5:
            resting.set()
            assert go_on.wait(WAIT_S)

    worker = PruneWorker(catalog, POLICY, pace=Throttle(clock=lambda: time.now, wait=rest))
    time.store.calls.clear()
    worker.ask()
    assert resting.wait(WAIT_S)
    assert sum(time.store.calls.values()) == 5
    assert not worker.drain(0)
    go_on.set()
    assert worker.drain(WAIT_S)
    assert worker.failure is None
    assert (len(time.rests), sum(time.store.calls.values()) > 15) == (5, True)
    assert [one.step for one in catalog.steps().checkpoints] == [300]

    # Whoever calls it himself waits too; and the next commit's round rests again.
    save(catalog, 400)
    worker.now()
    assert len(time.rests) == 5
    save(catalog, 500)
    time.store.calls.clear()
    worker.ask()
    while worker._thread is not None:
        threading.Event().wait(0.01)
    assert len(time.rests) - 5 == sum(time.store.calls.values())


PROGRAM = """
    import sys, threading, torch
    import torch.distributed.checkpoint as dcp
    from datetime import timedelta
    from bucketpoint import BucketWriter
    from bucketpoint.catalog.deletion import worker
    from bucketpoint.retention import Keep, MaxDelete, Prune, RetentionPolicy

    main, resting, rests, throttle = threading.main_thread(), threading.Event(), [], worker.Throttle

    def wait(seconds):
        rests.append(seconds)
        resting.set()
        main.join()

    worker.Throttle = lambda: throttle(wait=wait)
    torch.distributed.init_process_group("gloo", f"file://{sys.argv[1]}.store", rank=0, world_size=1)
    policy = RetentionPolicy(Keep(1), prune=Prune(grace=timedelta(0), max_delete=MaxDelete(fraction=1.0)))
    writer = BucketWriter(retention=policy)
    for step in range(1, 4):
        url = f"{sys.argv[1]}/step-{step}"
        begun = dcp.async_save({"w": torch.ones(200_000)}, checkpoint_id=url, storage_writer=writer)
        if step < 3:
            begun.result()
    # The last one is under way, and nobody waits for it.
    resting.wait()
    pruning = writer.pruning._thread
    threading.Thread(target=lambda: (pruning.join(), print(len(rests)))).start()
"""


def test_lets_a_program_end_at_once_and_keeps_its_last_save_and_record(tmp_path: Path) -> None:
    """The main thread has ended while the worker is at its first rest; it takes the others for nothing."""
    root = f"{tmp_path}/run"
    done = run_program(PROGRAM, root)
    assert "Traceback" not in done.stderr
    assert "1" in done.stdout.splitlines()
    catalog = open_catalog(root)
    assert [one.step for one in catalog.steps().checkpoints] in ([3], [2, 3])
    assert catalog.steps().attempts == ()
    # What the last round did not get to, the next job does.
    PruneWorker(catalog, POLICY).now()
    assert [one.step for one in catalog.steps().checkpoints] == [3]


def test_removes_a_marker_again_when_the_answer_is_lost() -> None:
    sent: list[str] = []

    class Signing(MemoryStore):
        def expiring_delete(self, key: str, seconds: int) -> Any:
            def send() -> bool:
                sent.append(key)
                if len(sent) < 2:
                    raise TransientStoreError("the answer is lost")
                return True

            return send

    catalog = memory_catalog(Signing())
    there = catalog.store.put("run/step-1/.metadata", [memoryview(b"x")])
    able = replace(catalog.store.capabilities, conditional_delete=False, expiring_delete=True)
    remove = put_marker(catalog, able, there, DeletionMarker("abcdefabcdef", 1.0, "by a test", ("abcdefabcdef",), ()))
    assert remove is not None
    assert remove()
    assert len(sent) == 2


def test_learns_about_deletions_in_a_paced_store_as_in_the_store_itself() -> None:
    class Unknown(MemoryStore):
        def prove_deletes(self, prefix: str) -> Capabilities:
            return replace(self.capabilities, expiring_delete=True)

        def expiring_delete(self, key: str, seconds: int) -> Any:
            raise NotImplementedError

    store: Any = Unknown()
    time = Time(0.01)
    assert proven_deletes(store, "run").expiring_delete
    assert proven_deletes(counted(store, lambda *_: time.pace.rest()), "run").expiring_delete
