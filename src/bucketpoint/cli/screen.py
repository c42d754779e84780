"""The screen of `watch`: the frame in colours, with the age of the newest whole checkpoint in large digits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bucketpoint.cli import run_lines, text
from bucketpoint.errors import BucketpointError

_BAR = 24
"""Characters of a progress bar."""

_LEAST_ROWS = 3
"""Checkpoints that are shown however low the terminal is."""

_GLYPHS = {
    "0": ("█▀█", "█ █", "▀▀▀"),
    "1": ("▀█ ", " █ ", "▀▀▀"),
    "2": ("▀▀█", "█▀▀", "▀▀▀"),
    "3": ("▀▀█", " ▀█", "▀▀▀"),
    "4": ("█ █", "▀▀█", "  ▀"),
    "5": ("█▀▀", "▀▀█", "▀▀▀"),
    "6": ("█▀▀", "█▀█", "▀▀▀"),
    "7": ("▀▀█", "  █", "  ▀"),
    "8": ("█▀█", "█▀█", "▀▀▀"),
    "9": ("█▀█", "▀▀█", "▀▀▀"),
}


class Screen:
    """A terminal on which the last document is drawn each second, so that ages go on between two looks.

    Attributes:
        document: the document of the last look that succeeded.
    """

    def __init__(self, document: dict[str, Any], clock: Callable[[], float], console: Console | None = None) -> None:
        self.document = document
        self._clock = clock
        self._failure: BucketpointError | None = None
        self._lock = threading.Lock()
        # Give rich the underlying stream: the program's own stream would escape rich's control characters.
        self._console = console or Console(file=getattr(sys.stdout, "rich_proxied_file", sys.stdout))
        self._live = Live(console=self._console, get_renderable=self.drawn, refresh_per_second=1, screen=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Draw while the block runs."""
        self._live.start(refresh=True)
        try:
            yield
        finally:
            self._live.stop()

    def show(self, document: dict[str, Any]) -> None:
        """Draw another document."""
        with self._lock:
            self.document, self._failure = document, None
        self._live.refresh()

    def fail(self, error: BucketpointError) -> None:
        """Go on with the last document, and say that it is old."""
        with self._lock:
            self._failure = error
        self._live.refresh()

    def drawn(self) -> RenderableType:
        """Return the picture of the present moment."""
        with self._lock:
            document, failure = self.document, self._failure
        return picture(document, self._clock(), failure, height=self._console.height)


def picture(
    document: Mapping[str, Any], now: float, failure: BucketpointError | None = None, *, height: int = 40
) -> RenderableType:
    """Draw a document. On a low terminal, which cuts what is below, fewer checkpoints are shown."""
    parts: list[RenderableType] = [_words(run_lines.title(document), "bold")]
    if failure is not None:
        old = run_lines.duration(now - document["taken"])
        parts.append(_words(f"The last look failed: {failure.message}. Shown is the run of {old} ago", "bold red"))
    parts += [_words(line, "yellow") for line in run_lines.notices(document)]
    parts += [Text(), *_newest(document, now), *_attempts(document, now)]
    prune = [_words(line) for line in run_lines.prune_lines(document, now)]
    if document["checkpoints"]:
        rows = max(_LEAST_ROWS, height - len(parts) - len(prune) - 5)
        parts += [Text(), _checkpoints(document, now, rows)]
    parts += [Text(), *prune] if prune else []
    return Group(*parts)


def large(seconds: float) -> list[str]:
    """Return the three rows of a length of time in large digits, with its units in small ones."""
    rows = ["", "", ""]
    for word in run_lines.duration(seconds).split():
        if word.isdecimal():
            for digit in word:
                rows = [row + part + " " for row, part in zip(rows, _GLYPHS[digit], strict=True)]
        else:
            blank = " " * len(word)
            rows = [row + part + "   " for row, part in zip(rows, (blank, blank, word), strict=True)]
    return [row.rstrip() for row in rows]


def _newest(document: Mapping[str, Any], now: float) -> Iterator[RenderableType]:
    newest = document["newest"]
    if newest is None:
        yield _words(run_lines.headline(document, now), "bold red")
        return
    late = run_lines.is_late(document, now)
    yield _words(f"age of the newest whole checkpoint, step {newest['step']}:")
    for row in large(now - newest["created"]):
        yield _words("  " + row, "bold yellow" if late else "bold green")
    for line in run_lines.details(document, now):
        yield _words(line, "dim")


def _attempts(document: Mapping[str, Any], now: float) -> Iterator[RenderableType]:
    if document["attempts"]:
        yield Text()
    live = [save for save in document["attempts"] if save["live"]]
    # All dead saves share the last line.
    for line, save in zip_longest(run_lines.attempt_lines(document, now), live):
        yield _words(line, "cyan" if save is not None else "dim")
        part = run_lines.share(save, document["newest"]) if save is not None else None
        if part is not None:
            full = round(_BAR * min(part, 1.0))
            yield Text.assemble("  ", ("━" * full, "cyan"), ("━" * (_BAR - full), "dim"), f" {part:.0%}")


def _checkpoints(document: Mapping[str, Any], now: float, rows: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in ("step", "age", "kind", "size"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("step", "size") else "left")
    table.add_column("metrics", overflow="ellipsis", no_wrap=True, ratio=2)
    table.add_column("", ratio=3)
    shown = document["checkpoints"][:rows]
    for row in shown:
        style = "dim" if row["tombstone"] or row.get("action") == "delete" else ""
        table.add_row(*(_words(cell, style) for cell in run_lines.row_cells(row, now)))
    more = document["count"] - len(shown)
    if more:
        size = text.size(document["bytes"])
        table.add_row("…", f"{more:,} more", "", size, "", run_lines.in_all(document), style="dim")
    return table


def _words(words: str, style: str = "") -> Text:
    """Return text in one style. Control characters in it are escaped, and nothing in it is markup."""
    return Text(text.printable(words), style)
