"""The report: tables put between the marks of `docs/scale.md`, and the raw figures as JSON beside it. No simulating."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.tables import table

from sim.layouts import MODELS, Layout
from sim.loading import CASES, GB, metadata_s
from sim.scenarios import DEFAULTS, MIB, RANKS

MOST_OVER_IDEAL = 1.25
MOST_OFF = 0.20
OURS, STOCK = "bucketpoint", "DCP"
IDENTITY = {
    "store": ("op", "terabytes", "ranks", "partitions", "device", "refuse", "part_mib", "connections"),
    "coordinator": ("who", "model", "ranks", "replicas"),
    "calibration": ("title", "processes"),
}
_UP, _DOWN = ("gather", "plan"), ("scatter", "results", "finish", "broadcast")
"""Costs that grow with the items that ranks send, and those that grow with what is left of them."""

LAYOUTS = (
    Layout(MODELS[0], 1024),
    Layout(MODELS[1], 1024),
    Layout(MODELS[2], 1024),
    Layout(MODELS[2], 10240, replicas=20),
    Layout(MODELS[2], 10240),
)


def write(result: dict[str, Any], template: Path, out: Path, *, merge: bool) -> None:
    """Fill the template's marks from the result, and from what is there of earlier runs where `merge` is set."""
    path = out.with_suffix(".json")
    if merge and path.exists():
        result = merged(json.loads(path.read_text()), result)
    text = template.read_text()
    for name, content in sections(result):
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n{content}\n\n{end}{tail}"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    path.write_text(json.dumps(result, indent=1) + "\n")


def merged(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """All rows of both, those of now where both have one."""
    whole = {**earlier, **now}
    for part, names in IDENTITY.items():
        rows = {tuple(row[name] for name in names): row for row in [*earlier.get(part, []), *now.get(part, [])]}
        whole[part] = list(rows.values())
    return whole


def verdicts(result: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    found = _store(result, op="save", terabytes=10, ranks=10240, partitions=64)
    if found:
        over = found["over_ideal"]
        text = f"10,240 ranks, 10 TB, defaults, 64 partitions: {over:.2f} x ideal, at most {MOST_OVER_IDEAL}"
        yield text, over <= MOST_OVER_IDEAL
    for row in result.get("calibration", []):
        for op in ("save", "load"):
            off = row[f"{op}_predicted_s"] / row[f"{op}_s"] - 1
            text = f"{row['processes']} processes, {op}, {row['title']}: predicted {off:+.0%} of the real time"
            yield text, abs(off) <= MOST_OFF


# -- lines of progress ------------------------------------------------------------------------------------------------


def line(part: str, found: dict[str, Any]) -> str:
    """One row of a part, in a line."""
    lines = {"store": _store_line, "coordinator": _coordinator_line, "calibration": _calibration_line}
    return lines[part](found)


def _store_line(found: dict[str, Any]) -> str:
    kind = f"{found['op']} {found['terabytes']:2} TB {found['ranks']:6} ranks {found['partitions']:2} partitions"
    flags = f"{'device ' if found['device'] else ''}{'503 ' if found['refuse'] else ''}"
    return f"{kind} {found['part_mib']} MiB x {found['connections']} {flags}{_ratio(found)} x {found['ideal_s']:.1f} s"


def _coordinator_line(found: dict[str, Any]) -> str:
    first, second = (sum(found[which]["cpu_s"].values()) / found["gathered"] * 1e6 for which in ("first", "second"))
    return f"{found['who']:12} {found['gathered']:8} items: {first:.1f} us an item, then {second:.2f} us"


def _calibration_line(found: dict[str, Any]) -> str:
    pairs = [f"{op} {found[f'{op}_s']:.2f} s, predicted {found[f'{op}_predicted_s']:.2f} s" for op in ("save", "load")]
    return f"{found['processes']} processes, {found['title']}: {'; '.join(pairs)}"


# -- tables -----------------------------------------------------------------------------------------------------------


def sections(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The content of each mark for which the result has rows."""
    if result.get("store"):
        yield "verdict", table(["must hold", "holds"], ([t, "yes" if ok else "**no**"] for t, ok in _issue(result)))
        yield "transfers", table(*_transfers(result))
        yield "partitions", table(*_partitions(result))
        yield "settings", table(*_settings(result))
    if result.get("coordinator"):
        yield "coordinator", table(*_coordinator(result))
        yield "coordinator-scale", table(*_coordinator_scale(result))
    yield "replicas", table(*_replicas())
    if "machine" in result:
        machine = result["machine"]
        yield (
            "machine",
            f"Seed {result['seed']}. Coordinator (CPU seconds) and calibration: {machine['cores']} cores "
            f"({machine['processor']}), beside other work,\nPython {machine['python']}, torch {machine['torch']}.",
        )


def _issue(result: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    yield from verdicts({"store": result["store"]})
    off = [text for text, holds in verdicts({"calibration": result.get("calibration", [])}) if not holds]
    if result.get("calibration"):
        offs = [
            row[f"{op}_predicted_s"] / row[f"{op}_s"] - 1 for row in result["calibration"] for op in ("save", "load")
        ]
        span = f"{len(offs)} cases, {min(offs):+.0%} to {max(offs):+.0%}"
        yield f"calibration: predicted within {MOST_OFF:.0%} of the real time ({span})", not off


def _store(result: dict[str, Any], **wanted: Any) -> dict[str, Any] | None:
    """The row with these facts, and the defaults otherwise."""
    usual = {
        "device": False,
        "refuse": False,
        "part_mib": DEFAULTS.part_bytes // MIB,
        "connections": DEFAULTS.connections,
    }
    wanted = {**usual, **wanted}
    rows = result.get("store", [])
    return next((row for row in rows if all(row[name] == value for name, value in wanted.items())), None)


def _ratio(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if found["failed"]:
        return f"**fails** after {found['wall_s']:.1f} s"
    return f"{found['over_ideal']:.2f}"


Table = tuple[list[str], list[list[str]]]


def _transfers(result: dict[str, Any]) -> Table:
    rows = []
    for op in ("save", "load"):
        for terabytes in (1, 10, 30):
            found = [_store(result, op=op, terabytes=terabytes, ranks=ranks, partitions=64) for ranks in RANKS]
            if all(found):
                cells = [f"{row['wall_s']:.1f} s, {_ratio(row)}" for row in found if row]
                rows.append([op, f"{terabytes} TB", *cells, *(f"{row['requests']:,}" for row in found[-1:] if row)])
    return ["", "", *(f"{ranks:,} ranks" for ranks in RANKS), f"requests of {RANKS[-1]:,}"], rows


def _partitions(result: dict[str, Any]) -> Table:
    rows = []
    for ranks in RANKS:
        cells = [
            _ratio(_store(result, op="save", terabytes=10, ranks=ranks, partitions=count, refuse=refuse))
            for refuse in (False, True)
            for count in (64, 8, 1)
        ]
        rows.append([f"{ranks:,}", *cells])
    return ["ranks", *(f"{count}, {what}" for what in ("waiting", "503") for count in (64, 8, 1))], rows


def _settings(result: dict[str, Any]) -> Table:
    chosen = sorted({(row["part_mib"], row["connections"]) for row in result["store"]}, key=lambda pair: pair[0])
    rows: list[list[str]] = []
    for part_mib, connections in chosen:
        cells: list[str] = []
        for count, refuse in ((64, False), (1, False), (8, True), (1, True)):
            found = _store(
                result, op="save", terabytes=10, ranks=10240, partitions=count, refuse=refuse, part_mib=part_mib,
                connections=connections,
            )  # fmt: skip
            if not cells:
                cells = [f"{found['requests']:,}" if found else ""]
            cells.append(_ratio(found))
        # Parts that fill the connections are cut alike.
        if not rows or cells != rows[-1][2:]:
            rows.append([f"{part_mib} MiB", str(connections), *cells])
    return [
        "`part_bytes`",
        "`connections`",
        "requests",
        "64 partitions",
        "1, waiting",
        "8, 503",
        "1, 503",
    ], rows


def _coordinator(result: dict[str, Any]) -> Table:
    """The smallest and the largest job of each client, and those with replicas."""
    rows = []
    measured = _measured(result)
    ends = [row for who in (STOCK, OURS) for row in _ends(_alone(measured, who))]
    for row in [*ends, *(row for row in measured if row["replicas"] > 1)]:
        first, second = (sum(row[which]["cpu_s"].values()) / row["gathered"] * 1e6 for which in ("first", "second"))
        sent = [sum(row[which]["sent"].values()) / row["gathered"] for which in ("first", "second")]
        size = (row["metadata_bytes"] + row["other_index_bytes"]) / row["kept"]
        ours = row["who"] == OURS
        cells = [f"{first:.0f}", f"{second:.2f}" if ours else "the same", f"{sent[1] if ours else sent[0]:.0f}"]
        rows.append(
            [_title(row), f"{row['gathered']:,}", *cells, f"{size:.0f}", f"{row['read_s'] / row['kept'] * 1e6:.0f}"]
        )
    heads = ["", "items", "first save, us", "later save, us", "bytes between ranks"]
    return [*heads, "`.metadata`, bytes a chunk", "decoding it, us a chunk"], rows


def _coordinator_scale(result: dict[str, Any]) -> Table:
    rows = []
    ours, stock = (_largest(result, who) for who in (OURS, STOCK))
    for layout in LAYOUTS if ours and stock else ():
        assert ours is not None
        assert stock is not None
        mesh = f"FSDP {layout.shards:,}" if layout.replicas == 1 else f"HSDP {layout.replicas} x {layout.shards:,}"
        cells = [f"{layout.model.name}, {mesh}", f"{layout.gathered / 1e6:.1f} M", f"{layout.kept / 1e6:.1f} M"]
        for row, which in ((stock, "first"), (ours, "first"), (ours, "second")):
            cells.append(_seconds(_predicted(row, which, layout)))
        nbytes = (ours["metadata_bytes"] + ours["other_index_bytes"]) / ours["kept"] * layout.kept
        decode = ours["read_s"] / ours["kept"] * layout.kept
        read = metadata_s(nbytes, decode, layout.ranks, nic=12.5 * GB, store=125 * GB, once=False)
        rows.append([*cells, f"{nbytes / 1e6:,.0f} MB", _seconds(read)])
    heads = ["", "items", "chunks", "DCP, each save", "first save", "later save"]
    return [*heads, "`.metadata`", "until all ranks have read it"], rows


def _replicas() -> Table:
    rows = [
        [case.title, *map(_seconds, (case.each_reads_s, case.one_broadcasts_s, case.shared_reads_s))] for case in CASES
    ]
    return ["", "each reads all", "one broadcasts", "each byte read once"], rows


def _measured(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result["coordinator"]
    return sorted(rows, key=lambda row: (row["who"] != STOCK, row["replicas"], row["gathered"]))


def _title(row: dict[str, Any]) -> str:
    mesh = (
        f"{row['ranks']} ranks"
        if row["replicas"] == 1
        else f"{row['replicas']} x {row['ranks'] // row['replicas']} ranks"
    )
    return f"{row['who']}, {row['model']}, {mesh}"


def _largest(result: dict[str, Any], who: str) -> dict[str, Any] | None:
    return max(_alone(result["coordinator"], who), key=lambda row: row["gathered"], default=None)


def _ends(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rows[0], *rows[1:][-1:]] if rows else []


def _alone(rows: list[dict[str, Any]], who: str) -> list[dict[str, Any]]:
    """The jobs of one client without replicas."""
    return [row for row in rows if row["who"] == who and row["replicas"] == 1]


def _predicted(row: dict[str, Any], which: str, layout: Layout) -> float:
    """CPU seconds of rank 0, from the costs that were measured an item."""
    costs = row[which]["cpu_s"]
    up = sum(costs.get(name, 0.0) for name in _UP) / row["gathered"] * layout.gathered
    down = sum(costs.get(name, 0.0) for name in _DOWN) / row["kept"] * layout.kept
    return float(up + down)


def _seconds(seconds: float) -> str:
    if not math.isfinite(seconds):
        return ""
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds:.0f} s" if seconds >= 20 else f"{seconds:.1f} s"
