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
from bench.serving import report as serving_report
from bench.staging import report as staging_report
from bench.stalls import report as stalls_report
from bench.start_up import report as start_up_report
from bench.stores import report as stores_report
from bench.tables import print_progress, shown, table, wrapped
from bench.thresholds import OURS, PEER, Verdict, verdicts
from bench.unchanged import report as unchanged_report

PARTS: dict[str, Any] = {
    "ranks": ranks_report,
    "staging": staging_report,
    "retention": retention_report,
    "stalls": stalls_report,
    "stores": stores_report,
    "start-up": start_up_report,
    "unchanged": unchanged_report,
    "serving": serving_report,
}
"""Sections of parts that are measured by themselves, in the order in which they are shown."""

SHAPES = ("{:.2f}", "{:.2f}", "{:+.0f}")
"""How wall time, CPU time and memory are written."""

SHOWN = (OURS, PEER, "s3fs", "disk", "raw-crc", "s5cmd")
"""Contenders in the tables. The others have their thresholds, and are among the raw figures."""

COLOURS = ("#1b6ca8", "#e07a3f", "#8a8a8a", "#b8b8b8", "#4c9f70", "#7fbf9a", "#9b72b0", "#c9a227")


def print_measurement(found: dict[str, Any]) -> None:
    """One line of progress."""
    line = f"{found['where']:8} {found['round']} {found['op']:9} {found['contender']:17}"
    if "wall_s" in found:
        line += f" {wall(found):6.2f} s  {cpu_per_gb(found):5.2f} cpu-s/GB  {peak_mb(found):+7.1f} MB"
    print_progress(line, found)


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
    sections = [
        "# Benchmark",
        "On this page you can compare bucketpoint with other writers and readers, and find the commands to repeat it.",
    ]
    if "measurements" in result:
        sections += _transfer_sections(result, plot_name)
    for name, part in PARTS.items():
        if name in result and hasattr(part, "sections"):
            sections += part.sections(result[name])
    sections += _threshold_sections(result)
    return "\n\n".join(map(wrapped, sections)) + "\n"


def _transfer_sections(result: dict[str, Any], plot_name: str) -> Iterator[str]:
    results = Results(result["measurements"])
    wire = f"{result['wire']['delay_s'] * 1e3:.0f} ms added to every request, {result['wire']['bytes_per_s'] / 1e6:.0f}"
    yield from _how(result)
    yield "## Saves and loads on loopback"
    yield f"![CPU and wall time of each contender]({plot_name})"
    yield from _op_tables(results)
    yield "## Through an emulated wire"
    yield f"{wire} MB/s a connection; wall time."
    yield _wire_table(results)
    yield "## Requests by kind"
    yield "Round trips are counted from the last acknowledged data to a visible `.metadata`."
    yield _kinds_table(results)
    yield from _error_section(results)


def _threshold_sections(result: dict[str, Any]) -> Iterator[str]:
    rows = _verdicts(result)
    missed = [row for row in rows if row.holds is False]
    yield "## Thresholds"
    yield (
        f"{sum(row.holds is True for row in rows)} of {len(rows)} thresholds hold; "
        "`python bench/run.py --report` prints all of them, with their intervals. Missed are:"
    )
    medians = ([row.what, row.demanded, row.measured.partition(" [")[0]] for row in missed)
    yield table(["", "demanded", "measured"], medians)


def _verdicts(result: dict[str, Any]) -> list[Verdict]:
    rows = list(verdicts(Results(result["measurements"]))) if "measurements" in result else []
    return rows + [row for name, part in PARTS.items() if name in result for row in part.verdicts(result[name])]


def thresholds_text(result: dict[str, Any]) -> str:
    marks = {True: "holds", False: "MISSED", None: "-"}
    rows = _verdicts(result)
    return "\n".join(f"{marks[row.holds]:7} {row.what}: {row.measured} (demanded {row.demanded})" for row in rows)


def _how(result: dict[str, Any]) -> Iterator[str]:
    machine, state = result["machine"], result["state"]
    if result["quick"]:
        yield "**A quick run: too few rounds to decide anything.**"
    yield "## How it is measured"
    minutes = round(result["seconds"] / 60)
    yield (
        "`make bench` runs all of it and writes this page and [the raw figures](benchmark.json); `make bench "
        'ARGS="--only PART"` runs one part. The server is MinIO over TLS on the same machine, with its data in '
        "memory. Contenders take turns, and each run is a fresh fork of one process. Every load is compared with "
        "what was saved. Figures are medians, in brackets the smallest and the largest. Ratios are of runs of one "
        "round; the range of 7 ratios holds the true median with probability 98.4 %. CPU is the client's, user and "
        "system. Memory is the peak over what the process held before. Requests and bytes are counted by a proxy in "
        "a separate run."
    )
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if name in _VERSIONS)
    yield (
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux "
        f"{machine['kernel'].partition('-')[0]}, Python {machine['python']}, {versions}."
    )
    yield (
        f"Saves and loads ({minutes} minutes): a transformer's state, bf16 weights and two fp32 moments, "
        f"{state['tensors']} tensors, {state['state_bytes'] / 1e9:.2f} GB. A dim-0 (dim-1) quarter is a load of a "
        "quarter of each tensor's rows (columns). Others run with their defaults, s3torchconnector with its "
        "DCP-optimized reader. `raw engine` is bucketpoint's store between one buffer and the bucket; `s5cmd` moves "
        "files of the same sizes."
    )


_VERSIONS = ("torch", "boto3", "s3torchconnector", "s3fs", "s5cmd")


def _op_tables(results: Results) -> Iterator[str]:
    heads = ["wall, s", "CPU s per GB", "memory, MB", "bytes moved per byte needed", "ours / this, wall"]
    for titles in ({"save": ""}, {"load": ""}, {"quarter0": "dim-0, ", "quarter1": "dim-1, "}):
        rows = [row for op, title in titles.items() for row in _op_rows(results, op, title)]
        if rows:
            yield table(
                ["load of a quarter" if len(titles) > 1 else next(iter(titles)), *heads, "ours / this, CPU"], rows
            )


def _op_rows(results: Results, op: str, title: str) -> Iterator[list[str]]:
    for name in SHOWN:
        spreads = [results.spread(name, op, "loopback", metric) for metric in (wall, cpu_per_gb, peak_mb)]
        moved = results.moved_per_needed(name, op)
        # Of a quarter, the bytes are what is compared, and none move to or from a local disk.
        if any(spreads) and (moved is not None or not title):
            ratios = [results.ratio(OURS, name, op, "loopback", metric) for metric in (wall, cpu_per_gb)]
            yield [
                title + CONTENDERS[name].title,
                *(shown(each, shape, brief=True) for each, shape in zip(spreads, SHAPES, strict=True)),
                f"{moved:.2f}" if moved is not None else "",
                *("" if name == OURS else shown(ratio, "{:.2f}") for ratio in ratios),
            ]


def _wire_table(results: Results) -> str:
    rows = []
    for name in SHOWN:
        cells = [shown(results.spread(name, op, "wire", wall), "{:.2f}", brief=True) for op in ("save", "load")]
        if any(cells):
            over = [shown(results.ratio(OURS, name, op, "wire", wall), "{:.2f}") for op in ("save", "load")]
            rows.append([CONTENDERS[name].title, *cells, *(over if name != OURS else ["", ""])])
    return table(["", "save, s", "load, s", "ours / this, save", "ours / this, load"], rows)


def _kinds_table(results: Results) -> str:
    rows = []
    for name in (OURS, PEER):
        for op in ("save", "overwrite"):
            found = results.counted(name, op)
            if found:
                seen = found["requests"]
                kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(seen["kinds"].items()))
                trips = seen["visible_after"]
                rows.append([CONTENDERS[name].title, op, kinds, "" if trips is None else str(trips)])
    return table(["", "", "requests", "round trips"], rows)


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
