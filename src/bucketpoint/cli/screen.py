"""Screen of `watch`: the frame in colours, drawn again each second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from bucketpoint.cli import run_lines, text
from bucketpoint.errors import BucketpointError

_LEAST_ROWS = 3
"""Least number of checkpoints that are shown, on a terminal of any height."""


class Screen:
    """Terminal on which the last document is drawn each second, so that ages advance between two looks.

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
        self.document, self._failure = document, None
        self.live.refresh()

    def fail(self, error: BucketpointError) -> None:
        """Show the error, and still the last document, with its age."""
        self._failure = error
        self.live.refresh()

    def _drawn(self) -> RenderableType:
        return picture(self.document, self._clock(), self._failure, height=self._console.height)


def picture(
    document: Mapping[str, Any], now: float, failure: BucketpointError | None = None, *, height: int = 40
) -> RenderableType:
    """Draw a document, with fewer checkpoints on a terminal with few lines."""
    parts: list[tuple[str, str]] = []
    if failure is not None:
        old = run_lines.duration(now - document["taken"])
        parts.append(("bold red", f"Reading the run failed: {failure.message}. This is its state {old} ago"))
    others = len(parts) + len(list(run_lines.frame(document, now, 0)))
    parts += run_lines.frame(document, now, max(_LEAST_ROWS, height - others))
    # Control characters in names are escaped, and brackets in a line are no markup.
    return Group(*(Text(text.printable(line), style) for style, line in parts))
