"""Trying again: what each failure calls for, how long a store that throttles is waited for, and at whose cost."""

from __future__ import annotations

import functools
import gc
import math
import os
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bucketpoint.errors import (
    Action,
    BucketpointError,
    CorruptDataError,
    CredentialsError,
    EndpointError,
    StoreError,
    ThrottledError,
    TransientStoreError,
    WrongRegionError,
)
from bucketpoint.stores import retry
from bucketpoint.stores.retry import retry_transient
from bucketpoint.stores.s3 import S3Options, S3Store
from bucketpoint.stores.s3 import client as s3_client
from bucketpoint.stores.s3.errors import RULE_BY_TYPE, RULES
from bucketpoint.transfer import TaskGroup
from kit.servers import S3Server
from stores.engines import s3_at
from stores.scripted import Answer, Seen, error, scripted

OK = Answer(headers={"ETag": '"e"'})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits are noted instead of waited for, and each test has a budget of its own."""
    waits: list[float] = []
    monkeypatch.setattr(retry, "pause", waits.append)
    monkeypatch.setattr(retry, "_budgets", {})
    return waits


store_at = functools.partial(s3_at, max_attempts=None)


def unshared() -> dict[str, Any]:
    """Options of which no other test has the client."""
    return {"config_kwargs": {"user_agent_extra": os.urandom(4).hex()}}


def put(store: S3Store) -> None:
    store.put("k", [memoryview(b"content")])


def test_checks_types_of_every_rule_of_the_table() -> None:
    rules = [*RULES.values(), *(rule for _, rule in RULE_BY_TYPE)]
    assert {rule.action for rule in rules} == set(Action)
    for rule in rules:
        assert issubclass(rule.kind, StoreError)
        assert (rule.kind is ThrottledError) == (rule.action is Action.THROTTLE)
        assert rule.kind is not TransientStoreError or rule.action in (Action.RETRY, Action.OUTAGE)
        if rule.action is Action.REFRESH:
            assert rule.kind is CredentialsError


def test_sends_each_code_as_often_as_its_rule_says() -> None:
    # The options hold the credentials, so there are no others to be had.
    expected = {Action.RETRY: 3, Action.THROTTLE: 3, Action.REFRESH: 1, Action.FATAL: 1}
    answers: list[Answer] = []
    with scripted(lambda request, number: answers.pop(0) if answers else OK) as server:
        store = store_at(server)
        for code, rule in RULES.items():
            if not isinstance(code, str) or rule.kind is WrongRegionError:
                continue  # botocore asks the right region by itself
            before = len(server.seen)
            answers[:] = [error(503 if rule.action is Action.THROTTLE else 400, code)] * 2
            if rule.action in (Action.RETRY, Action.THROTTLE):
                put(store)
            else:
                with pytest.raises(rule.kind):
                    put(store)
            assert len(server.seen) - before == expected[rule.action], code


def test_gives_up_a_store_that_throttles_for_ever_at_the_deadline() -> None:
    throttling = scripted(lambda request, number: error(503, "SlowDown"))
    with throttling as server, pytest.raises(ThrottledError, match="SlowDown") as caught:
        put(store_at(server, retry_deadline_s=0.3))
    assert len(server.seen) > 1
    assert caught.value.action is Action.FATAL


def test_repeats_what_is_throttled_by_waits_with_full_jitter_at_no_cost(quick: list[float]) -> None:
    with scripted(lambda request, number: error(503, "SlowDown") if number < 60 else OK) as server:
        put(store_at(server))
    assert len(server.seen) == 61
    highs = [min(retry.FIRST_THROTTLED_DELAY_S * 2.0**number, retry.LONGEST_THROTTLED_DELAY_S) for number in range(60)]
    assert len(quick) == 60
    assert all(0 <= wait <= high for wait, high in zip(quick, highs, strict=True))
    assert len(set(quick)) > 50
    counts = retry.process_budget().counts
    assert retry.process_budget().tokens == retry.BUDGET_TOKENS
    assert (counts["succeeded"], counts["retried"], counts["throttled"]) == (1, 0, 60)


def test_waits_for_a_dead_endpoint_only_if_it_has_answered_before(
    monkeypatch: pytest.MonkeyPatch, quick: list[float]
) -> None:
    monkeypatch.setattr(retry, "UNSEEN_S", 0.0)
    with scripted(lambda request, number: OK) as server:
        seen, unseen = store_at(server), store_at(server, connections=7)
        put(seen)
        seen.client.api.close()
    with pytest.raises(EndpointError, match="Could not connect"):
        put(unseen)
    assert not quick

    def given_up(seconds: float) -> None:
        raise InterruptedError

    monkeypatch.setattr(retry, "pause", given_up)
    with pytest.raises(InterruptedError):
        put(seen)


def test_refuses_at_once_an_untrusted_endpoint_and_one_without_tls(minio_tls: S3Server, quick: list[float]) -> None:
    with pytest.raises(EndpointError):
        put(store_at(minio_tls.endpoint))
    with (
        scripted(lambda request, number: OK) as server,
        pytest.raises(EndpointError, match="write the endpoint with http:"),
    ):
        put(store_at(server.endpoint.replace("http:", "https:")))
    assert not quick


def test_multiplies_neither_six_attempts_nor_the_deadline_by_loops_within_loops() -> None:
    with scripted(lambda request, number: error(500, "InternalError")) as server:
        store = store_at(server)
        with pytest.raises(TransientStoreError):
            retry_transient(lambda: store.get("k"), attempts=5)
    assert len(server.seen) == 6
    ends: list[float] = []
    with retry.deadline(5) as outer:
        with retry.deadline(1000) as inner:
            ends.append(inner)
        with retry.deadline(1) as shorter:
            ends.append(shorter)
    assert ends[0] == outer
    assert ends[1] < outer


def test_carries_the_first_error_in_the_last_unless_it_is_alone() -> None:
    answers = [error(500, "InternalError"), error(503, "SlowDown"), error(403, "AccessDenied")]
    with scripted(lambda request, number: answers[number]) as server, pytest.raises(StoreError) as caught:
        put(store_at(server))
    found = caught.value
    assert "AccessDenied" in found.message
    assert "InternalError" in found.message
    assert "attempt 3" in found.message
    assert isinstance(found.__cause__, TransientStoreError)
    assert "InternalError" in str(pickle.loads(pickle.dumps(found)))
    assert "hush" not in str(found)
    with scripted(lambda request, number: answers[2]) as server, pytest.raises(StoreError) as alone:
        put(store_at(server))
    assert "attempt" not in alone.value.message
    assert alone.value.__cause__ is None


class Body(bytearray):
    """A body that can be referred to weakly."""


def fail_with_a_body(attempts: int) -> tuple[StoreError, weakref.ref[Body]]:
    body = Body(b"x" * 100)

    def attempt() -> None:
        assert body
        raise TransientStoreError("no")

    try:
        retry.run(attempt, retry.RetryPolicy(attempts=attempts))
    except StoreError as error:
        return error, weakref.ref(body)
    raise AssertionError


@pytest.mark.parametrize("attempts", [1, 2])
def test_frees_the_body_at_once_after_an_error_that_was_handled(attempts: int) -> None:
    gc.disable()
    try:
        assert fail_with_a_body(attempts)[1]() is None
    finally:
        gc.enable()


def test_keeps_no_body_alive_by_the_first_error() -> None:
    last, body = fail_with_a_body(2)
    first = last.__cause__
    del last
    gc.collect()
    assert first is not None
    assert body() is None


def test_stops_repeating_in_the_process_once_its_budget_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_budgets", {"process": retry.Budget(tokens=8)})
    with scripted(lambda request, number: error(500, "InternalError")) as server:
        for bucket in ("one", "two", "three"):
            with pytest.raises(TransientStoreError):
                S3Store(bucket, store_at(server).options).get("k")
    assert len(server.seen) == 3 + 8
    counts = retry.process_budget().counts
    assert (counts["succeeded"], counts["retried"], counts["given_up"]) == (0, 8, 3)


def test_fills_the_budget_again_by_successes() -> None:
    with scripted(lambda request, number: OK if number % 3 == 2 else error(500, "InternalError")) as server:
        store = store_at(server)
        budget = retry.process_budget()
        for _ in range(10):
            put(store)
    assert len(server.seen) == 30
    assert budget.tokens == retry.BUDGET_TOKENS - 20 + 10 * retry.REFUND


def test_halves_the_limit_once_a_round_and_raises_it_with_successes() -> None:
    def throttled(requests: int) -> retry.ConcurrencyLimiter:
        gate = retry.ConcurrencyLimiter()
        for epoch in [gate.enter(math.inf) for _ in range(requests)]:
            gate.leave(epoch, answered=True, throttled=True, succeeded=False)
        return gate

    gate = throttled(16)
    assert gate.limit == 8
    gate.leave(gate.enter(math.inf), answered=True, throttled=True, succeeded=False)
    assert gate.limit == 1, "half of the one that was under way, and never none"
    gate, limits = throttled(8), []
    while gate.limit < math.inf:
        limits.append(gate.limit)
        gate.leave(gate.enter(math.inf), answered=True, throttled=False, succeeded=True)
    assert limits == sorted(limits)
    assert limits[0] == 4
    assert 15 < limits[-1] < 16
    assert len(limits) < 16 * 16


def test_keeps_no_more_requests_under_way_than_the_store_can_bear() -> None:
    """A store that takes 3 requests at once and answers SlowDown to more: all 60 arrive, and refusals stay few."""
    lock = threading.Lock()
    running = peak = refused = 0
    everyone = threading.Barrier(24, timeout=60)

    def script(request: Seen, number: int) -> Answer:
        nonlocal running, peak, refused
        if number < 24:
            # So that all of the first round are there together, on any machine.
            everyone.wait()
            return error(503, "SlowDown")
        with lock:
            running += 1
            peak = max(peak, running)
            full = running > 12
            refused += full
        threading.Event().wait(0.005)
        with lock:
            running -= 1
        return error(503, "SlowDown") if full else OK

    with scripted(script) as server:
        store = store_at(server)
        with ThreadPoolExecutor(24) as pool:
            list(pool.map(lambda _: put(store), range(60)))
    assert peak < 20
    assert refused <= 12
    assert len(server.seen) == 24 + 60 + refused


def test_fails_a_request_that_never_gets_its_turn_at_the_deadline() -> None:
    gate = retry.ConcurrencyLimiter()
    gate.leave(gate.enter(math.inf), answered=True, throttled=True, succeeded=False)
    gate.enter(math.inf)
    with pytest.raises(ThrottledError, match="was not sent before its deadline"):
        retry.run(lambda: None, retry.RetryPolicy(deadline_s=0.05), gate=gate)


def test_waits_for_no_throttled_request_whose_sibling_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    waiting = threading.Event()

    def throttled() -> None:
        def attempt() -> None:
            waiting.set()
            raise ThrottledError("later")

        retry.run(attempt, retry.RetryPolicy(deadline_s=100_000))

    def denied() -> None:
        assert waiting.wait(240)
        raise BucketpointError("denied")

    with pytest.raises(BucketpointError, match="denied"), TaskGroup(2) as group:
        group.start(throttled)
        group.start(denied)


def test_asks_again_for_expired_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minio: S3Server) -> None:
    """What a job sees whose credentials another program renews in a file: the session ends, the file has a new one."""
    secrets = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(secrets))

    def write(key: str, secret: str) -> None:
        secrets.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    write("gone", "gone")
    bucket = minio.make_bucket()
    store = S3Store(bucket, S3Options(endpoint_url=minio.endpoint, **unshared()))
    client = s3_client.clients.get(store.options)
    with pytest.raises(CredentialsError, match="attempt 3"):
        put(store)
    write(minio.key, minio.secret)
    put(store)
    assert store.get("k")[0] == b"content"
    assert s3_client.clients.get(store.options) is not client
    assert s3_client.clients.get(store.options).gate is client.gate
    assert retry.process_budget().counts["refreshed"] == 3


def test_makes_one_new_client_for_threads_whose_credentials_expire_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "credentials"
    path.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = hush\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    together = threading.Barrier(6, timeout=60)

    def script(request: Seen, number: int) -> Answer:
        if "Credential=old" not in request.headers["authorization"]:
            return OK
        together.wait()
        return error(400, "ExpiredToken")

    made: list[S3Options] = []
    build = s3_client.build_client

    def counting(options: S3Options) -> Any:
        made.append(options)
        return build(options)

    monkeypatch.setattr(s3_client, "build_client", counting)
    with scripted(script) as server:
        store = S3Store("b", S3Options(endpoint_url=server.endpoint, **unshared()))
        s3_client.clients.get(store.options)
        path.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = hush\n")
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda _: put(store), range(6)))
    assert len(made) == 2
    assert len(server.seen) == 12


@pytest.mark.parametrize("damaged", [1, 2], ids=["once", "each time"])
def test_reads_damaged_bytes_once_more(damaged: int) -> None:
    reads: list[int] = []

    def attempt() -> str:
        reads.append(1)
        if len(reads) <= damaged:
            raise CorruptDataError("Checksum mismatch")
        return "fine"

    if damaged == 1:
        assert retry_transient(attempt, attempts=5) == "fine"
    else:
        with pytest.raises(CorruptDataError):
            retry_transient(attempt, attempts=5)
    assert len(reads) == 2


def test_repeats_each_page_of_a_listing_by_itself(minio: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store(
        minio.make_bucket(),
        S3Options.from_storage_options({**minio.options, "s3_additional_kwargs": {"MaxKeys": 3}}),
    )
    names = [f"a b/ü&{number:02}" for number in range(10)]
    for name in names:
        store.put(name, [memoryview(b"x")])
    failed: set[Any] = set()
    call = s3_client.S3Client.call

    def flaky(self: Any, operation: str, **parameters: Any) -> Any:
        mark = parameters.get("ContinuationToken")
        if operation == "ListObjectsV2" and mark not in failed:
            failed.add(mark)
            raise TransientStoreError("cut")
        return call(self, operation, **parameters)

    monkeypatch.setattr(s3_client.S3Client, "call", flaky)
    assert [info.key for info in store.list("a b/")] == names
    assert len(failed) == 4
