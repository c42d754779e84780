"""128-bit digests of items, by which a later save recognises bytes that have not changed.

A digest is a tree: each block of the item is hashed separately, and the hashes are hashed together. So threads can hash
blocks in any order, each while its bytes are in the cache for their checksum. XXH3 is no cryptographic hash: chosen
bytes can give two items one digest.
"""

from __future__ import annotations

import xxhash

DIGEST_BYTES = 16

BLOCK_BYTES = 512 << 10
"""Size of a block. Part of the definition of a digest: with another size, items of earlier saves count as changed."""


def digest(view: memoryview, seed: bytes) -> bytes:
    """Return the digest of an item's bytes, in one go. An upload computes the same from its blocks."""
    blocks = [block_digest(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES)]
    return fold(seed, len(view), b"".join(blocks))


def block_digest(view: memoryview) -> bytes:
    """Return the digest of one block. Releases the GIL."""
    return xxhash.xxh3_128_digest(view)


def fold(seed: bytes, nbytes: int, blocks: bytes | bytearray) -> bytes:
    """Return the digest of an item from those of its blocks, in their order.

    Args:
        seed: everything besides the bytes that makes two items the same, such as dtype and shape.
        nbytes: size of the item.
    """
    return xxhash.xxh3_128_digest(b"".join((seed, nbytes.to_bytes(8, "little"), blocks)))
