"""Spans and metrics of bucketpoint, for programs that have configured OpenTelemetry.

Such a program has imported OpenTelemetry. So this module looks for OpenTelemetry in `sys.modules` and never imports it:
without OpenTelemetry each function returns at once.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bucketpoint.version import __version__

logger = logging.getLogger(__name__)

_NAME = "bucketpoint"


@dataclass(frozen=True)
class Metric:
    """One metric: the kind of its instrument, the unit (UCUM) and its description."""

    kind: Literal["histogram", "counter", "gauge"]
    unit: str
    description: str


METRICS: Mapping[str, Metric] = {
    "bucketpoint.save.blocked": Metric("histogram", "s", "Time that a save blocked training"),
    "bucketpoint.save.duration": Metric("histogram", "s", "Time from the call of a save to its end"),
    "bucketpoint.save.upload": Metric("histogram", "s", "Time of a rank's upload"),
    "bucketpoint.save.sent": Metric("histogram", "By", "Bytes of data objects that a rank sent in a save"),
    "bucketpoint.save.copied": Metric("histogram", "By", "Bytes that the store copied in a save"),
    "bucketpoint.save.failures": Metric("counter", "{save}", "Saves in the background that failed"),
    "bucketpoint.load.duration": Metric("histogram", "s", "Time from the beginning of a load to its end"),
    "bucketpoint.load.received": Metric("histogram", "By", "Bytes of data objects that a rank received in a load"),
    "bucketpoint.requests": Metric("counter", "{request}", "Attempts of requests of saves and loads, by kind"),
    "bucketpoint.retries": Metric(
        "counter", "{request}", "Requests that were sent again after a failure other than throttling"
    ),
    "bucketpoint.throttled": Metric("counter", "{request}", "Answers of a store that asked for fewer requests"),
    "bucketpoint.checkpoint.committed": Metric(
        "gauge", "s", "Unix time of the last commit of a run; the current time minus this is its age"
    ),
    "bucketpoint.checkpoint.size": Metric("gauge", "By", "Bytes of the checkpoint that was committed last"),
    "bucketpoint.kept.size": Metric("gauge", "By", "Bytes of the checkpoints that the policy keeps"),
    "bucketpoint.kept.checkpoints": Metric("gauge", "{checkpoint}", "Number of checkpoints that the policy keeps"),
    "bucketpoint.prune.duration": Metric("histogram", "s", "Time of a round of pruning"),
    "bucketpoint.prune.deleted": Metric("counter", "{checkpoint}", "Checkpoints that pruning deleted"),
    "bucketpoint.prune.failures": Metric("counter", "{round}", "Rounds of pruning that failed"),
}


_BOUNDS: Mapping[str, tuple[float, ...]] = {
    "s": tuple(digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5)),
    "By": tuple(4.0**power for power in range(5, 22)),
}
"""Bounds of histograms by unit. OpenTelemetry's defaults are for milliseconds, and put all saves into one bucket."""


def is_loaded() -> bool:
    """Return True if the program has imported OpenTelemetry. Otherwise callers need not compute values."""
    return "opentelemetry" in sys.modules


def _loaded(module: str) -> Any:
    return sys.modules.get(f"opentelemetry.{module}")


def record(name: str, value: float, attributes: Mapping[str, Any]) -> None:
    """Record a value of one of `METRICS`. Errors of OpenTelemetry are logged: no save may fail because of it."""
    if _loaded("metrics") is None:
        return
    try:
        _instrument(name)(value, attributes)
    except Exception:
        logger.exception("a value of %s was not recorded", name)


@functools.cache
def _instrument(name: str) -> Callable[[float, Mapping[str, Any]], None]:
    # Cached, because the SDK warns of a second instrument of the same name.
    metric, meter = METRICS[name], _loaded("metrics").get_meter(_NAME, __version__)
    about = name, metric.unit, metric.description
    if metric.kind == "counter":
        return meter.create_counter(*about).add  # type: ignore[no-any-return]
    if metric.kind == "gauge":
        return meter.create_gauge(*about).set  # type: ignore[no-any-return]
    try:
        histogram = meter.create_histogram(*about, explicit_bucket_boundaries_advisory=_BOUNDS[metric.unit])
    except TypeError:
        # opentelemetry-api before 1.30: the program may set bounds by a View.
        histogram = meter.create_histogram(*about)
    return histogram.record  # type: ignore[no-any-return]


def current_context() -> Any:
    """Return the context of the caller's span, as the parent of spans on other threads; None without OpenTelemetry."""
    loaded = _loaded("context")
    if loaded is None:
        return None
    try:
        return loaded.get_current()
    except Exception:
        logger.exception("the span of the caller could not be read")
        return None


def begin_span(
    name: str, began: float, *, parent: Any = None, link: str | None = None, attributes: Mapping[str, Any] | None = None
) -> Any:
    """Begin a span, and return it; None without OpenTelemetry.

    Args:
        began: beginning of the span, `time.monotonic` seconds.
        parent: the parent's context or span; None for no parent.
        link: result of `reference` for a span of another process.
    """
    trace = _loaded("trace")
    if trace is None:
        return None
    try:
        if parent is not None and hasattr(parent, "get_span_context"):
            parent = trace.set_span_in_context(parent)
        links = [] if link is None else [trace.Link(_span_context(trace, link))]
        # Without a parent, begin in a new context: the current one may belong to another save of this thread.
        around = _loaded("context").Context() if parent is None else parent
        return trace.get_tracer(_NAME, __version__).start_span(
            name, around, attributes=attributes, links=links, start_time=_epoch_ns(began)
        )
    except Exception:
        logger.exception("the span %s was not begun", name)
        return None


def end_span(
    span: Any, ended: float, error: BaseException | None = None, attributes: Mapping[str, Any] | None = None
) -> None:
    """End a span of `begin_span`, as failed if `error` is given.

    Args:
        ended: end of the span, `time.monotonic` seconds.
    """
    if span is None:
        return
    try:
        span.set_attributes(attributes or {})
        if error is not None:
            trace = _loaded("trace")
            span.set_attribute("error.type", type(error).__qualname__)
            # Record only the message: the rest of the text is the URL, which may hold credentials, and the remedy.
            words = getattr(error, "message", None) or str(error)
            span.set_status(trace.Status(trace.StatusCode.ERROR, words))
        span.end(_epoch_ns(ended))
    except Exception:
        logger.exception("a span was not ended")


def reference(span: Any) -> str | None:
    """Return the span's `traceparent` (W3C Trace Context, level 1), by which other processes refer to the span.

    None without OpenTelemetry, and for a span that is not recorded.
    """
    try:
        if span is None or not span.is_recording():
            return None
        about = span.get_span_context()
        return f"00-{about.trace_id:032x}-{about.span_id:016x}-{int(about.trace_flags):02x}"
    except Exception:
        logger.exception("the name of a span could not be read")
        return None


def _span_context(trace: Any, text: str) -> Any:
    _, trace_id, span_id, flags = text.split("-")
    return trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16)))


def _epoch_ns(moment: float) -> int:
    """Convert a time of the monotonic clock to nanoseconds since the epoch."""
    return time.time_ns() - int((time.monotonic() - moment) * 1e9)
