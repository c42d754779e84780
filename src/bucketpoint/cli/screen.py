"""The screen of `watch`: the frame in colours, with the age of the newest whole checkpoint in large digits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bucketpoint.cli import run_lines, text
from bucketpoint.errors import BucketpointError

_LEAST_ROWS = 3
"""Least number of checkpoints that are shown, on a terminal of any height."""

_DIGITS = (
    "█▀█ ▀█  ▀▀█ ▀▀█ █ █ █▀▀ █▀▀ ▀▀█ █▀█ █▀█ ",
    "█ █  █  █▀▀  ▀█ ▀▀█ ▀▀█ █▀█   █ █▀█ ▀▀█ ",
    "▀▀▀ ▀▀▀ ▀▀▀ ▀▀▀   ▀ ▀▀▀ ▀▀▀   ▀ ▀▀▀ ▀▀▀ ",
)


class Screen:
    """A terminal on which the last document is drawn each second, so that ages advance between two looks.

    Attributes:
        document: the document of the last look that succeeded.
        live: the display, which draws while it is entered.
    """

    def __init__(self, document: dict[str, Any], clock: Callable[[], float]) -> None:
        self.document = document
        self._clock = clock
        self._failure: BucketpointError | None = None
        # Give rich the underlying stream: the program's own stream would escape rich's control characters.
        self._console = Console(file=getattr(sys.stdout, "rich_proxied_file", sys.stdout))
        self.live = Live(console=self._console, get_renderable=self._drawn, refresh_per_second=1, screen=True)

    def show(self, document: dict[str, Any]) -> None:
        """Draw another document."""
        self.document, self._failure = document, None
        self.live.refresh()

    def fail(self, error: BucketpointError) -> None:
        """Keep showing the last document, and its age."""
        self._failure = error
        self.live.refresh()

    def _drawn(self) -> RenderableType:
        return picture(self.document, self._clock(), self._failure, height=self._console.height)


def picture(
    document: Mapping[str, Any], now: float, failure: BucketpointError | None = None, *, height: int = 40
) -> RenderableType:
    """Draw a document. On a low terminal, which cuts what is below, fewer checkpoints are shown."""
    parts: list[RenderableType] = [_words(run_lines.title(document), "bold")]
    if failure is not None:
        old = run_lines.duration(now - document["taken"])
        parts.append(_words(f"The last look failed: {failure.message}. This is the run of {old} ago", "bold red"))
    parts += [_words(line, "yellow") for line in run_lines.notices(document)]
    parts += [Text(), *_newest(document, now)]
    if document["attempts"]:
        parts += [Text(), *(_words(line, "cyan") for line in run_lines.attempt_lines(document, now))]
    prune = [_words(line) for line in run_lines.prune_lines(document, now)]
    if document["checkpoints"]:
        rows = max(_LEAST_ROWS, height - len(parts) - len(prune) - 5)
        parts += [Text(), _checkpoints(document, now, rows)]
    parts += [Text(), *prune] if prune else []
    return Group(*parts)


def large(seconds: float) -> list[str]:
    """Return the three rows of a length of time in large digits, with its units in small ones."""
    number_and_unit = run_lines.duration(seconds).split()
    rows = []
    for number, digits in enumerate(_DIGITS):
        row = ""
        for word in number_and_unit:
            if word.isdecimal():
                row += "".join(digits[4 * int(digit) :][:4] for digit in word)
            else:
                row += (word if number == 2 else " " * len(word)) + "   "
        rows.append(row.rstrip())
    return rows


def _newest(document: Mapping[str, Any], now: float) -> Iterator[Text]:
    newest = document["newest"]
    if newest is None:
        yield _words(run_lines.headline(document, now), "bold red")
        return
    yield _words(f"age of the newest whole checkpoint, step {newest['step']}:")
    style = "dim" if run_lines.is_ended(document, now) else "bold green"
    style = "bold yellow" if run_lines.is_late(document, now) else style
    yield from (_words("  " + row, style) for row in large(now - newest["created"]))
    yield from (_words(line, "dim") for line in run_lines.details(document, now))


def _checkpoints(document: Mapping[str, Any], now: float, rows: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in ("step", "age", "kind", "size"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("step", "size") else "left")
    shown = document["checkpoints"][:rows]
    # A metric is not cut: several of one checkpoint take several lines.
    cells = [run_lines.row_cells(row, now) for row in shown]
    words = (word for row in cells for word in row[4].split())
    table.add_column("metrics", overflow="fold", ratio=2, width=max(map(len, words), default=1))
    table.add_column("", ratio=3)
    for row, of_row in zip(shown, cells, strict=True):
        style = "dim" if row["tombstone"] or row.get("action") == "delete" else ""
        table.add_row(*(_words(cell, style) for cell in of_row))
    more = document["count"] - len(shown)
    if more:
        size = text.size(document["bytes"])
        table.add_row("…", f"{more:,} more", "", size, "", "in all", style="dim")
    return table


def _words(words: str, style: str = "") -> Text:
    """Return text in one style. Control characters in it are escaped, and nothing in it is markup."""
    return Text(text.printable(words), style)
