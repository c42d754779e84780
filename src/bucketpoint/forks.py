"""Renewal of the objects that a forked process inherits: locks, threads, connections and memory of its parent.

A fork copies objects, but none of the threads that work on them. A lock that another thread held is never released in
the child, a thread pool has no threads, and a connection or shared memory would be used by two processes. So the owner
of such an object registers a function here that replaces it in each child.

This module also reserves descriptors 0 to 2, to which libraries write even in a program without standard streams.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

no_fork = threading.RLock()
"""Held during each fork, and while a thread opens what no child may inherit, such as the helper's end of a channel."""


@dataclass(frozen=True)
class _Renewal:
    owner: weakref.ref[Any]
    in_child: Callable[[Any], None]
    before: Callable[[Any], None] | None
    in_parent: Callable[[Any], None] | None


_renewals: dict[int, _Renewal] = {}
_numbers = itertools.count()


def renew_in_child(
    owner: T,
    in_child: Callable[[T], None],
    *,
    before: Callable[[T], None] | None = None,
    in_parent: Callable[[T], None] | None = None,
) -> None:
    """Call functions with `owner` around each fork, for as long as `owner` lives.

    Args:
        in_child: called in the child, whose only thread is the one that forked. It must not wait for anything, nor use
            objects that belong to the parent.
        before: called in the parent before the fork, on the thread that forks.
        in_parent: called in the parent after the fork, on the same thread.
    """
    number = next(_numbers)
    renewals = _renewals
    reference = weakref.ref(owner, lambda _: renewals.pop(number, None))
    renewals[number] = _Renewal(reference, in_child, before, in_parent)


def process_lock(forget: Callable[[], object] = lambda: None) -> threading.Lock:
    """Return a lock that is free in each forked child, whichever thread holds it at the fork.

    It is the interpreter's own lock, as `with` has to enter it in C: a signal's handler that raises, as at Ctrl-C, can
    end an `__enter__` in Python after it has taken the lock, and then no `__exit__` releases it.

    Args:
        forget: called in a child, to drop the objects that the lock guards, which belong to the parent.
    """

    def renew(lock: Any) -> None:
        lock._at_fork_reinit()
        forget()

    lock = threading.Lock()
    renew_in_child(lock, renew)
    return lock


class Monitor(type(threading.RLock()), threading.Condition):  # type: ignore[misc]
    """`threading.Condition` that `with` enters in C: see `process_lock`."""

    def __init__(self) -> None:
        # All that `Condition` needs besides the methods of the lock.
        self._waiters: deque[Any] = deque()


class Event(threading.Event):
    """`threading.Event` whose methods enter its condition in C: see `process_lock`."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = Monitor()


def _before() -> None:
    # A signal's handler may raise here; then the fork continues without the lock.
    no_fork.acquire()
    _call("before")


def _in_parent() -> None:
    _call("in_parent")
    try:
        no_fork.release()
    except RuntimeError:
        logger.debug("a fork continued without its lock")


def _in_child() -> None:
    # Free the lock even if another thread held it, because the wait in `_before` was interrupted.
    no_fork._at_fork_reinit()  # type: ignore[attr-defined]
    _call("in_child")


def _call(moment: str) -> None:
    # `owners` keeps all owners alive until the last is renewed: a finalizer would act on the parent's objects.
    owners = [(renewal.owner(), getattr(renewal, moment)) for renewal in list(_renewals.values())]
    for owner, function in owners:
        if owner is not None and function is not None:
            try:
                function(owner)
            except Exception:
                # The other owners are still renewed.
                logger.exception("a %s of the parent was not renewed in a fork", type(owner).__qualname__)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def occupy_standard_descriptors() -> None:
    """Open the null device as each closed descriptor from 0 to 2, as in a daemon started with `2>&-`.

    Otherwise the next file, connection or staging memory would get that number, and warnings of C libraries would be
    written to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # `os.open` returns the lowest free number: `number`, unless another thread opens a file at this moment.
            opened = os.open(os.devnull, os.O_RDWR)
            if opened > 2:
                os.close(opened)
            else:
                # Inheritable, because a started program such as the upload helper expects all three descriptors.
                os.set_inheritable(opened, True)
