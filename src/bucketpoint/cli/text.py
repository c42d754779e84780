"""Text for people: formats of numbers, sizes, times, shapes and tables, exit codes, and streams that print it safely.

Terminals obey control characters, and keys and names may contain them. The status line on standard error is shown
during a prune or a sweep.
"""

from __future__ import annotations

import datetime
import io
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO, cast

import click

from bucketpoint import errors
from bucketpoint.errors import BucketpointError

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog

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


# -- exit codes --------------------------------------------------------------------------------------------------------

FINE = 0
FOUND = 1
"""The command ran, and found its object damaged, different or unfit."""
USAGE = 2
NOT_FOUND = 3
NO_PERMISSION = 4
IN_THE_WAY = 5
"""Something exists at the target already, or appeared meanwhile. Nothing was overwritten."""
STORE_FAILED = 6
INTERNAL = 70
"""A fault of bucketpoint itself: EX_SOFTWARE in sysexits.h."""
OUTPUT_FAILED = 74
"""Standard output is closed, or on a full disk: EX_IOERR in sysexits.h."""
INTERRUPTED = 130
"""The code that a shell reports for a program that SIGINT ended."""

# Order matters: the first match wins, so subclasses come before their bases.
_BY_KIND: tuple[tuple[type[errors.BucketpointError], int], ...] = (
    (errors.InvalidURLError, USAGE),
    (errors.CheckpointNotFoundError, NOT_FOUND),
    (errors.ObjectNotFoundError, NOT_FOUND),
    (errors.BucketNotFoundError, NOT_FOUND),
    (errors.AccessDeniedError, NO_PERMISSION),
    (errors.CredentialsError, NO_PERMISSION),
    (errors.CheckpointExistsError, IN_THE_WAY),
    (errors.CommitConflictError, IN_THE_WAY),
    (errors.OtherRunError, IN_THE_WAY),
    (errors.PreconditionFailedError, IN_THE_WAY),
    (errors.CorruptDataError, FOUND),
    (errors.MetadataError, FOUND),
    (errors.UnsafeDataError, FOUND),
    (errors.StoreError, STORE_FAILED),
)


def exit_code(error: errors.BucketpointError) -> int:
    """Return the program's exit code for an error. Errors of no listed kind count as usage errors."""
    return next((code for kind, code in _BY_KIND if isinstance(error, kind)), USAGE)


# -- streams and the status line ---------------------------------------------------------------------------------------

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


@contextmanager
def watched(catalog: Catalog, wanted: bool | None) -> Iterator[Catalog]:
    """Yield the catalog, over a store whose listed and deleted objects are counted on a status line.

    Raises BucketpointError if `wanted` is True and rich is not installed.
    """
    if wanted is False or sys.stderr is None or (wanted is None and not sys.stderr.isatty()):
        yield catalog
        return
    # Imported on use: `--help` needs none of it.
    from bucketpoint.catalog.deletion.worker import counted

    try:
        from rich.console import Console
    except ImportError:
        if wanted:
            raise BucketpointError(
                "--progress needs the package rich", remedy="pip install 'rich>=13', or leave out --progress"
            ) from None
        yield catalog
        return
    # Give rich the underlying stream: the program's own stream would escape rich's control characters.
    with Console(file=getattr(sys.stderr, "rich_proxied_file", sys.stderr)).status("reading the catalog") as line:
        listed = deleted = 0

        def tell(more_listed: int, more_deleted: int) -> None:
            nonlocal listed, deleted
            listed, deleted = listed + more_listed, deleted + more_deleted
            line.update(f"{listed:,} objects listed, {deleted:,} deleted")

        yield replace(catalog, store=counted(catalog.store, tell))
