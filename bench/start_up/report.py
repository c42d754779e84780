"""Verdicts of the start-up part: CPU time of a fresh process until its first connection. It has no section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.figures import Results, Spread
from bench.thresholds import Verdict, bounded

COMMANDS = {
    "show": ["show", "s3://bench-start-up/run/step-1"],
    "ls": ["ls", "s3://bench-start-up/run"],
    "prune --dry-run": ["prune", "--dry-run", "{policy}"],
}
MAX_CPU_S = 0.5


def print_measurement(found: dict[str, Any]) -> None:
    """One line of progress."""
    print(f"{'start-up':9} {found['round']} {found['contender']:15} {found['cpu_s']:.3f} cpu-s", flush=True)


def _spread(results: Results, name: str) -> Spread | None:
    return Spread.of([float(found["cpu_s"]) for found in results.of(name, "start", "fresh process")])


def verdicts(part: dict[str, Any]) -> Iterator[Verdict]:
    results = Results(part["measurements"])
    for name in COMMANDS:
        what = f"`bucketpoint {name}`, CPU before the first request"
        yield bounded(what, f"<= {MAX_CPU_S} s", _spread(results, name), MAX_CPU_S, "{:.2f} s")
