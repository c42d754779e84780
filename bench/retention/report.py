"""What the retention part found: its verdicts and its section of the report. No measuring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.figures import Metric, Results
from bench.tables import print_progress, shown, table
from bench.thresholds import Verdict, bounded

OURS = "bucketpoint"
MAX_PLAN_S, MAX_STEP, MAX_REQUESTS = 1.0, 1.03, 4
TOMBSTONE = 3
"""Requests for a tombstone: it is made, claimed, and deleted."""
CLAIMED = 2
"""Listings of a prune that has claimed any, however many: whoever took hold of them meanwhile is in these."""


def over_idle(window: str, figure: str) -> Metric:
    """The steps of a window over those without a prune, of the same cycle."""
    return lambda found: float(found[window][figure] / found["idle"][figure])


def print_measurement(found: dict[str, Any]) -> None:
    """One line of progress."""
    line = f"{'retention':9} {found['round']:2} {found['op']:8}"
    if "rows" in found:
        line += f" {found['rows']} rows: {found['wall_s']:.2f} s, {found['cpu_s']:.2f} cpu-s"
        line += f", its words {found['words_cpu_s']:.2f} cpu-s"
    if "pruning" in found:
        ratios = {name: over_idle(name, "mean_s")(found) for name in ("control", "pruning")}
        line += f" steps x {ratios['pruning']:.3f} beside a prune, x {ratios['control']:.3f} without"
    if "deleted" in found:
        line += f" {found['deleted']} deletions, the last of them in {found['hurried_s']:.2f} s"
    if "requests" in found:
        line += f" {found['requests']}"
    print_progress(line, found)


def of_one(results: Results) -> int | None:
    """Requests that one checkpoint more costs a prune, without its tombstone.

    Of the prunes that delete one the last is taken: the first also tries out what the server's deletions can do.
    """
    found = {one["round"]: sum(one["requests"].values()) for one in results.of(OURS, "prune", "count")}
    return found[1] - found[0] - TOMBSTONE - CLAIMED if {0, 1} <= set(found) else None


def verdicts(retention: dict[str, Any]) -> Iterator[Verdict]:
    results = Results(retention["measurements"])
    walls = results.spread(OURS, "engine", "memory", lambda found: float(found["wall_s"]))
    yield bounded("100,000 checkpoints planned, wall", f"<= {MAX_PLAN_S:.0f} s", walls, MAX_PLAN_S, "{:.2f} s")
    for title, figure in (("median", "median_s"), ("mean", "mean_s")):
        steps = results.spread(OURS, "beside", "minio", over_idle("pruning", figure))
        what = f"training step beside a prune, {title}"
        yield bounded(what, f"<= {MAX_STEP:.2f} x without", steps, MAX_STEP, "{:.3f} x")
    what, cost = f"pruning one checkpoint of {retention['objects']} objects, requests", of_one(results)
    demanded = f"<= {MAX_REQUESTS} besides the tombstone"
    holds = None if cost is None else 0 < cost <= MAX_REQUESTS
    yield Verdict(what, demanded, "not measured" if cost is None else str(cost), holds)


def sections(retention: dict[str, Any]) -> Iterator[str]:
    results = Results(retention["measurements"])
    yield "## Retention: plans, and pruning beside training"
    if retention["quick"]:
        yield "**A quick run: too few rounds to decide anything.**"
    yield (
        f"`--only retention`, {retention['seconds']} s. A prune deletes {retention['pruned']} checkpoints of "
        f"{retention['objects']} objects each on a thread of the process that trains. A step is 200 "
        f"small operations, some Python and a matrix product; windows of {retention['window_s']:.0f} s without and "
        "with a prune alternate. The ratio of two windows without a prune is the noise."
    )
    plans = [results.spread(OURS, "engine", "memory", lambda one, n=name: float(one[n])) for name in _PLAN]  # type: ignore[misc]
    if all(plans):
        took = [f"{shown(spread, '{:.2f}', brief=True)} s" for spread in plans]
        yield f"A plan of 100,000 checkpoints takes {took[0]}, and the reasons of every deletion {took[1]} of CPU."
    yield table(
        ["", "the pruner as it is", "one without rests"],
        [
            [name, *(shown(results.spread(OURS, op, "minio", metric), "{:.3f}") for op in _KINDS)]
            for name, metric in _STEPS.items()
        ],
    )
    yield table(["", "requests", "in all"], _request_rows(results))
    errors = [[found["op"], str(found["error"])] for found in results.errors()]
    if errors:
        yield table(["failed", "error"], errors)


_PLAN = ("wall_s", "words_cpu_s")

_KINDS = ("beside", "restless")

_STEPS: dict[str, Metric] = {
    "mean step beside a prune over without": over_idle("pruning", "mean_s"),
    "without over without": over_idle("control", "mean_s"),
    "the pruner's CPU, cores": lambda found: float(found["pruning"]["others_cpu"] - found["idle"]["others_cpu"]),
}


def _request_rows(results: Results) -> Iterator[list[str]]:
    titles = {"latest": "the newest checkpoint, found", "plan": "rows for a plan"}
    for op in ("latest", "plan", "prune"):
        # The first prune that deletes one also tries out what the server's deletions can do.
        for found in {one["round"]: one for one in results.of(OURS, op, "count")}.values():
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found["requests"].items()))
            title = titles.get(op, f"a prune that deletes {found['round']}")
            yield [title, kinds, str(sum(found["requests"].values()))]
