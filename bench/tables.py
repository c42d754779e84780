"""Markdown tables, and how a spread is written. No figures are made here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from bench.figures import Spread


def wrapped(section: str) -> str:
    """The section with its lines filled, if it is a paragraph."""
    return section if section.startswith(("|", "#", "!")) else textwrap.fill(section, 120, break_on_hyphens=False)


def shown(spread: Spread | None, shape: str, *, brief: bool = False) -> str:
    if spread is None:
        return ""
    text = shape.format(spread.middle)
    return text if brief or spread.count == 1 else f"{text} [{shape.format(spread.low)}, {shape.format(spread.high)}]"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)
