"""Decision on whether a group of ranks reads together: the options, and the model that predicts the load times.

`schedule.py` then decides which rank reads which bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

from bucketpoint.errors import BucketpointError

Mode = Literal["off", "node", "group", "auto"]

WORTHWHILE_BYTES = 64 << 20
"""Bytes a rank below which `auto` reads plainly: the latency of requests decides then, not the number of bytes."""

_WORTHWHILE_GAIN = 0.9


ASSUMED_STORE = 25e9
"""Assumed bytes a second from the store: 200 Gb/s is a common quota of an account."""

ASSUMED_NIC = 12.5e9
"""Assumed bytes a second to one node: a 100 Gb/s port."""


@dataclass(frozen=True)
class Bandwidths:
    """Bandwidths from which `cooperative="auto"` predicts load times, in bytes a second.

    A bandwidth that you do not state is measured, or else assumed.

    Attributes:
        store: bandwidth of the store to the whole group. Assumed: 25 GB/s.
        nic: bandwidth from the store to one node. Assumed: 12.5 GB/s.
        exchange: bandwidth from other ranks to one node, over a separate fabric. Assumed: the exchange shares the port
            through which the store is read, and traffic within a node costs nothing.

    Raises:
        BucketpointError: a bandwidth is not a positive number.
    """

    store: float | None = None
    nic: float | None = None
    exchange: float | None = None

    def __post_init__(self) -> None:
        for name in ("store", "nic", "exchange"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise BucketpointError(f"Bandwidths.{name} must be a positive number of bytes a second, not {value}")


UNKNOWN = Bandwidths()


@dataclass(frozen=True)
class Demand:
    """The amount that the ranks of a group want to read.

    Attributes:
        total: bytes, summed over the ranks.
        distinct: bytes, each counted once however many ranks want it.
        crossing: share of the exchanged bytes that goes from one node to another, 0 to 1.
    """

    ranks: int
    nodes: int
    total: int
    distinct: int
    crossing: float


@dataclass(frozen=True)
class CooperativeDecision:
    """The decision to read together or not, and the reason in words."""

    together: bool
    reason: str


def check_mode(mode: str) -> Mode:
    """Return the mode. Raises BucketpointError for a value that `cooperative=` does not take."""
    if mode not in get_args(Mode):
        raise BucketpointError(
            f"cooperative={mode!r} is not known", remedy=f"Pass one of {', '.join(map(repr, get_args(Mode)))}"
        )
    return cast("Mode", mode)


def _rates(nodes: int, stated: Bandwidths, measured: Bandwidths) -> tuple[float, float, float | None, str]:
    """Return the bandwidths of the store, of a node's port and of the exchange, and in words where each is from."""
    # The measured rate is the smaller one of the store and all ports together, so it is a lower bound of both.
    store, from_store = _first((stated.store, "stated"), (measured.store, "measured"), (ASSUMED_STORE, "assumed"))
    port = None if measured.store is None else measured.store / nodes
    nic, from_nic = _first((stated.nic, "stated"), (port, "measured"), (ASSUMED_NIC, "assumed"))
    # A comparison of a measured exchange with an assumed rate of the store would decide nothing.
    usable = measured.exchange if from_store != "assumed" else None
    exchange = usable / nodes if usable is not None and stated.exchange is None else stated.exchange
    from_exchange = "measured" if stated.exchange is None else "stated"
    origin = "over the same port, assumed" if exchange is None else f"{_gb(exchange)} a node, {from_exchange}"
    return store, nic, exchange, f"store {_gb(store)}, {from_store}; port {_gb(nic)}, {from_nic}; exchange {origin}"


def _first(*rates: tuple[float | None, str]) -> tuple[float, str]:
    return next((value, origin) for value, origin in rates if value is not None)


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def predict(demand: Demand, stated: Bandwidths, measured: Bandwidths = UNKNOWN) -> tuple[float, float]:
    """Return the seconds of a load if each rank reads all it wants, and if each distinct byte is read only once."""
    store, nic, exchange, _ = _rates(demand.nodes, stated, measured)
    plain = max(demand.total / (demand.nodes * nic), demand.total / store)
    handed_on = demand.total - demand.distinct
    read = max(demand.distinct / (demand.nodes * nic), demand.distinct / store)
    if exchange is None:
        through_nic = demand.distinct + demand.crossing * handed_on
        return plain, max(read, through_nic / (demand.nodes * nic))
    exchanging = handed_on / (demand.nodes * exchange)
    # Added, not overlapped: a measured exchange may have had the port and the cores to itself, and now shares them.
    return plain, read + exchanging if stated.exchange is None else max(read, exchanging)


def decide(mode: Mode, demand: Demand, stated: Bandwidths, measured: Bandwidths = UNKNOWN) -> CooperativeDecision:
    """Decide whether a group reads together. With the same arguments, the decision is the same on every rank.

    Args:
        measured: bandwidths that all ranks together measured earlier. The rate of the exchange is used only if the rate
            of the store is stated or measured too.
    """
    decision = unconditional(mode, demand)
    if decision is not None:
        return decision
    _, _, exchange, origins = _rates(demand.nodes, stated, measured)
    if demand.nodes == 1 and exchange is None:
        return CooperativeDecision(True, "all ranks are on one node, whose port to the store they share")
    plain, together = predict(demand, stated, measured)
    figures = f"predicted {plain:.2f} s if each rank reads alone and {together:.2f} s together ({origins})"
    if together <= _WORTHWHILE_GAIN * plain:
        return CooperativeDecision(True, figures)
    return CooperativeDecision(False, f"{figures}, so there is no gain")


def unconditional(mode: Mode, demand: Demand) -> CooperativeDecision | None:
    """Return the decision that needs no bandwidths; None if bandwidths are needed."""
    if demand.total == demand.distinct:
        return CooperativeDecision(False, "no two ranks need the same bytes")
    if mode != "auto":
        return CooperativeDecision(True, f"cooperative={mode!r} was asked for")
    if demand.total < WORTHWHILE_BYTES * demand.ranks:
        return CooperativeDecision(False, f"the ranks need less than {WORTHWHILE_BYTES >> 20} MiB each")
    return None
