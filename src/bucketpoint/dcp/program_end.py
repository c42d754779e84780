"""Exit status of a program that loses its last asynchronous save.

The interpreter waits for the threads that save, but an error there does not change the exit status, and so a job whose
last checkpoint failed would look like one that is complete. Python documents one way to change it that late: the status
is 120 if output cannot be flushed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any

from bucketpoint.errors import BucketpointError


class LastSave:
    """Outcome of one save. A small object of its own: the error itself would keep its frames and their memory alive.

    Attributes:
        failure: why the save failed, as text; empty while it runs, None once it is committed, or once the program has
            been told of the failure.
    """

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.failure: str | None = ""
        self._process = os.getpid()

    @property
    def is_lost(self) -> bool:
        # A forked process did not begin it, whatever its parent's copy says.
        return self.failure is not None and self._process == os.getpid()


_last: LastSave | None = None


def begin(url: str | None) -> LastSave:
    """Note that a save has begun, which from now on is the one that counts."""
    global _last
    _last = LastSave(url)
    return _last


def lose(url: str | None, error: BaseException) -> None:
    """Note that a save failed of which nobody can be told any more."""
    begin(url).failure = str(error)


def has_come() -> bool:
    """True once the main program is through, and the interpreter waits for threads."""
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


class _Unflushable:
    """Standard output that passes everything on, and fails to be flushed when the interpreter ends."""

    def __init__(self, stream: Any, error: BucketpointError) -> None:
        self._stream = stream
        self._error = error
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        # Raised once: the interpreter flushes twice.
        if not self.closed:
            self.closed = True
            raise self._error


@atexit.register
def _tell() -> None:
    # Registered when this module is imported, it runs after the managers have waited for their saves.
    if _last is None or not _last.is_lost:
        return
    why = _last.failure or "the program ended first"
    message = f"The last save was lost: {why}. The exit status says so"
    sys.stdout = _Unflushable(sys.stdout, BucketpointError(message, url=_last.url))
