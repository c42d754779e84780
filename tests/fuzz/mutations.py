"""Inputs that begin as valid ones: bits flipped, cut, spliced with each other, repeated, numbers made extreme."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hypothesis import strategies as st

INPUTS = int(os.environ.get("BUCKETPOINT_FUZZ") or 5000)
"""Of all targets together. `make fuzz` asks for 100,000."""

_WIDTHS = (1, 2, 4, 8)
EXTREME = [
    *(
        value.to_bytes(width, "little")
        for width in _WIDTHS
        for value in (0, 1, (1 << 8 * width) - 1, 1 << 8 * width - 1)
    ),
    *(b"\x00" * 16, b"9" * 40, b"-1", b"1e999", b"NaN", b"../", b"\xff\xfe", b"\xed\xa0\x80"),
    *(b"(" * 40, b"[" * 60, b"{" * 60),
]


@st.composite
def _step(draw: st.DrawFn, data: bytes, seeds: Sequence[bytes]) -> bytes:
    at = draw(st.integers(0, len(data)))
    kind = draw(st.sampled_from(["flip", "byte", "cut", "drop", "splice", "repeat", "extreme", "insert"]))
    if kind == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
    if kind == "byte" and at < len(data):
        return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    end = draw(st.integers(at, min(len(data), at + 64)))
    if kind == "drop":
        return data[:at] + data[end:]
    if kind == "repeat":
        return data[:at] + data[at:end] * draw(st.integers(2, 20)) + data[end:]
    if kind == "splice":
        other = draw(st.sampled_from(seeds))
        return data[:at] + other[draw(st.integers(0, len(other))) :]
    piece = draw(st.sampled_from(EXTREME)) if kind == "extreme" else draw(st.binary(max_size=12))
    return data[:at] + piece + data[at + len(piece) if kind == "extreme" else at :]


@st.composite
def mutated(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds after one to six changes."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 6))):
        data = draw(_step(data, seeds))
    return data
