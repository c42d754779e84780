"""A load in which ranks read for each other: meets them, agrees on a schedule, and runs it round by round.

All collectives are made here, on the caller's thread; store reads and checks run on threads beside it. What a schedule
is, and whether one is worth it, is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bucketpoint.dcp import carrier as carriers
from bucketpoint.dcp import exchange as exchanges
from bucketpoint.dcp.cooperative import Bandwidths, Decision, Demand, Measured, check_mode, decide, unconditional
from bucketpoint.dcp.cooperative_rounds import SharedLoad, reason_of, round_bytes
from bucketpoint.dcp.cooperative_schedule import Overlaps, Schedule
from bucketpoint.dcp.exchange import Exchange, Message, Note, meet
from bucketpoint.errors import BucketpointError, PeerFailedError
from bucketpoint.stores import Store
from bucketpoint.transfer import BufferPool, Meter, Request, TransferOptions, fetch

_PLANNED, _REFUSED = 0, 1

_NOTHING_THERE = ". Through host memory: nothing that ranks share goes to their current devices"
_NOT_BY_ITSELF = " does not choose NCCL yet"

_TRIAL_BYTES = 4 << 20
"""Enough to fill the buffers of a connection several times, and less than a hundredth of what is decided about."""


class Cooperation:
    """The ranks that a reader loads with, from one load to the next.

    Args:
        mode: `"off"`, `"node"`, `"group"` or `"auto"`.
        group: torch's process group; None for all ranks of the job.
        exchange: `"auto"`, `"host"` or `"device"`.
    """

    def __init__(self, mode: str, group: Any, bandwidths: Bandwidths | None, exchange: str = "auto") -> None:
        self._mode = check_mode(mode)
        self._way = carriers.check_exchange(exchange)
        self._group = group
        self._bandwidths = bandwidths or Bandwidths()
        self._exchange: Exchange | None = None
        self._ranks: tuple[int, ...] = ()
        self._found = Measured()
        self.explanation = "Nothing has been loaded yet"
        self.peak_bytes = 0
        """The most memory of its own that the last load together held at once on this rank."""
        self.device_peak_bytes = 0
        """The same on its device."""
        self._device: carriers.Device | None = None

    def connect(self, url: str | None) -> None:
        """Begin a load: with whom. A collective on the group, unless the mode is `"off"` or there is one rank."""
        self.close()
        self.peak_bytes = self.device_peak_bytes = 0
        self._device = None
        if self._mode == "off":
            self.explanation = 'Plain: cooperative="off"'
        elif not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self._group) == 1:
            self.explanation = "Plain: there is one rank"
        else:
            stated = self._bandwidths
            members = meet(self._mode, url, self._group, (stated.store, stated.nic, stated.exchange), self._way)
            ranks = tuple(member.rank for member in members)
            if ranks != self._ranks:
                self._ranks, self._found = ranks, Measured()
            self.explanation = "Plain: this rank is alone on its node"
            if len(members) > 1:
                self._exchange = Exchange(members, self._group)
                self._device = carriers.device_here() if self._way == "device" else None

    @property
    def device(self) -> torch.device | None:
        """What bytes can come to in this load from the device of another rank."""
        return self._device.device if self._device is not None and self._exchange is not None else None

    def close(self) -> None:
        """Give up a load that has begun and has not ended: no other rank waits for this one."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.leave("it gave up this load before it read anything")

    def _end(self) -> None:
        """What comes until the next `connect` is read plainly."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def read_once(self, get: Callable[[], bytes]) -> bytes:
        """What `get` returns or raises on the first member, on all members."""
        exchange = self._exchange
        if exchange is None:
            return get()
        data, outcome = b"", _PLANNED
        with self.taking_part():
            if exchange.rank == 0:
                try:
                    data = get()
                except Exception as error:  # noqa: BLE001 (raised on every member)
                    known = isinstance(error, BucketpointError)
                    data, outcome = pickle.dumps(error if known else BucketpointError(reason_of(error))), _REFUSED
            nbytes, outcome = exchange.agree(Note((len(data), outcome)))[0].numbers
            received = exchange.broadcast(data, nbytes)
        if outcome == _REFUSED:
            self._end()
            self.explanation = "Plain: there is no common metadata"
            raise pickle.loads(received)
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
        """Plan this rank's requests and run them, those of common bytes together with the other members.

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
            requests = _plan_or_tell(exchange, plan)
            numbers = {key: _number_of(key) for key in {request.key for request in requests}}
            schedule = self._agree(exchange, requests, numbers, options)
            if schedule is None:
                self._end()
                began = time.monotonic()
                _fetch_alone(store, requests, options, pool, meter)
                rate = meter.done_bytes / max(time.monotonic() - began, 1e-9)
                self._found = replace(self._found, store=rate or None)
                return
            with _connected(exchange, schedule, self.device) as carrier:
                load = SharedLoad(
                    exchange,
                    schedule,
                    requests,
                    numbers,
                    store=store,
                    options=options,
                    meter=meter,
                    carrier=carrier,
                )
                load.run(self.taking_part)
            self._found = Measured(load.store_rate, load.exchange_rate or self._found.exchange)
            self.peak_bytes, self.device_peak_bytes = load.peak_bytes, load.device_peak_bytes
            self.explanation += f". This rank read {meter.done_bytes / 1e9:.3f} GB"
        self._end()

    def _agree(
        self, exchange: Exchange, requests: list[Request], numbers: dict[str, int], options: TransferOptions
    ) -> Schedule | None:
        """Who reads what for whom; None if each rank reads for itself. The same decision on every member."""
        notes = exchange.agree(Note((len(requests), options.max_inflight_bytes)))
        # A model may be built, and so loaded, under another default device.
        with torch.device("cpu"):
            through = self._choose_way(exchange)
            table = [(numbers[own.key], own.start, own.stop, int(own.on_device)) for own in requests]
            rows = torch.tensor(table, dtype=torch.int64).reshape(-1, 4)[:, : 4 if self.device is not None else 3]
            overlaps = Overlaps(exchange.gather(rows, [note.numbers[0] for note in notes]), exchange.nodes)
            measured = self._measure(exchange, overlaps.demand)
            decision = decide(self._mode, overlaps.demand, self._bandwidths, measured)
            self.explanation = _explain(decision, overlaps.demand)
            if not decision.together:
                return None
            size = round_bytes(min(note.numbers[1] for note in notes))
            schedule = overlaps.schedule(exchange.rank, size)
            unused = self.device is not None and not schedule.by_device
            self.explanation += _NOTHING_THERE if unused else through
            return schedule

    def _choose_way(self, exchange: Exchange) -> str:
        """Which way bytes for devices go, the same on every member, in words. Forgets the device if they go by host."""
        if self._way != "device":
            return f'. Through host memory: exchange="{self._way}"' + (_NOT_BY_ITSELF if self._way == "auto" else "")
        own = self._device.identity if self._device is not None else 0
        found = [note.numbers[0] for note in exchange.agree(Note((own, 0)))]
        if all(found) and len(set(found)) == len(found):
            return ". From device to device, what targets on devices take"
        self._device = None
        if all(found):
            return ". Through host memory: two ranks have the same device"
        without = next(exchange.members[number].rank for number, each in enumerate(found) if not each)
        return f". Through host memory: rank {without} has no CUDA device with NCCL"

    def _measure(self, exchange: Exchange, demand: Demand) -> Measured:
        """What the members have found so far, summed; the same on all of them, so that they decide alike.

        The store's rate is that of the last load. The exchange's is that of the last load together; if there was none,
        and ranks are on several nodes, all try it once.
        """
        stated = self._bandwidths
        if unconditional(self._mode, demand) is not None:
            return Measured()
        notes = exchange.agree(Note((int(self._found.store or 0), int(self._found.exchange or 0))))
        found = Measured(*(_together([note.numbers[index] for note in notes]) for index in (0, 1)))
        if stated.exchange is None and found.exchange is None and demand.nodes > 1 and (found.store or stated.store):
            self._found = replace(self._found, exchange=_try_out(exchange))
            notes = exchange.agree(Note((0, int(self._found.exchange or 0))))
            found = replace(found, exchange=_together([note.numbers[1] for note in notes]))
        return found

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Whatever is raised within, no other rank is left waiting."""
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


@contextlib.contextmanager
def _connected(
    exchange: Exchange, schedule: Schedule, device: torch.device | None
) -> Iterator[carriers.Carrier | None]:
    """A carrier between the devices of all who share bytes, where any take them there."""
    if device is None or not schedule.by_device:
        yield None
        return
    peers = schedule.peers
    token, rank = exchange.members[peers[0]].token, peers.index(exchange.rank)
    # What connects the devices may wait for ever for a rank that is lost: all are still here.
    exchange.agree(Note(), peers)
    carrier = carriers.open_carrier(token, rank, len(peers), device, min(exchanges.ARRIVE_WITHIN, exchange.timeout))
    try:
        yield carrier
    finally:
        carrier.abort()


def _plan_or_tell(exchange: Exchange, plan: Callable[[], list[Request]]) -> list[Request]:
    """This rank's requests. The others are told if it cannot plan them, before that is raised."""
    try:
        return plan()
    except Exception as error:
        with contextlib.suppress(BucketpointError):
            exchange.swap(Note(failure=reason_of(error)))
        raise


def _fetch_alone(
    store: Store, requests: list[Request], options: TransferOptions, pool: BufferPool, meter: Meter
) -> None:
    meter.total_bytes = meter.done_bytes + sum(request.stop - request.start for request in requests)
    fetch(store, requests, options, pool=pool, meter=meter)


def _try_out(exchange: Exchange) -> float:
    """Bytes a second that this rank receives while each sends to one that is half the group away."""
    ranks, half = len(exchange.members), len(exchange.members) // 2
    received = Message((exchange.rank - half) % ranks, 0, memoryview(bytearray(_TRIAL_BYTES)))
    sent = Message((exchange.rank + half) % ranks, 0, memoryview(bytearray(_TRIAL_BYTES)))
    began = time.monotonic()
    exchange.move([received], [sent])
    return _TRIAL_BYTES / max(time.monotonic() - began, 1e-9)


def _together(rates: Sequence[int]) -> float | None:
    """What all ranks reach at once, or None if one has no figure."""
    return float(sum(rates)) if all(rates) else None


def _number_of(key: str) -> int:
    """A number for an object that needs no table: 63 bits of a hash, as two that met would fail the checksums."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def _explain(decision: Decision, demand: Demand) -> str:
    taken = "Cooperative" if decision.together else "Plain"
    holders = demand.total / demand.distinct if demand.distinct else 1.0
    nodes = f"{demand.nodes} node{'s' if demand.nodes > 1 else ''}"
    return (
        f"{taken}: {decision.reason}. {demand.ranks} ranks on {nodes} want {demand.total / 1e9:.3f} GB in all, "
        f"of which {demand.distinct / 1e9:.3f} GB are distinct ({holders:.2f} ranks a byte)"
    )
