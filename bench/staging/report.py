"""What the staging part found: its verdicts and its section of the report. No measuring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.figures import Measurement, Metric, Results, Spread
from bench.tables import print_progress, shown, table
from bench.thresholds import Verdict, bounded

OURS = "bucketpoint"
MANY, FEW = "2000", "32"
MAX_OVER_REUSED, MAX_FIRST = 0.80, 1.30
MAX_OVER_MEMCPY = {MANY: 1.2, FEW: 1.1}
MAX_BESIDE_S = 5e-3 + 2e-6 * int(MANY)
MAX_CAPPED_STEP = 1.03
MAX_OVER_FLOOR, MAX_LOST_OVER_FLOOR, MAX_OF_PEER = 1.15, 1.20, 0.65
MAX_LOCK_S, MAX_UPLOAD_OVER_THREADS, MAX_HELPER_MB, MAX_READY_S = 0.03, 1.1, 90, 1.0
STEPS = {"short": "1 ms steps", "long": "30 ms steps"}
SPARE_BYTES_A_TENSOR, PAGE = 64, 4096
MAX_RESIDENT_MOVE = 0.01
MIN_OF_PINNED, MAX_CUDA_BLOCKED_S = 0.90, 10e-3

TITLES = {
    "memcpy": "memcpy: `torch.Tensor.copy_`, its threads",
    "memcpy-threads": "memcpy: `memmove`, as many threads",
    "bucketpoint": "bucketpoint",
    "bucketpoint-prefault": "bucketpoint after `prefault()`",
    "bucketpoint-threads": 'bucketpoint, `background="thread"`',
    "bucketpoint-dcp-process": "bucketpoint, DCP's checkpoint process",
    "stager-reused": "one reused torch `DefaultStager`",
    "torch": "torch FileSystemWriter, FsspecWriter",
    "s3torchconnector": "s3torchconnector",
    "s3torchconnector-dcp-process": "s3torchconnector, DCP's checkpoint process",
    "s3fs": "torch FsspecWriter + s3fs",
    "floor": "another process that only uploads",
}


def seconds(found: Measurement) -> float:
    return float(found["seconds"])


def mean_ratio(found: Measurement) -> float:
    """How much longer steps take during an upload, on average, than just before and after."""
    return float(found["busy"]["mean_s"] / found["idle"]["mean_s"])


def median_ratio(found: Measurement) -> float:
    return float(found["busy"]["median_s"] / found["idle"]["median_s"])


def p95_over_median(found: Measurement) -> float:
    return float(found["busy"]["p95_s"] / found["idle"]["median_s"])


def lost(found: Measurement) -> float:
    """Seconds of training time lost per GB: in `async_save`, and by what steps took longer meanwhile."""
    return float(found["lost_s_per_gb"])


def lock_s(found: Measurement) -> float:
    """Seconds for each GB in which another thread than the waiting main one held the interpreter's lock."""
    return float(found["held"] * found["upload_s"] / (found["nbytes"] / 1e9))


def order_s(found: Measurement) -> float:
    """CPU seconds for each GB of the thread that talks to the helper: it holds the lock no longer than that."""
    return float(sum(found["order_cpu_s"]) / (found["nbytes"] / 1e9))


def upload_s(found: Measurement) -> float:
    return float(found["upload_s"])


def lock_of_load_s(found: Measurement) -> float:
    """Seconds for each GB loaded in which any thread held the interpreter's lock."""
    return float(found["held_by_any"] * found["upload_s"] / (found["nbytes"] / 1e9))


def print_measurement(found: dict[str, Any]) -> None:
    """One line of progress."""
    line = f"{'staging':8} {found['round']:2} {found['op']:9} {found['contender']:20} {found['where']:>6}"
    if "seconds" in found:
        line += f" {found['seconds'] * 1e3:8.1f} ms"
    if "memcpy_s" in found:
        line += f" (memcpy {found['memcpy_s'] * 1e3:.1f} ms)"
    if "busy" in found:
        line += f" step x {mean_ratio(found):.2f}, median x {median_ratio(found):.2f}, lost {lost(found):.2f} s a GB, "
        line += f"{found['busy']['count']} steps of an upload of {found['upload_s']:.1f} s"
    if found.get("held") is not None:
        line += f" lock held {found['held']:.1%} of {found['upload_s']:.2f} s, {lock_s(found):.3f} s a GB"
    if "ready_s" in found:
        line += f" {found['resident_mb']:.0f} MB, ready after {found['ready_s']:.2f} s"
    if "staged_bytes" in found:
        line += f" {found['staged_bytes']} B staged for {found['state_bytes']}"
    line += f"  not run: {found['not_run']}" if "not_run" in found else ""
    print_progress(line, found)


def verdicts(staging: dict[str, Any]) -> Iterator[Verdict]:
    results = Results(staging["measurements"])
    for other in ("memcpy", "memcpy-threads", "stager-reused"):
        for where in (MANY, FEW):
            limit = MAX_OVER_REUSED if other == "stager-reused" else MAX_OVER_MEMCPY[where]
            ratio = results.ratio(OURS, other, "blocked", where, seconds)
            yield bounded(f"blocked, {where} tensors", f"<= {limit:.2f} x {other}", ratio, limit, "{:.2f} x")
    kept = _scaled(results.spread(OURS, "beside", MANY, seconds), 1e3)
    limit = MAX_BESIDE_S * 1e3
    yield bounded(f"blocked, asynchronous staging, {MANY} tensors", f"<= {limit:.0f} ms", kept, limit, "{:.1f} ms")
    ratio = _first(results, "bucketpoint-prefault")
    yield bounded("first save after prefault()", f"<= {MAX_FIRST:.2f} x memcpy", ratio, MAX_FIRST, "{:.2f} x")
    rate = staging["cap_bytes_per_s"] / 1e6
    for where, title in STEPS.items():
        step = results.spread(OURS, "capped", where, mean_ratio)
        what = f"mean step during an upload at {rate:.0f} MB/s, {title}"
        yield bounded(what, f"<= {MAX_CAPPED_STEP} x idle", step, MAX_CAPPED_STEP, "{:.3f} x")
    for metric, what, over_floor in (
        (mean_ratio, "mean step during an upload at full speed", MAX_OVER_FLOOR),
        (lost, "training time lost per GB at full speed", MAX_LOST_OVER_FLOOR),
    ):
        for peer, limit in (("floor", over_floor), ("s3torchconnector", MAX_OF_PEER)):
            ratio = _ratio_of_medians(results, peer, metric)
            yield bounded(f"{what}, {STEPS['short']}", f"<= {limit:.2f} x {peer}'s", ratio, limit, "{:.2f} x")
    held = results.spread(OURS, "lock", "minio", order_s)
    what = "CPU of the trainer for each GB uploaded, planning and commit apart"
    yield bounded(what, f"<= {MAX_LOCK_S} s", held, MAX_LOCK_S, "{:.3f} s")
    ratio = _ratio_of_medians(results, "bucketpoint-threads", upload_s, "lock", "minio")
    limit = MAX_UPLOAD_OVER_THREADS
    yield bounded("upload with nothing beside it", f"<= {limit:.2f} x threads", ratio, limit, "{:.2f} x")
    for key, what, limit, unit in (
        ("resident_mb", "memory of the process beside the staging memory", MAX_HELPER_MB, "MB"),
        ("ready_s", "the process is ready after", MAX_READY_S, "s"),
    ):
        spread = results.spread(OURS, "helper", "minio", lambda found, key=key: float(found[key]))
        yield bounded(what, f"<= {limit:.0f} {unit}", spread, limit, f"{{:.2f}} {unit}")
    yield from _memory_verdicts(results.of(OURS, "memory", "400"))
    yield from _cuda_verdicts(results)


def _ratio_of_medians(
    results: Results, peer: str, metric: Metric, op: str = "full", where: str = "short"
) -> Spread | None:
    """Ours over a peer's. Rounds are noisy: medians are compared, and not neighbours."""
    ours, theirs = (results.spread(name, op, where, metric) for name in (OURS, peer))
    if ours is None or theirs is None:
        return None
    return Spread(ours.middle / theirs.middle, ours.low / theirs.high, ours.high / theirs.low, ours.count)


def _memory_verdicts(found: Sequence[Measurement]) -> Iterator[Verdict]:
    for one in found:
        over = one["staged_bytes"] - one["state_bytes"]
        spare = SPARE_BYTES_A_TENSOR * one["tensors"] + PAGE
        demanded = f"<= {spare} B ({SPARE_BYTES_A_TENSOR} B a tensor and a page)"
        yield Verdict("staged bytes over the state's", demanded, f"{over} B", over <= spare)
        low, high = min(one["resident"]), max(one["resident"])
        move = (high - low) / one["resident"][0]
        what = f"resident memory over {one['saves']} saves"
        yield Verdict(what, "moves by < 1 %", f"{move:.2%}", move < MAX_RESIDENT_MOVE)
        # Of the staging memory, what stays resident; the rest of the process moves by as much as is allowed above.
        kept = one["staged_bytes"] - (one["resident"][-1] - one["resident_after_close"])
        returned = kept <= MAX_RESIDENT_MOVE * one["staged_bytes"]
        yield Verdict(
            "staging memory after close()",
            "returned",
            f"{kept / 1e6:+.1f} of {one['staged_bytes'] / 1e6:.0f} MB kept",
            returned,
        )
        fewest, most = min(one["descriptors"]), max(one["descriptors"])
        steady = fewest == most and one["descriptors_after_close"] <= most
        measured = f"{fewest} to {most}, {one['descriptors_after_close']} after close()"
        yield Verdict(f"open descriptors over {one['saves']} saves", "constant", measured, steady)


def _cuda_verdicts(results: Results) -> Iterator[Verdict]:
    not_run = next((found["not_run"] for found in results.measurements if "not_run" in found), None)
    speed = results.ratio("memcpy", OURS, "cuda", MANY, seconds)
    kept = _scaled(results.spread("bucketpoint-async", "cuda", MANY, seconds), 1e3)
    rows = (
        ("CUDA: staging, of one pinned copy's speed", f">= {MIN_OF_PINNED:.0%}", speed, "{:.0%}", MIN_OF_PINNED, False),
        ("CUDA: blocked, asynchronous staging of 10 GB", "< 10 ms", kept, "{:.1f} ms", MAX_CUDA_BLOCKED_S * 1e3, True),
    )
    for what, demanded, spread, shape, limit, at_most in rows:
        if spread is None:
            yield Verdict(what, demanded, f"not run: {not_run}" if not_run else "not measured", None)
        else:
            holds = spread.middle < limit if at_most else spread.middle >= limit
            yield Verdict(what, demanded, f"{shown(spread, shape)} n={spread.count}", holds)


def sections(staging: dict[str, Any]) -> Iterator[str]:
    results = Results(staging["measurements"])
    yield "## Staging: what an asynchronous save costs training"
    if staging["quick"]:
        yield "**A quick run: too few rounds to decide anything.**"
    yield "### Blocked time of `async_save`"
    yield (
        f"`--only staging`, {staging['seconds']} s in all. 1 GB on the CPU, after the first save. bucketpoint and "
        "the reused stager upload into a store within the process, the others upload nothing. `memcpy` copies one "
        "stretch of the same size into memory that has been written before."
    )
    yield table(["", "2,000 tensors, ms", "x memcpy", "32 tensors, ms", "x memcpy"], _blocked_rows(results))
    yield "Asynchronous staging, and first saves of a process, each in a fork:"
    yield table(["", "blocked, ms", "x memcpy", "copied after, ms"], _other_rows(results))
    yield "### A training step beside an upload"
    yield (
        "A step of 1 ms is 60 small operations and a small matrix product; one of 30 ms is 200 small operations, "
        "some Python and a 1024 x 1024 matrix product on all cores. *Mean* is the mean step during an upload over "
        "those just before and after; *lost* is the time in `async_save` plus the delay of all steps, in s a GB. "
        "At full speed the upload goes to MinIO on the same cores, at a capped rate to an endpoint that throws bytes "
        "away. *Lock held* is s a GB in which a thread other than the waiting main one held the interpreter's lock, "
        "during an upload with nothing beside it."
    )
    heads = [f"{what}, {title}" for title in STEPS.values() for what in ("mean", "lost")]
    yield table(["", *heads, "lock held"], _step_rows(results, staging["cap_bytes_per_s"]))
    errors = [[found["contender"], found["op"], str(found["error"])] for found in results.errors()]
    if errors:
        yield table(["failed", "", "error"], errors)


def _blocked_rows(results: Results) -> Iterator[list[str]]:
    for name, title in TITLES.items():
        cells = []
        for where in (MANY, FEW):
            taken = _scaled(results.spread(name, "blocked", where, seconds), 1e3)
            ratio = results.ratio(name, "memcpy", "blocked", where, seconds)
            cells += [shown(taken, "{:.0f}", brief=True), "" if name == "memcpy" else shown(ratio, "{:.2f}")]
        if any(cells):
            yield [title, *cells]


def _other_rows(results: Results) -> Iterator[list[str]]:
    beside = results.spread(OURS, "beside", MANY, seconds)
    if beside:
        staged = results.spread(OURS, "beside", MANY, lambda found: float(found["staged_s"]))
        ratio = results.ratio(OURS, "memcpy", "beside", MANY, seconds)
        cells = [shown(_scaled(beside, 1e3), "{:.1f}"), shown(ratio, "{:.2f}"), shown(_scaled(staged, 1e3), "{:.0f}")]
        yield ["bucketpoint, asynchronous staging", *cells]
    for name in ("bucketpoint-prefault", "bucketpoint", "stager-reused"):
        taken = _scaled(results.spread(name, "first", MANY, seconds), 1e3)
        if taken:
            title = "torch `DefaultStager`" if name == "stager-reused" else TITLES[name]
            yield [f"first save, {title}", shown(taken, "{:.0f}"), shown(_first(results, name), "{:.2f}"), ""]


def _step_rows(results: Results, cap_bytes_per_s: float) -> Iterator[list[str]]:
    for op, speed in (("capped", f", at {cap_bytes_per_s / 1e6:.0f} MB/s"), ("full", "")):
        for name in TITLES:
            spreads = [results.spread(name, op, where, metric) for where in STEPS for metric in (mean_ratio, lost)]
            held = results.spread(name, "lock", "minio", lock_s) if op == "full" else None
            if any(spreads):
                cells = [shown(spread, "{:.2f}") for spread in spreads]
                yield [f"{TITLES[name]}{speed}", *cells, shown(held, "{:.2f}", brief=True)]


def _first(results: Results, name: str) -> Spread | None:
    over: Metric = lambda found: float(found["seconds"] / found["memcpy_s"])  # noqa: E731
    return results.spread(name, "first", MANY, over)


def _scaled(spread: Spread | None, factor: float) -> Spread | None:
    if spread is None:
        return None
    return Spread(spread.middle * factor, spread.low * factor, spread.high * factor, spread.count)
