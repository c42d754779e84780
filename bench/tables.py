"""Markdown tables, and how a spread and a verdict are written. No figures are made here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.figures import Spread
from bench.thresholds import Verdict


def verdict_table(rows: Iterable[Verdict]) -> str:
    marks = {True: "yes", False: "**no**", None: "-"}
    return table(
        ["", "demanded", "measured", "holds"],
        ([row.what, row.demanded, row.measured, marks[row.holds]] for row in rows),
    )


def shown(spread: Spread | None, shape: str, *, brief: bool = False) -> str:
    if spread is None:
        return ""
    text = shape.format(spread.middle)
    return text if brief or spread.count == 1 else f"{text} [{shape.format(spread.low)}, {shape.format(spread.high)}]"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)
