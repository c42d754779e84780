"""Separate connections between the ranks that load together, for bytes and short notes.

The connections last for one load. They are separate from the caller's process group, so that they never mix with other
collectives, and so that closing them wakes every rank that waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from bucketpoint.dcp.process_groups import disconnect, timeout_of
from bucketpoint.errors import BucketpointError, PeerFailedError, RanksDisagreeError
from bucketpoint.format.keys import new_token

_NOTE = struct.Struct("<BH2q")
_NOTE_BYTES = 512
_NOTE_TAG = 0
_FAREWELL = timedelta(seconds=1)
_AT_ONCE = timedelta(milliseconds=1)

ARRIVE_WITHIN = timedelta(minutes=2)
"""Limit on the time between the first and the last rank to finish planning. The work in between is local and short. A
rank that failed in it waits in a collective of DCP, which the others reach only after they give up here.
"""


@dataclass(frozen=True)
class Member:
    """A rank that may load together with this one.

    Attributes:
        rank: global rank.
        node: name of the machine.
    """

    rank: int
    node: str
    token: str
    url: str | None
    mode: str


@dataclass(frozen=True)
class Note:
    """Short message of a rank to all others: two numbers, and the reason if the rank has failed."""

    numbers: tuple[int, int] = (0, 0)
    failure: str | None = None

    def pack(self) -> torch.Tensor:
        text = (self.failure or "").encode("utf-8", "replace")[: _NOTE_BYTES - _NOTE.size]
        data = bytearray(_NOTE_BYTES)
        _NOTE.pack_into(data, 0, self.failure is not None, len(text), *self.numbers)
        data[_NOTE.size : _NOTE.size + len(text)] = text
        return torch.frombuffer(data, dtype=torch.uint8)

    @staticmethod
    def unpack(packed: torch.Tensor) -> Note:
        data = bytes(packed.tolist())
        failed, length, *numbers = _NOTE.unpack_from(data)
        text = data[_NOTE.size : _NOTE.size + length].decode("utf-8", "replace")
        return Note((numbers[0], numbers[1]), text if failed else None)


@dataclass(frozen=True)
class Message:
    """Bytes to send to, or to receive from, another member. Both sides use the same tag for a message."""

    peer: int
    tag: int
    data: memoryview


def meet(mode: str, url: str | None, group: Any) -> list[Member]:
    """Find the ranks that load with this one: those of the same node, or all of the group. One collective on the group.

    Returns:
        The members, in the order of their ranks in the group; this rank is one of them.

    Raises:
        BucketpointError: this rank is not in the group, or a rank is missing.
        RanksDisagreeError: a rank loads something else.
    """
    here = dist.get_rank()
    if dist.get_rank(group) < 0:
        raise BucketpointError(
            f"Rank {here} loads cooperatively, but is not in the process group that was passed",
            remedy="Pass each rank a group that it is in; the groups of different ranks may differ",
        )
    # Containers may all have the same host name, so the number of torchrun's agent is part of the node's name.
    node = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"
    own = Member(here, node, new_token(), url, mode)
    members: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(members, own, group=group)
    except RuntimeError as error:
        raise BucketpointError(
            f"Some ranks of the process group did not begin the cooperative load: {_first_line(error)}",
            remedy="All ranks of the group must load, each with the same cooperative=",
        ) from error
    for other in members:
        if (other.url, other.mode) != (url, mode):
            raise RanksDisagreeError(
                f"Rank {other.rank} loads {other.url} with cooperative={other.mode!r}, "
                f"and rank {here} {url} with {mode!r}: they cannot load together",
                remedy="Load the same checkpoint in the same mode on all ranks of the group",
            )
    return [member for member in members if mode != "node" or member.node == own.node]


class Peers:
    """Connections among the members of a load. All calls must come from one thread, in the same order on every member.

    From here on a rank is the position in `members`. Every method that communicates raises BucketpointError if a member
    is lost; the caller must then call `leave`.
    """

    def __init__(self, members: Sequence[Member], group: Any) -> None:
        self.members = tuple(members)
        self.rank = [member.rank for member in members].index(dist.get_rank())
        self.timeout = timeout_of(group)
        with self._losing("the first of them to be missed"):
            self._backend: Any = _gloo(members[0].token, self.rank, len(members), self.timeout)

    def arrive(self) -> None:
        """Wait until all members are about to read: for `ARRIVE_WITHIN`, or the timeout if that is shorter.

        Raises:
            BucketpointError: a member has not come in time.
        """
        self.agree(Note(), within=min(ARRIVE_WITHIN, self.timeout))

    def agree(self, note: Note, peers: Sequence[int] | None = None, within: timedelta | None = None) -> list[Note]:
        """Send a note to all peers and receive one from each. Return the notes in the order of `peers`.

        Args:
            peers: the members that take part, with or without this one; by default all.
            within: how long to wait for all peers; by default the timeout of the group.

        Raises:
            PeerFailedError: ranks have failed, possibly this one; the error has the reason of the first.
        """
        everyone = range(len(self.members)) if peers is None else peers
        # A note of zeros reports no failure, and neither does a note that has not arrived.
        packed = {peer: torch.zeros(_NOTE_BYTES, dtype=torch.uint8, device="cpu") for peer in everyone}
        packed[self.rank] = note.pack()
        others = [peer for peer in everyone if peer != self.rank]
        lost: BucketpointError | None = None
        try:
            works = [self._start(self._backend.recv, packed[peer], peer, _NOTE_TAG) for peer in others]
            works += [self._start(self._backend.send, packed[self.rank], peer, _NOTE_TAG) for peer in others]
            self._wait(works, within)
        except BucketpointError as error:
            lost = error
        notes = [Note.unpack(packed[peer]) for peer in everyone]
        failed = [peer for peer, other in zip(everyone, notes, strict=True) if other.failure is not None]
        if failed:
            first, more = failed[0], f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            reason, rank = notes[everyone.index(first)].failure, self.members[first].rank
            failure = PeerFailedError(f"Rank {rank}{more} failed, so no rank can load: {reason}", rank=rank)
            if lost is not None and note.failure is None:
                # Pass the reason on: the rank that failed may not have told all others.
                self.leave(failure.message)
            raise failure from lost
        if lost is not None:
            raise lost
        return notes

    def gather(self, rows: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return the rows of every member. `rows` has shape (counts[rank], n); dtype and n are the same everywhere."""
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        tables = [torch.empty_like(padded) for _ in counts]
        if padded.numel():
            with self._losing():
                self._backend.allgather([tables], [padded]).wait()
        return [table[:count] for table, count in zip(tables, counts, strict=True)]

    def broadcast(self, data: bytes, nbytes: int) -> memoryview:
        """Send the first member's `data` to all members, and return it. All members must know the length, `nbytes`."""
        buffer = bytearray(data if self.rank == 0 else nbytes)
        if nbytes:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            with self._losing():
                self._backend.broadcast([torch.frombuffer(buffer, dtype=torch.uint8)], options).wait()
        return memoryview(buffer)

    def move(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Receive and send all messages. In one call, each pair of ranks uses each tag, from 0 on, only once."""
        works = []
        for start, messages in ((self._backend.recv, receives), (self._backend.send, sends)):
            for message in messages:
                data = torch.frombuffer(message.data, dtype=torch.uint8)
                works.append(self._start(start, data, message.peer, _NOTE_TAG + 1 + message.tag))
        self._wait(works)

    def close(self) -> None:
        """Close the connections, once no member waits on them any more."""
        self._backend = None

    def leave(self, reason: str) -> None:
        """Close the connections while others may wait on them: send the reason to all, then cut the connections."""
        backend, self._backend = self._backend, None
        if backend is None:
            return
        others = [peer for peer in range(len(self.members)) if peer != self.rank]
        packed = Note(failure=reason).pack()
        works = []
        for peer in others:
            # A lost peer must not prevent the others from receiving the reason.
            with contextlib.suppress(RuntimeError):
                works.append(backend.send([packed], peer, _NOTE_TAG))
        with contextlib.suppress(RuntimeError):
            for work in works:
                work.wait(_FAREWELL)
        disconnect(backend, others)

    def _start(self, begin: Any, data: torch.Tensor, peer: int, tag: int) -> tuple[int, Any]:
        # gloo raises here, and not in the wait, if it has noticed that the connection is cut.
        with self._losing(self._near(peer)):
            return peer, begin([data], peer, tag)

    def _near(self, peer: int) -> str:
        return f"rank {self.members[peer].rank}, or a rank that it waited for"

    def _wait(self, works: Sequence[tuple[int, Any]], within: timedelta | None = None) -> None:
        limit = within or self.timeout
        deadline = time.monotonic() + limit.total_seconds()
        for peer, work in works:
            with self._losing(self._near(peer), limit):
                if within is None:
                    work.wait()
                else:
                    work.wait(max(timedelta(seconds=deadline - time.monotonic()), _AT_ONCE))

    @contextlib.contextmanager
    def _losing(self, whom: str = "one of them", limit: timedelta | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            ranks = ", ".join(str(member.rank) for member in self.members[:16])
            more = ", ..." if len(self.members) > 16 else ""
            raise BucketpointError(
                f"Ranks {ranks}{more} load together, but {whom} died, was stopped, or did not answer for "
                f"{(limit or self.timeout).total_seconds():.0f} s: {_first_line(error)}",
                remedy="Read the error or the log of that rank, and load again on all ranks",
            ) from error


def _gloo(token: str, rank: int, size: int, timeout: timedelta) -> Any:
    try:
        from torch.distributed.distributed_c10d import ProcessGroupGloo, _get_default_store
    except ImportError as error:  # pragma: no cover - a torch that was built without gloo
        raise BucketpointError(
            "This build of torch lacks gloo, which a cooperative load needs", remedy='Pass cooperative="off"'
        ) from error
    # Not `dist.new_group`: every rank of the job would have to call it, and its group names repeat after a failure.
    return ProcessGroupGloo(PrefixStore(f"bucketpoint/{token}", _get_default_store()), rank, size, timeout)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
