"""Figures of a save and of a load: seconds, bytes and requests of a rank, and of all ranks on the coordinator.

OpenTelemetry's spans and metrics are made from these figures: see `telemetry`. `CommitInfo` describes a checkpoint for
`on_commit`.
"""

from __future__ import annotations

import logging
import statistics
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bucketpoint.location import parent_and_name
from bucketpoint.staging import Lease
from bucketpoint.stores import retry
from bucketpoint.stores.redact import without_credentials
from bucketpoint.telemetry import begin_span, current_context, end_span, is_loaded, record, reference

logger = logging.getLogger(__name__)

_REPORT = struct.Struct("<4f2Q2I")
_REPORTED = ("staging_s", "queued_s", "planning_s", "upload_s", "sent_bytes", "copied_bytes", "retried", "throttled")
"""The figures that each rank sends to the coordinator, in 40 bytes."""


@dataclass(frozen=True)
class Spread:
    """One figure over all ranks.

    Attributes:
        slowest: global rank of the maximum; the first such rank if there are several.
    """

    min: float
    median: float
    max: float
    slowest: int


@dataclass(frozen=True)
class SaveStats:
    """Figures of one save on one rank.

    Attributes:
        rank: global rank.
        blocked_s: seconds for which the call of `async_save` blocked training; for `dcp.save` all seconds.
        staging_s: seconds of the copy to host memory; 0 for `dcp.save`.
        queued_s: seconds that the save waited for earlier saves of this process.
        planning_s: seconds from the end of this wait to the start of the upload, with waits for plans of other ranks.
        upload_s: seconds of this rank's upload.
        waiting_s: seconds from the end of this rank's upload to the start of the commit; on ranks that do not commit,
            to the end of the save.
        commit_s: seconds of the commit; 0 on ranks that do not commit.
        total_s: seconds from the call to the end.
        staged_bytes: bytes of the state that were copied to host memory; 0 for `dcp.save`.
        memory_bytes: bytes of host memory that are held for staging when the save ends.
        sent_bytes: bytes of data objects that this rank sent.
        copied_bytes: bytes of items that the store copied.
        requests: attempts of requests by kind, named after the methods of a store: `put`, `put_part`, `get` and so on.
            Not counted for local folders.
        retried: requests that were sent again after a failure.
        throttled: answers of the store that ask for fewer requests.
        ranks: on the coordinator of a save with collectives, the spread over the ranks by name of the figure:
            `staging_s`, `queued_s`, `planning_s`, `upload_s`, `sent_bytes`, `copied_bytes`, `retried` and `throttled`;
            otherwise empty.
    """

    rank: int
    blocked_s: float
    staging_s: float
    queued_s: float
    planning_s: float
    upload_s: float
    waiting_s: float
    commit_s: float
    total_s: float
    staged_bytes: int
    memory_bytes: int
    sent_bytes: int
    copied_bytes: int
    requests: Mapping[str, int] = field(default_factory=dict)
    retried: int = 0
    throttled: int = 0
    ranks: Mapping[str, Spread] = field(default_factory=dict)

    @property
    def upload_bytes_per_s(self) -> float:
        """Bytes sent per second of this rank's upload; 0 without an upload."""
        return self.sent_bytes / self.upload_s if self.upload_s else 0.0


@dataclass(frozen=True)
class LoadStats:
    """Figures of one load on one rank.

    Attributes:
        rank: global rank.
        metadata_s: seconds until the checkpoint's metadata was read.
        planning_s: seconds from this read to the first read of data, with waits for plans of other ranks.
        read_s: seconds of the reads of data, with decoding and checksums.
        total_s: seconds from the beginning to the end of the reads.
        read_bytes: bytes of data objects that this rank received from the store.
        node_bytes: bytes of data objects that this rank read from the node's copy.
        requests, retried, throttled: as for `SaveStats`.
    """

    rank: int
    metadata_s: float
    planning_s: float
    read_s: float
    total_s: float
    read_bytes: int
    node_bytes: int = 0
    requests: Mapping[str, int] = field(default_factory=dict)
    retried: int = 0
    throttled: int = 0

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes received per second of this rank's reads; 0 without reads."""
        return self.read_bytes / self.read_s if self.read_s else 0.0


def requests_of(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the requests by kind among the counts of `retry.count_into`."""
    return {kind: counts[kind] for kind in retry.KINDS if counts.get(kind)}


@dataclass
class SaveTimes:
    """Monotonic times and counts of a running save on this rank. A time is 0 until it is set.

    Attributes:
        begun: DCP began the save on this thread.
        turn: earlier saves had ended.
        planned: the upload began.
        uploaded: the upload ended.
        committing, committed: the commit began and ended.
        called: the copy of the state began; without a copy, `begun`.
        staging_s: seconds of the copy to host memory.
        nbytes: on the rank that has committed the checkpoint, its bytes on all ranks; else 0.
        context: OpenTelemetry's context of the call; span: the coordinator's span; link: its name, on other ranks.
        reports: on the coordinator, the report of each rank, by global rank.
    """

    rank: int = 0
    begun: float = field(default_factory=lambda: time.monotonic())  # a lambda, because a simulation replaces the clock
    called: float = 0.0
    turn: float = 0.0
    planned: float = 0.0
    uploaded: float = 0.0
    committing: float = 0.0
    committed: float = 0.0
    staging_s: float = 0.0
    sent_bytes: int = 0
    copied_bytes: int = 0
    nbytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    context: Any = None
    span: Any = None
    link: str | None = None
    reports: Mapping[int, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.called = self.begun

    def begin(self, rank: int, lease: Lease | None) -> None:
        """Record the origin of the save: a state that another thread staged, or a call on this thread."""
        self.rank = rank
        self.turn = self.turn or time.monotonic()
        if lease is None:
            self.context = current_context()
        else:
            self.called, self.staging_s, self.context = lease.started, lease.copy_s, lease.context
            lease.times = self

    def report(self) -> bytes:
        """Return the figures `_REPORTED`, which the rank sends to the coordinator with its results."""
        figures = self.stats()
        return _REPORT.pack(*(getattr(figures, name) for name in _REPORTED))

    def stats(self, ended: float = 0.0) -> SaveStats:
        """Return the figures of a blocking save until `ended`, by default until the last recorded end."""
        ended = ended or self.committed or self.uploaded
        total_s = _between(self.begun, ended)
        return SaveStats(
            rank=self.rank,
            blocked_s=total_s,
            staging_s=self.staging_s,
            queued_s=_between(self.begun, self.turn),
            planning_s=_between(self.turn, self.planned),
            upload_s=_between(self.planned, self.uploaded),
            waiting_s=_between(self.uploaded, self.committing or ended),
            commit_s=_between(self.committing, self.committed),
            total_s=total_s,
            staged_bytes=0,
            memory_bytes=0,
            sent_bytes=self.sent_bytes,
            copied_bytes=self.copied_bytes,
            requests=requests_of(self.counts),
            retried=self.counts["retried"],
            throttled=self.counts["throttled"],
            ranks=_spreads(self.reports),
        )


def _between(start: float, stop: float) -> float:
    """Return the seconds from one time to another; 0 if one is not set."""
    return max(stop - start, 0.0) if start and stop else 0.0


def _spreads(reports: Mapping[int, object]) -> dict[str, Spread]:
    """Return the spread of each figure; empty if a rank, for example with an older version, has reported no figures."""
    known = {rank: each for rank, each in reports.items() if isinstance(each, bytes) and len(each) == _REPORT.size}
    if not known or len(known) < len(reports):
        return {}
    ranks, figures = list(known), [_REPORT.unpack(each) for each in known.values()]
    return {
        name: Spread(min(values), statistics.median(values), max(values), ranks[values.index(max(values))])
        for name, values in zip(_REPORTED, zip(*figures, strict=True), strict=True)
    }


# -- OpenTelemetry ----------------------------------------------------------------------------------------------------


def begin_save(times: SaveTimes, url: str) -> str | None:
    """Begin the coordinator's span at the time of the call. Return its name for other ranks; None if not recorded."""
    if not is_loaded():
        return None
    times.span = _begin(times, url)
    return reference(times.span)


def end_save(times: SaveTimes, stats: SaveStats, url: str, error: BaseException | None = None) -> None:
    """End the span of a save on this rank, make the spans of its steps, and record its metrics."""
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
    attributes = {**_run(url), "error.type": type(error).__qualname__}
    record("bucketpoint.save.failures", 1, attributes)


def note_load(stats: LoadStats, url: str) -> None:
    """Make the spans of a load that has just ended, and of its steps, and record its metrics."""
    if not is_loaded():
        return
    run, ended = _run(url), time.monotonic()
    began = ended - stats.total_s
    span = begin_span("bucketpoint.load", began, parent=current_context(), attributes=_about(url, stats.rank))
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
    about = _about(url, times.rank)
    return begin_span("bucketpoint.save", times.called, parent=times.context, link=times.link, attributes=about)


def _about(url: str, rank: int) -> dict[str, Any]:
    return {"url.full": without_credentials(url), "bucketpoint.rank": rank}


def _run(url: str) -> dict[str, str]:
    url = without_credentials(url)
    split = parent_and_name(url)
    return {"bucketpoint.run": url if split is None else split[0]}


def _record_requests(stats: SaveStats | LoadStats, run: Mapping[str, Any]) -> None:
    for kind, count in stats.requests.items():
        record("bucketpoint.requests", count, {**run, "bucketpoint.request.kind": kind})
    record("bucketpoint.retries", stats.retried, run)
    record("bucketpoint.throttled", stats.throttled, run)


@dataclass(frozen=True)
class CommitInfo:
    """Description of a committed checkpoint for `on_commit`.

    Attributes:
        url: URL of the checkpoint.
        step: training step; None if the save has no log in a catalog.
        nbytes: bytes of the checkpoint's data on all ranks.
        blocked_s: seconds for which `async_save` blocked training on the coordinator.
        commit_s: seconds from the call of `async_save` to the commit, on the coordinator.
        metrics: metrics of the step at the time of the save.
        stats: figures of the save; None with a checkpoint process.
    """

    url: str
    step: int | None
    nbytes: int
    blocked_s: float
    commit_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    stats: SaveStats | None = None


OnCommit = Callable[[CommitInfo], None]


def tell(on_commit: OnCommit, info: CommitInfo) -> None:
    """Call `on_commit` and log its error, which must not fail the committed save."""
    try:
        on_commit(info)
    except KeyboardInterrupt:
        # Only the main thread receives a KeyboardInterrupt, and the program should stop.
        raise
    # SystemExit or DCP's CheckpointException would end the thread that must report the end of the save.
    except BaseException:
        logger.exception("%s is committed, but on_commit raised an error", info.url)
