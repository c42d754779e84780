"""Clock that measures ages across a suspension of the process or of the machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


def boottime() -> float:
    """Return the seconds since the machine started; on Linux, they include suspensions."""
    # CLOCK_MONOTONIC stops while a laptop sleeps. CLOCK_BOOTTIME does not, but only Linux has CLOCK_BOOTTIME.
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(frozen=True)
class Stopwatch:
    """Time since the start, including any suspension of the process or of the machine."""

    wall: float = field(default_factory=lambda: time.time())
    awake: float = field(default_factory=boottime)

    def seconds(self) -> float:
        """Return the seconds since the start by the faster of two clocks, because each may stop or be set back."""
        return max(time.time() - self.wall, boottime() - self.awake)


LONG_AGO = Stopwatch(float("-inf"), float("-inf"))
"""Start of an attempt that may reuse data of an earlier attempt, however old."""
