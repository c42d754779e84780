"""Cooperative load, in which ranks read for each other: connect the ranks, agree on a schedule, and run its rounds.

All collectives are made here, on the caller's thread; store reads and checks run on other threads. `schedule.py`
computes the schedule.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bucketpoint.dcp import process_groups
from bucketpoint.dcp.cooperative.rounds import Peers, SharedLoad, round_bytes
from bucketpoint.dcp.cooperative.schedule import Overlaps, Schedule
from bucketpoint.dcp.meeting import Meeting
from bucketpoint.dcp.meshes import Mesh, not_connected
from bucketpoint.errors import BucketpointError
from bucketpoint.stores import Store
from bucketpoint.transfer import Meter, Request, TransferOptions

ARRIVE_WITHIN = timedelta(minutes=2)
"""Limit on the time between the first and the last rank to finish planning, which is local and short. If a rank fails
in planning, it waits in a collective of DCP, which the other ranks reach only after this limit.
"""

_MODES = ("off", "node", "group")


class Cooperation:
    """State of cooperative loading in one reader, kept from one load to the next.

    Args:
        mode: `"node"` or `"group"`.
        group: torch's process group; None for all ranks of the job.

    Raises:
        BucketpointError: `mode` is unknown.
    """

    def __init__(self, mode: str, group: Any) -> None:
        if mode not in _MODES:
            raise BucketpointError(
                f"cooperative={mode!r} is invalid", remedy=f"Pass one of {', '.join(map(repr, _MODES))}"
            )
        self._mode = mode
        self._group = group
        self._url: str | None = None
        self._exchange: Peers | None = None
        self.explanation = "Nothing has been loaded yet"

    def connect(self, url: str | None) -> None:
        """Begin a load: find the ranks that take part, and connect them. A collective call if there are several ranks.

        Raises:
            BucketpointError: this rank is not in the group, or a rank is missing.
            RanksDisagreeError: a rank loads another checkpoint, or in another mode.
        """
        self.close()
        self._url, ranks = url, process_groups.ranks_of(self._group)
        if len(ranks) == 1:
            self.explanation = "Plain: there is one rank"
            return
        # Containers may all have the same host name, so the name of a node includes the number of torchrun's agent.
        node = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"
        within = process_groups.timeout_of(self._group)
        call = f"the load of {url} with cooperative={self._mode!r}"
        # Before the meeting, the ranks of this node are unknown, but torchrun provides their number.
        local = os.environ.get("LOCAL_WORLD_SIZE", "") if self._mode == "node" else ""
        refused = process_groups.too_few_descriptors(ranks[: int(local) if local.isdigit() else None])
        meeting = Meeting.begin(ranks, call, note=node, purpose="loads", error=refused)
        meeting.wait(within.total_seconds())
        members = ranks
        if self._mode == "node":
            members = tuple(rank for rank, other in zip(ranks, meeting.notes(), strict=True) if other == node)
        self.explanation = "Plain: this rank is alone on its node"
        if len(members) > 1:
            store = dist.PrefixStore(f"members/{members[0]}", meeting.store)
            # Another group may have the same members and numbers of meetings, so the name includes a digest of `ranks`.
            name = f"{meeting.name}-{process_groups.digest_of(ranks)}"
            meeting = replace(meeting, ranks=members, store=store, name=name)
            try:
                self._exchange = Peers(Mesh.connect(meeting, within))
            except BaseException as error:
                reason = not_connected(meeting, error, "The load")
                if isinstance(error, Exception):
                    raise reason from error
                raise

    def close(self) -> None:
        """Abort an unfinished load, and notify the other ranks, so that they do not wait for this rank."""
        if self._exchange is not None:
            self._give_up(BucketpointError("The rank gave up this load before any read"))

    def _end(self) -> None:
        """End the cooperation: all reads until the next `connect` are plain."""
        if self._exchange is not None:
            self._exchange.mesh.complete()
            self._exchange = None

    def _give_up(self, error: BaseException) -> BucketpointError | None:
        """End the cooperation on all ranks. Return the failure that ended it; None if it had ended before."""
        if self._exchange is None:
            return None
        self.explanation = "Plain: the ranks did not load together"
        mesh, self._exchange, failure = self._exchange.mesh, None, None
        if process_groups.is_known(mesh.group):
            failure = mesh.end(error, self._url, "The load")
        else:
            # torch has destroyed the group, so the other ranks cannot be notified; they see closed connections.
            mesh.cut()
        mesh.drop()
        return failure

    def read_once(self, get: Callable[[], bytes]) -> bytes:
        """Call `get` on the first member only; return its result, or raise its error, on all members."""
        exchange = self._exchange
        if exchange is None:
            return get()
        with self.taking_part():
            return bytes(exchange.broadcast(get() if exchange.rank == 0 else b""))

    def fetch(
        self, store: Store, plan: Callable[[], list[Request]], options: TransferOptions, *, meter: Meter
    ) -> list[Request]:
        """Plan this rank's requests and run them. One member reads the bytes that several members need.

        Returns:
            All requests if no bytes are shared: then this rank has to run them.

        Raises:
            BucketpointError: the error of another rank that failed.
            PeerFailedError: another rank is lost; the error names it.
        """
        exchange = self._exchange
        if exchange is None:
            return plan()
        with self.taking_part():
            exchange.agree(range(exchange.size), within=min(ARRIVE_WITHIN, exchange.mesh.timeout))
            requests = plan()
            numbers = {key: _number_of(key) for key in {request.key for request in requests}}
            schedule = self._agree(exchange, requests, numbers, options)
            if schedule is not None:
                load = SharedLoad(exchange, schedule, requests, numbers, store=store, options=options, meter=meter)
                load.run(self.taking_part)
                self.explanation += f". This rank read {meter.done_bytes / 1e9:.3f} GB"
        self._end()
        return requests if schedule is None else []

    def _agree(
        self, exchange: Peers, requests: list[Request], numbers: dict[str, int], options: TransferOptions
    ) -> Schedule | None:
        """Agree on a schedule. Return None, on all members, if no bytes are shared, or the node's copy is used."""
        # The caller may have set another default device, as is common while a model is built.
        with torch.device("cpu"):
            shares = self._mode == "node" and options.node_copy is not None
            offers = exchange.gather(torch.tensor([options.max_inflight_bytes, shares]))
            if all(int(offer[1]) for offer in offers):
                self.explanation = f"Plain: the {exchange.size} ranks share the node's copy"
                return None
            most = min(int(offer[0]) for offer in offers)
            table = [(numbers[own.key], own.start, own.stop) for own in requests]
            overlaps = Overlaps(exchange.gather(torch.tensor(table, dtype=torch.int64).reshape(-1, 3)))
            if overlaps.total == overlaps.distinct:
                self.explanation = f"Plain: no two of the {exchange.size} ranks need the same bytes"
                return None
            self.explanation = (
                f"Cooperative: {exchange.size} ranks need {overlaps.total / 1e9:.3f} GB in all, of which "
                f"{overlaps.distinct / 1e9:.3f} GB are distinct ({overlaps.total / overlaps.distinct:.2f} ranks a byte)"
            )
            return overlaps.schedule(exchange.rank, round_bytes(most))

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Report an error in the block to all ranks, so that none waits forever. Raise the first error of all ranks."""
        try:
            yield
        except BaseException as error:
            failure = self._give_up(error)
            if failure is None or failure.rank == process_groups.this_rank() or not isinstance(error, Exception):
                raise
            raise failure from error


def _number_of(key: str) -> int:
    """Return a number for an object: 63 bits of a hash, so that ranks need not share a table.

    If two objects had the same number, the checksums of their bytes would not match.
    """
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1
