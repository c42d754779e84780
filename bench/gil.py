"""Which thread holds the interpreter's lock, looked at from another process. Linux, CPython 3.10 to 3.13.

The measured process says where its lock is; whoever started it reads the lock's two fields about a thousand times a
second, without stopping it and without taking part in the fight for the lock.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

PERIOD_S = 0.001
_SEARCHED_BYTES = 1 << 18
# Odd on purpose: the interval, the holder and `locked` follow each other in the lock, and are looked for together.
_INTERVAL_US = 4999
_HOLDER_OFFSET = 8
_LOCK = struct.Struct("<Qi")


def locate() -> tuple[int, int] | None:
    """Address of the lock's fields and the current thread's identity in them; None where they are not found."""
    sys.setswitchinterval(_INTERVAL_US / 1e6)
    try:
        base = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
        here = ctypes.pythonapi.PyThreadState_Get
        here.restype = ctypes.c_void_p
        thread: int = here()
        size = min(_SEARCHED_BYTES, _end_of_mapping(base) - base)
        at = ctypes.string_at(base, size).find(struct.pack("<QQi", _INTERVAL_US, thread, 1))
        return (base + at + _HOLDER_OFFSET, thread) if at >= 0 else None
    except (ValueError, OSError, AttributeError):
        return None
    finally:
        sys.setswitchinterval(0.005)


def _end_of_mapping(address: int) -> int:
    with open("/proc/self/maps") as lines:
        for line in lines:
            low, high = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
            if low <= address < high:
                return high
    return address


@dataclass
class Held:
    """How many looks found the lock free, held by the thread that was named, and held by any other."""

    looks: int = 0
    free: int = 0
    named: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def others(self) -> float | None:
        """The fraction of the looks in which another thread held it."""
        return (self.looks - self.free - self.named) / self.looks if self.looks else None

    @property
    def any(self) -> float | None:
        """The fraction of the looks in which some thread held it."""
        return (self.looks - self.free) / self.looks if self.looks else None


def watch(pid: int, address: int, thread: int, begun: Callable[[], bool], ended: threading.Event) -> Held:
    """Look at the lock of a process from when `begun()` until `ended`."""
    held = Held()
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError as error:
        held.errors.append(str(error))
        return held
    try:
        while not ended.is_set():
            time.sleep(PERIOD_S)
            if begun():
                holder, locked = _LOCK.unpack(os.pread(memory, _LOCK.size, address))
                held.looks += 1
                held.free += not locked
                held.named += bool(locked) and holder == thread
    except OSError as error:
        held.errors.append(str(error))
    finally:
        os.close(memory)
    return held
