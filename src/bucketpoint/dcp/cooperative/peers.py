"""Messages between the ranks that load together, over connections that last for one load.

The connections are separate from the caller's process group, so that messages never mix with other collectives, and
closing the connections wakes every waiting rank.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bucketpoint.dcp.meshes import Mesh
from bucketpoint.dcp.process_groups import backend_of
from bucketpoint.errors import PeerFailedError

_READY_TAG = 0
_AT_ONCE = timedelta(milliseconds=1)

ARRIVE_WITHIN = timedelta(minutes=2)
"""Limit on the time between the first and the last rank to finish planning, which is local and short. If a rank fails
in planning, it waits in a collective of DCP, which the other ranks reach only after this limit.
"""


@dataclass(frozen=True)
class Message:
    """Bytes to send to, or to receive from, another member. Both sides use the same tag for a message."""

    peer: int
    tag: int
    data: memoryview


class Peers:
    """The members of a load, by rank in `mesh`. Each member makes all calls on one thread, in the same order.

    Every method that communicates raises PeerFailedError if a member is lost, or has aborted the load.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.rank: int = mesh.group.rank()
        self.size: int = mesh.group.size()
        self._backend: Any = backend_of(mesh.group)

    def arrive(self) -> None:
        """Wait until all members are about to read, for at most `ARRIVE_WITHIN` or the group's timeout."""
        self.agree(range(self.size), within=min(ARRIVE_WITHIN, self.mesh.timeout))

    def agree(self, peers: Sequence[int], within: timedelta | None = None) -> None:
        """Wait until all of `peers` have made this call, for at most `within`, by default the group's timeout."""
        ready, others = memoryview(bytearray(1)), [peer for peer in peers if peer != self.rank]
        received = [(peer, _READY_TAG, memoryview(bytearray(1))) for peer in others]
        self._exchange(received, [(peer, _READY_TAG, ready) for peer in others], within or self.mesh.timeout)

    def gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of every member; dtype and length of a row are the same everywhere."""
        with self._losing():
            counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            self._backend.allgather([counts], [torch.tensor([len(rows)])]).wait()
            padded = rows.new_zeros(max(map(int, counts)), *rows.shape[1:])
            padded[: len(rows)] = rows
            tables = [torch.empty_like(padded) for _ in counts]
            if padded.numel():
                self._backend.allgather([tables], [padded]).wait()
        return [table[: int(count)] for table, count in zip(tables, counts, strict=True)]

    def broadcast(self, data: bytes) -> memoryview:
        """Return the first member's `data` on all members."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self._losing():
            length = torch.tensor([len(data)], device="cpu")
            self._backend.broadcast([length], options).wait()
            buffer = bytearray(data if self.rank == 0 else int(length))
            if buffer:
                self._backend.broadcast([torch.frombuffer(buffer, dtype=torch.uint8)], options).wait()
        return memoryview(buffer)

    def move(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Receive and send all messages. In one call, each pair of ranks uses each tag, from 0 on, only once."""
        received, sent = (
            [(message.peer, _READY_TAG + 1 + message.tag, message.data) for message in messages]
            for messages in (receives, sends)
        )
        self._exchange(received, sent, self.mesh.timeout)

    def _exchange(
        self,
        receives: Sequence[tuple[int, int, memoryview]],
        sends: Sequence[tuple[int, int, memoryview]],
        limit: timedelta,
    ) -> None:
        ends = time.monotonic() + limit.total_seconds()
        # If gloo has already noticed a closed connection, it raises here and not in the wait.
        with self._losing(limit):
            works = [
                begin([torch.frombuffer(data, dtype=torch.uint8)], peer, tag)
                for begin, messages in ((self._backend.recv, receives), (self._backend.send, sends))
                for peer, tag, data in messages
            ]
            for work in works:
                work.wait(max(timedelta(seconds=ends - time.monotonic()), _AT_ONCE))

    @contextlib.contextmanager
    def _losing(self, limit: timedelta | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            seconds, reason = (limit or self.mesh.timeout).total_seconds(), str(error).partition("\n")[0][:300]
            raise PeerFailedError(
                f"One of {self.size} ranks that load together died, or did not answer for {seconds:.0f} s: {reason}",
                remedy="Read the error or the log of that rank, and load again on all ranks",
            ) from error
