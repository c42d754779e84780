"""Checksums of a file, stored after its bytes in the same object.

An object has the file's bytes, a table with the CRC32C of each block of 1 MiB, and 24 bytes: a magic number, the file's
size, a zero, and the CRC32C of the table and these. Checksums are not in the manifest, because the committing rank
lacks those of other ranks; an object for them would cost another PUT.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bucketpoint.errors import CorruptDataError
from bucketpoint.transfer import Block
from bucketpoint.transfer.checksum import combine, crc32c

BLOCK_BYTES = 1 << 20
"""Size of a block: a small read receives and verifies whole blocks. The usual part, 32 MiB, is a multiple."""

_MAGIC = b"BPTCSUM1"
_FOOTER = struct.Struct("<8sQII")


def object_bytes(nbytes: int) -> int:
    """Return the size of the object for a file of `nbytes`."""
    return nbytes + 4 * -(-nbytes // BLOCK_BYTES) + _FOOTER.size


def file_bytes(object_nbytes: int) -> int:
    """Return the size of a file from that of its object. The reverse of `object_bytes`."""
    rest = object_nbytes - _FOOTER.size
    return rest - 4 * -(-rest // (BLOCK_BYTES + 4))


def block_sums(pieces: Iterable[memoryview]) -> list[int]:
    """Return the CRC32C of each block of the pieces' bytes."""
    sums: list[int] = []
    filled = BLOCK_BYTES
    for piece in pieces:
        taken = 0
        while taken < len(piece):
            if filled == BLOCK_BYTES:
                sums.append(0)
                filled = 0
            stretch = piece[taken : taken + BLOCK_BYTES - filled]
            sums[-1] = crc32c(stretch, sums[-1])
            taken += len(stretch)
            filled += len(stretch)
    return sums


def joined(sums: Sequence[int], nbytes: int) -> int:
    """Return the CRC32C of `nbytes` bytes from the sums of their blocks."""
    total = 0
    for index, crc in enumerate(sums):
        total = combine(total, crc, min(BLOCK_BYTES, nbytes - index * BLOCK_BYTES))
    return total


def encode(sums: Sequence[int], nbytes: int) -> bytes:
    """Return the checksums as the bytes that follow a file's bytes in its object."""
    table = struct.pack(f"<{len(sums)}I", *sums)
    head = struct.pack("<8sQI", _MAGIC, nbytes, 0)
    return table + _FOOTER.pack(_MAGIC, nbytes, 0, crc32c(memoryview(table + head)))


@dataclass(frozen=True)
class Sums:
    """Checksums of a file of `nbytes`."""

    nbytes: int
    crcs: Sequence[int]

    @classmethod
    def decode(cls, data: memoryview, nbytes: int, *, url: str, key: str) -> Sums:
        """Decode the checksums of a file of `nbytes`. Raises CorruptDataError if they are damaged or do not fit."""
        table = data[: max(len(data) - _FOOTER.size, 0)]
        right = False
        if len(data) == object_bytes(nbytes) - nbytes:
            magic, written, zero, crc = _FOOTER.unpack(data[len(table) :])
            head = struct.pack("<8sQI", magic, written, zero)
            right = (magic, written) == (_MAGIC, nbytes) and crc == crc32c(memoryview(bytes(table) + head))
        if not right:
            raise CorruptDataError("The checksums of a file are damaged", url=url, key=key)
        return cls(nbytes, struct.unpack(f"<{len(table) // 4}I", table))

    def blocks(self, start: int, stop: int) -> list[Block]:
        """Return the checksums of the bytes `[start, stop)`, a range of whole blocks."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        return [
            Block(min(BLOCK_BYTES, self.nbytes - index * BLOCK_BYTES), self.crcs[index]) for index in range(first, last)
        ]
