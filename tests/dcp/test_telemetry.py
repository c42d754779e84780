"""Spans and metrics of OpenTelemetry: a span for each rank of a save, linked with the coordinator's."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import fsspec
import opentelemetry.context
import pytest
import torch
import torch.distributed.checkpoint as dcp
from opentelemetry import trace

import bucketpoint
from bucketpoint import BucketWriter, CheckpointManager, RetentionPolicy, telemetry
from bucketpoint.retention import Keep
from dcp import scenarios
from dcp.ranks import Ranks
from dcp.recorded import recorded
from dcp.saving.async_scenarios import FailingPlanner
from kit import FaultProxy, Refuse, Rule, Script
from kit.servers import S3Server

STEPS = ["bucketpoint.save.stage", "bucketpoint.save.plan", "bucketpoint.save.upload", "bucketpoint.save.wait"]

STATE = {"weight": torch.ones(1000)}


def spans_of_a_save(rank: int, world: int, root: str) -> dict[str, Any]:
    with recorded() as found:
        with found.tracer.start_as_current_span("training step") as step:
            handle = bucketpoint.async_save({f"weight of {rank}": torch.ones(1000)}, f"{root}/step-1")
        handle.result(60)
        (span,) = found.spans("bucketpoint.save")
        return {
            "trace": span.context.trace_id == step.get_span_context().trace_id,
            "parent": span.parent.span_id == step.get_span_context().span_id,
            "id": (span.context.trace_id, span.context.span_id),
            "links": [(link.context.trace_id, link.context.span_id) for link in span.links],
            "attributes": dict(span.attributes),
            "below": found.below(span),
            "status": span.status.status_code.name,
            "metrics": sorted(found.metrics()),
        }


def test_links_the_span_of_each_rank_with_the_coordinators(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(spans_of_a_save, str(tmp_path))
    assert all(each["trace"] and each["parent"] and each["status"] == "UNSET" for each in (first, second))
    assert first["below"] == [*STEPS, "bucketpoint.save.commit"]
    assert second["below"] == STEPS
    assert (first["links"], second["links"]) == ([], [first["id"]])
    assert [each["attributes"]["bucketpoint.rank"] for each in (first, second)] == [0, 1]
    assert {each["attributes"]["url.full"] for each in (first, second)} == {f"{tmp_path}/step-1"}
    # A run has one last commit, which the coordinator tells.
    assert "bucketpoint.checkpoint.committed" in first["metrics"]
    assert "bucketpoint.checkpoint.committed" not in second["metrics"]


def test_makes_spans_of_a_save_and_a_load_in_the_foreground(tmp_path: Path) -> None:
    url = str(tmp_path / "step-1")
    with recorded() as found:
        dcp.save(STATE, checkpoint_id=url, storage_writer=BucketWriter(), no_dist=True)
        bucketpoint.load({"weight": torch.zeros(1000)}, url)
        (saved,), (loaded,) = found.spans("bucketpoint.save"), found.spans("bucketpoint.load")
        assert found.below(saved) == [*STEPS[1:], "bucketpoint.save.commit"]
        assert found.below(loaded) == [f"bucketpoint.load.{step}" for step in ("metadata", "plan", "read")]
        assert saved.attributes["bucketpoint.save.sent"] > loaded.attributes["bucketpoint.load.received"] == 4000
        assert saved.end_time <= loaded.start_time


def test_makes_a_span_with_its_error_and_counts_requests_for_a_save_that_fails(minio: S3Server) -> None:
    with recorded() as found, FaultProxy(minio.endpoint) as proxy:
        writer = BucketWriter(storage_options=minio.at(proxy.url).options)
        proxy.play(Script((Rule((Refuse(403, "AccessDenied"),), ("PutObject",)),)))
        error = bucketpoint.async_save(
            dict(STATE), f"s3://{minio.make_bucket()}/step-1", storage_writer=writer
        ).exception()
        (span,), metrics = found.spans("bucketpoint.save"), found.metrics()
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.status.description == error.message != ""
    (failures,) = metrics["bucketpoint.save.failures"]
    assert failures.value == 1
    assert failures.attributes["error.type"] == span.attributes["error.type"] == type(error).__name__
    requests = {point.attributes["bucketpoint.request.kind"]: point.value for point in metrics["bucketpoint.requests"]}
    assert requests["put"] == proxy.counts.requests["PutObject"] > 0


def test_records_every_metric_with_its_unit(minio: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run = f"s3://{minio.make_bucket()}/run"
    seen: dict[str, list[Any]] = {}
    with recorded() as found, FaultProxy(minio.endpoint) as proxy:
        policy, options = RetentionPolicy(Keep(latest=1)), minio.at(proxy.url).options
        slow, broken = Refuse(503, "SlowDown"), Refuse(500, "InternalError")
        proxy.play(
            Script((Rule((slow,), ("PutObject",), times=1), Rule((broken,), ("PutObject",), "*/data/*", times=1)))
        )
        with CheckpointManager(run, policy=policy, storage_options=options) as manager:
            for step in (1, 2):
                handle = manager.save(step, {"weight": torch.full((1000,), float(step))})
                handle.result()
            manager.prune(force=True)
            manager.restore({"weight": torch.zeros(1000)})
        seen |= found.metrics()
        failed = bucketpoint.async_save(
            dict(STATE),
            f"{run}/step-3",
            storage_writer=BucketWriter(storage_options=options),
            planner=FailingPlanner("upload"),
        )
        assert failed.exception() is not None
        monkeypatch.setattr("bucketpoint.catalog.deletion.prune.judged", lambda *_, **__: 1 / 0)
        with (
            CheckpointManager(run, policy=policy, storage_options=options) as manager,
            pytest.raises(ZeroDivisionError),
        ):
            manager.prune()
        seen |= found.metrics()
    assert set(seen) == set(telemetry.METRICS)
    # Buckets separate short times and large objects.
    blocked, sent = (seen[f"bucketpoint.save.{name}"][0].explicit_bounds for name in ("blocked", "sent"))
    assert (blocked[0], blocked[-1], sent[-1]) == (0.001, 5000, 4.0**21)
    assert {point.attributes["bucketpoint.run"] for points in seen.values() for point in points} == {run}
    kinds = {point.attributes["bucketpoint.request.kind"] for point in seen["bucketpoint.requests"]}
    assert {"put", "get"} <= kinds
    assert seen["bucketpoint.retries"][0].value > 0
    assert seen["bucketpoint.throttled"][0].value > 0
    assert seen["bucketpoint.kept.checkpoints"][0].value == 1
    assert 4000 < seen["bucketpoint.kept.size"][0].value == seen["bucketpoint.checkpoint.size"][0].value


def test_names_every_metric_with_its_unit_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(bucketpoint\.[a-z.]+)` \| (\w+) \| `([^`]+)` \|", page, re.MULTILINE)
    assert rows == [(name, metric.kind, metric.unit) for name, metric in telemetry.METRICS.items()]


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no room for more instruments")


@pytest.mark.parametrize("what", ["library", "span"])
def test_fails_no_save_by_errors_of_opentelemetry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    with recorded():
        if what == "library":
            monkeypatch.setattr(telemetry, "_loaded", lambda module: Broken() if module != "context" else None)
        else:
            monkeypatch.setattr(telemetry, "begin_span", lambda *_, **__: Broken())
            monkeypatch.setattr("bucketpoint.dcp.stats.begin_span", lambda *_, **__: Broken())
        bucketpoint.async_save(dict(STATE), str(tmp_path / "step-1")).result()
        assert "no room for more instruments" in caplog.text
        bucketpoint.load({"weight": torch.zeros(1000)}, str(tmp_path / "step-1"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        # A URL with a password is refused, and its span is that of the failure.
        ("https://user:secret@host/bucket/run/step-1", "https://host/bucket/run"),
        ("https://secret@host/bucket/run/step-1", "https://host/bucket/run"),
        ("memory://bucket/run/step-1?sig=secret", "memory://bucket/run"),
        (
            "abfs://container@account.dfs.core.windows.net/run/step-1",
            "abfs://container@account.dfs.core.windows.net/run",
        ),
    ],
)
def test_holds_no_credentials_in_spans_and_metrics(url: str, shown: str) -> None:
    with recorded() as found:
        writer = BucketWriter(fs=fsspec.filesystem("memory"))
        bucketpoint.async_save(dict(STATE), url, storage_writer=writer, no_dist=True).exception()
        (span,) = found.spans("bucketpoint.save")
        points = [point for points in found.metrics().values() for point in points]
    assert "secret" not in f"{dict(span.attributes)} {span.status.description} {points}"
    assert span.attributes["url.full"] == f"{shown}/step-1"
    assert {point.attributes["bucketpoint.run"] for point in points} == {shown}


class Kept:
    """An object that a program puts into a context."""


@pytest.mark.parametrize("failing", [False, True])
def test_keeps_no_context_of_the_program_in_a_kept_handle(tmp_path: Path, failing: bool) -> None:
    value = Kept()
    alive = weakref.ref(value)
    with recorded():
        token = opentelemetry.context.attach(opentelemetry.context.set_value("kept", value))
        planner = FailingPlanner("upload") if failing else None
        handle = bucketpoint.async_save(dict(STATE), str(tmp_path / "step-1"), planner=planner)
        opentelemetry.context.detach(token)
        assert (handle.exception() is not None) is failing
    del value, token, planner
    gc.collect()
    assert alive() is None
    assert handle.stats is not None


def test_imports_no_opentelemetry_into_a_program_without_it(one_rank: Ranks, tmp_path: Path) -> None:
    assert one_rank.run(scenarios.opentelemetry_after_a_save_and_a_load, str(tmp_path / "step-1")) == [[]]
