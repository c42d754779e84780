"""Exit status of a program that loses its last asynchronous save.

The interpreter waits for the threads that save, but an error in one of them does not change the exit status, so a job
whose last checkpoint failed would look complete. Python documents one way to change the status that late: 120 if output
cannot be flushed.
"""

from __future__ import annotations

import atexit
import sys
import threading
from typing import Any

from bucketpoint.errors import BucketpointError
from bucketpoint.forks import renew_in_child


class LastSave:
    """Outcome of one save. Holds the text of an error only: the error would keep its frames and their memory alive.

    Attributes:
        failure: text of the failure; empty while the save runs, None once it is committed or the failure was received.
    """

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.failure: str | None = ""
        # The outcome of this save does not concern a fork.
        renew_in_child(self, lambda inherited: vars(inherited).update(failure=None))


_last: LastSave | None = None


def begin(url: str | None) -> LastSave:
    """Record that a save has begun: from now on its outcome decides the exit status."""
    global _last
    _last = LastSave(url)
    return _last


def lose(url: str | None, error: BaseException) -> None:
    """Record the failure of a save after the end of the program, which cannot receive it."""
    begin(url).failure = str(error)


def has_come() -> bool:
    """Return True once the main program has ended and the interpreter waits for threads."""
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


class _Unflushable:
    """Wrapper of standard output that passes everything on, but fails to flush when the interpreter ends."""

    def __init__(self, stream: Any, error: BucketpointError) -> None:
        self._stream = stream
        self._error = error
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        # Raised only once, as the interpreter flushes twice.
        if not self.closed:
            self.closed = True
            raise self._error


@atexit.register
def _tell() -> None:
    # Registered when this module is imported, so it runs after the managers have waited for their saves: atexit calls
    # the function that was registered first last.
    if _last is None or _last.failure is None:
        return
    why = _last.failure or "the program ended before the commit"
    message = f"The last save was lost: {why}. The program exits with an error status"
    sys.stdout = _Unflushable(sys.stdout, BucketpointError(message, url=_last.url))
