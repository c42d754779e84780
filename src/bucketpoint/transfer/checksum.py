"""CRC32C of buffers: computed once over each byte, then combined for parts, blocks and items."""

from __future__ import annotations

from collections.abc import Sequence

from awscrt.checksums import combine_crc32c as _combine
from awscrt.checksums import crc32c as _crc32c


def crc32c(view: memoryview, previous: int = 0) -> int:
    """Compute the CRC32C of `view`, continued from `previous`. Releases the GIL."""
    return int(_crc32c(view, previous)) if len(view) else previous


def combine(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC32C of two adjacent byte ranges from the CRC32C of each."""
    if second_nbytes == 0:
        return first
    return int(_combine(first, second, second_nbytes))


def fold_blocks(crcs: Sequence[int], nbytes: int, block_nbytes: int) -> int:
    """Return the CRC32C of `nbytes` bytes from those of their blocks, each `block_nbytes` long except the last."""
    total = 0
    for index, crc in enumerate(crcs):
        total = combine(total, crc, min(block_nbytes, nbytes - index * block_nbytes))
    return total
