"""Bodies and targets in memory, as stores take them."""

from __future__ import annotations


def views(*chunks: bytes | bytearray) -> list[memoryview]:
    return [memoryview(chunk) for chunk in chunks]


def room(size: int) -> tuple[bytearray, list[memoryview]]:
    """Memory for so many bytes, and the view of it."""
    data = bytearray(size)
    return data, [memoryview(data)]
