"""What must hold, and whether it did: each threshold with the measured figure. No files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.figures import Metric, Results, Spread, cpu_per_gb, peak_mb, wall
from bench.requests_seen import UNWANTED_KINDS

OURS, LEAN, PEER = "bucketpoint", "bucketpoint-lean", "s3torchconnector"
MAX_EXTRA_MB = 96
NOISE_MB = 4
MAX_SAVE_CPU, MAX_LOAD_CPU, MAX_WALL, MAX_OVER_RAW = 0.5, 0.6, 0.8, 1.10
MAX_QUARTER_BYTES = 1.03
MAX_COLUMNS_CPU, MAX_LEAN_WALL = 0.75, 1.5
MAX_CONTROL, MAX_ROUND_TRIPS = 3, 3


@dataclass(frozen=True)
class Verdict:
    """One row: what is demanded, what was measured, and whether it holds (None: not measured in this run)."""

    what: str
    demanded: str
    measured: str
    holds: bool | None


def verdicts(results: Results) -> Iterator[Verdict]:
    yield _ratio(results, "save, CPU", PEER, "save", "loopback", cpu_per_gb, MAX_SAVE_CPU)
    yield _ratio(results, "load, CPU", PEER, "load", "loopback", cpu_per_gb, MAX_LOAD_CPU)
    for where in ("loopback", "wire"):
        for op in ("save", "load"):
            yield _ratio(results, f"{op}, wall, {where}", PEER, op, where, wall, MAX_WALL)
    for op in ("save", "load", "quarter0", "quarter1"):
        peak = results.spread(OURS, op, "loopback", peak_mb)
        yield bounded(f"{op}, peak memory over the state", f"<= {MAX_EXTRA_MB} MB", peak, MAX_EXTRA_MB, "{:+.0f} MB")
    for op in ("save", "load", "quarter1"):
        lean, full = (results.spread(name, op, "loopback", peak_mb) for name in (LEAN, OURS))
        limit = full.high + NOISE_MB if full else 0.0
        yield bounded(f"{op}, memory with a quarter of the budget", f"<= {limit:.0f} MB", lean, limit, "{:+.0f} MB")
    yield _ratio(results, "dim-1 quarter, CPU", PEER, "quarter1", "loopback", cpu_per_gb, MAX_COLUMNS_CPU)
    yield _ratio(results, "dim-1 quarter, wall, loopback", PEER, "quarter1", "loopback", wall, MAX_WALL)
    ratio = results.ratio(LEAN, OURS, "quarter1", "loopback", wall)
    what, demanded = "dim-1 quarter with a quarter of the budget, wall", f"<= {MAX_LEAN_WALL:.2f} x its own"
    yield bounded(what, demanded, ratio, MAX_LEAN_WALL, "{:.2f} x")
    moved = results.moved_per_needed(OURS, "quarter0")
    yield _count("dim-0 quarter, bytes moved per byte needed", moved, MAX_QUARTER_BYTES, "{:.3f}")
    save, load, again = (results.counted(OURS, op) for op in ("save", "load", "overwrite"))
    control = sum(save["requests"]["control"].values()) if save else None
    yield _count("fresh save, control requests", control, MAX_CONTROL, "{}")
    if again:
        extra = dict(again["requests"]["control"])
        kept = sum(count for kind, count in extra.items() if not kind.startswith("Delete"))
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(extra.items()))
        yield Verdict("overwrite, control requests", f"<= {MAX_CONTROL} + 1 + clean-up", shown, kept <= MAX_CONTROL + 1)
    unwanted = [
        f"{op} {kind} x{found['requests']['kinds'][kind]}"
        for op, found in (("save", save), ("load", load))
        for kind in UNWANTED_KINDS
        if found and kind in found["requests"]["kinds"]
    ]
    if save and load:
        yield Verdict(
            "LIST, HEAD, COPY, DELETE in a fresh save or a load", "none", ", ".join(unwanted) or "none", not unwanted
        )
    for where in ("loopback", "wire"):
        for op in ("save", "load"):
            for raw in ("raw", "raw-crc"):
                yield _ratio(results, f"{op}, wall, {where}", raw, op, where, wall, MAX_OVER_RAW)
    trips = save["requests"]["visible_after"] if save else None
    yield _count("last data acknowledged to checkpoint visible, round trips", trips, MAX_ROUND_TRIPS, "{}")


def _ratio(results: Results, what: str, other: str, op: str, where: str, metric: Metric, limit: float) -> Verdict:
    return bounded(what, f"<= {limit:.2f} x {other}", results.ratio(OURS, other, op, where, metric), limit, "{:.2f} x")


def bounded(what: str, demanded: str, spread: Spread | None, limit: float, shape: str) -> Verdict:
    if spread is None:
        return Verdict(what, demanded, "not measured", None)
    around = f" [{shape.format(spread.low)}, {shape.format(spread.high)}]" if spread.count > 1 else ""
    return Verdict(what, demanded, f"{shape.format(spread.middle)}{around} n={spread.count}", spread.middle <= limit)


def _count(what: str, value: float | None, limit: float, shape: str) -> Verdict:
    if value is None:
        return Verdict(what, f"<= {limit}", "not measured", None)
    return Verdict(what, f"<= {limit}", shape.format(value), value <= limit)
