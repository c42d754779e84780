"""Exit status of a program that loses its last asynchronous save.

The interpreter waits for threads that save, but their errors do not change the exit status, so a job whose last save
failed would look complete. Python documents one way to change the status so late: 120 if output cannot be flushed.
"""

from __future__ import annotations

import atexit
import sys
import threading
from typing import Any

from bucketpoint.errors import BucketpointError
from bucketpoint.forks import renew_in_child


class LastSave:
    """Outcome of one save, without the error, which would keep its frames and their memory alive.

    Attributes:
        failure: text of the error; empty while the save runs; None once the save has committed, or the program has
            received the error.
    """

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.failure: str | None = ""
        # A fork must not report the outcome of this save.
        renew_in_child(self, lambda inherited: vars(inherited).update(failure=None))


_last: LastSave | None = None


def begin(url: str | None) -> LastSave:
    """Record that a save has begun, whose outcome then decides the exit status."""
    global _last
    _last = LastSave(url)
    return _last


def lose(url: str | None, error: BaseException) -> None:
    """Record the failure of a save after the main program has ended, and can no longer receive the error."""
    begin(url).failure = str(error)


def has_come() -> bool:
    """Return True once the main program has ended and the interpreter waits for threads."""
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


class _Unflushable:
    """Wrapper of standard output that forwards all calls, but whose flush fails when the interpreter ends."""

    def __init__(self, stream: Any, error: BucketpointError) -> None:
        self._stream = stream
        self._error = error
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        # The interpreter flushes twice, and one error is enough.
        if not self.closed:
            self.closed = True
            raise self._error


@atexit.register
def _tell() -> None:
    # atexit calls functions in reverse order. This function is registered at import, so it runs after the managers have
    # waited for their saves.
    if _last is None or _last.failure is None:
        return
    why = _last.failure or "the program ended before the commit"
    message = f"The last save was lost: {why}. The program exits with an error status"
    sys.stdout = _Unflushable(sys.stdout, BucketpointError(message, url=_last.url))
