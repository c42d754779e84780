"""What the retention part measures: plans of many rows, training steps beside a pruner, and one prune at a time.

A process of its own. Reads one JSON command a line and answers with one JSON line.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from bench.lines import commands, speaker
from bench.staging.steps import SETTLE_S, WORK, Trainer
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.deletion.prune import prune_by
from bucketpoint.catalog.deletion.worker import PruneWorker, Throttle
from bucketpoint.retention import (
    Await,
    Best,
    EveryHours,
    EverySteps,
    Keep,
    MaxDelete,
    Plan,
    Prune,
    RetentionPolicy,
    Row,
    circuit_breaker,
    plan,
)
from catalog.memory import save

OWN = 3
"""Objects that the tests' smallest checkpoint has: `.metadata`, weights, moments."""

IDLE, CONTROL, PRUNING = WINDOWS = ("idle", "control", "pruning")

RULES = RetentionPolicy(
    Keep(
        latest=3,
        best=[Best("eval/loss", "min", 5, wait=Await(timedelta(hours=12), 4)), Best("eval/accuracy", "max", 3)],
        every=[EverySteps(1000, until=10_000), EverySteps(10_000), EveryHours(24, last=14, thin="weights")],
        within=timedelta(hours=6),
        steps=[143_000],
    )
)
"""Every kind of rule that needs no code of a user's."""

LATEST = RetentionPolicy(
    Keep(latest=1), prune=Prune(grace=timedelta(0), max_delete=MaxDelete(count=1_000_000, fraction=1.0))
)
"""Whatever is not the newest goes at once."""


def rows(number: int) -> list[Row]:
    """A long run, in the order of its steps as a listing has it; two in three have a metric."""
    values = random.Random(number)
    return [
        Row(
            100 * place,
            1.7e9 + 300 * place,
            f"{place:012x}",
            bytes=3,
            groups={"model": 1, "optim": 2},
            metrics={"eval/loss": values.random()} if place % 3 else {},
        )
        for place in range(number)
    ]


class Process:
    """The commands."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._trainer = Trainer(WORK["long"])
        for _ in range(20):
            self._trainer.step()

    def engine(self, number: int) -> dict[str, Any]:
        """Time one plan with the verdict on it, as a pruner makes after every commit, and its words in a dry run."""
        given = rows(number)
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        made = plan(RULES, given)
        circuit_breaker(made, count=20, fraction=0.5)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        words = time.process_time()
        explained = _words(made)
        words = time.process_time() - words
        return {"cpu_s": cpu, "wall_s": wall, "words_cpu_s": words, "rows": number, "explained": explained}

    def fill(self, root: str, first: int, number: int, objects: int) -> dict[str, Any]:
        """Commit light checkpoints of so many objects, of which one is `.metadata`."""
        catalog = open_catalog(root)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda step: save(catalog, step, objects=objects - OWN), range(first, first + number - 1)))
        # Alone, so that the newest by step is the newest by time too, and all others go.
        save(catalog, first + number - 1, objects=objects - OWN)
        return {}

    def beside(self, root: str, rests: bool, cycles: int, window_s: float) -> dict[str, Any]:
        """Steps without a prune, again without, and beside one, in turns; and what the prune came to."""
        going = threading.Event()

        def wait(seconds: float) -> None:
            time.sleep(seconds if rests else 0.0)
            going.wait()

        # A clock that hardly moves makes rests of nothing.
        clock = time.monotonic if rests else itertools.count(0.0, 1e-9).__next__
        worker = PruneWorker(open_catalog(root), LATEST, pace=Throttle(clock=clock, wait=wait))
        found: list[dict[str, Any]] = []
        begun = time.monotonic()
        worker.ask()
        asked = time.monotonic() - begun
        pruning_s = 0.0
        while len(found) < cycles:
            cycle: dict[str, Any] = {}
            # Each has every place in turn, so that a machine that slows down favours none.
            turn = len(found) % len(WINDOWS)
            for name in WINDOWS[turn:] + WINDOWS[:turn]:
                cycle[name] = self._window(window_s, going if name == PRUNING else None)
                pruning_s += window_s * (name == PRUNING)
            if not any(thread.name == "bucketpoint-prune" for thread in threading.enumerate()):
                break
            found.append(cycle)
        begun = time.monotonic()
        going.set()
        worker.drain()
        if worker.failure is not None or worker.last is None:
            raise RuntimeError(f"the pruner failed: {worker.failure}")
        return {
            "cycles": found,
            "asked_s": asked,
            "beside_s": pruning_s,
            "hurried_s": time.monotonic() - begun,
            "deleted": len(worker.last.done.deleted),
        }

    def _window(self, seconds: float, going: threading.Event | None) -> dict[str, float]:
        """Steps for so long, while the pruner may go on if there is an event to tell it so."""
        gc.collect()
        # The request that is under way at the end of a window.
        time.sleep(SETTLE_S)
        if going is not None:
            going.set()
        begun, others = time.monotonic(), time.process_time() - time.thread_time()
        steps = self._trainer.steps(lambda: time.monotonic() - begun >= seconds)
        lasted, others = time.monotonic() - begun, time.process_time() - time.thread_time() - others
        if going is not None:
            going.clear()
        return {
            "steps": len(steps),
            "median_s": statistics.median(steps),
            "mean_s": statistics.mean(steps),
            "others_cpu": others / lasted,
        }

    def once(self, root: str, what: str) -> dict[str, Any]:
        """One call, whose requests are looked at from outside."""
        catalog = open_catalog(root)
        begun = time.monotonic()
        if what == "prune":
            done = len(prune_by(catalog, LATEST, holder="bench").done.deleted)
        elif what == "plan":
            done = len(catalog.snapshot().rows())
        else:
            done = next(catalog.candidates()).step
        end = time.monotonic()
        return {"start": begun, "end": end, "wall_s": end - begun, "done": done}


def _words(made: Plan) -> int:
    return sum(len(str(entry.miss)) for entry in made.deleted)


def main() -> None:
    say = speaker()
    process = Process(**json.loads(sys.argv[1]))
    for command in commands():
        try:
            found = getattr(process, command.pop("do"))(**command)
        except Exception as error:  # noqa: BLE001 (reported)
            found = {"error": f"{type(error).__name__}: {error}"}
        say(found)


if __name__ == "__main__":
    main()
