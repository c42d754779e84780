"""The save under way of a manager, as one rank sees it."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from bucketpoint.dcp import SaveHandle
from bucketpoint.errors import BucketpointError


@dataclass
class Running:
    """The save under way, as this rank sees it.

    Attributes:
        full: the checkpoint is one that a job can resume from.
        reported: True if the program has received the save's error on this rank.
        settled: set when the follow-up work of the save is done. A future wakes those who wait for it before it runs
            its callbacks, so its end alone does not say that.
    """

    step: int
    handle: SaveHandle
    full: bool = True
    reported: bool = False
    settled: threading.Event = field(default_factory=threading.Event)

    @property
    def failed(self) -> bool:
        """True if the save failed, as far as this rank knows yet."""
        return self.handle.failure() is not None

    @property
    def error(self) -> BaseException:
        """The error of the save, of this rank or of another."""
        error = self.handle.exception() if self.handle.done() else None
        return error or BucketpointError(f"The save of step {self.step} failed on another rank", url=self.handle.url)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the save and for its follow-up work, at most `timeout` seconds each. True if both have ended."""
        return self.handle.wait(timeout) and self.settled.wait(timeout)


def note_end(manager: weakref.ref[Any], running: Running, handle: SaveHandle) -> None:
    """Tell the manager of a save how it ended, if there is one still."""
    alive = manager()
    if alive is not None and handle.failure() is None:
        alive._standing.saved(running.step, handle.begun_s, full=running.full)
        alive._replacing.committed(running.step)
    elif alive is not None:
        alive._standing.lost()
        alive._replacing.failed()
    running.settled.set()
