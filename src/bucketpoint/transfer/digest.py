"""128-bit digests of items. A later save compares digests to find the items whose bytes have not changed.

Each block of an item is hashed separately, and the hashes are hashed together. So threads can hash blocks in any order,
each block while it is in the CPU cache for its checksum. XXH3 is not a cryptographic hash: an attacker can make two
items with the same digest.
"""

from __future__ import annotations

import xxhash

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
        seed: bytes of the other properties that identify the item, such as dtype and shape.
    """
    return xxhash.xxh3_128_digest(b"".join((seed, nbytes.to_bytes(8, "little"), blocks)))
