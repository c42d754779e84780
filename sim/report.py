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
    Layout(MODELS[1], 10240, replicas=40),
    Layout(MODELS[2], 1024),
    Layout(MODELS[2], 4096, replicas=8),
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
    return f"{kind} {found['part_mib']} MiB x {found['connections']} {flags}{_ratio(found)} of {found['ideal_s']:.1f} s"


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
        yield "device", table(*_device(result))
        yield "settings", table(*_settings(result))
    if result.get("coordinator"):
        yield "coordinator", table(*_coordinator(result))
        yield "coordinator-bytes", table(*_coordinator_bytes(result))
        yield "coordinator-scale", table(*_coordinator_scale(result))
        yield "metadata", table(*_metadata(result))
    yield "replicas", table(*_replicas())
    if result.get("calibration"):
        yield "calibration", table(*_calibration(result))
    if "machine" in result:
        machine = result["machine"]
        yield (
            "machine",
            f"Seed {result['seed']}. Coordinator and calibration: {machine['cores']} cores ({machine['processor']}), "
            f"Python {machine['python']},\ntorch {machine['torch']}; CPU seconds, on a machine with other work.",
        )


def _issue(result: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    yield from verdicts({"store": result["store"]})
    off = [text for text, holds in verdicts({"calibration": result.get("calibration", [])}) if not holds]
    if result.get("calibration"):
        yield f"calibration: predicted within {MOST_OFF:.0%} of the real time in every case", not off


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
    return f"{found['over_ideal']:.2f} x"


Table = tuple[list[str], list[list[str]]]


def _transfers(result: dict[str, Any]) -> Table:
    rows = []
    for op in ("save", "load"):
        for terabytes in (1, 10, 30):
            for ranks in RANKS:
                found = _store(result, op=op, terabytes=terabytes, ranks=ranks, partitions=64)
                if found:
                    times = [f"{found['wall_s']:.1f} s", f"{found['ideal_s']:.1f} s", _ratio(found)]
                    counts = [f"{found['requests']:,}", f"{found['peak_per_partition']:,}"]
                    rows.append([op, f"{terabytes} TB", f"{ranks:,}", *times, *counts])
    return ["", "", "ranks", "wall", "ideal", "over ideal", "requests", "most in 1 s at one partition"], rows


def _partitions(result: dict[str, Any]) -> Table:
    rows = []
    for ranks in RANKS:
        for refuse, title in ((False, "wait in line"), (True, "503, sent again")):
            cells = [
                _ratio(_store(result, op="save", terabytes=10, ranks=ranks, partitions=count, refuse=refuse))
                for count in (64, 8, 1)
            ]
            rows.append([f"{ranks:,}", title, *cells])
    return ["ranks", "requests over the rate", "64 partitions", "8", "1"], rows


def _device(result: dict[str, Any]) -> Table:
    rows = []
    for op in ("save", "load"):
        for ranks in (RANKS[0], RANKS[-1]):
            cells: list[str] = []
            for device in (False, True):
                found = _store(result, op=op, terabytes=10, ranks=ranks, partitions=64, device=device)
                cells += [_ratio(found), f"{found['requests']:,}" if found else ""]
            rows.append([op, f"{ranks:,}", *cells])
    return ["10 TB", "ranks", "host memory", "requests", "device memory", "requests"], rows


def _settings(result: dict[str, Any]) -> Table:
    chosen = sorted({(row["part_mib"], row["connections"]) for row in result["store"]}, key=lambda pair: pair[0])
    rows = []
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
        rows.append([f"{part_mib} MiB", str(connections), *cells])
    return [
        "`part_bytes`",
        "`connections`",
        "requests",
        "64 partitions",
        "1, in line",
        "8, with 503",
        "1, with 503",
    ], rows


def _coordinator(result: dict[str, Any]) -> Table:
    rows = []
    for row in _measured(result):
        costs = [row["first"]["cpu_s"].get(name, 0.0) / row["gathered"] * 1e6 for name in (*_UP, *_DOWN)]
        first = sum(costs)
        second = sum(row["second"]["cpu_s"].values()) / row["gathered"] * 1e6
        cells = [f"{cost:.1f}" for cost in costs]
        again = f"**{second:.2f}**" if row["who"] == OURS else "as the first"
        rows.append([_title(row), f"{row['gathered']:,}", f"{row['kept']:,}", *cells, f"**{first:.0f}**", again])
    heads = ["", "items sent", "kept", "unpickle plans", "plan", "pickle plans", "unpickle results", "commit"]
    return [*heads, "pickle metadata", "first save", "unchanged"], rows


def _coordinator_bytes(result: dict[str, Any]) -> Table:
    rows = []
    for row in _measured(result):
        for which, title in (("first", "first"), ("second", "unchanged")):
            if which == "second" and row["who"] != OURS:
                continue
            sent, count = row[which]["sent"], row["gathered"]
            cells = [f"{sent[name] / count:.1f}" for name in ("plans_up", "plans_down", "results", "metadata_down")]
            index = (row["metadata_bytes"] + row["other_index_bytes"]) / row["kept"]
            stored = [f"{index:.0f}", f"{row['read_s'] / row['kept'] * 1e6:.1f}"] if which == "first" else ["", ""]
            rows.append([_title(row), f"{row['gathered']:,}", title, *cells, *stored])
    heads = ["", "items sent", "save", "plans, B an item", "dealt plans", "results", "metadata broadcast, to each rank"]
    return [*heads, "index in the store, B a chunk", "reading it, us a chunk"], rows


def _coordinator_scale(result: dict[str, Any]) -> Table:
    rows = []
    ours, stock = (_largest(result, who) for who in (OURS, STOCK))
    for layout in LAYOUTS:
        mesh = f"FSDP {layout.shards:,}" if layout.replicas == 1 else f"HSDP {layout.replicas} x {layout.shards:,}"
        cells = [f"{layout.model.name}, {mesh}", f"{layout.gathered / 1e6:.1f} M", f"{layout.kept / 1e6:.2f} M"]
        for row, which in ((stock, "first"), (ours, "first"), (ours, "second")):
            cells.append(_seconds(_predicted(row, which, layout)) if row else "")
        if ours:
            per_chunk = (ours["metadata_bytes"] + ours["other_index_bytes"]) / ours["kept"]
            cells.append(f"{per_chunk * layout.kept / 1e6:,.0f} MB")
            cells.append(_seconds(ours["read_s"] / ours["kept"] * layout.kept))
            cells.append(f"{ours['first']['sent']['plans_up'] / ours['gathered'] * layout.gathered / 1e9:.1f} GB")
        rows.append(cells)
    heads = ["", "items sent", "kept", "DCP, each save", "first save", "unchanged"]
    return [*heads, "index", "decoding it", "plans to rank 0, first save"], rows


def _metadata(result: dict[str, Any]) -> Table:
    ours = _largest(result, OURS)
    rows = []
    for layout in LAYOUTS if ours else ():
        assert ours is not None
        nbytes = (ours["metadata_bytes"] + ours["other_index_bytes"]) / ours["kept"] * layout.kept
        decode = ours["read_s"] / ours["kept"] * layout.kept
        times = [
            metadata_s(nbytes, decode, layout.ranks, nic=12.5 * GB, store=store, once=once)
            for store, once in ((1000 * GB, False), (125 * GB, False), (125 * GB, True))
        ]
        mesh = f"{layout.model.name}, {layout.ranks:,} ranks, {layout.replicas} replicas"
        total = f"{nbytes * layout.ranks / 1e12:.2f} TB"
        rows.append([mesh, f"{nbytes / 1e6:,.0f} MB", total, *map(_seconds, times), _seconds(decode)])
    heads = [
        "",
        "index",
        "read by all",
        "by all, at 1 TB/s",
        "by all, at 125 GB/s",
        "once, handed on",
        "of it decoding",
    ]
    return heads, rows


def _replicas() -> Table:
    rows = []
    for case in CASES:
        times = [case.each_reads_s, case.one_broadcasts_s, case.shared_reads_s]
        best = min(range(3), key=lambda at: times[at] - 1e-9 * (at == 0))
        cells = [f"**{_seconds(each)}**" if at == best else _seconds(each) for at, each in enumerate(times)]
        rows.append([case.title, *cells, f"{times[0] / times[2]:.1f} x"])
    heads = ["", "each replica reads all", "one reads, broadcast", "each byte read once, exchanged"]
    return [*heads, "gain of the last over the first"], rows


def _calibration(result: dict[str, Any]) -> Table:
    rows = []
    for row in sorted(result["calibration"], key=lambda each: (each["title"], each["processes"])):
        cells = [row["title"], str(row["processes"])]
        for op in ("save", "load"):
            real, said = row[f"{op}_s"], row[f"{op}_predicted_s"]
            cells += [f"{real:.2f} s", f"{said:.2f} s", f"{said / real - 1:+.0%}"]
        rows.append(cells)
    heads = ["what binds", "processes", "save, real", "predicted", "off"]
    return [*heads, "load, real", "predicted", "off"], rows


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
    rows = [row for row in result["coordinator"] if row["who"] == who and row["replicas"] == 1]
    return max(rows, key=lambda row: row["gathered"], default=None)


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
