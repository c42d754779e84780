"""Parts of pickles of protocol 4, from which others are put together."""

from __future__ import annotations

import io
import pickle
from typing import Any

PROTOCOL = 4
"""Every supported Python reads it, and it is the lowest that has frames and MEMOIZE."""

PROTO = pickle.PROTO + bytes([PROTOCOL])


def framed(body: bytes | bytearray) -> bytes:
    """Return the pickle of these opcodes, the last of them STOP."""
    return b"".join((PROTO, pickle.FRAME, len(body).to_bytes(8, "little"), body))


def unframed(data: bytes) -> bytes | None:
    """Return the opcodes of a pickle but for the first and the last; None if some of them are outside of frames."""
    if not data.startswith(PROTO):
        return None
    position, parts = len(PROTO), []
    while data[position : position + 1] == pickle.FRAME:
        size = int.from_bytes(data[position + 1 : position + 9], "little")
        parts.append(data[position + 9 : position + 9 + size])
        position += 9 + size
    return b"".join(parts).removesuffix(pickle.STOP) if position == len(data) else None


def unshared(value: Any) -> bytes:
    """Pickle without memo entries: the result follows another pickle, whose entries are numbered."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=PROTOCOL)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()


def recall(number: int) -> bytes:
    """Return the opcode that pushes a memo entry."""
    return pickle.BINGET + bytes((number,)) if number < 256 else pickle.LONG_BINGET + number.to_bytes(4, "little")


def text_header(size: int) -> bytes:
    """Return the opcode and the length for a text of `size` bytes."""
    if size < 256:
        return pickle.SHORT_BINUNICODE + bytes((size,))
    return pickle.BINUNICODE + size.to_bytes(4, "little")
