"""Memory that the ranks of one node share in a cooperative load: each rank writes its own, and the others read it.

The caller decides which bytes are written, and when they may be overwritten: this module does not wait until other
ranks have copied them. The memory is an unnamed file (memfd), which the kernel frees when the processes that hold it
end, even if they crash.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence

import torch

from bucketpoint.dcp.cooperative.peers import Note, Peers

_NAME = "bucketpoint-load"
_HEADER_BYTES = mmap.PAGESIZE
_HALVES = 2


class NodeMemory:
    """Shared memory of the ranks of one node, with two halves on each rank: one for even rounds, one for odd rounds.

    The constructor is a collective among those of `peers` that are on this rank's node. If one of them cannot open the
    memory of another, as processes of different users cannot, no rank of the node uses shared memory.

    Args:
        half_bytes: most bytes that this rank writes in a round.
    """

    def __init__(self, exchange: Peers, peers: Sequence[int], half_bytes: int) -> None:
        node = exchange.members[exchange.rank].node
        together = [peer for peer in peers if exchange.members[peer].node == node]
        self.near: frozenset[int] = frozenset()
        """The other ranks of the node: this rank can read their memory, and they can read this rank's."""
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
            # All ranks have opened the memory before any closes the descriptor by which others open it.
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
        """Write this rank's bytes of round `number` for the other ranks, from byte `at` of the half on."""
        half = _half(self._own, number)
        if len(data):
            # Copied by torch, which lets other threads run meanwhile.
            target = torch.frombuffer(half, dtype=torch.uint8, count=len(data), offset=at)
            target.copy_(torch.frombuffer(data, dtype=torch.uint8))

    def read(self, peer: int, number: int, at: int, nbytes: int) -> memoryview:
        """Return bytes that another rank wrote in round `number`."""
        return _half(self._theirs[peer], number)[at : at + nbytes]


def _half(memory: memoryview, number: int) -> memoryview:
    nbytes = (len(memory) - _HEADER_BYTES) // _HALVES
    first = _HEADER_BYTES + number % _HALVES * nbytes
    return memory[first : first + nbytes]


def _create(token: str, half_bytes: int) -> int:
    """Make memory that begins with the token, and return the file descriptor; -1 if the system cannot make any."""
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
    # Process numbers repeat between containers, so the path may lead to another file: open it only if it is such a
    # memfd, and read it only if it begins with the token.
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise OSError(f"{path} is not shared memory of bucketpoint")
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = memoryview(mmap.mmap(opened, 0, prot=mmap.PROT_READ))
    finally:
        os.close(opened)
    if memory[: len(token)] != token.encode():
        raise OSError(f"{path} belongs to another load")
    return memory
