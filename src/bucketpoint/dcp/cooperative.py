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


ASSUMED_STORE = 25e9
"""Bytes a second: 200 Gb/s is a common quota of an account."""

ASSUMED_NIC = 12.5e9
"""Bytes a second: a 100 Gb/s port."""


@dataclass(frozen=True)
class Bandwidths:
    """What `cooperative="auto"` reckons with, in bytes a second. What is not stated is measured, or else assumed.

    Attributes:
        store: what the store gives the whole group at once. Assumed: 25 GB/s.
        nic: what one node can receive from the store. Assumed: 12.5 GB/s.
        exchange: what one node can receive from the other ranks, over a fabric of its own. Assumed: they share the
            port that the store is read through, and what stays within a node costs nothing.
    """

    store: float | None = None
    nic: float | None = None
    exchange: float | None = None

    def __post_init__(self) -> None:
        for name in ("store", "nic", "exchange"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise BucketpointError(f"Bandwidths.{name} must be a positive number of bytes a second, not {value}")


@dataclass(frozen=True)
class Measured:
    """What the ranks of a group found earlier, all of them together, in bytes a second; None: nothing yet.

    Attributes:
        store: what they read at once from the store.
        exchange: what they handed to each other at once. Of use only beside a rate of the store that is stated or
            measured too: where one figure is assumed, comparing the other with it decides nothing.
    """

    store: float | None = None
    exchange: float | None = None


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


@dataclass(frozen=True)
class _Rates:
    """What `predict` reckons with. `apart`: the exchange and the reads do not slow each other down."""

    store: float
    nic: float
    exchange: float | None
    apart: bool
    origins: str


def _rates(nodes: int, stated: Bandwidths, measured: Measured) -> _Rates:
    # What all ranks received at once is the least of what the store and the ports give.
    store, from_store = _first((stated.store, "stated"), (measured.store, "measured"), (ASSUMED_STORE, "assumed"))
    port = None if measured.store is None else measured.store / nodes
    nic, from_nic = _first((stated.nic, "stated"), (port, "measured"), (ASSUMED_NIC, "assumed"))
    known = from_store != "assumed"
    handed = measured.exchange / nodes if measured.exchange is not None and known else None
    exchange = stated.exchange if stated.exchange is not None else handed
    from_exchange = "stated" if stated.exchange is not None else "measured"
    said = "over the same port, assumed" if exchange is None else f"{_gb(exchange)} a node, {from_exchange}"
    origins = f"store {_gb(store)}, {from_store}; port {_gb(nic)}, {from_nic}; exchange {said}"
    return _Rates(store, nic, exchange, stated.exchange is not None, origins)


def _first(*found: tuple[float | None, str]) -> tuple[float, str]:
    return next((value, origin) for value, origin in found if value is not None)


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def predict(demand: Demand, bandwidths: Bandwidths, measured: Measured | None = None) -> tuple[float, float]:
    """Seconds that a load takes if each rank reads all it wants, and if each distinct byte is read once."""
    return _predict(demand, _rates(demand.nodes, bandwidths, measured or Measured()))


def _predict(demand: Demand, rates: _Rates) -> tuple[float, float]:
    plain = max(demand.total / (demand.nodes * rates.nic), demand.total / rates.store)
    handed_on = demand.total - demand.distinct
    read = max(demand.distinct / (demand.nodes * rates.nic), demand.distinct / rates.store)
    if rates.exchange is None:
        through_nic = demand.distinct + demand.crossing * handed_on
        return plain, max(read, through_nic / (demand.nodes * rates.nic))
    exchange = handed_on / (demand.nodes * rates.exchange)
    # What was measured may have had the port and the cores for itself, which it now shares.
    return plain, max(read, exchange) if rates.apart else read + exchange


def decide(mode: Mode, demand: Demand, bandwidths: Bandwidths, measured: Measured | None = None) -> Decision:
    """Whether a group reads together. The same on every rank that is given the same arguments."""
    known = unconditional(mode, demand)
    if known is not None:
        return known
    rates = _rates(demand.nodes, bandwidths, measured or Measured())
    if demand.nodes == 1 and rates.exchange is None:
        return Decision(True, "all ranks are on one node, whose port to the store they share")
    plain, together = _predict(demand, rates)
    figures = f"predicted {plain:.2f} s plain and {together:.2f} s together ({rates.origins})"
    if together <= _WORTHWHILE_GAIN * plain:
        return Decision(True, figures)
    return Decision(False, f"{figures}, which is no gain")


def unconditional(mode: Mode, demand: Demand) -> Decision | None:
    """What is decided without bandwidths, if anything is."""
    if demand.total == demand.distinct:
        return Decision(False, "no two ranks want the same bytes")
    if mode != "auto":
        return Decision(True, f"cooperative={mode!r} was asked for")
    if demand.total < WORTHWHILE_BYTES * demand.ranks:
        return Decision(False, f"a rank wants less than {WORTHWHILE_BYTES >> 20} MiB")
    return None
