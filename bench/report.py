"""The report: Markdown tables, a plot as SVG, and the raw figures as JSON. No measuring."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.contenders import CONTENDERS
from bench.figures import Results, cpu_per_gb, peak_mb, wall
from bench.ranks import report as ranks_report
from bench.retention import report as retention_report
from bench.staging import report as staging_report
from bench.stalls import report as stalls_report
from bench.start_up import report as start_up_report
from bench.stores import report as stores_report
from bench.tables import shown, table, verdict_table
from bench.thresholds import OURS, verdicts
from bench.unchanged import report as unchanged_report

PARTS: dict[str, Any] = {
    "ranks": ranks_report,
    "staging": staging_report,
    "retention": retention_report,
    "stalls": stalls_report,
    "stores": stores_report,
    "start-up": start_up_report,
    "unchanged": unchanged_report,
}
"""Sections of parts that are measured by themselves, in the order in which they are shown."""

OP_TITLES = {
    "save": "save",
    "load": "load",
    "quarter0": "load of a dim-0 quarter",
    "quarter1": "load of a dim-1 quarter",
}
COLOURS = ("#1b6ca8", "#e07a3f", "#8a8a8a", "#b8b8b8", "#4c9f70", "#7fbf9a", "#9b72b0", "#c9a227")


def print_measurement(found: dict[str, Any]) -> None:
    """One line of progress."""
    line = f"{found['where']:8} {found['round']} {found['op']:9} {found['contender']:17}"
    if "wall_s" in found:
        line += f" {wall(found):6.2f} s  {cpu_per_gb(found):5.2f} cpu-s/GB  {peak_mb(found):+7.1f} MB"
    if "error" in found:
        line += f"  ERROR {found['error']}\n{found.get('traceback', '')}"
    print(line, flush=True)


def merged(result: dict[str, Any], out: Path) -> dict[str, Any]:
    """The result with what this run did not measure, parts or transfers, taken over from the report that is there."""
    path = out.with_suffix(".json")
    earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {**earlier, **result}


def write(result: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    if "measurements" in result:
        out.with_suffix(".svg").write_text(plot(Results(result["measurements"])))
    out.write_text(markdown(result, out.with_suffix(".svg").name))


def markdown(result: dict[str, Any], plot_name: str) -> str:
    sections = ["# Benchmark"]
    if "measurements" in result:
        sections += _transfer_sections(result, plot_name)
    for name, part in PARTS.items():
        if name in result:
            sections += part.sections(result[name])
    return "\n\n".join(sections) + "\n"


def _transfer_sections(result: dict[str, Any], plot_name: str) -> Iterator[str]:
    results = Results(result["measurements"])
    wire = f"{result['wire']['delay_s'] * 1e3:.0f} ms added to every request, {result['wire']['bytes_per_s'] / 1e6:.0f}"
    yield from _how(result)
    yield "## Must hold"
    yield verdict_table(verdicts(results))
    yield f"![CPU and wall time of each contender]({plot_name})"
    yield "## On loopback, MinIO over TLS"
    yield (
        "Medians; `[smallest, largest]`. CPU is the client's, user and system. Memory is the peak of anonymous and\n"
        "shared pages over what the process held before it began. Requests and bytes come from one pass of their own\n"
        "through a counting proxy."
    )
    yield from _op_tables(results)
    yield "## Ratios of neighbouring runs"
    yield "Each ratio is of two runs of the same round. The range of 7 holds the true median with probability 98.4 %."
    yield _ratio_table(results)
    yield "## Through an emulated wire"
    yield f"{wire} MB/s a connection."
    yield _wire_table(results)
    yield "## Requests by kind"
    yield _kinds_table(results)
    yield from _error_section(results)


def thresholds_text(result: dict[str, Any]) -> str:
    marks = {True: "holds", False: "MISSED", None: "-"}
    rows = list(verdicts(Results(result["measurements"]))) if "measurements" in result else []
    rows += [row for name, part in PARTS.items() if name in result for row in part.verdicts(result[name])]
    return "\n".join(f"{marks[row.holds]:7} {row.what}: {row.measured} (demanded {row.demanded})" for row in rows)


def _how(result: dict[str, Any]) -> Iterator[str]:
    machine, state = result["machine"], result["state"]
    if result["quick"]:
        yield "**A quick run: too few rounds to decide anything.**"
    size = f"{state['tensors']} tensors, {state['state_bytes'] / 1e9:.3f} GB"
    minutes = round(result["seconds"] / 60)
    yield (
        f"`make bench`, {minutes} minutes. One process saves and loads a transformer's state: bf16\n"
        f"weights and two fp32 moments, {size}. The server runs on the same machine, with its data in memory; the\n"
        "contenders take turns, one run each a round, and every run is a fresh fork of the same process after one\n"
        "small save and load to warm up. Every load is compared with what was saved."
    )
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    yield (
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB,\n"
        f"Linux {machine['kernel'].partition('-')[0]}, Python {machine['python']}. {versions}."
    )
    yield (
        "`raw engine` is bucketpoint's store alone: the same object sizes, parts and connections between one prepared\n"
        "buffer and the bucket, without and with CRC32C. `s5cmd` moves files of those sizes between memory and the\n"
        "bucket. Peers run with their defaults; s3torchconnector reads with its DCP-optimized reader."
    )


def _op_tables(results: Results) -> Iterator[str]:
    for op, title in OP_TITLES.items():
        rows = []
        for name, contender in CONTENDERS.items():
            spreads = [results.spread(name, op, "loopback", metric) for metric in (wall, cpu_per_gb, peak_mb)]
            if not any(spreads):
                continue
            counted, moved = results.counted(name, op), results.moved_per_needed(name, op)
            rows.append(
                [
                    contender.title,
                    shown(spreads[0], "{:.2f}"),
                    shown(spreads[1], "{:.2f}"),
                    shown(spreads[2], "{:+.0f}", brief=True),
                    str(sum(counted["requests"]["kinds"].values())) if counted else "",
                    str(counted["requests"]["connections"]) if counted else "",
                    f"{moved:.3f}" if moved is not None else "",
                ]
            )
        if rows:
            heads = [
                title,
                "wall, s",
                "CPU s per GB",
                "memory, MB",
                "requests",
                "connections",
                "bytes moved per byte needed",
            ]
            yield table(heads, rows)


def _ratio_table(results: Results) -> str:
    rows = []
    for other in [name for name in CONTENDERS if name != OURS]:
        for op, title in OP_TITLES.items():
            walls = results.ratio(OURS, other, op, "loopback", wall)
            cpus = results.ratio(OURS, other, op, "loopback", cpu_per_gb)
            if walls:
                rows.append(
                    [CONTENDERS[other].title, title, shown(walls, "{:.2f}"), shown(cpus, "{:.2f}"), str(walls.count)]
                )
    return table(["bucketpoint over", "", "wall", "CPU", "pairs"], rows)


def _wire_table(results: Results) -> str:
    rows = []
    for name, contender in CONTENDERS.items():
        cells = [
            shown(results.spread(name, op, "wire", metric), "{:.2f}")
            for op in ("save", "load")
            for metric in (wall, cpu_per_gb)
        ]
        if any(cells):
            over = [shown(results.ratio(OURS, name, op, "wire", wall), "{:.2f}") for op in ("save", "load")]
            rows.append([contender.title, *cells, *(over if name != OURS else ["", ""])])
    heads = ["", "save, s", "CPU s per GB", "load, s", "CPU s per GB", "ours / this, save", "ours / this, load"]
    return table(heads, rows)


def _kinds_table(results: Results) -> str:
    rows = []
    for name, contender in CONTENDERS.items():
        for op, title in {**OP_TITLES, "overwrite": "overwrite"}.items():
            found = results.counted(name, op)
            if found:
                seen = found["requests"]
                kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(seen["kinds"].items()))
                trips = seen["visible_after"]
                rows.append([contender.title, title, kinds, "" if trips is None else str(trips)])
    return table(["", "", "requests", "round trips from last data to visible"], rows)


def _error_section(results: Results) -> list[str]:
    rows = [[found["contender"], found["op"], found["where"], str(found["error"])] for found in results.errors()]
    return ["## Failed", table(["", "", "", "error"], rows)] if rows else []


def plot(results: Results) -> str:
    """Four panels of horizontal bars as SVG: a plotting library would be the benchmark's largest dependency."""
    panels = [
        (f"{op}, {label}", op, metric)
        for metric, label in ((cpu_per_gb, "CPU s per GB"), (wall, "wall, s"))
        for op in ("save", "load")
    ]
    width, bar, gap = 430, 18, 34
    names = [name for name in CONTENDERS if any(results.of(name, op, "loopback") for op in ("save", "load"))]
    height = gap + bar * len(names) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width}" height="{2 * height}"',
        ' font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, (title, op, metric) in enumerate(panels):
        left, top = (index % 2) * width, (index // 2) * height
        parts.append(f'<text x="{left + 12}" y="{top + 20}" font-weight="bold">{title}</text>')
        spreads = {name: results.spread(name, op, "loopback", metric) for name in names}
        longest = max((spread.high for spread in spreads.values() if spread), default=1.0)
        for row, name in enumerate(names):
            spread, y = spreads[name], top + gap + row * bar
            parts.append(f'<text x="{left + 128}" y="{y + 11}" text-anchor="end">{name}</text>')
            if spread is None:
                continue
            scale = (width - 190) / longest
            colour = COLOURS[list(CONTENDERS).index(name) % len(COLOURS)]
            place = f'x="{left + 134}" y="{y + 1}" width="{spread.middle * scale:.1f}" height="{bar - 5}"'
            parts.append(f'<rect {place} fill="{colour}"/>')
            ends = [left + 134 + value * scale for value in (spread.low, spread.high)]
            parts.append(f'<line x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y + 7.5}" y2="{y + 7.5}" stroke="black"/>')
            parts.append(f'<text x="{ends[1] + 5:.1f}" y="{y + 11}">{spread.middle:.2f}</text>')
    return "\n".join([*parts, "</svg>", ""])
