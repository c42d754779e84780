"""What the part for stores found: its verdicts and its section of the report. No measuring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.figures import Results, cpu_per_gb, peak_mb, wall
from bench.tables import print_progress, shown, table
from bench.thresholds import Verdict, bounded

MAX_MOVED = 1.1
OP_TITLES = {"save": "save", "load": "load", "quarter0": "dim-0 quarter"}
MAX_OF_GCSFS = 0.7
BUDGET_BYTES = 64 << 20
PAIRS = {"s3fs": ("bucketpoint + s3fs", "torch + s3fs"), "gcs": ("bucketpoint + gcs", "torch + gcsfs")}
"""Ours and the one that it is held against."""


def print_measurement(found: dict[str, Any]) -> None:
    """One line of progress."""
    line = f"{'stores':8} {found['where']:8} {found['round']} {found['op']:9} {found['contender']:19}"
    if "wall_s" in found:
        line += f" {wall(found):6.2f} s  {cpu_per_gb(found):5.2f} cpu-s/GB  {peak_mb(found):+7.1f} MB"
    if "requests" in found:
        moved = found["requests"]["sent" if found["op"] == "save" else "received"] / found["needed_bytes"]
        line += f"  {sum(found['requests']['kinds'].values())} requests, {moved:.3f} bytes moved per byte needed"
    print_progress(line, found)


def verdicts(stores: dict[str, Any]) -> Iterator[Verdict]:
    results = Results(stores["measurements"])
    ours, theirs = PAIRS["s3fs"]
    for op in ("save", "load"):
        ratio = results.ratio(ours, theirs, op, "loopback", wall)
        yield bounded(f"{op} over s3fs, wall", f"<= 1.00 x {theirs}", ratio, 1.0, "{:.2f} x")
    moved = results.moved_per_needed(ours, "quarter0")
    what = "dim-0 quarter over s3fs, bytes moved per byte needed"
    said = "not measured" if moved is None else f"{moved:.3f}"
    yield Verdict(what, f"<= {MAX_MOVED}", said, None if moved is None else moved <= MAX_MOVED)
    ours, theirs = PAIRS["gcs"]
    for op in ("save", "load"):
        for name, metric in (("CPU", cpu_per_gb), ("wall", wall)):
            ratio = results.ratio(ours, theirs, op, "loopback", metric)
            yield bounded(f"{op} on GCS, {name}", f"<= {MAX_OF_GCSFS:.2f} x {theirs}", ratio, MAX_OF_GCSFS, "{:.2f} x")
        peak = results.spread(ours, op, "loopback", peak_mb)
        most = BUDGET_BYTES / 1e6
        yield bounded(f"{op} on GCS, memory over the state, MB", f"<= {most:.0f}, the budget", peak, most, "{:+.0f}")


def sections(stores: dict[str, Any]) -> Iterator[str]:
    results = Results(stores["measurements"])
    yield "## Other stores, and any filesystem"
    if stores["quick"]:
        yield "**A quick run: too few rounds to decide anything.**"
    yield (
        f"`--only stores`, {stores['seconds']} s. 252 MB of a transformer's state: to MinIO over TLS with "
        "`BucketWriter(fs=...)`, `BucketReader(fs=...)`, and torch's writer and reader, all on s3fs; to "
        "fake-gcs-server without TLS with `GCSWriter`, `GCSReader`, and torch's on gcsfs."
    )
    yield table(["", "", "wall, s", "CPU s per GB", "memory, MB", "bytes moved per byte needed"], _rows(results))
    errors = [[found["contender"], found["op"], str(found["error"])] for found in results.errors()]
    if errors:
        yield table(["failed", "", "error"], errors)


def _rows(results: Results) -> Iterator[list[str]]:
    for op, title in OP_TITLES.items():
        for name in [name for pair in PAIRS.values() for name in pair]:
            moved = results.moved_per_needed(name, op)
            where = "loopback" if results.of(name, op, "loopback") else "count"
            spreads = [results.spread(name, op, where, metric) for metric in (wall, cpu_per_gb, peak_mb)]
            if not any(spreads):
                continue
            yield [
                title,
                name,
                *(
                    shown(spread, shape, brief=True)
                    for spread, shape in zip(spreads, ("{:.2f}", "{:.2f}", "{:+.0f}"), strict=True)
                ),
                "" if moved is None else f"{moved:.2f}",
            ]
