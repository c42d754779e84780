"""Outages are logged once for all threads, with what fails and since when, and once more when they are over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from bucketpoint.errors import StoreError, ThrottledError
from bucketpoint.stores import retry
from bucketpoint.stores.fsspec import FsspecStore
from bucketpoint.stores.outage import REPEAT_S, SILENT_S
from bucketpoint.stores.retry import retry_transient
from stores.engines import GCS, S3, Engine
from stores.scripted import Answer, Seen, scripted


class Clock:
    """Time that passes only while somebody waits for another attempt."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        with self._lock:
            self.now += 1.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(retry, "_budgets", {})
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=made.monotonic))
    monkeypatch.setattr(retry, "pause", made.pause)
    return made


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[tuple[str, str]]]]:
    with caplog.at_level(logging.DEBUG, logger="bucketpoint"):
        yield lambda: [
            (record.levelname, record.getMessage())
            for record in caplog.records
            if record.name == "bucketpoint.stores.outage"
        ]


def answers(count: int, answer: Answer, then: Answer) -> Callable[[Seen, int], Answer]:
    return lambda request, number: answer if number < count else then


@pytest.mark.parametrize(
    ("engine", "said"),
    [(S3, "PutObject failed: SlowDown (HTTP 503)"), (GCS, "objects.insert failed: rateLimitExceeded (HTTP 429)")],
    ids=["s3", "gcs"],
)
def test_warns_of_an_outage_and_tells_its_end(engine: Engine, said: str, lines: Any) -> None:
    with scripted(answers(20, engine.failures["throttled"], engine.written)) as server:
        engine.at(server, max_attempts=None).put("run/k", [memoryview(b"content")])
    (warned, warning), (told, over) = lines()
    assert (warned, told) == ("WARNING", "INFO")
    assert warning.startswith(f"requests to {engine.scheme}://bucket have failed for {SILENT_S:.0f} s, since 20")
    assert f"ThrottledError: {said}" in warning
    assert f"url={engine.scheme}://bucket/run/k" in warning
    assert "hush" not in warning
    assert over == f"requests to {engine.scheme}://bucket succeed again, after 20 s"


def test_warns_of_an_outage_of_a_filesystem_and_tells_its_end(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = fsspec.filesystem("memory")
    store = FsspecStore(fs, "/outage")
    store.put("k", [memoryview(b"content")])
    failures = iter([TimeoutError("late")] * 20)
    real = store.head

    def head() -> Any:
        failure = next(failures, None)
        if failure is not None:
            raise store._translated(failure, "head", "k")
        return real("k")

    retry_transient(head, attempts=40)
    (_, warning), (_, over) = lines()
    assert "requests to memory:// have failed" in warning
    assert over == "requests to memory:// succeed again, after 20 s"


def test_logs_nothing_that_passes_soon(lines: Any) -> None:
    with scripted(answers(3, S3.failures["throttled"], S3.written)) as server:
        S3.at(server, max_attempts=None).put("k", [memoryview(b"content")])
    assert lines() == []


def test_logs_one_line_of_many_threads_that_fail_together(lines: Any, clock: Clock) -> None:
    def until(ends: float) -> Any:
        def attempt() -> None:
            if clock.now < ends:
                raise ThrottledError("PutObject failed: SlowDown", url="s3://bucket/k")

        return attempt

    ends = clock.now + 2.5 * REPEAT_S
    # All have failed before time goes on.
    ready = threading.Barrier(32, timeout=60)
    with ThreadPoolExecutor(32) as pool:

        def one() -> None:
            ready.wait()
            retry.run(until(ends), retry.RetryPolicy(deadline_s=10_000))

        for done in [pool.submit(one) for _ in range(32)]:
            done.result()
    found = [level for level, _ in lines()]
    assert found == ["WARNING"] * 3 + ["INFO"], "one at first, one a minute, and the end"


def test_ends_no_outage_well_by_a_request_that_is_given_up(lines: Any) -> None:
    def fails() -> None:
        raise ThrottledError("no", url="s3://bucket/k")

    with pytest.raises(StoreError):
        retry.run(fails, retry.RetryPolicy(deadline_s=20))
    assert [level for level, _ in lines()] == ["WARNING"]
