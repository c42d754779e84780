"""Spans and metrics of saves and loads, from their figures: see `telemetry`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bucketpoint.dcp.saving.earlier_saves import run_of
from bucketpoint.dcp.stats import LoadStats, SaveStats, SaveTimes
from bucketpoint.stores import retry
from bucketpoint.stores.redact import without_credentials
from bucketpoint.telemetry import begin_span, current_context, end_span, is_loaded, record, reference


def begin_save(times: SaveTimes, url: str) -> str | None:
    """Begin the coordinator's span of a save. Return its name for the spans of other ranks; None if it is not recorded.

    It begins at the call of the save, and `end_save` ends it.
    """
    if not is_loaded():
        return None
    times.span = _begin(times, url)
    return reference(times.span)


def end_save(times: SaveTimes, stats: SaveStats, url: str, error: BaseException | None = None) -> None:
    """End the span of a save on this rank, with those of its steps, and record its metrics."""
    # Later requests of this thread do not belong to this save, but `BucketWriter.stats` would count them.
    retry.count_into(None)
    if not is_loaded():
        return
    run, ended = _run(url), time.monotonic()
    span = times.span if times.span is not None else _begin(times, url)
    if span is not None:
        for step, began, stopped in (
            ("stage", times.called, times.called + times.staging_s if times.staging_s else 0.0),
            ("plan", times.turn, times.planned),
            ("upload", times.planned, times.uploaded),
            ("wait", times.uploaded, times.committing or ended),
            ("commit", times.committing, times.committed),
        ):
            if began and stopped:
                child = begin_span(f"bucketpoint.save.{step}", began, parent=span)
                end_span(child, stopped)
        figures = {
            "bucketpoint.save.sent": stats.sent_bytes,
            "bucketpoint.save.copied": stats.copied_bytes,
            "bucketpoint.retries": stats.retried,
            "bucketpoint.throttled": stats.throttled,
        }
        end_span(span, ended, error, figures)
    times.span = times.context = None
    _record_requests(stats, run)
    if error is not None:
        note_failure(url, error)
        return
    for name, value in (
        ("bucketpoint.save.blocked", stats.blocked_s),
        ("bucketpoint.save.duration", stats.total_s),
        ("bucketpoint.save.upload", stats.upload_s),
        ("bucketpoint.save.sent", stats.sent_bytes),
        ("bucketpoint.save.copied", stats.copied_bytes),
    ):
        record(name, value, run)
    if times.nbytes:
        record("bucketpoint.checkpoint.committed", time.time(), run)
        record("bucketpoint.checkpoint.size", times.nbytes, run)


def note_failure(url: str, error: BaseException) -> None:
    """Count a save that failed."""
    attributes = {**_run(url), "error.type": type(error).__qualname__}
    record("bucketpoint.save.failures", 1, attributes)


def note_load(stats: LoadStats, url: str) -> None:
    """Make the span of a load that has just ended, with those of its steps, and record its metrics."""
    if not is_loaded():
        return
    run, ended = _run(url), time.monotonic()
    began = ended - stats.total_s
    span = begin_span("bucketpoint.load", began, parent=current_context(), attributes=_of(url, stats.rank))
    if span is not None:
        for step, seconds in (("metadata", stats.metadata_s), ("plan", stats.planning_s), ("read", stats.read_s)):
            child = begin_span(f"bucketpoint.load.{step}", began, parent=span)
            began += seconds
            end_span(child, began)
        end_span(span, ended, attributes={"bucketpoint.load.received": stats.read_bytes})
    record("bucketpoint.load.duration", stats.total_s, run)
    record("bucketpoint.load.received", stats.read_bytes, run)
    _record_requests(stats, run)


def _begin(times: SaveTimes, url: str) -> Any:
    about = _of(url, times.rank)
    return begin_span("bucketpoint.save", times.called, parent=times.context, link=times.link, attributes=about)


def _of(url: str, rank: int) -> dict[str, Any]:
    return {"url.full": without_credentials(url), "bucketpoint.rank": rank}


def _run(url: str) -> dict[str, str]:
    return {"bucketpoint.run": run_of(without_credentials(url))}


def _record_requests(stats: SaveStats | LoadStats, run: Mapping[str, Any]) -> None:
    for kind, count in stats.requests.items():
        record("bucketpoint.requests", count, {**run, "bucketpoint.request.kind": kind})
    record("bucketpoint.retries", stats.retried, run)
    record("bucketpoint.throttled", stats.throttled, run)
