"""The report of the part on unchanged bytes: its verdicts and its section. No measuring."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from bench.figures import Measurement, Metric, Results, Spread, peak_mb, wall
from bench.tables import print_progress, shown, table
from bench.thresholds import NOISE_MB, Verdict, bounded

COPY, SEND = "copy", "send"
MAX_SENT, MAX_WALL, MAX_CPU, MAX_DENSE_WALL, MAX_DIGEST_CPU = 0.03, 0.25, 1.05, 1.03, 0.12
COPIED_BY_ONE = 4 << 30
"""Bytes that one request must copy at least, besides one request for each object."""

COPY_KINDS = ("CopyObject", "UploadPartCopy")


def cpu(found: Measurement) -> float:
    """CPU seconds of the trainer and of the process that uploads."""
    return float(found["cpu_s"])


def print_measurement(found: Measurement) -> None:
    """One line of progress."""
    line = f"{'unchanged':9} {found['round']:2} {found['op']:15} {found['contender']:4}"
    if "wall_s" in found:
        line += f" {wall(found):6.2f} s  {cpu(found):5.2f} cpu-s  {peak_mb(found):7.1f} MB"
        line += f"  compared in {found['compared_cpu_s']:.3f} cpu-s"
    if "requests" in found:
        line += f"  {found['requests']['sent'] / 1e6:.1f} MB sent, {found['requests']['kinds']}"
    print_progress(line, found)


def _sent(part: dict[str, Any], op: str) -> float | None:
    """Bytes sent for each byte of the state."""
    found = Results(part["measurements"]).counted(COPY, op)
    return None if found is None else float(found["requests"]["sent"] / part["sizes"]["lora"]["state_bytes"])


def _share(what: str, share: float | None) -> Verdict:
    demanded = f"<= {MAX_SENT:.0%} of the state"
    if share is None:
        return Verdict(what, demanded, "not measured", None)
    return Verdict(what, demanded, f"{share:.2%}", share <= MAX_SENT)


def _copies(part: dict[str, Any]) -> Verdict:
    found = Results(part["measurements"]).counted(COPY, "second")
    size = part["sizes"].get("lora", {})
    frozen = size.get("state_bytes", 0) - size.get("trained_bytes", 0)
    # The frozen tensors lie in one object.
    limit = frozen // COPIED_BY_ONE + 1
    made = None if found is None else sum(found["requests"]["kinds"].get(kind, 0) for kind in COPY_KINDS)
    what, demanded = "second save, requests that copy", f"1 to {limit} (one each 4 GiB and each object)"
    holds = None if made is None else 0 < made <= limit
    return Verdict(what, demanded, "not measured" if made is None else str(made), holds)


def _means(results: Results, metric: Metric) -> float | None:
    """The mean of `copy` over the mean of `send`, of a state of which everything changes."""
    ours, theirs = ([metric(found) for found in results.of(name, "dense", "minio")] for name in (COPY, SEND))
    return fmean(ours) / fmean(theirs) if ours and theirs else None


def _extra_mb(results: Results) -> Spread | None:
    """Peak memory of `copy` less that of `send`, of neighbouring saves."""
    theirs = {found["round"]: peak_mb(found) for found in results.of(SEND, "dense", "minio")}
    ours = results.of(COPY, "dense", "minio")
    return Spread.of([peak_mb(found) - theirs[found["round"]] for found in ours if found["round"] in theirs])


def _digest_cpu(part: dict[str, Any]) -> Spread | None:
    size = part["sizes"].get("lora", {})
    frozen = size.get("state_bytes", 0) - size.get("trained_bytes", 0)
    results = Results(part["measurements"])
    return results.spread(COPY, "lora", "minio", lambda found: float(found["compared_cpu_s"]) / (frozen / 1e9))


def verdicts(part: dict[str, Any]) -> Iterator[Verdict]:
    results = Results(part["measurements"])
    yield _share("LoRA, second save, bytes sent", _sent(part, "second"))
    yield _share("LoRA, third save, bytes sent", _sent(part, "third"))
    yield _share("restarted process, first save, bytes sent", _sent(part, "restarted"))
    yield _copies(part)
    walls = results.ratio(COPY, SEND, "lora", "minio", wall)
    yield bounded("LoRA, second save on, wall", f"<= {MAX_WALL:.2f} x a full save", walls, MAX_WALL, "{:.3f} x")
    metrics: tuple[tuple[str, Metric, float], ...] = (("CPU", cpu, MAX_CPU), ("wall", wall, MAX_DENSE_WALL))
    for title, metric, limit in metrics:
        demanded = f"<= {limit:.2f} x `send`"
        ratio = results.ratio(COPY, SEND, "dense", "minio", metric)
        yield bounded(f"everything changes, {title}, median", demanded, ratio, limit, "{:.3f} x")
        mean = _means(results, metric)
        shown_mean = "not measured" if mean is None else f"{mean:.3f} x"
        what = f"everything changes, {title}, mean over mean"
        yield Verdict(what, demanded, shown_mean, None if mean is None else mean <= limit)
    extra = _extra_mb(results)
    yield bounded("everything changes, peak memory", f"+ 0 MB (noise: {NOISE_MB} MB)", extra, NOISE_MB, "{:+.1f} MB")
    demanded = f"<= {MAX_DIGEST_CPU:.2f} CPU s a GB"
    yield bounded("comparison with the last save, CPU", demanded, _digest_cpu(part), MAX_DIGEST_CPU, "{:.3f} s a GB")


_OPS = {"lora": "LoRA-like, second save on", "dense": "everything changes"}

_COUNTED = {
    "first": "first save",
    "second": "second save, adapters trained",
    "nothing changed": "later save, nothing changed",
    "restarted": "first save of a restarted process, nothing changed",
}


def sections(part: dict[str, Any]) -> Iterator[str]:
    results = Results(part["measurements"])
    lora = part["sizes"]["lora"]
    frozen = lora["state_bytes"] - lora["trained_bytes"]
    yield '## Unchanged bytes: `unchanged="copy"` beside `"send"`'
    if part["quick"]:
        yield "**A quick run: too few rounds to decide anything.**"
    yield (
        f"`--only unchanged`, {part['seconds']} s. The LoRA-like state has {frozen / 1e6:,.0f} MB of frozen bf16 "
        f"weights, and {lora['trained_bytes'] / 1e6:.0f} MB of adapters and their moments, which a step changes. A "
        f"step changes all of the other state, {part['sizes']['dense']['state_bytes'] / 1e6:,.0f} MB. "
        "Saves are asynchronous, and wall time is until the commit. MinIO copies with the same cores and receives "
        "over no network: elsewhere sending is slower. CPU and memory include the process that uploads."
    )
    rows = []
    for op, title in _OPS.items():
        for name in (COPY, SEND):
            walls, cpus, peaks = (results.spread(name, op, "minio", metric) for metric in (wall, cpu, peak_mb))
            rows.append(
                [
                    title,
                    f'`"{name}"`',
                    *(
                        shown(each, shape, brief=True)
                        for each, shape in ((walls, "{:.2f}"), (cpus, "{:.2f}"), (peaks, "{:.0f}"))
                    ),
                ]
            )
    yield table(["", "unchanged=", "wall, s", "CPU, s", "peak memory, MB"], rows)
    counted = []
    for op, title in _COUNTED.items():
        found, share = results.counted(COPY, op), _sent(part, op)
        if found is not None and share is not None:
            kinds = found["requests"]["kinds"]
            copies = sum(kinds.get(kind, 0) for kind in COPY_KINDS)
            cells = [f"{found['requests']['sent'] / 1e6:,.1f}", f"{share:.2%}", f"{wall(found):.1f}"]
            counted.append([title, *cells, str(sum(kinds.values())), str(copies)])
    heads = ["LoRA-like state", "MB sent", "of the state", "wall, s", "requests", "of them copies"]
    yield table(heads, counted)
    errors = [[found["op"], str(found["error"])] for found in results.errors()]
    if errors:
        yield table(["failed", "error"], errors)
