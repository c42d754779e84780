"""Exit status of a program that loses its last asynchronous save.

The interpreter waits for the threads that save, but an error in one of them does not change the exit status, so a job
whose last checkpoint failed would look complete. Python documents one way to change the status that late: it is 120 if
output cannot be flushed.
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
        failure: why the save failed, as text; empty while it runs, None once it is committed, or once the program has
            been told of the failure.
    """

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.failure: str | None = ""
        # The outcome of this save is no matter of a fork's.
        renew_in_child(self, lambda inherited: vars(inherited).update(failure=None))


_last: LastSave | None = None


def begin(url: str | None) -> LastSave:
    """Note that a save has begun: from now on its outcome decides the exit status."""
    global _last
    _last = LastSave(url)
    return _last


def lose(url: str | None, error: BaseException) -> None:
    """Note the failure of a save when the program has ended and cannot be told of it."""
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
