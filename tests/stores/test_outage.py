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
from bucketpoint.stores.gcs import GCSOptions, GCSStore
from bucketpoint.stores.outage import REPEAT_S, SILENT_S
from bucketpoint.stores.retry import retry_transient
from bucketpoint.stores.s3 import S3Options, S3Store
from stores.scripted import Answer, ScriptedServer, Seen, error, scripted


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


def s3(server: ScriptedServer) -> S3Store:
    return S3Store("bucket", S3Options(endpoint_url=server.endpoint, access_key="a", secret_key="hush-hush"))


def test_warns_of_an_outage_of_s3_and_tells_its_end(lines: Any) -> None:
    slow = answers(20, error(503, "SlowDown"), Answer(headers={"ETag": '"e"'}))
    with scripted(slow) as server:
        s3(server).put("run/k", [memoryview(b"content")])
    (warned, warning), (told, over) = lines()
    assert (warned, told) == ("WARNING", "INFO")
    assert warning.startswith(f"requests to s3://bucket have failed for {SILENT_S:.0f} s, since 20")
    assert "ThrottledError: PutObject failed: SlowDown (HTTP 503)" in warning
    assert "url=s3://bucket/run/k" in warning
    assert "hush" not in warning
    assert over == "requests to s3://bucket succeed again, after 20 s"


def test_warns_of_an_outage_of_gcs_and_tells_its_end(lines: Any) -> None:
    found = Answer(200, body=b'{"name": "k", "size": "7", "generation": "1", "etag": "e"}')
    with scripted(answers(20, Answer(503), found)) as server:
        GCSStore("bucket", GCSOptions(endpoint_url=server.endpoint, token="anon", max_attempts=40)).head("k")
    (warned, warning), (told, _) = lines()
    assert (warned, told) == ("WARNING", "INFO")
    assert "requests to gs://bucket have failed" in warning
    assert "HTTP 503" in warning


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
    with scripted(answers(3, error(503, "SlowDown"), Answer(headers={"ETag": '"e"'}))) as server:
        s3(server).put("k", [memoryview(b"content")])
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
