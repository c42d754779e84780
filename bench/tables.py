"""Markdown tables, lines of progress, and how a spread is written. No figures are made here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.figures import Spread


def wrapped(section: str) -> str:
    """The section with its lines filled, if it is a paragraph."""
    return section if section.startswith(("|", "#", "!")) else textwrap.fill(section, 120, break_on_hyphens=False)


def shown(spread: Spread | None, shape: str, *, brief: bool = False) -> str:
    if spread is None:
        return ""
    text = shape.format(spread.middle)
    return text if brief or spread.count == 1 else f"{text} [{shape.format(spread.low)}, {shape.format(spread.high)}]"


def print_progress(line: str, found: Mapping[str, Any]) -> None:
    """Print the line of a measurement at once, with the error that ended it."""
    error = f"  ERROR {found['error']}" if "error" in found else ""
    trace = f"\n{found['traceback']}" if found.get("traceback") else ""
    print(line + error + trace, flush=True)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)
