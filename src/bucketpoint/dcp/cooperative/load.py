"""A load in which ranks read for each other: find the ranks, agree on a schedule, and run it round by round.

All collectives are made here, on the caller's thread; store reads and checks run on other threads. `schedule.py`
computes the schedule.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from bucketpoint.dcp.cooperative.peers import Note, Peers, meet
from bucketpoint.dcp.cooperative.rounds import SharedLoad, reason_of, round_bytes
from bucketpoint.dcp.cooperative.schedule import Overlaps, Schedule
from bucketpoint.dcp.error_boundary import decoded, from_plain, to_plain
from bucketpoint.errors import BucketpointError, PeerFailedError
from bucketpoint.stores import Store
from bucketpoint.transfer import BufferPool, Meter, Request, TransferOptions, fetch

_MODES = ("off", "node", "group")

_PLANNED, _REFUSED = 0, 1


class Cooperation:
    """State of cooperative loading in one reader, kept from one load to the next.

    Args:
        mode: `"node"` or `"group"`.
        group: torch's process group; None for all ranks of the job.

    Raises:
        BucketpointError: `cooperative=` does not take this mode.
    """

    def __init__(self, mode: str, group: Any) -> None:
        if mode not in _MODES:
            raise BucketpointError(
                f"cooperative={mode!r} is not known", remedy=f"Pass one of {', '.join(map(repr, _MODES))}"
            )
        self._mode = mode
        self._group = group
        self._exchange: Peers | None = None
        self.explanation = "Nothing has been loaded yet"

    def connect(self, url: str | None) -> None:
        """Begin a load: find the ranks that take part.

        Makes a collective on the group, unless there is one rank.
        """
        self.close()
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self._group) == 1:
            self.explanation = "Plain: there is one rank"
        else:
            members = meet(self._mode, url, self._group)
            self.explanation = "Plain: this rank is alone on its node"
            if len(members) > 1:
                self._exchange = Peers(members, self._group)

    def close(self) -> None:
        """Give up a load that has begun and not ended. Notifies the other ranks, so that none waits for this one."""
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
                _fetch_alone(store, requests, options, pool, meter)
                return
            load = SharedLoad(exchange, schedule, requests, numbers, store=store, options=options, meter=meter)
            load.run(self.taking_part)
            self.explanation += f". This rank read {meter.done_bytes / 1e9:.3f} GB"
        self._end()

    def _agree(
        self, exchange: Peers, requests: list[Request], numbers: dict[str, int], options: TransferOptions
    ) -> Schedule | None:
        """Agree on a schedule. Return None, on all members, if no two of them need the same bytes."""
        notes = exchange.agree(Note((len(requests), options.max_inflight_bytes)))
        # The caller may have set another default device, which is common when a model is built.
        with torch.device("cpu"):
            table = [(numbers[own.key], own.start, own.stop) for own in requests]
            rows = torch.tensor(table, dtype=torch.int64).reshape(-1, 3)
            overlaps = Overlaps(exchange.gather(rows, [note.numbers[0] for note in notes]))
            self.explanation = _explain(len(notes), overlaps)
            if overlaps.total == overlaps.distinct:
                return None
            size = round_bytes(min(note.numbers[1] for note in notes))
            return overlaps.schedule(exchange.rank, size)

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Report any error in the block to the other ranks, so that none waits forever."""
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


def _number_of(key: str) -> int:
    """Return a number for an object, without a table that ranks must share: 63 bits of a hash.

    If two objects had the same number, the checksums of their bytes would fail.
    """
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def _explain(ranks: int, overlaps: Overlaps) -> str:
    if overlaps.total == overlaps.distinct:
        return f"Plain: no two of the {ranks} ranks need the same bytes"
    return (
        f"Cooperative: {ranks} ranks need {overlaps.total / 1e9:.3f} GB in all, of which "
        f"{overlaps.distinct / 1e9:.3f} GB are distinct ({overlaps.total / overlaps.distinct:.2f} ranks a byte)"
    )
