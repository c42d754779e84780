"""Damage to files: bytes that flip on a disk."""

from __future__ import annotations

import os
from pathlib import Path


def flip(path: Path, place: float = 0.5) -> None:
    """Flip a bit of the byte at this part of a file, whose times stay: only a checksum tells."""
    times, data = path.stat(), bytearray(path.read_bytes())
    data[int((len(data) - 1) * place)] ^= 0x10
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def flip_all(folder: Path) -> None:
    """Flip a bit in the middle of each file of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            flip(path)
