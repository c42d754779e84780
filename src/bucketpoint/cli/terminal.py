"""Streams that make printed text safe: terminals obey control characters, and keys and names may contain them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from bucketpoint.cli.text import printable

_KEPT = "\n\t"


class PrintableStream:
    """A text stream that shows control characters as escapes instead of sending them."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """The raw stream, under the name that rich looks for: rich draws with control characters, but only its own."""

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
    """Make everything printable that is printed and logged while the block runs."""
    out, err = (cast("TextIO", PrintableStream(stream)) for stream in (sys.stdout, sys.stderr))
    # While a bar is drawn, rich replaces standard error, and log records would bypass the stream above: filter them.
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
