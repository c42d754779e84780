"""The lock of one file in a folder: a file beside it, which only processes with write access can create.

The process that creates the lock file holds the lock, and deletes the file to release it. So the lock works on every
filesystem that creates files exclusively. `flock` does not work on some (Lustre, NFS), and any reader may hold it.

A lock is broken if its holder has died. On the holder's machine `/proc` shows whether the holder is alive. To another
machine or container, the lock counts as abandoned after `ABANDONED_S`, by the filesystem's time. A holder changes the
file only within `HELD_S` of taking the lock, and refuses later. So two writers can collide only if one of them is
suspended for minutes between its last check of the clock and the next system call.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator

from bucketpoint.stopwatch import boottime
from bucketpoint.stores.local_folders import NEW, TEMPORARY, open_file, temporary

HELD_S = 30.0
"""Seconds after which the holder of a lock no longer relies on it."""
ABANDONED_S = 240.0
"""Age, in seconds, at which a lock is broken if it is unknown whether its holder is alive. Shorter than a request's
deadline."""

_WAIT_S = 0.5
"""Seconds to wait for a lock in one attempt. The retry loop of the request makes further attempts."""
_LONGEST_PAUSE_S = 0.02
_LONGEST_CONTENT = 200
_RELEASES = 3


class LockedError(OSError):
    """Another writer holds the lock of the file."""

    def __init__(self, lock: str, holder: str) -> None:
        super().__init__(errno.EBUSY, f"another writer{holder} holds the object's lock, the file {lock}", lock)


@contextlib.contextmanager
def locked(above: int, name: str, *, needed: bool = True) -> Iterator[Callable[[], None]]:
    """Lock the file `name` in the folder `above`, so that no other writer replaces or deletes it meanwhile.

    Args:
        needed: raise if no lock file can be created (a full disk). Otherwise continue without the lock.

    Yields:
        a function to call right before the change. Raises OSError if the lock has been held for too long.
    """
    began, token = boottime(), None
    try:
        token = _acquire(above, name)
    except LockedError:
        raise
    except OSError:
        # A plain deletion works without the lock, and may be what frees the disk. Only a condition needs the lock.
        if needed:
            raise

    def ensure() -> None:
        if token is not None and boottime() - began > HELD_S:
            raise OSError(errno.EAGAIN, "the process was suspended while it held the lock of the file", name)

    try:
        yield ensure
    finally:
        if token is not None:
            _release(above, temporary("lock", name), token, broken=boottime() - began > HELD_S)


def _acquire(above: int, name: str, of: str = "") -> str:
    """Create the lock file, and return its token. If `of`, the token of a dead lock, is given, the file gives the right
    to remove that lock."""
    lock, token = temporary("lock" + of, name), secrets.token_hex(6)
    ends = time.monotonic() + _WAIT_S
    while not _created(above, lock, f"{token} {_process()}"):
        holder = ""
        with contextlib.suppress(FileNotFoundError):
            held, holder, dead = _look(above, lock)
            if dead:
                # Only one process at a time removes the lock: a slower one would remove the new lock of the faster one.
                breaking = _acquire(above, name, of + held)
                try:
                    if _look(above, lock)[0] == held:
                        os.unlink(lock, dir_fd=above)
                finally:
                    _release(above, temporary("lock" + of + held, name), breaking)
                continue
        if time.monotonic() >= ends:
            raise LockedError(lock, holder)
        time.sleep(random.uniform(0, _LONGEST_PAUSE_S))
    return token


def _created(above: int, lock: str, content: str) -> bool:
    try:
        fd = os.open(lock, NEW, 0o666, dir_fd=above)
    except FileExistsError:
        return False
    try:
        # On a full disk the lock file is empty: then only its age shows whether the holder has died.
        with contextlib.suppress(OSError):
            os.write(fd, content.encode())
    finally:
        # gcsfuse creates the file at this point, and raises if another machine was faster.
        os.close(fd)
    return True


def _release(above: int, lock: str, token: str, *, broken: bool = False) -> None:
    for _ in range(_RELEASES):
        with contextlib.suppress(OSError):
            if not broken or _look(above, lock)[0] == token:
                os.unlink(lock, dir_fd=above)
            return


def _look(above: int, lock: str) -> tuple[str, str, bool]:
    """Return the token of a lock, its holder for messages, and True if the holder has died."""
    try:
        with open(open_file(lock, above), "rb") as file:
            status = os.fstat(file.fileno())
            token, *owner = file.read(_LONGEST_CONTENT).decode("ascii", "replace").split()
    except (OSError, ValueError):
        # Unreadable, empty, or not a file. `os.stat` raises FileNotFoundError if the lock was released.
        status, token, owner = os.stat(lock, dir_fd=above, follow_symlinks=False), "", []
    alive = _is_alive(owner)
    if alive is None:
        alive = _time_of(above) - status.st_mtime < ABANDONED_S
    shown = f" (process {owner[2]} of this machine)" if owner[:2] == _process().split()[:2] else ""
    return token if token.isalnum() else f"{status.st_ino:x}x{status.st_mtime_ns:x}", shown, not alive


def _is_alive(owner: list[str]) -> bool | None:
    """Return True if the process that `_process` has described is running; None if this is unknown here."""
    boot, namespace, *_ = [*_process().split(), "", ""]
    if not boot or owner[:2] != [boot, namespace] or len(owner) != 4 or not owner[2].isdecimal():
        return None
    try:
        return _start_of(owner[2]) == owner[3]
    except FileNotFoundError:
        pass
    try:
        os.kill(int(owner[2]), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return None  # /proc hides the processes of other users


def _process() -> str:
    """Describe this process by the machine's boot, the namespace of process ids, the process id and the start time."""
    return _described(os.getpid())


@functools.lru_cache(maxsize=1)
def _described(process: int) -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = f"{os.stat('/proc/self/ns/pid').st_ino:x}"
        return f"{boot} {namespace} {process} {_start_of('self')}"
    except OSError:  # not Linux
        return ""


def _start_of(process: str) -> str:
    """Return the start time of a running process; empty if it has ended but was not yet reaped by its parent."""
    with open(f"/proc/{process}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _time_of(above: int) -> float:
    """Return the filesystem's current time: the modification time of a new file."""
    name = TEMPORARY + secrets.token_hex(8)
    fd = os.open(name, NEW, 0o666, dir_fd=above)
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=above)
