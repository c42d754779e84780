"""What the ranks part found: its verdicts and its section of the report. No measuring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.figures import Measurement, Results
from bench.tables import print_progress, shown, table
from bench.thresholds import Verdict, bounded

OURS, STOCK = "bucketpoint", "dcp"
MAX_IMBALANCE, MAX_OVERREAD, MAX_WALL = 1.05, 1.02, 0.35
MAX_MESSAGE_BYTES, MAX_BYTES_AN_ITEM = 4000, 24

PLANNERS = {
    "bucketpoint": "`bucketpoint.SavePlanner`",
    "dcp": "DCP's planner, plan caching on",
    "dcp-lowest": "DCP's, duplicates to the lowest rank",
}
LAYOUTS = {"ddp": "8 replicas", "hsdp": "2 replicas of 4 shards"}
LOADS = {
    "replicated-replicated": "all ranks load everything",
    "rows-columns": "dim-1 shards of tensors saved as dim-0 shards",
}


def imbalance(found: Measurement) -> float:
    """The most that a rank has in the store over the mean of all ranks."""
    written = found["written"]
    return float(max(written) * len(written) / sum(written))


def overread(found: Measurement) -> float:
    """Bytes that the store sent, headers aside, over the bytes that the ranks together need, each once."""
    return float(found["received"] / found["needed_bytes"])


def seconds(found: Measurement) -> float:
    return float(found["seconds"])


def print_measurement(found: dict[str, Any]) -> None:
    """One line of progress."""
    line = f"{'ranks':8} {found['round']:2} {found['op']:5} {found['contender']:12} {found['where']:22}"
    if "written" in found:
        line += f" max/mean {imbalance(found):.3f}, {found['messages']} B of messages for {found['items']} items"
    if "received" in found:
        line += f" {seconds(found):6.2f} s, store bytes x {overread(found):.3f}, {found['peak_bytes'] / 1e6:+.0f} MB"
    print_progress(line, found)


def verdicts(ranks: dict[str, Any]) -> Iterator[Verdict]:
    results = Results(ranks["measurements"])
    for layout, title in LAYOUTS.items():
        spread = results.spread(OURS, "save", layout, imbalance)
        yield bounded(f"bytes written, max over mean, {title}", f"<= {MAX_IMBALANCE}", spread, MAX_IMBALANCE, "{:.3f}")
    for layout, title in LAYOUTS.items():
        again = [found for found in results.of(OURS, "save", layout) if found["round"] == 1]
        for found in again:
            limit = MAX_MESSAGE_BYTES + MAX_BYTES_AN_ITEM * found["items"]
            what = f"second save, bytes of messages of a rank, {title}"
            demanded = f"<= {MAX_MESSAGE_BYTES} B + {MAX_BYTES_AN_ITEM} B an item"
            yield Verdict(what, demanded, f"{found['messages']} B ({limit} B)", found["messages"] <= limit)
    for where, title in LOADS.items():
        spread = results.spread("group", "load", where, overread)
        yield bounded(f"store bytes over distinct bytes, {title}", f"<= {MAX_OVERREAD}", spread, MAX_OVERREAD, "{:.3f}")
    for where, title in LOADS.items():
        ratio = results.ratio("group", "off", "load", where, seconds)
        yield bounded(f"wall time, {title}", f"<= {MAX_WALL} x plain", ratio, MAX_WALL, "{:.2f} x")


def sections(ranks: dict[str, Any]) -> Iterator[str]:
    results = Results(ranks["measurements"])
    yield "## Many ranks: what is written once and read once"
    if ranks["quick"]:
        yield "**A quick run: too few rounds to decide anything.**"
    yield (
        f"`--only ranks`, {ranks['seconds']} s. {ranks['saving']} ranks save a small transformer; {ranks['loading']} "
        f"load one from a store that gives all of them together {ranks['store_bytes_per_s'] / 1e6:.0f} MB/s. Ranks "
        "are processes with gloo on loopback. The first table has the most bytes that a rank writes, divided by the "
        "mean, and the DCP messages of the busiest rank beside the coordinator in a first save."
    )
    heads = ["", "", "bytes, most over mean", "messages"]
    yield table(heads, _save_rows(results))
    heads = ["", "cooperative", "s", "store bytes over distinct", "memory over the target"]
    yield table(heads, _load_rows(results))
    errors = [[found["contender"], found["where"], str(found["error"])] for found in results.errors()]
    if errors:
        yield table(["failed", "", "error"], errors)


def _save_rows(results: Results) -> Iterator[list[str]]:
    for layout, title in LAYOUTS.items():
        for planner, named in PLANNERS.items():
            found = {one["round"]: one for one in results.of(planner, "save", layout)}
            if len(found) == 2:
                yield [title, named, f"{imbalance(found[1]):.2f}", f"{found[0]['messages'] / 1e3:.1f} kB"]


def _load_rows(results: Results) -> Iterator[list[str]]:
    for where, title in LOADS.items():
        for mode in ("off", "group"):
            found = results.of(mode, "load", where)
            if not found:
                continue
            taken = shown(results.spread(mode, "load", where, seconds), "{:.2f}", brief=True)
            bytes_ = shown(results.spread(mode, "load", where, overread), "{:.2f}", brief=True)
            peak = max(one["peak_bytes"] for one in found) / 1e6
            yield [title, mode, taken, bytes_, f"{peak:+.0f} MB"]
