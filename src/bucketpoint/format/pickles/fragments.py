"""Fragments of pickles of protocol 4, from which other pickles are assembled."""

from __future__ import annotations

import io
import pickle
from typing import Any

PROTOCOL = 4
"""Lowest pickle protocol with frames and MEMOIZE. Every supported Python reads it."""

PROTO = pickle.PROTO + bytes([PROTOCOL])


def framed(body: bytes | bytearray) -> bytes:
    """Return the pickle of these opcodes, which end with STOP."""
    return b"".join((PROTO, pickle.FRAME, len(body).to_bytes(8, "little"), body))


def unframed(data: bytes) -> bytes | None:
    """Return the opcodes of a pickle without PROTO and STOP; None if some of them are outside of frames."""
    if not data.startswith(PROTO):
        return None
    position, parts = len(PROTO), []
    while data[position : position + 1] == pickle.FRAME:
        size = int.from_bytes(data[position + 1 : position + 9], "little")
        parts.append(data[position + 9 : position + 9 + size])
        position += 9 + size
    return b"".join(parts).removesuffix(pickle.STOP) if position == len(data) else None


def unshared(value: Any) -> bytes:
    """Pickle `value` without memo entries, so that its opcodes can follow those of a pickle that has memo entries."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=PROTOCOL)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()


def recall(number: int) -> bytes:
    """Return the opcode that pushes a memo entry."""
    return pickle.BINGET + bytes((number,)) if number < 256 else pickle.LONG_BINGET + number.to_bytes(4, "little")


def text_header(size: int) -> bytes:
    """Return the opcode and the length that precede a text of `size` bytes."""
    if size < 256:
        return pickle.SHORT_BINUNICODE + bytes((size,))
    return pickle.BINUNICODE + size.to_bytes(4, "little")
