"""What the hedging part found: its verdicts and its section of the report. No measuring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.figures import Results, Spread, wall
from bench.tables import shown, table, verdict_table
from bench.thresholds import Verdict, bounded

HEDGED, PLAIN = "hedged", "plain"
MAX_WALL, MAX_EXTRA, MAX_CPU = 0.8, 0.05, 1.25
TITLES = {
    "answer": "1 % of the answers two seconds late",
    "body": "1 % of the bodies take two seconds",
    "none late": "nothing late, no proxy",
}


def print_measurement(found: dict[str, Any]) -> None:
    """One line of progress."""
    line = f"{'hedge':9} {found['round']} {found['where']:9} {found['contender']:7}"
    if "wall_s" in found:
        line += f" {found['wall_s']:.2f} s  {found['cpu_s']:.2f} cpu-s  {found['requests']} requests"
    print(line + (f"  ERROR {found['error']}" if "error" in found else ""), flush=True)


def extra(results: Results, where: str, ranges: int) -> Spread | None:
    """Second requests over ranges."""
    once = {found["round"]: found["requests"] for found in results.of(PLAIN, "load", where)}
    twice = results.of(HEDGED, "load", where)
    return Spread.of([(found["requests"] - once[found["round"]]) / ranges for found in twice if found["round"] in once])


def verdicts(hedge: dict[str, Any]) -> Iterator[Verdict]:
    results = Results(hedge["measurements"])
    for where in ("answer", "body"):
        ratio = results.ratio(HEDGED, PLAIN, "load", where, wall)
        yield bounded(f"load, {TITLES[where]}, hedged", f"<= {MAX_WALL} x plain", ratio, MAX_WALL, "{:.2f} x")
        most = extra(results, where, hedge["ranges"])
        yield bounded("second requests over ranges", f"<= {MAX_EXTRA}", most, MAX_EXTRA + 1 / hedge["ranges"], "{:.3f}")
    cpu = results.ratio(HEDGED, PLAIN, "load", "none late", lambda found: float(found["cpu_s"]))
    yield bounded("load, nothing late, CPU, hedged", f"<= {MAX_CPU} x plain", cpu, MAX_CPU, "{:.2f} x")


def sections(hedge: dict[str, Any]) -> Iterator[str]:
    results = Results(hedge["measurements"])
    yield "## Hedged reads: a few late ranges"
    if hedge["quick"]:
        yield "**A quick run: too few rounds to decide anything.**"
    yield (
        f"`make bench`, or `bench/run.py --only hedge`; {hedge['seconds']} s on {hedge['machine']['cores']} cores.\n"
        f"One process loads {hedge['ranges']} tensors of 768 KiB, a range each, over 16 connections, through a proxy\n"
        "that adds 20 ms to each request and makes two of them late: the n-th request has the same fate in both loads\n"
        "of a pair. `Hedge()` as it is. Ranges are small on purpose, as each costs a thread.\n"
        "Medians; `[smallest, largest]`."
    )
    yield verdict_table(verdicts(hedge))
    rows = []
    for where, title in TITLES.items():
        walls = [shown(results.spread(name, "load", where, wall), "{:.2f}") for name in (PLAIN, HEDGED)]
        over = shown(results.ratio(HEDGED, PLAIN, "load", where, wall), "{:.2f}")
        rows.append([title, *walls, over, shown(extra(results, where, hedge["ranges"]), "{:.3f}")])
    yield table(["", "plain, s", "hedged, s", "hedged / plain", "second requests over ranges"], rows)
    errors = [[found["contender"], found["where"], str(found["error"])] for found in results.errors()]
    if errors:
        yield table(["failed", "", "error"], errors)
