"""A load in which ranks read for each other: find the ranks, agree on a schedule, and run it round by round.

All collectives are made here, on the caller's thread; store reads and checks run on other threads. `schedule.py`
computes the schedule, and `decision.py` decides whether it is worth it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bucketpoint.dcp.cooperative.decision import (
    UNKNOWN,
    Bandwidths,
    CooperativeDecision,
    Demand,
    check_mode,
    decide,
    unconditional,
)
from bucketpoint.dcp.cooperative.peers import Message, Note, Peers, meet
from bucketpoint.dcp.cooperative.rounds import SharedLoad, reason_of, round_bytes
from bucketpoint.dcp.cooperative.schedule import Overlaps, Schedule
from bucketpoint.dcp.error_boundary import decoded, from_plain, to_plain
from bucketpoint.errors import BucketpointError, PeerFailedError
from bucketpoint.stores import Store
from bucketpoint.transfer import BufferPool, Meter, Request, TransferOptions, fetch

_PLANNED, _REFUSED = 0, 1

_TRIAL_BYTES = 4 << 20
"""Bytes of a trial exchange: enough to fill the buffers of a connection several times, and less than a hundredth of the
load that is decided about."""


class Cooperation:
    """State of cooperative loading in one reader, kept from one load to the next.

    Args:
        mode: `"node"`, `"group"` or `"auto"`.
        group: torch's process group; None for all ranks of the job.
    """

    def __init__(self, mode: str, group: Any, bandwidths: Bandwidths | None) -> None:
        self._mode = check_mode(mode)
        self._group = group
        self._bandwidths = bandwidths or Bandwidths()
        self._exchange: Peers | None = None
        self._ranks: tuple[int, ...] = ()
        self._measured = UNKNOWN
        self.explanation = "Nothing has been loaded yet"
        self.peak_bytes = 0
        """Most host memory for buffers that the last cooperative load held at once on this rank."""

    def connect(self, url: str | None) -> None:
        """Begin a load: find the ranks that take part.

        A collective on the group, unless there is one rank.
        """
        self.close()
        self.peak_bytes = 0
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self._group) == 1:
            self.explanation = "Plain: there is one rank"
        else:
            stated = self._bandwidths
            members = meet(self._mode, url, self._group, (stated.store, stated.nic, stated.exchange))
            ranks = tuple(member.rank for member in members)
            if ranks != self._ranks:
                self._ranks, self._measured = ranks, UNKNOWN
            self.explanation = "Plain: this rank is alone on its node"
            if len(members) > 1:
                self._exchange = Peers(members, self._group)

    def close(self) -> None:
        """Give up a load that has begun and not ended. Other ranks are told, so that none waits for this one."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.leave("it gave up this load before it read anything")

    def _end(self) -> None:
        """End the cooperation: all reads until the next `connect` are plain."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def read_once(self, get: Callable[[], bytes]) -> bytes:
        """Call `get` on the first member only; return or raise the same on all members."""
        exchange = self._exchange
        if exchange is None:
            return get()
        data, outcome = b"", _PLANNED
        with self.taking_part():
            if exchange.rank == 0:
                try:
                    data = get()
                except Exception as error:  # noqa: BLE001 (raised on every member)
                    ours = error if isinstance(error, BucketpointError) else BucketpointError(reason_of(error))
                    data, outcome = json.dumps(to_plain(ours)).encode(), _REFUSED
            nbytes, outcome = exchange.agree(Note((len(data), outcome)))[0].numbers
            received = exchange.broadcast(data, nbytes)
        if outcome == _REFUSED:
            self._end()
            self.explanation = "Plain: there is no common metadata"
            raise from_plain(decoded(bytes(received)))
        return data if exchange.rank == 0 else bytes(received)

    def fetch(
        self,
        store: Store,
        plan: Callable[[], list[Request]],
        options: TransferOptions,
        *,
        pool: BufferPool,
        meter: Meter,
    ) -> None:
        """Plan this rank's requests and run them. Bytes that several members want are read together.

        Raises:
            PeerFailedError: another rank failed; it is named.
            BucketpointError: another rank is lost.
        """
        exchange = self._exchange
        if exchange is None:
            _fetch_alone(store, plan(), options, pool, meter)
            return
        with self.taking_part():
            exchange.arrive()
            try:
                requests = plan()
            except Exception as error:
                with contextlib.suppress(BucketpointError):
                    exchange.agree(Note(failure=reason_of(error)))
                raise
            numbers = {key: _number_of(key) for key in {request.key for request in requests}}
            schedule = self._agree(exchange, requests, numbers, options)
            if schedule is None:
                self._end()
                began = time.monotonic()
                _fetch_alone(store, requests, options, pool, meter)
                rate = meter.done_bytes / max(time.monotonic() - began, 1e-9)
                self._measured = replace(self._measured, store=rate or None)
                return
            load = SharedLoad(exchange, schedule, requests, numbers, store=store, options=options, meter=meter)
            load.run(self.taking_part)
            self._measured = Bandwidths(load.store_rate, exchange=load.exchange_rate or self._measured.exchange)
            self.peak_bytes = load.peak_bytes
            self.explanation += f". This rank read {meter.done_bytes / 1e9:.3f} GB"
        self._end()

    def _agree(
        self, exchange: Peers, requests: list[Request], numbers: dict[str, int], options: TransferOptions
    ) -> Schedule | None:
        """Agree on a schedule; return None if each rank reads for itself. All members decide the same."""
        notes = exchange.agree(Note((len(requests), options.max_inflight_bytes)))
        # The caller may have set another default device, as it is common when a model is built.
        with torch.device("cpu"):
            table = [(numbers[own.key], own.start, own.stop) for own in requests]
            rows = torch.tensor(table, dtype=torch.int64).reshape(-1, 3)
            overlaps = Overlaps(exchange.gather(rows, [note.numbers[0] for note in notes]), exchange.nodes)
            measured = self._measure(exchange, overlaps.demand)
            decision = decide(self._mode, overlaps.demand, self._bandwidths, measured)
            self.explanation = _explain(decision, overlaps.demand)
            if not decision.together:
                return None
            size = round_bytes(min(note.numbers[1] for note in notes))
            return overlaps.schedule(exchange.rank, size)

    def _measure(self, exchange: Peers, demand: Demand) -> Bandwidths:
        """Sum the rates that the members have measured. The result is the same on all, so that they decide the same.

        The rate of the store is that of the last load. The rate of the exchange is that of the last cooperative load;
        if there was none, and the ranks are on several nodes, all members measure it once in a trial.
        """
        stated = self._bandwidths
        if unconditional(self._mode, demand) is not None:
            return UNKNOWN
        own = self._measured
        notes = exchange.agree(Note((int(own.store or 0), int(own.exchange or 0))))
        store, rate = (_together([note.numbers[index] for note in notes]) for index in (0, 1))
        if stated.exchange is None and rate is None and demand.nodes > 1 and (store or stated.store):
            self._measured = replace(own, exchange=_try_out(exchange))
            notes = exchange.agree(Note((0, int(self._measured.exchange or 0))))
            rate = _together([note.numbers[1] for note in notes])
        return Bandwidths(store, exchange=rate)

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Tell the other ranks of any error in the block, so that none is left waiting."""
        try:
            yield
        except PeerFailedError:
            self._end()
            raise
        except BaseException as error:
            exchange, self._exchange = self._exchange, None
            if exchange is not None:
                exchange.leave(reason_of(error))
            raise


def _fetch_alone(
    store: Store, requests: list[Request], options: TransferOptions, pool: BufferPool, meter: Meter
) -> None:
    meter.expect(sum(request.nbytes for request in requests))
    fetch(store, requests, options, pool=pool, meter=meter)


def _try_out(exchange: Peers) -> float:
    """Measure the bytes a second that this rank receives while each rank sends to the one half the group away."""
    ranks, half = len(exchange.members), len(exchange.members) // 2
    received = Message((exchange.rank - half) % ranks, 0, memoryview(bytearray(_TRIAL_BYTES)))
    sent = Message((exchange.rank + half) % ranks, 0, memoryview(bytearray(_TRIAL_BYTES)))
    began = time.monotonic()
    exchange.move([received], [sent])
    return _TRIAL_BYTES / max(time.monotonic() - began, 1e-9)


def _together(rates: Sequence[int]) -> float | None:
    """Return the sum of the rates of all ranks; None if one has not measured any."""
    return float(sum(rates)) if all(rates) else None


def _number_of(key: str) -> int:
    """Return a number for an object, without a table that ranks must share: 63 bits of a hash.

    If two objects had the same number, the checksums of their bytes would fail.
    """
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def _explain(decision: CooperativeDecision, demand: Demand) -> str:
    taken = "Cooperative" if decision.together else "Plain"
    holders = demand.total / demand.distinct if demand.distinct else 1.0
    nodes = f"{demand.nodes} node{'s' if demand.nodes > 1 else ''}"
    return (
        f"{taken}: {decision.reason}. {demand.ranks} ranks on {nodes} want {demand.total / 1e9:.3f} GB in all, "
        f"of which {demand.distinct / 1e9:.3f} GB are distinct ({holders:.2f} ranks a byte)"
    )
