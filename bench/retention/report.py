"""What the retention part found: its verdicts and its section of the report. No measuring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.figures import Metric, Results
from bench.tables import shown, table, verdict_table
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
    line += f"  ERROR {found['error']}" if "error" in found else ""
    print(line, flush=True)


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
        f"`make bench`, or `bench/run.py --only retention`; {retention['seconds']} s on "
        f"{retention['machine']['cores']} cores.\n"
        f"A prune deletes {retention['pruned']} checkpoints of {retention['objects']} objects each from MinIO, on a\n"
        "thread of the process that trains. Steps are 200 small operations, some Python and a matrix product; they\n"
        "have one core fewer than there are, as the server runs here too. They are measured in windows of\n"
        f"{retention['window_s']:.0f} s: without a prune, again without, and beside one, in turns, while the prune\n"
        "stands still where none is wanted. Each ratio is of windows that follow each other; that of the two without\n"
        "a prune is the machine's noise.\n"
        "Medians; `[smallest, largest]`."
    )
    yield verdict_table(verdicts(retention))
    plans = [results.spread(OURS, "engine", "memory", lambda one, n=name: float(one[n])) for name in _PLAN]  # type: ignore[misc]
    yield table(
        ["100,000 checkpoints", "s"],
        [[title, shown(spread, "{:.2f}")] for title, spread in zip(_PLAN.values(), plans, strict=True)],
    )
    yield table(
        ["training", "the pruner as it is", "one that takes no rests"],
        [
            [name, *(shown(results.spread(OURS, op, "minio", metric), "{:.3f}") for op in _KINDS)]
            for name, metric in _STEPS.items()
        ],
    )
    yield table(
        ["the prune", "as it is", "without rests"],
        [
            [name, *(shown(results.spread(OURS, f"{op} in all", "minio", metric), "{:.1f}") for op in _KINDS)]
            for name, metric in _WHOLE.items()
        ],
    )
    yield table(["", "requests", "in all"], _request_rows(results))
    errors = [[found["op"], str(found["error"])] for found in results.errors()]
    if errors:
        yield table(["failed", "error"], errors)


_PLAN = {
    "wall_s": "plan and verdict, wall",
    "cpu_s": "the same, CPU",
    "words_cpu_s": "and the words of every deletion, CPU",
}

_KINDS = ("beside", "restless")

_STEPS: dict[str, Metric] = {
    "step without a prune, mean, s": lambda found: float(found["idle"]["mean_s"]),
    "beside a prune over without, mean": over_idle("pruning", "mean_s"),
    "without over without, mean": over_idle("control", "mean_s"),
    "beside a prune over without, median": over_idle("pruning", "median_s"),
    "without over without, median": over_idle("control", "median_s"),
    "the pruner's CPU, cores": lambda found: float(found["pruning"]["others_cpu"] - found["idle"]["others_cpu"]),
}

_WHOLE: dict[str, Metric] = {
    "the call that asks for it, ms": lambda found: 1e3 * float(found["asked_s"]),
    "time that it had beside training, s": lambda found: float(found["beside_s"]),
    "what was left of it once it was waited for, s": lambda found: float(found["hurried_s"]),
}


def _request_rows(results: Results) -> Iterator[list[str]]:
    titles = {"latest": "the newest checkpoint, found", "plan": "rows for a plan"}
    for op in ("latest", "plan", "prune"):
        for found in results.of(OURS, op, "count"):
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found["requests"].items()))
            title = titles.get(op, f"a prune that deletes {found['round']}")
            yield [title, kinds, str(sum(found["requests"].values()))]
