"""What the part for serving found: its verdicts and its section of the report. No measuring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.figures import Results, Spread, cpu_per_gb, peak_mb, wall
from bench.tables import print_progress, shown, table
from bench.thresholds import MAX_EXTRA_MB, OURS, Verdict, bounded

LIMITS = {"dcp.load": 1.10, "runai": 1.00}
WORLDS = (1, 2, 4)
MAX_GETS, MAX_MOVED, MAX_LOCK_S = 64, 1.02, 0.15
LISTS = {"step": 0, "run": 2}
TITLES = {
    OURS: "bucketpoint, into vLLM's parameters",
    "dcp.load": "dcp.load",
    "runai": "Run:ai's streamer, safetensors",
}


def print_measurement(found: dict[str, Any]) -> None:
    """One line of progress."""
    line = f"{'serving':8} {found['where']:8} {found['round']} {found['op']:5} {found['contender']:12}"
    if "wall_s" in found:
        line += f" {wall(found):6.2f} s  {cpu_per_gb(found):5.2f} cpu-s/GB  {peak_mb(found):+7.1f} MB"
    if "lock_s_per_gb" in found:
        line += f"  lock {found['lock_s_per_gb']:.2f} s/GB"
    if "requests" in found:
        line += f"  {found['requests']['kinds']}, {_moved(found):.4f} bytes a byte"
    print_progress(line, found)


def _moved(found: dict[str, Any]) -> float:
    return float(found["requests"]["received"] / found["needed_bytes"])


def verdicts(part: dict[str, Any]) -> Iterator[Verdict]:
    results = Results(part["measurements"])
    for other, limit in LIMITS.items():
        for what, metric in (("wall", wall), ("CPU", cpu_per_gb)):
            ratio = results.ratio(OURS, other, "load", "loopback", metric)
            yield bounded(f"weights for vLLM, {what}", f"<= {limit:.2f} x {other}", ratio, limit, "{:.2f} x")
    peak = results.spread(OURS, "load", "loopback", peak_mb)
    what = "weights for vLLM, memory over the parameters"
    yield bounded(what, f"<= {MAX_EXTRA_MB} MB", peak, MAX_EXTRA_MB, "{:+.0f} MB")
    lock = Spread.of([found["lock_s_per_gb"] for found in results.of(OURS, "lock", "loopback")])
    what = "weights for vLLM, interpreter lock"
    yield bounded(what, f"<= {MAX_LOCK_S} s a GB", lock, MAX_LOCK_S, "{:.2f} s")
    for op, lists in LISTS.items():
        for kind, most in (("GetObject", MAX_GETS), ("ListObjects", lists)):
            found = results.counted(OURS, op)
            count = found["requests"]["kinds"].get(kind, 0) if found else None
            measured, holds = ("not measured", None) if count is None else (str(count), count <= most)
            yield Verdict(f"weights for vLLM from the URL of a {op}, {kind}", f"<= {most}", measured, holds)
    for world in WORLDS:
        found = results.counted(OURS, "step" if world == 1 else f"tp{world}")
        measured, holds = (f"{_moved(found):.4f}", _moved(found) <= MAX_MOVED) if found else ("not measured", None)
        yield Verdict(f"weights for vLLM, bytes read a byte, TP={world}", f"<= {MAX_MOVED}", measured, holds)


def sections(part: dict[str, Any]) -> Iterator[str]:
    results = Results(part["measurements"])
    yield "## Weights for vLLM"
    if part["quick"]:
        yield "**A quick run: too few rounds to decide anything.**"
    yield (
        f"`--only serving`, {part['seconds']} s. 8 ranks saved 1.00 GB of bf16 weights (291 tensors) and an "
        "optimizer; the weights are loaded from MinIO over TLS into torch parameters with the layout of vLLM's Llama."
    )
    metrics = ((wall, "{:.2f}"), (cpu_per_gb, "{:.2f}"), (peak_mb, "{:+.0f}"))
    rows = []
    for name, title in TITLES.items():
        cells = [
            shown(results.spread(name, "load", "loopback", metric), shape, brief=True) for metric, shape in metrics
        ]
        over = [results.ratio(OURS, name, "load", "loopback", metric) for metric in (wall, cpu_per_gb)]
        rows.append([title, *cells, *("" if name == OURS else shown(ratio, "{:.2f}") for ratio in over)])
    heads = ["load", "wall, s", "CPU s per GB", "memory over the parameters, MB"]
    yield table([*heads, "ours / this, wall", "ours / this, CPU"], rows)
    moved = [f"{_moved(found):.3f}" for world in WORLDS[1:] if (found := results.counted(OURS, f"tp{world}"))]
    if moved:
        yield f"Two and four workers of a host read {' and '.join(moved)} bytes for each byte of the weights."
