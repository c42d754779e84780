"""CRC32C of buffers, computed once over each byte, then combined for parts, blocks and items; 128-bit digests of items.

A later save compares digests to find the items whose bytes have not changed. Each block of an item is hashed
separately, and the hashes are hashed together. So threads can hash blocks in any order, each block while it is in the
CPU cache for its checksum. XXH3 is not a cryptographic hash: an attacker can make two items with the same digest.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import xxhash
from awscrt import checksums

_FUNCTIONS = {
    "crc32c": (checksums.crc32c, checksums.combine_crc32c),
    "crc32": (checksums.crc32, checksums.combine_crc32),
}


def crc32c(view: memoryview, previous: int = 0) -> int:
    """Compute the CRC32C of `view`, continued from `previous`. Releases the GIL."""
    return int(checksums.crc32c(view, previous))


def combine(first: int, second: int, second_nbytes: int, kind: str = "crc32c") -> int:
    """Return the checksum of two adjacent byte ranges from the checksum of each."""
    return int(_FUNCTIONS[kind][1](first, second, second_nbytes)) if second_nbytes else first


def fold_blocks(crcs: Sequence[int], nbytes: int, block_nbytes: int) -> int:
    """Combine the CRC32C of consecutive blocks into the CRC32C of all `nbytes`. Only the last block may be shorter."""
    total = 0
    for index, crc in enumerate(crcs):
        total = combine(total, crc, min(block_nbytes, nbytes - index * block_nbytes))
    return total


class CrcAccumulator:
    """Checksum (`"crc32c"`, or `"crc32"` as in zip archives) of bytes that arrive in any order, from any thread."""

    def __init__(self, nbytes: int, kind: str = "crc32c") -> None:
        self.nbytes = nbytes
        self._kind = kind
        self._lock = threading.Lock()
        self._missing = nbytes
        self._pieces: dict[int, tuple[int, int]] = {}

    def take(self, start: int, view: memoryview) -> bool:
        """Compute and record the checksum of the piece at offset `start`. Return the same as `add`."""
        return self.add(start, len(view), int(_FUNCTIONS[self._kind][0](view)))

    def add(self, start: int, nbytes: int, crc: int) -> bool:
        """Record the checksum of a piece. Return True once all bytes have arrived."""
        with self._lock:
            if nbytes:
                self._missing -= nbytes - self._pieces.get(start, (0, 0))[0]
                self._pieces[start] = nbytes, crc
            return self._missing <= 0

    def total(self) -> int:
        """Return the checksum of all pieces, in the order of their offsets."""
        total = 0
        for _, (nbytes, crc) in sorted(self._pieces.items()):
            total = combine(total, crc, nbytes, self._kind)
        return total

    def between(self, start: int, stop: int) -> int:
        """Return the checksum of bytes `[start, stop)`. Pieces must begin at `start` and end at `stop`."""
        total = 0
        while start < stop:
            nbytes, crc = self._pieces[start]
            total = combine(total, crc, nbytes, self._kind)
            start += nbytes
        assert start == stop
        return total


DIGEST_BYTES = 16

BLOCK_BYTES = 512 << 10
"""Size of a block. With another size all digests differ, so that all items of earlier saves count as changed."""


def digest(view: memoryview, seed: bytes) -> bytes:
    """Return the digest of an item whose bytes are all in memory. An upload computes the same digest block by block."""
    blocks = [block_digest(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES)]
    return fold(seed, len(view), b"".join(blocks))


def block_digest(view: memoryview) -> bytes:
    """Return the digest of one block. Releases the GIL."""
    return xxhash.xxh3_128_digest(view)


def fold(seed: bytes, nbytes: int, blocks: bytes | bytearray) -> bytes:
    """Return the digest of an item from the concatenated digests of its blocks.

    Args:
        seed: bytes derived from the item's other properties, such as dtype and shape.
    """
    return xxhash.xxh3_128_digest(b"".join((seed, nbytes.to_bytes(8, "little"), blocks)))
