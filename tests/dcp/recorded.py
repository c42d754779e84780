"""Spans and metrics of OpenTelemetry's SDK in memory, for one test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import opentelemetry.context
import opentelemetry.trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bucketpoint import telemetry


class Recorded:
    """What was recorded."""

    def __init__(self, spans: InMemorySpanExporter, metrics: InMemoryMetricReader, tracer: Any) -> None:
        self._spans = spans
        self._metrics = metrics
        self.tracer = tracer

    def spans(self, name: str) -> list[Any]:
        return [span for span in self._spans.get_finished_spans() if span.name == name]

    def below(self, parent: Any) -> list[str]:
        """Return the names of the spans below a span, in the order in which they began."""
        found = [
            span
            for span in self._spans.get_finished_spans()
            if span.parent is not None and span.parent.span_id == parent.context.span_id
        ]
        return [span.name for span in sorted(found, key=lambda span: span.start_time)]

    def metrics(self) -> dict[str, list[Any]]:
        """Return the points of each metric by its name. The points of counters begin anew with each call."""
        data = self._metrics.get_metrics_data()
        found = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    found[metric.name] = list(metric.data.data_points)
        return found


@contextlib.contextmanager
def recorded() -> Iterator[Recorded]:
    """Record what bucketpoint gives to OpenTelemetry within the block. The program's own providers stay."""
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(), MeterProvider([reader])
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    trace = SimpleNamespace(**{**vars(opentelemetry.trace), "get_tracer": tracers.get_tracer})
    loaded = {
        "trace": trace,
        "metrics": SimpleNamespace(get_meter=meters.get_meter),
        "context": opentelemetry.context,
    }
    before = telemetry._loaded
    telemetry._loaded = loaded.get
    telemetry._instrument.cache_clear()
    try:
        yield Recorded(exporter, reader, tracers.get_tracer("a program"))
    finally:
        telemetry._loaded = before
        telemetry._instrument.cache_clear()
