"""What the engines part found: its verdicts and its section of the report. No measuring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.figures import Results, cpu_per_gb, peak_mb, wall
from bench.tables import shown, table, verdict_table
from bench.thresholds import Verdict, bounded

PEER = "s3torchconnector"
ENGINES = ("boto3", "crt")
OPS = ("save", "load")


def print_measurement(found: dict[str, Any]) -> None:
    """One line of progress."""
    line = f"{'engines':8} {found['round']:2} {found['op']:5} {found['contender']:17} {found['where']:>3}"
    if "wall_s" in found:
        line += f" {wall(found):6.2f} s  {cpu_per_gb(found):5.2f} cpu-s/GB  {peak_mb(found):+7.1f} MB"
    line += f"  ERROR {found['error']}\n{found.get('traceback', '')}" if "error" in found else ""
    print(line, flush=True)


def verdicts(engines: dict[str, Any]) -> Iterator[Verdict]:
    results = Results(engines["measurements"])
    for op in OPS:
        for connections in engines["connections"]:
            spread = results.ratio("crt", PEER, op, str(connections), cpu_per_gb)
            what = f"CRT engine, {op}, CPU, {connections} connections"
            yield bounded(what, f"< 1.00 x {PEER}", spread, 1.0, "{:.2f} x")


def sections(engines: dict[str, Any]) -> Iterator[str]:
    yield "## Engines"
    gb, cores = engines["state_bytes"] / 1e9, engines["machine"]["cores"]
    yield (
        f"`make bench ARGS='--only engines'`, {engines['seconds']} s, {engines['rounds']} rounds. One process saves\n"
        f"and loads {gb:.2f} GB in parts of 8 MiB, on a MinIO over TLS on the same machine ({cores} cores, which the\n"
        "server shares). Each run is a fresh fork, which has saved and loaded a little before. s3torchconnector\n"
        "chooses its connections itself: it is run again beside each number of ours."
    )
    yield verdict_table(verdicts(engines))
    results = Results(engines["measurements"])
    rows = []
    for op in OPS:
        for connections in engines["connections"]:
            for name in (*ENGINES, PEER):
                rows.append([op, name, str(connections), *_cells(results, name, op, str(connections))])
    yield table(["", "engine", "connections", "wall, s", "CPU s per GB", "memory, MB"], rows)


def _cells(results: Results, name: str, op: str, where: str) -> list[str]:
    return [
        shown(results.spread(name, op, where, wall), "{:.2f}"),
        shown(results.spread(name, op, where, cpu_per_gb), "{:.2f}"),
        shown(results.spread(name, op, where, peak_mb), "{:+.0f}", brief=True),
    ]
