"""Findings about the throughput of a store, with advice for `TransferOptions`."""

from __future__ import annotations

from collections.abc import Callable

from bucketpoint.doctor.report import Report
from bucketpoint.doctor.throughput import Speed, probe


def measure(report: Report, folder: str, nbytes: int, *, used: Callable[[str], None]) -> Speed | None:
    """Measure throughput below `folder` and report it. `used` is called with each key before it is written."""
    speed = report.quietly(lambda: probe(report.store, folder, nbytes, used=used), "throughput")
    if speed is None:
        return None
    for direction in ("up", "down"):
        levels = [(level.connections, level.up if direction == "up" else level.down) for level in speed.levels]
        said = ", ".join(f"{rate / 1e6:,.0f} MB/s with {count}" for count, rate in levels)
        report.say(f"throughput {direction}", "ok", f"{said} connections")
    advised = speed.advice(report.store.capabilities.min_part_bytes)
    part, rate, latency = advised.part_bytes >> 20, speed.connection_rate, speed.latency_s * 1e3
    waiting = speed.latency_s / (speed.latency_s + advised.part_bytes / rate)
    report.say(
        "advice",
        "ok",
        f"TransferOptions(part_bytes={part} << 20, connections={advised.connections}): an answer takes "
        f"{latency:.1f} ms and a connection carries {rate / 1e6:,.0f} MB/s, so that a part of {part} MiB "
        f"waits for {waiting:.0%} of its time; {advised.connections} are the fewest connections that carry 90 % of "
        "what the most of those tried did",
    )
    return speed
