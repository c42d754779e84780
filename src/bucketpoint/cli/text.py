"""Text for people: formats of numbers, sizes, times, shapes and tables."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(nbytes: float) -> str:
    """Format bytes in decimal units, with three digits: `1.05 GB`."""
    value, unit = float(nbytes), 0
    # A value that would round to 1000 of a unit is written as 1 of the next.
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{value:.0f} B"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {_UNITS[unit]}"


def count(number: int, noun: str) -> str:
    """Format a number and its noun: `1 object`, `1,234 objects`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def are(number: int) -> str:
    """Return the verb for a number of things: `1 of 2 checkpoints is`, `2 of 2 checkpoints are`."""
    return "is" if number == 1 else "are"


def not_deleted(failure: Mapping[str, str], then: str = "") -> str:
    """Format a key that the store did not delete, with the store's reason."""
    return f"not deleted: {failure['key']} ({failure['code']} {failure['message']}){then}"


def when(seconds: float | None) -> str:
    """Format seconds since the epoch as UTC."""
    if seconds is None:
        return "at an unknown time"
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def shape(sizes: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def table(rows: Iterable[Sequence[str]], *, indent: int = 2) -> list[str]:
    """Format rows with columns aligned to the left."""
    cells = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        (" " * indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in cells
    ]


def printable(text: str, *, keep: str = "") -> str:
    """Replace control characters, and those that change the direction of text, by escapes: `\\x1b`, `\\u202e`.

    Anybody may have written keys and names into the store, and a terminal obeys control characters in them.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in text
    )
