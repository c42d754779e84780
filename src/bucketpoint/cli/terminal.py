"""Streams that make printed text safe: a terminal obeys some of the characters in others' keys and names."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from bucketpoint.cli.text import printable

_KEPT = "\n\t"


class PrintableStream:
    """A text stream that shows control characters instead of sending them."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """By this name rich finds the stream itself: it draws with control characters, of its own only."""

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(printable(text, keep=_KEPT))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def printed_safely() -> Iterator[None]:
    """Everything printed and logged while the block runs is made printable."""
    out, err = (cast("TextIO", PrintableStream(stream)) for stream in (sys.stdout, sys.stderr))
    # While a bar is drawn, rich takes standard error over, and what is logged goes through no stream of ours.
    handler = logging.lastResort
    if handler is not None:
        handler.addFilter(_made_printable)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield
    finally:
        if handler is not None:
            handler.removeFilter(_made_printable)


def _made_printable(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), None
    return True
