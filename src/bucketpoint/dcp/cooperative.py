"""Whether a group of ranks should read together: the options, the model of how long it takes, and the decision.

Pure arithmetic: no I/O and no collectives. Who reads what is `cooperative_schedule`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from bucketpoint.errors import BucketpointError

Mode = Literal["off", "node", "group", "auto"]

WORTHWHILE_BYTES = 64 << 20
"""Below this much a rank, `auto` reads plainly: the latency of requests decides there, and not the bytes."""

_WORTHWHILE_GAIN = 0.9


@dataclass(frozen=True)
class Bandwidths:
    """What `cooperative="auto"` reckons with, in bytes a second.

    Attributes:
        store: what the store gives the whole group at once. 25 GB/s: 200 Gb/s is a common quota of an account.
        nic: what one node can receive from the store. 12.5 GB/s: a 100 Gb/s port.
        exchange: what one node can receive from the other ranks. None: they share the port that the store is read
            through, and what stays within a node costs nothing.
    """

    store: float = 25e9
    nic: float = 12.5e9
    exchange: float | None = None

    def __post_init__(self) -> None:
        for name in ("store", "nic", "exchange"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise BucketpointError(f"Bandwidths.{name} must be a positive number of bytes a second, not {value}")


@dataclass(frozen=True)
class Demand:
    """What the ranks of a group want to read.

    Attributes:
        total: bytes, summed over the ranks.
        distinct: bytes, each counted once however many ranks want it.
        crossing: the part of the exchanged bytes that goes from one node to another, 0 to 1.
    """

    ranks: int
    nodes: int
    total: int
    distinct: int
    crossing: float


@dataclass(frozen=True)
class Decision:
    """Whether to read together, and why, in words."""

    together: bool
    reason: str


def check_mode(mode: str) -> Mode:
    """Raises BucketpointError for anything that `cooperative=` does not take."""
    for known in get_args(Mode):
        if mode == known:
            return known  # type: ignore[no-any-return]
    raise BucketpointError(
        f"cooperative={mode!r} is not known", remedy=f"Pass one of {', '.join(map(repr, get_args(Mode)))}"
    )


def predict(demand: Demand, bandwidths: Bandwidths) -> tuple[float, float]:
    """Seconds that a load takes if each rank reads all it wants, and if each distinct byte is read once."""
    plain = max(demand.total / (demand.nodes * bandwidths.nic), demand.total / bandwidths.store)
    handed_on = demand.total - demand.distinct
    read = max(demand.distinct / (demand.nodes * bandwidths.nic), demand.distinct / bandwidths.store)
    if bandwidths.exchange is None:
        through_nic = demand.distinct + demand.crossing * handed_on
        return plain, max(read, through_nic / (demand.nodes * bandwidths.nic))
    return plain, max(read, handed_on / (demand.nodes * bandwidths.exchange))


def decide(mode: Mode, demand: Demand, bandwidths: Bandwidths) -> Decision:
    """Whether a group reads together. The same on every rank that is given the same arguments."""
    if demand.total == demand.distinct:
        return Decision(False, "no two ranks want the same bytes")
    if mode != "auto":
        return Decision(True, f"cooperative={mode!r} was asked for")
    if demand.total < WORTHWHILE_BYTES * demand.ranks:
        return Decision(False, f"a rank wants less than {WORTHWHILE_BYTES >> 20} MiB")
    if demand.nodes == 1 and bandwidths.exchange is None:
        return Decision(True, "all ranks are on one node, whose port to the store they share")
    plain, together = predict(demand, bandwidths)
    figures = f"predicted {plain:.2f} s plain and {together:.2f} s together"
    if together <= _WORTHWHILE_GAIN * plain:
        return Decision(True, figures)
    return Decision(False, f"{figures}, which is no gain")
