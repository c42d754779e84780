"""Which transfers are simulated, with what settings, and the outcome of each as plain values."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bucketpoint.transfer import TransferOptions
from sim.services import Cluster, Service
from sim.store import simulate
from sim.transfers import load_work, partitions, save_work

MIB = 1 << 20
SEED = 20261121
RANKS = (1024, 4096, 10240)
DEFAULTS = TransferOptions()


@dataclass(frozen=True)
class Scenario:
    """One simulated transfer.

    Attributes:
        op: "save" or "load".
        device: the tensors are on a device and not in host memory.
        refuse: the store answers 503 above its rate; else requests wait in line.
    """

    op: str
    terabytes: int
    ranks: int
    partitions: int
    device: bool = False
    refuse: bool = False
    part_mib: int = DEFAULTS.part_bytes // MIB
    connections: int = DEFAULTS.connections

    def run(self) -> dict[str, Any]:
        began = time.process_time()
        nbytes = self.terabytes * 10**12 // self.ranks
        options = TransferOptions(part_bytes=self.part_mib * MIB, connections=self.connections)
        work = (save_work if self.op == "save" else load_work)(nbytes, options, device=self.device)
        outcome = simulate(
            work,
            partitions(self.ranks, nbytes, self.partitions),
            Cluster(self.ranks, connections=self.connections),
            Service(partitions=self.partitions),
            seed=SEED,
            refuse=self.refuse,
            # Minutes of waiting in line, in which no moment matters.
            step_s=0.1 if self.partitions == 1 and not self.refuse else None,
        )
        return {
            **asdict(self),
            "wall_s": outcome.wall_s,
            "ideal_s": outcome.ideal_s,
            "over_ideal": math.inf if outcome.failed else outcome.over_ideal,
            "requests": work.requests * self.ranks,
            "refused": outcome.refused,
            "failed": outcome.failed,
            "peak_per_partition": outcome.peak_per_partition,
            "cpu_s": time.process_time() - began,
        }


SETTINGS = ((32, 24), (48, 24), (128, 12), (256, 4), (1024, 1))
"""(part MiB, connections) beside each other, the default first."""


def scenarios(*, quick: bool) -> Iterator[Scenario]:
    if quick:
        yield Scenario("save", 10, 10240, 64)
        yield Scenario("save", 10, 1024, 64)
        yield Scenario("save", 10, 1024, 64, refuse=True)
        yield Scenario("load", 10, 1024, 64)
        return
    for ranks in RANKS:
        for op in ("save", "load"):
            for terabytes in (1, 10, 30):
                yield Scenario(op, terabytes, ranks, 64)
        for count in (8, 1):
            yield Scenario("save", 10, ranks, count)
        for count in (64, 8, 1):
            yield Scenario("save", 10, ranks, count, refuse=True)
    for ranks in (RANKS[0], RANKS[-1]):
        for op in ("save", "load"):
            yield Scenario(op, 10, ranks, 64, device=True)
    for part_mib, connections in SETTINGS[1:]:
        for count in (64, 1):
            yield Scenario("save", 10, 10240, count, part_mib=part_mib, connections=connections)
        for count in (8, 1):
            yield Scenario("save", 10, 10240, count, part_mib=part_mib, connections=connections, refuse=True)
