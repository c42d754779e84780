"""The one save that a manager has under way, and what became of it. Begins none."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from bucketpoint.dcp import SaveHandle
from bucketpoint.errors import BucketpointError


@dataclass
class Running:
    """Attributes:
    told: this rank's program knows that it failed.
    settled: what follows the save has been seen to: a future tells those who wait for it before it calls back.
    """

    step: int
    handle: SaveHandle
    told: bool = False
    settled: threading.Event = field(default_factory=threading.Event)

    @property
    def failed(self) -> bool:
        """On this rank, as far as is known yet."""
        return self.handle.failure() is not None

    @property
    def error(self) -> BaseException:
        """Why it failed, on this rank or on another."""
        error = self.handle.exception() if self.handle.done() else None
        return error or BucketpointError(f"The save of step {self.step} failed on another rank", url=self.handle.url)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended in time, in seconds."""
        return self.handle.wait(timeout) and self.settled.wait(timeout)
