"""Streams that make printed text safe: terminals obey control characters, and keys and names may contain them."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

import click

from bucketpoint.cli.exits import OUTPUT_FAILED
from bucketpoint.cli.text import printable

_KEPT = "\n\t"


class OutputError(click.ClickException):
    """A standard stream could not be written. The command's result is lost."""

    exit_code = OUTPUT_FAILED

    def __init__(self, error: OSError) -> None:
        super().__init__(f"The output cannot be written: {error.strerror}")
        self._quiet = isinstance(error, BrokenPipeError)

    def show(self, file: Any = None) -> None:
        # Quiet if the reader, such as `head`, closed the pipe. Suppressed, as the stream that failed may be stderr.
        if not self._quiet:
            with suppress(OutputError):
                super().show(file)


class PrintableStream:
    """Text stream that writes control characters as escapes. Raises OutputError if the stream cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """The raw stream, under the name that rich looks for: rich's own control characters are not escaped."""

    def write(self, text: str) -> int:
        try:
            self.rich_proxied_file.write(printable(text, keep=_KEPT))
        except OSError as error:
            raise OutputError(error) from None
        return len(text)

    def flush(self) -> None:
        try:
            self.rich_proxied_file.flush()
        except OSError as error:
            raise OutputError(error) from None

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def printed_safely() -> Iterator[None]:
    """Escape control characters in all output and logs while the block runs."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The locale's encoding may lack letters of keys and names. For standard error Python does this itself.
        sys.stdout.reconfigure(errors="backslashreplace")
    # A stream that was closed before the program began is None.
    out, err = (stream and cast("TextIO", PrintableStream(stream)) for stream in (sys.stdout, sys.stderr))
    # While rich draws a bar, it replaces standard error, and log records bypass the stream above: filter them.
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
