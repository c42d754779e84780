"""Memory that the ranks of one node share while they load together: each writes its own, the others read it.

Who writes what, and when it may be overwritten, is the caller's: nothing here waits for the other ranks' copies. The
memory is an unnamed file that ends with the processes that hold it, however they end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence

import torch

from bucketpoint.dcp.exchange import Exchange, Note

_NAME = "bucketpoint-load"
_HEADER_BYTES = mmap.PAGESIZE
_HALVES = 2


class NodeMemory:
    """Two halves of memory on each rank, for even and for odd rounds.

    Opening it is a collective among those of `peers` that are on this rank's node. If one of them cannot open
    another's, as processes of different users cannot, none uses it.

    Args:
        half_bytes: what this rank writes in a round at most.
    """

    def __init__(self, exchange: Exchange, peers: Sequence[int], half_bytes: int) -> None:
        node = exchange.members[exchange.rank].node
        together = [peer for peer in peers if exchange.members[peer].node == node]
        self.near: frozenset[int] = frozenset()
        """The ranks, without this one, whose memory can be read here, and which can read this one's."""
        self.nbytes = 0
        self._own = memoryview(b"")
        self._theirs: dict[int, memoryview] = {}
        if len(together) < 2:
            return
        token = exchange.members[exchange.rank].token
        fd = _create(token, half_bytes)
        try:
            notes = exchange.agree(Note((os.getpid(), fd)), together)
            for peer, note in zip(together, notes, strict=True):
                if peer != exchange.rank and fd >= 0:
                    with contextlib.suppress(OSError):
                        self._theirs[peer] = _open(*note.numbers, exchange.members[peer].token)
            complete = fd >= 0 and len(self._theirs) == len(together) - 1
            # Nobody closes before all have opened.
            if not all(note.numbers[0] for note in exchange.agree(Note((int(complete), 0)), together)):
                self._theirs = {}
                return
            self._own = memoryview(mmap.mmap(fd, 0))
        finally:
            if fd >= 0:
                os.close(fd)
        self.near = frozenset(self._theirs)
        self.nbytes = len(self._own)

    def write(self, number: int, at: int, data: memoryview) -> None:
        """Put this rank's bytes of round `number` where the others find them, from byte `at` of the half on."""
        half = _half(self._own, number)
        if len(data):
            # Torch lets other threads run while it copies.
            target = torch.frombuffer(half, dtype=torch.uint8, count=len(data), offset=at)
            target.copy_(torch.frombuffer(data, dtype=torch.uint8))

    def read(self, peer: int, number: int, at: int, nbytes: int) -> memoryview:
        """What another rank wrote in round `number`."""
        return _half(self._theirs[peer], number)[at : at + nbytes]


def _half(memory: memoryview, number: int) -> memoryview:
    nbytes = (len(memory) - _HEADER_BYTES) // _HALVES
    first = _HEADER_BYTES + number % _HALVES * nbytes
    return memory[first : first + nbytes]


def _create(token: str, half_bytes: int) -> int:
    """The descriptor of new memory that begins with the token; -1 where there is no such memory."""
    if not hasattr(os, "memfd_create"):  # pragma: no cover - not Linux
        return -1
    try:
        fd = os.memfd_create(_NAME)
    except OSError:
        return -1
    os.ftruncate(fd, _HEADER_BYTES + _HALVES * half_bytes)
    os.pwrite(fd, token.encode(), 0)
    return fd


def _open(pid: int, fd: int, token: str) -> memoryview:
    # Process numbers repeat in containers: nothing but such memory is opened, and only the one that was meant is read.
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise OSError(f"{path} is something else")
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = memoryview(mmap.mmap(opened, 0, prot=mmap.PROT_READ))
    finally:
        os.close(opened)
    if memory[: len(token)] != token.encode():
        raise OSError(f"{path} is another load's")
    return memory
