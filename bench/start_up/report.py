"""The report of the start-up part: its verdicts and its section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.figures import Results, Spread
from bench.tables import shown, table, verdict_table
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


def sections(part: dict[str, Any]) -> Iterator[str]:
    results = Results(part["measurements"])
    yield "## The command line before its first request"
    if part["quick"]:
        yield "**A quick run: too few rounds to decide anything.**"
    yield (
        f"`make bench`, or `bench/run.py --only start-up`; {part['seconds']} s on {part['machine']['cores']} cores.\n"
        "CPU time of a fresh process, Python included, until it opens its first connection. Modules are compiled\n"
        "already, as after `pip install`. Medians; `[smallest, largest]`."
    )
    yield verdict_table(verdicts(part))
    torch = {name: any(found["torch"] for found in results.of(name, "start", "fresh process")) for name in COMMANDS}
    rows = [(name, shown(_spread(results, name), "{:.2f}"), "yes" if torch[name] else "no") for name in COMMANDS]
    yield table(("command", "CPU seconds", "imports torch"), rows)
