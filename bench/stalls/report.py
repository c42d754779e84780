"""Verdicts and section of the report for the part `stalls`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.figures import Results, wall
from bench.tables import print_progress, shown, table
from bench.thresholds import Verdict, bounded

LIMITED, PLAIN = "limited", "plain"
MAX_WALL = 0.5
TITLES = {"answer": "1 % of the answers 20 s late", "body": "1 % of the bodies silent for 20 s"}


def print_measurement(found: dict[str, Any]) -> None:
    """One line of progress."""
    line = f"{'stalls':9} {found['round']} {found['where']:9} {found['contender']:7}"
    if "wall_s" in found:
        line += f" {found['wall_s']:.2f} s  {found['cpu_s']:.2f} cpu-s"
    print_progress(line, found)


def verdicts(stalls: dict[str, Any]) -> Iterator[Verdict]:
    results = Results(stalls["measurements"])
    for where, title in TITLES.items():
        ratio = results.ratio(LIMITED, PLAIN, "load", where, wall)
        yield bounded(f"load, {title}", f"<= {MAX_WALL} x without the limit", ratio, MAX_WALL, "{:.2f} x")


def sections(stalls: dict[str, Any]) -> Iterator[str]:
    results = Results(stalls["measurements"])
    yield "## Silent reads"
    if stalls["quick"]:
        yield "**A quick run: too few rounds to decide anything.**"
    yield (
        f"`--only stalls`, {stalls['seconds']} s. Loads of {stalls['ranges']} ranges of 768 KiB over 16 connections, "
        "through a proxy that adds 20 ms to each request and holds back two of them."
    )
    rows = []
    for where, title in TITLES.items():
        walls = [shown(results.spread(name, "load", where, wall), "{:.2f}") for name in (PLAIN, LIMITED)]
        rows.append([title, *walls, shown(results.ratio(LIMITED, PLAIN, "load", where, wall), "{:.2f}")])
    yield table(["", "without the limit, s", "with it, s", "ratio"], rows)
    errors = [[found["contender"], found["where"], str(found["error"])] for found in results.errors()]
    if errors:
        yield table(["failed", "", "error"], errors)
