"""Cost of OpenTelemetry's spans and metrics to a save: CPU time of the saving process, and its peak memory.

    python -m bench.telemetry_cost
    python -m bench.telemetry_cost --before /path/to/older/src   # the older version's saves too, without OpenTelemetry

Saves to a local folder, with the SDK's spans and metrics, and without: a save of each kind is a pair. Both run in one
process, in turn; for the saves without, bucketpoint finds no OpenTelemetry, as in a program that has not imported it.
The process that uploads beside training is not counted: it records nothing. Memory is that of processes that make saves
of one kind only. Each figure is that of several processes, since other work on the machine changes CPU times too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.resident import memory

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 3
"""Saves that are not counted: they allocate memory and start threads."""

KINDS = ("not imported", "imported only", "spans and metrics")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=30, help="pairs of saves in a process")
    parser.add_argument("--rounds", type=int, default=5, help="processes for each figure")
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--nbytes", type=int, default=64_000_000)
    parser.add_argument("--before", type=Path, help="folder with an older bucketpoint, such as the src of a checkout")
    parser.add_argument("--only", choices=("cpu", "memory", "before"), help="one of the figures; default: all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        _child(args.child, args.saves, args.tensors, args.nbytes)
        return
    own = ["--saves", str(args.saves), "--tensors", str(args.tensors), "--nbytes", str(args.nbytes)]
    if args.only in (None, "cpu"):
        _cpu(args.rounds, own)
    if args.only in (None, "memory"):
        _memory(args.rounds, own)
    if args.only in (None, "before") and args.before is not None:
        _versions(args.rounds, args.saves, own, args.before.resolve())


# -- the parent --------------------------------------------------------------------------------------------------------


def _cpu(rounds: int, own: Sequence[str]) -> None:
    print("CPU time of a save with spans and metrics, over one without, of pairs in one process")
    ratios: list[float] = []
    for number in range(1, rounds + 1):
        pairs = _run(["--child", "pairs", *own])["pairs"]
        found = [on / off for off, on, _ in pairs]
        ratios += found
        off, inside = (statistics.median(each[index] for each in pairs) for index in (0, 2))
        print(
            f"  process {number}: {_spread(found)}; a save without takes {off * 1e3:.1f} ms of CPU; "
            f"{inside * 1e3:.3f} ms in the calls of telemetry, {inside / off:.4f} of it",
            flush=True,
        )
    print(f"  all {len(ratios)} pairs: {_spread(ratios)}")


def _memory(rounds: int, own: Sequence[str]) -> None:
    print("Peak memory (VmHWM) of a process that saves, MB")
    peaks: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        # Another first one each time.
        for kind in (*KINDS[number % 3 :], *KINDS[: number % 3]):
            peaks[kind].append(_run(["--child", kind, *own])["peak_bytes"] / 1e6)
    for kind, found in peaks.items():
        each = " ".join(f"{peak:.1f}" for peak in sorted(found))
        print(f"  OpenTelemetry {kind}: median {statistics.median(found):.1f} ({each})")
    _, imported, used = (statistics.median(found) for found in peaks.values())
    print(f"  spans and metrics of bucketpoint: {used - imported:+.1f} MB", flush=True)


def _versions(rounds: int, saves: int, own: Sequence[str], before: Path) -> None:
    print(f"CPU time of a save with spans and metrics, over one of {before}, of pairs in two processes")
    ratios: list[float] = []
    for number in range(1, rounds + 1):
        sources = [before, ROOT / "src"]
        children = [
            _start(["--child", kind, *own], source, stdin=subprocess.PIPE)
            for kind, source in zip(("asked: not imported", "asked: spans and metrics"), sources, strict=True)
        ]
        found = []
        for index in range(WARM_UP + saves):
            order = (0, 1) if index % 2 else (1, 0)
            cpu = {each: _ask(children[each]) for each in order}
            found.append(cpu[1] / cpu[0])
        for child in children:
            child.communicate()
        print(f"  processes {number}: {_spread(found[WARM_UP:])}", flush=True)
        ratios += found[WARM_UP:]
    print(f"  all {len(ratios)} pairs: {_spread(ratios)}")


def _spread(ratios: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(ratios, n=4)
    middle, mean = statistics.median(ratios), statistics.mean(ratios)
    return f"median {middle:.4f}, mean {mean:.4f}, quartiles {low:.3f} to {high:.3f}"


def _start(arguments: Sequence[str], source: Path, **streams: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.telemetry_cost", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        text=True,
        **streams,  # type: ignore[call-overload]
    )


def _run(arguments: Sequence[str]) -> Any:
    with _start(arguments, ROOT / "src") as child:
        printed, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"a process failed with status {child.returncode}")
    return json.loads(printed.splitlines()[-1])


def _ask(child: subprocess.Popen[str]) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("save\n")
    child.stdin.flush()
    return float(child.stdout.readline())


# -- a process that saves ----------------------------------------------------------------------------------------------


def _child(kind: str, saves: int, tensors: int, nbytes: int) -> None:
    if "not imported" not in kind:
        _configure()
    import torch

    from bucketpoint import BucketWriter

    state = {f"layer.{index}.weight": torch.full((nbytes // tensors // 4,), float(index)) for index in range(tensors)}
    with tempfile.TemporaryDirectory(prefix="bucketpoint-cost-") as folder, closing(BucketWriter()) as writer:
        if kind == "pairs":
            print(json.dumps({"pairs": _pairs(state, writer, folder, saves)}))
            return
        if kind == "imported only":
            _switch(on=False)
        for number in range(WARM_UP + saves):
            if kind.startswith("asked") and not sys.stdin.readline():
                return
            spent = _save(state, writer, f"{folder}/run/step-{number}")
            if kind.startswith("asked"):
                print(spent, flush=True)
        print(json.dumps({"peak_bytes": memory()["VmHWM"]}))


def _pairs(state: dict[str, Any], writer: Any, folder: str, saves: int) -> list[tuple[float, float, float]]:
    """Return the CPU seconds of each pair: without, with, and those of the latter in the calls of telemetry."""
    inside = _clock_calls()
    pairs = []
    for number in range(WARM_UP + saves):
        spent: dict[bool, float] = {}
        inside[0] = 0.0
        for on in (True, False) if number % 2 else (False, True):
            _switch(on=on)
            before = inside[0]
            spent[on] = _save(state, writer, f"{folder}/run/step-{2 * number + on}")
            if not on:
                inside[0] = before
        pairs.append((spent[False], spent[True], inside[0]))
    return pairs[WARM_UP:]


def _save(state: dict[str, Any], writer: Any, url: str) -> float:
    """Save once, and return the CPU seconds of this process."""
    import bucketpoint

    next(iter(state.values())).add_(1)  # A warning is logged of a state that does not change.
    gc.collect()
    began = time.process_time()
    bucketpoint.async_save(state, url, storage_writer=writer).result()
    spent = time.process_time() - began
    shutil.rmtree(url)
    return spent


def _configure() -> None:
    """Configure the SDK with exporters that keep nothing, as in a program that exports spans and metrics."""
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    class Discard(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(Discard()))
    trace.set_tracer_provider(tracers)


def _switch(*, on: bool) -> None:
    """Let bucketpoint find OpenTelemetry, or nothing, as where it is not imported."""
    from bucketpoint import telemetry

    telemetry._loaded = (lambda module: sys.modules.get(f"opentelemetry.{module}")) if on else (lambda module: None)


def _clock_calls() -> list[float]:
    """Count the CPU seconds of the calls that make spans and record metrics, from now on."""
    import bucketpoint.dcp.async_save
    import bucketpoint.dcp.writer

    total = [0.0]

    def clocked(call: Any) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                total[0] += time.thread_time() - began

        return replacement

    for module in (bucketpoint.dcp.async_save, bucketpoint.dcp.writer):
        for name in ("begin_save", "end_save"):
            if hasattr(module, name):
                setattr(module, name, clocked(getattr(module, name)))
    return total


if __name__ == "__main__":
    main()
