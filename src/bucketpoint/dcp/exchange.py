"""Bytes and short notes between the ranks that load together, over connections of their own. Knows nothing of stores.

The connections last for one load and are apart from the caller's process group, so that no other collective can meet
them, and so that closing them tells every rank that waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from bucketpoint.dcp.process_groups import timeout_of
from bucketpoint.errors import BucketpointError, PeerFailedError
from bucketpoint.format.keys import new_token

_NOTE = struct.Struct("<BH2q")
_NOTE_BYTES = 512
_NOTE_TAG = 0
_UNUSED_TAG = 1 << 30
_FAREWELL = timedelta(seconds=1)
_AT_ONCE = timedelta(milliseconds=1)

ARRIVE_WITHIN = timedelta(minutes=2)
"""How much later than the first rank the last one may come from planning to reading. What is done in between is local
and short; a rank that has failed there waits in a collective of DCP's, which no other reaches before it gives up here.
"""


@dataclass(frozen=True)
class Member:
    """A rank that may load with this one.

    Attributes:
        rank: in the whole job.
        node: the machine that it is on.
        figures: what its user states, which all must agree on as they decide by it.
        way: how bytes for devices are to go, which all must agree on.
    """

    rank: int
    node: str
    token: str
    url: str | None
    mode: str
    figures: tuple[float | None, ...] = ()
    way: str = ""


@dataclass(frozen=True)
class Note:
    """What a rank tells all others: two numbers, and why it has failed if it has."""

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
    """Bytes to send to, or to receive from, a rank of the exchange. Both sides give a message the same tag."""

    peer: int
    tag: int
    data: memoryview


def meet(mode: str, url: str | None, group: Any, figures: tuple[float | None, ...] = (), way: str = "") -> list[Member]:
    """Find out who loads with this rank: the ranks of its node, or all of the group. One collective on the group.

    Returns:
        The members, in the order of their ranks in the group; this rank is one of them.

    Raises:
        BucketpointError: this rank is not in the group, or a rank is missing, or loads something else.
    """
    here = dist.get_rank()
    if dist.get_rank(group) < 0:
        raise BucketpointError(
            f"Rank {here} loads, and is not in the process group that was given to load together",
            remedy="Pass each rank a group that it is in; the groups of different ranks may differ",
        )
    own = Member(here, _node(), new_token(), url, mode, figures, way)
    found: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(found, own, group=group)
    except RuntimeError as error:
        raise BucketpointError(
            f"Not all ranks of the process group came to load together: {_first_line(error)}",
            remedy="All ranks of the group must load, each with the same cooperative=",
        ) from error
    for other in found:
        if (other.url, other.mode) != (url, mode):
            raise BucketpointError(
                f"Rank {other.rank} loads {other.url} with cooperative={other.mode!r}, "
                f"and rank {here} {url} with {mode!r}: they cannot load together",
                remedy="Load the same checkpoint in the same mode on all ranks of the group",
            )
        if other.way != way:
            raise BucketpointError(
                f"Rank {other.rank} loads with exchange={other.way!r} and rank {here} with {way!r}: "
                "they cannot load together",
                remedy="Pass the same exchange= on all ranks of the group",
            )
        if other.figures != figures:
            raise BucketpointError(
                f"Rank {other.rank} was given other bandwidths than rank {here}: they cannot decide alike",
                remedy="Pass the same bandwidths= on all ranks of the group",
            )
    return [member for member in found if mode != "node" or member.node == own.node]


class Exchange:
    """Connections among the members. All calls are made by one thread, in the same order on every member.

    Ranks are counted within the members from here on. Every method that communicates raises BucketpointError if a
    member is lost, and then `leave` must follow.
    """

    def __init__(self, members: Sequence[Member], group: Any) -> None:
        self.members = tuple(members)
        self.rank = [member.rank for member in members].index(dist.get_rank())
        self.timeout = timeout_of(group)
        self._ears: dict[int, tuple[torch.Tensor, Any]] = {}
        with self._losing("the first of them to be missed"):
            self._backend: Any = _gloo(members[0].token, self.rank, len(members), self.timeout)

    @property
    def nodes(self) -> list[int]:
        """For each member the number of its node."""
        names = sorted({member.node for member in self.members})
        return [names.index(member.node) for member in self.members]

    def arrive(self) -> None:
        """Wait until all members are about to read: for `ARRIVE_WITHIN`, or the timeout if that is shorter.

        Raises:
            BucketpointError: one has not come.
        """
        self.agree(Note(), within=min(ARRIVE_WITHIN, self.timeout))

    def swap(self, note: Note, peers: Sequence[int] | None = None, within: timedelta | None = None) -> list[Note]:
        """Tell all peers something and hear the same from each. Returns their notes, in the order of `peers`.

        Args:
            within: how long to wait for them all; by default as long as the group waits.

        Raises:
            PeerFailedError: a peer is lost, and one has said why it failed.
        """
        everyone = self._all() if peers is None else peers
        if not self._ears:
            self.listen(everyone)
        ears, self._ears = self._ears, {}
        heard = {peer: tensor for peer, (tensor, _) in ears.items()}
        packed = note.pack()
        works = [(peer, work) for peer, (_, work) in ears.items()]
        works += [(peer, self._backend.send([packed], peer, _NOTE_TAG)) for peer in heard]
        try:
            self._wait(works, within)
        except BucketpointError as error:
            refusal = self._refusal({peer: Note.unpack(tensor) for peer, tensor in heard.items()})
            if refusal is None:
                raise
            # The lost one has told this rank, and not surely all others.
            self.leave(refusal.message)
            raise refusal from error
        heard[self.rank] = packed
        return [Note.unpack(heard[peer]) for peer in everyone]

    def listen(self, peers: Sequence[int]) -> None:
        """Be ready to hear what the peers say next; the `swap` with the same peers that follows waits for it."""
        for peer in peers:
            if peer != self.rank:
                # Zeros are a note without a failure: what has not been heard says nothing.
                heard = torch.zeros(_NOTE_BYTES, dtype=torch.uint8, device="cpu")
                self._ears[peer] = heard, self._backend.recv([heard], peer, _NOTE_TAG)

    def raise_if_told(self) -> None:
        """What a peer has said since `listen`, if that is that it failed. Waits for nothing else.

        Raises:
            PeerFailedError: names the rank, and its reason.
        """
        for peer, (heard, work) in self._ears.items():
            if heard[0]:
                with contextlib.suppress(RuntimeError):
                    work.wait(_FAREWELL)
                refusal = self._refusal({peer: Note.unpack(heard)})
                assert refusal is not None
                # Not surely all others have heard it.
                self.leave(refusal.message)
                raise refusal

    def agree(self, note: Note, peers: Sequence[int] | None = None, within: timedelta | None = None) -> list[Note]:
        """`swap`, after which no peer goes on if one has failed.

        Raises:
            PeerFailedError: names the ranks that failed, and the reason of the first.
        """
        notes = self.swap(note, peers, within)
        refusal = self._refusal(dict(zip(self._all() if peers is None else peers, notes, strict=True)))
        if refusal is not None:
            raise refusal
        return notes

    def gather(self, rows: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """The rows of every member. `rows` is of shape (counts[rank], n), and of the same dtype and n everywhere."""
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in counts]
        if padded.numel():
            with self._losing():
                self._backend.allgather([found], [padded]).wait()
        return [table[:count] for table, count in zip(found, counts, strict=True)]

    def broadcast(self, data: bytes, nbytes: int) -> memoryview:
        """The first member's `data` on all members; `nbytes` is its length, which all know."""
        buffer = bytearray(data if self.rank == 0 else nbytes)
        if nbytes:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            with self._losing():
                self._backend.broadcast([torch.frombuffer(buffer, dtype=torch.uint8)], options).wait()
        return memoryview(buffer)

    def move(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Receive and send all of these. Tags, from 0, are each used once between two ranks in a call."""
        works = [
            (message.peer, self._backend.recv([_bytes(message.data)], message.peer, _NOTE_TAG + 1 + message.tag))
            for message in receives
        ]
        works += [
            (message.peer, self._backend.send([_bytes(message.data)], message.peer, _NOTE_TAG + 1 + message.tag))
            for message in sends
        ]
        self._wait(works)

    def close(self) -> None:
        """End an exchange that no member waits in any more."""
        self._backend, self._ears = None, {}

    def leave(self, reason: str) -> None:
        """End an exchange that others may still wait in: tell those who listen why, then cut all connections."""
        backend, self._backend, self._ears = self._backend, None, {}
        if backend is None:
            return
        others = [peer for peer in self._all() if peer != self.rank]
        packed = Note(failure=reason).pack()
        with contextlib.suppress(RuntimeError):
            works = [backend.send([packed], peer, _NOTE_TAG) for peer in others]
            for work in works:
                work.wait(_FAREWELL)
        # Connections stay open while anything refers to them, a traceback for one. A wait that ends in vain closes all;
        # one for a member that is lost already ends before that, and closes nothing.
        for peer in others:
            with contextlib.suppress(RuntimeError):
                backend.recv([packed], peer, _UNUSED_TAG).wait(_AT_ONCE)

    def _refusal(self, notes: Mapping[int, Note]) -> PeerFailedError | None:
        failed = [(self.members[peer].rank, note.failure) for peer, note in notes.items() if note.failure is not None]
        if not failed:
            return None
        first, reason = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return PeerFailedError(f"Rank {first}{more} failed, so no rank can load: {reason}", rank=first)

    def _all(self) -> Sequence[int]:
        return range(len(self.members))

    def _wait(self, works: Sequence[tuple[int, Any]], within: timedelta | None = None) -> None:
        limit = within or self.timeout
        deadline = time.monotonic() + limit.total_seconds()
        for peer, work in works:
            with self._losing(f"rank {self.members[peer].rank}, or a rank that it waited for", limit):
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
                f"Ranks {ranks}{more} load together, and {whom} died, was stopped, or was silent for "
                f"{(limit or self.timeout).total_seconds():.0f} s: {_first_line(error)}",
                remedy="Look at that rank's own error or log, and load again on all ranks",
            ) from error


def _gloo(token: str, rank: int, size: int, timeout: timedelta) -> Any:
    try:
        from torch.distributed.distributed_c10d import ProcessGroupGloo, _get_default_store
    except ImportError as error:  # pragma: no cover - a torch that was built without gloo
        raise BucketpointError(
            "This torch has no gloo, which ranks that load together talk over", remedy='Pass cooperative="off"'
        ) from error
    # Not `dist.new_group`: every rank of the job would have to call it, and its names repeat after a failure.
    return ProcessGroupGloo(PrefixStore(f"bucketpoint/{token}", _get_default_store()), rank, size, timeout)


def _node() -> str:
    # Containers of one machine may all be called the same; torchrun numbers its agents.
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"


def _bytes(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
