"""Run many seeds over several processes, and print what went wrong, by kind: `python -m tests.simulation.simulate`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator

from tests.simulation.guards import GUARDS, switched_off
from tests.simulation.patches import simulated
from tests.simulation.run import Outcome, run
from tests.simulation.shrink import shrunk, told

_real_clock = time.perf_counter
_CHUNK = 100

Found = tuple[int, str, str, str]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one alone, with its trace")
    parser.add_argument("--family", default="", help="scenarios of this family only")
    parser.add_argument(
        "--off", default="", choices=["", *GUARDS], metavar="GUARD", help="switch off a guard of the product"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="do not make violations smaller")
    parser.add_argument("--traces", type=int, default=1, help="how many of each kind are printed with a trace")
    return parser.parse_args()


def _some(given: tuple[int, int, str, str]) -> tuple[int, int, list[Found]]:
    first, count, family, off = given
    found, requests = [], 0
    with simulated(), switched_off(off):
        for seed in range(first, first + count):
            made = run(seed, only=family)
            requests += made.requests
            if made.kind:
                found.append((seed, made.kind, made.scenario.family, str(made.violation)))
    return count, requests, found


def _chunks(first: int, seeds: int, family: str, off: str) -> Iterator[tuple[int, int, str, str]]:
    for start in range(first, first + seeds, _CHUNK):
        yield start, min(_CHUNK, first + seeds - start), family, off


def small(seed: int, family: str, off: str, *, whole: bool = False) -> Outcome:
    """The run of a seed, made small unless `whole`."""
    with simulated(), switched_off(off):
        made = run(seed, only=family)
        return made if whole or not made.kind else shrunk(made)


def main() -> int:
    """Returns 1 if anything was violated."""
    chosen = _arguments()
    if chosen.seed is not None:
        made = small(chosen.seed, chosen.family, chosen.off, whole=chosen.whole)
        print(told(made))
        return 1 if made.kind else 0
    began = _real_clock()
    by_kind: dict[str, list[Found]] = {}
    done = requests = 0
    with multiprocessing.get_context("fork").Pool(chosen.processes) as pool:
        work = _chunks(chosen.first, chosen.seeds, chosen.family, chosen.off)
        for count, sent, found in pool.imap(_some, work):
            done, requests = done + count, requests + sent
            for one in found:
                by_kind.setdefault(one[1], []).append(one)
    took = _real_clock() - began
    for kind, ones in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        families = sorted({one[2] for one in ones})
        print(f"{kind}: {len(ones)} of {done}, first with seed {ones[0][0]} after {ones[0][0] - chosen.first + 1}")
        print(f"  seeds {', '.join(str(one[0]) for one in ones[:8])}; {', '.join(families)}")
        for one in ones[: chosen.traces]:
            text = told(small(one[0], chosen.family, chosen.off, whole=chosen.whole))
            print("  " + text.replace("\n", "\n  "))
    violations = sum(map(len, by_kind.values()))
    pace = done / took * 60
    print(
        f"{done} schedules, {requests} requests, {violations} violations, in {took:.0f} s: {pace:.0f} a minute, "
        f"{chosen.processes} processes"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of a set of strings is the process's own, and may decide about the order of requests.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-W", "ignore", "-m", "tests.simulation.simulate", *sys.argv[1:]])
    sys.exit(main())
