"""Display of the progress of a save or load: a bar on a terminal, or lines, and one log line at the end."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from bucketpoint.forks import renew_in_child
from bucketpoint.staging import current_lease
from bucketpoint.transfer import Meter, Progress, ProgressCallback

LINE_S = 10.0
"""Seconds between the lines of a transfer if no bar can be drawn."""


@contextlib.contextmanager
def progress_callback(
    wanted: ProgressCallback | bool | None, place: int, rank: int = 0
) -> Iterator[ProgressCallback | None]:
    """Provide the callback for one transfer: the user's own, a `rich` bar, lines, or none.

    With None the bar is shown on the first rank of the group if standard error is a terminal and `rich` is installed; a
    log file gets nothing. With True a log file, or a terminal without `rich`, gets a line every `LINE_S` seconds, and
    a line at the end. A notebook gets the bar, or lines if `rich` or `ipywidgets` is missing.

    Args:
        place: rank in the process group.
        rank: global rank.
    """
    if callable(wanted):
        yield wanted
    elif (
        wanted is False
        or sys.stderr is None
        or (wanted is None and (place or not (_notebook() or sys.stderr.isatty())))
    ):
        yield None
    elif (console := _console()) is not None:
        with _bar(console) as bar:
            yield bar
    else:
        yield _lines(sys.stderr, f" on rank {rank}" if rank else "") if wanted or _notebook() else None


def noted(callback: ProgressCallback | None) -> ProgressCallback | None:
    """Wrap a callback so that the handle of this thread's asynchronous save gets the progress too."""
    lease = current_lease()
    if lease is None:
        return callback

    def note(event: Progress) -> None:
        lease.progress = event
        if callback is not None:
            callback(event)

    return note


def _console() -> Any:
    """Return a console on which a bar can be drawn, on a terminal or in a notebook; None without one."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    # While a display of rich is active, standard error is a proxy: draw on the original stream.
    console = Console(file=getattr(sys.stderr, "rich_proxied_file", sys.stderr))
    return console if console.is_terminal or (console.is_jupyter and find_spec("ipywidgets")) else None


def _notebook() -> bool:
    return "ipykernel" in sys.modules


def _lines(stream: Any, where: str) -> ProgressCallback:
    """Return a callback that writes a line at most every `LINE_S` seconds, and a line at the end."""
    started = written = time.monotonic()

    def update(event: Progress) -> None:
        nonlocal written
        now = time.monotonic()
        if not event.finished and now - written < LINE_S:
            return
        written = now
        whole = f" of {event.total_bytes / 1e6:.1f}" if event.total_bytes else ""
        share = f" ({100 * event.done_bytes // event.total_bytes} %)" if event.total_bytes else ""
        moved = f"{event.done_bytes / 1e6:.1f}{whole} MB{share} in {now - started:.0f} s"
        stream.write(f"{event.phase} {event.url}{where}: {moved}\n")
        stream.flush()

    return update


@contextlib.contextmanager
def _bar(console: Any) -> Iterator[ProgressCallback]:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with RichProgress(*columns, console=console, transient=True) as shown:
        # A thread may hold the display's lock at a fork, so a child must not print through the display.
        renew_in_child(shown, lambda _: _leave_display())
        # A bar without a total would look full, so it is hidden at first.
        task = shown.add_task("", total=None, visible=False)

        def update(event: Progress) -> None:
            description = f"{event.phase} {event.url}"
            known, done = event.total_bytes, event.done_bytes
            shown.update(task, completed=done, total=known or None, description=description, visible=known + done > 0)

        yield update


def _leave_display() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


def describe(logger: logging.Logger, level: int, verb: str, url: str | None, meter: Meter, started: float) -> None:
    """Log the bytes moved, the seconds, and the number of requests of a transfer."""
    amount, seconds = meter.done_bytes / 1e6, time.monotonic() - started
    node = f", {meter.node_bytes / 1e6:.1f} MB of them from the node's copy" if meter.node_bytes else ""
    logger.log(level, "%s %s: %.1f MB in %.2f s%s, %d data requests", verb, url, amount, seconds, node, meter.requests)
