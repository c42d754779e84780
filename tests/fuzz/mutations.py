"""Inputs that begin as valid ones: bits flipped, cut, spliced with each other, repeated, numbers made extreme."""

from __future__ import annotations

import random
from collections.abc import Sequence

MOST_BYTES = 64 << 10

_WIDTHS = (1, 2, 4, 8)
EXTREME = [
    *(
        value.to_bytes(width, "little")
        for width in _WIDTHS
        for value in (0, 1, (1 << 8 * width) - 1, 1 << 8 * width - 1)
    ),
    *(b"\x00" * 16, b"9" * 40, b"-1", b"1e999", b"NaN", b"../", b"\xff\xfe", b"\xed\xa0\x80"),
    *(b"(" * 40, b"[" * 60, b"{" * 60),
    # Of pickles: calls, changes, keys, and what was made before.
    *(b"R", b"b", b"\x81", b"s", b"u", b"\x85R", b"\x86R", b"h\x00", b"h\x01", b"\x94", b"2", b"0", b"\x8f", b"\x90"),
]


def _changed(draw: random.Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    at = draw.randint(0, len(data))
    kind = draw.choice(["flip", "byte", "cut", "drop", "splice", "repeat", "extreme", "insert", "move"])
    if kind == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind == "byte" and at < len(data):
        return data[:at] + draw.randbytes(1) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    end = draw.randint(at, min(len(data), at + 64))
    if kind == "drop":
        return data[:at] + data[end:]
    if kind == "repeat":
        # Now and then very often: what is worse than linear shows in long inputs.
        most = 20 if draw.random() < 0.97 else 5000
        return data[:at] + data[at:end] * draw.randint(2, most) + data[end:]
    if kind == "splice":
        other = draw.choice(seeds)
        return data[:at] + other[draw.randint(0, len(other)) :]
    if kind == "move":
        other = draw.choice(seeds)
        start = draw.randint(0, len(other))
        return data[:at] + other[start : start + draw.randint(1, 64)] + data[at:]
    piece = draw.choice(EXTREME) if kind == "extreme" else draw.randbytes(draw.randint(0, 12))
    return data[:at] + piece + data[at + len(piece) if kind == "extreme" else at :]


def mutated(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds after one to six changes."""
    data = draw.choice(seeds)
    for _ in range(draw.randint(1, 6)):
        data = _changed(draw, data, seeds)
    return data[:MOST_BYTES]
